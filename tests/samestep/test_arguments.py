"""Invalid arguments of `fit` are refused in one line, before `build` is called; also errors and
interrupts while `fit` waits for the coordinator."""

from __future__ import annotations

import itertools
import math
import queue
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from protocol.base.errors import SamestepError, Unreachable, UsageError
from samestep import fitting
from samestep.arguments import Arguments
from samestep.coordinator_subprocess import (
    CoordinatorEnded,
    CoordinatorSubprocess,
    EventQueue,
    Interrupted,
    Line,
)
from samestep.fitting import _handle_events
from samestep.srun import TaskDeadline
from samestep.worker_thread import WorkerEnded
from tests.samestep.specs import SPEC
from worker.scripts.script_task import ScriptTask

X = torch.linspace(-1, 1, 8)[:, None]
DATA = TensorDataset(X, 2 * X)
EXPECTED_INTEGER = "expected a whole number, got"


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fail_if_called():
    raise AssertionError("build was called")


def make_task(**changes):
    return samestep.Task(**{
        "module": nn.Linear(1, 1), "train": DATA,
        "loss": lambda module, batch: ((module(batch[0]) - batch[1]) ** 2).sum(), **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps: expected a number of at least 1, got 0"),
        ({"steps": "four"}, f"steps: {EXPECTED_INTEGER} 'four'"),
        ({"steps": 2.5}, f"steps: {EXPECTED_INTEGER} 2.5"),
        ({"steps": True}, f"steps: {EXPECTED_INTEGER} True"),
        ({"steps": None}, "expected either steps= or epochs="),
        ({"epochs": 1}, "expected either steps= or epochs="),
        ({"steps": None, "epochs": 0}, "epochs: expected a number above 0, got 0"),
        ({"steps": None, "epochs": -3}, "epochs: expected a number above 0, got -3"),
        ({"steps": None, "epochs": "2"}, "epochs: expected a number, got '2'"),
        ({"steps": None, "epochs": math.inf}, "epochs: expected a finite number, got inf"),
        ({"steps": None, "epochs": math.nan}, "epochs: expected a finite number, got nan"),
        ({"batch": "64"}, f"batch: {EXPECTED_INTEGER} '64'"),
        ({"batch": None}, f"batch: {EXPECTED_INTEGER} None"),
        ({"batch": 0}, "batch: expected a number of at least 1, got 0"),
        ({"microbatch": 0}, "microbatch: expected a number of at least 1, got 0"),
        ({"workers": 0}, "workers: expected a number of at least 1, got 0"),
        ({"workers": "two"}, f"workers: {EXPECTED_INTEGER} 'two'"),
        ({"seed": -1}, "seed: expected a number of at least 0, got -1"),
        ({"seed": None}, f"seed: {EXPECTED_INTEGER} None"),
        ({"seed": 2**63}, "seed: expected a number below"),
        ({"evaluate_every": -1}, "evaluate_every: expected a number of at least 0, got -1"),
        ({"precision": "fp16"}, "precision: expected float32, bfloat16 or float16, got 'fp16'$"),
        ({"precision": torch.bfloat16}, "precision: .* got torch.bfloat16"),
        ({"device": "tpu"}, "device: expected auto or one of cuda, .* got 'tpu'"),
        ({"device": "cuda0-3"}, "backend 'cuda' is not usable here"),
        ({"device": "cuda3-0"}, "device: .*expected devices such as cuda0-3, got 'cuda3-0'"),
        ({"device": ""}, "device: .* got ''"),
        ({"device": "cuda99"}, "backend 'cuda' is not usable here"),
        ({"directory": ""}, "directory: expected a path, got ''"),
        ({"directory": 3}, "directory: expected a path, got 3"),
        ({"resume": "yes"}, "resume: expected True, False or \"edited\", got 'yes'"),
        ({"control": ""}, "control: .* got ''"),
        ({"name": ""}, "name: .* got ''"),
        ({"settings": [1]}, r"settings: expected keys and values, got \[1\]"),
        ({"options": "a"}, "options: expected keys and values, got 'a'"),
        ({"options": {"a": 1}}, r"options: .* takes none: write def build\(options\)"),
        ({"resume": True}, "resume: expected the directory of the run to resume, got none"),
        ({"resume": True, "directory": "typo"}, "resume: .* in 'typo', found no such directory"),
        ({"control": "127.0.0.1:1", "workers": 2}, "expected none of them with control"),
        ({"control": "127.0.0.1:1", "directory": "x"}, "expected none of them with control"),
        ({"settings": {"epochs": 2}}, "'epochs': use the argument of fit"),
        ({"settings": {"lora": {"r": 4}}}, "keys that apply to a script, got 'lora'"),
        ({"settings": {"model": {"source": "x"}}}, "keys that apply to a script, got 'model'"),
        ({"settings": {"capture": {"top_k": 3}}}, "keys that apply to a script, got 'capture'"),
        ({"settings": {"init_from": "x"}}, "keys that apply to a script, got 'init_from'"),
    ],
)  # fmt: skip
def test_invalid_argument_is_refused_in_one_line(arguments, message, tmp_path):
    with pytest.raises(SamestepError, match=message) as error:
        samestep.fit(fail_if_called, **{"steps": 1, **arguments})
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"), [("SAMESTEP_EXPECT_WORKERS", "abc"), ("SAMESTEP_EXPECT_WORKERS", "0"),
                        ("SAMESTEP_BACKEND", "tpu")],
)  # fmt: skip
def test_invalid_environment_names_its_variable(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(SamestepError, match=f"{name}: expected .*, got '{value}'"):
        samestep.fit(fail_if_called, steps=1)


def test_numpy_numbers_and_a_numbered_device_are_accepted():
    unset = (
        "options",
        "microbatch",
        "workers",
        "directory",
        "control",
        "name",
        "settings",
        "steps",
    )
    usual = {"optimizer": "sgd", "evaluate_every": 0, "precision": "float32", "resume": False}
    arguments = Arguments.of(
        **dict.fromkeys(unset),
        **usual,
        epochs=np.int64(2),
        batch=np.int32(8),
        seed=np.uint8(3),
        device="cuda1",
    )
    assert (arguments.epochs, arguments.batch, arguments.seed) == (2, 8, 3)
    assert arguments.backend == ("cuda", 1)
    assert (arguments.several_devices, arguments.expected_workers) == ((), 1)


def test_several_devices_are_one_worker_and_are_refused_in_a_slurm_step(monkeypatch):
    monkeypatch.setenv("SAMESTEP_BACKEND", "cuda1-3")
    monkeypatch.delenv("SAMESTEP_EXPECT_WORKERS", raising=False)
    unset = (
        "options", "microbatch", "workers", "directory", "control", "name", "settings", "epochs",
        "device",
    )  # fmt: skip
    arguments = Arguments.of(
        **dict.fromkeys(unset), optimizer="sgd", evaluate_every=0, precision="float32",
        resume=False, batch=8, seed=3, steps=1,
    )  # fmt: skip
    assert arguments.backend == ("cuda", 1)
    assert (arguments.several_devices, arguments.expected_workers) == ((1, 2, 3), 1)
    variables = ("PROCID", "STEP_NUM_TASKS", "STEP_NUM_NODES", "LOCALID")
    for name, value in zip(variables, "0211", strict=True):
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(UsageError, match="expected one device for each task of an srun step"):
        _ = arguments.several_devices


def raise_index_error(_, batch):
    return [][len(batch)]


def return_text(*_):
    return "many"


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            raise_index_error,
            r"the metric 'near' raised IndexError: .* in test_arguments.py, line \d+$",
        ),
        (return_text, r"the metric 'near' in test_arguments.py, line \d+ to return .* got 'many'"),
        (lambda *_: None, "the metric 'near' in .* got None"),
        (lambda *_: (1, 2, 3), r"the metric 'near' in .* got \(1, 2, 3\)"),
        (lambda _, batch: batch[0], "the metric 'near' in .* got tensor"),
    ],
)
def test_metric_is_tried_on_the_first_batch(metric, message):
    with pytest.raises(SamestepError, match=message):
        ScriptTask(make_task(held_out=DATA, metrics={"near": metric}), SPEC, {})


def test_metrics_beyond_the_limit_of_sums_are_refused():
    metrics = {f"metric {n}": lambda *_: 1.0 for n in range(32)}
    with pytest.raises(SamestepError, match="expected at most 31 metrics, got 32"):
        ScriptTask(make_task(held_out=DATA, metrics=metrics), SPEC, {})
    del metrics["metric 31"]
    ScriptTask(make_task(held_out=DATA, metrics=metrics), SPEC, {})


def test_error_names_the_metric_that_has_no_data_or_fails_later():
    with pytest.raises(SamestepError, match="expected held_out for the metric 'near', got none"):
        ScriptTask(make_task(metrics={"near": return_text}), SPEC, {})
    calls = itertools.count()
    script_task = ScriptTask(
        make_task(held_out=DATA, metrics={"near": lambda *_: [1.0][next(calls)]}), SPEC, {}
    )
    arrays = {n: torch.tensor(a) for n, a in script_task.evaluation_batch(1).arrays.items()}
    raised = pytest.raises(SamestepError, match="the metric 'near' raised IndexError")
    with torch.no_grad(), raised:
        script_task._evaluate(script_task.user.module, arrays)


@pytest.mark.parametrize("pair", [(1, 0), (0, 0)])
def test_metric_with_a_zero_denominator_is_nan(pair):
    script_task = ScriptTask(make_task(held_out=DATA, metrics={"near": lambda *_: pair}), SPEC, {})
    arrays = {n: torch.tensor(a) for n, a in script_task.evaluation_batch(0).arrays.items()}
    with torch.no_grad():
        sums = dict(script_task._evaluate(script_task.user.module, arrays))
    values = {metric.name: metric.value(sums) for metric in script_task.manifest.metrics}
    assert math.isnan(values["near"])
    assert math.isfinite(values["loss"])


def test_worker_refuses_an_invalid_precision_in_the_run_spec():
    spec = SPEC.model_copy(update={"options": {"precision": "float64"}})
    with pytest.raises(SamestepError, match="precision: expected float32, bfloat16 or float16"):
        ScriptTask(make_task(), spec, {})


class FakeCoordinator:
    """A coordinator that has emitted these events, and then has ended; it hangs without `end`."""

    def __init__(self, lines, end=None):
        self.event_queue: EventQueue = queue.SimpleQueue()
        for event in (*lines, *([] if end is None else [end])):
            self.event_queue.put(event)
        self.drain_count = 0
        self.end_message = None

    def drain(self):
        self.drain_count += 1

    def kill(self):
        self.event_queue.put(CoordinatorEnded(-9, "it was ended by SIGKILL"))

    def handle_events(self, directory, *, is_alone=True):
        owner: Any = self
        _handle_events(
            owner, owner, self.event_queue, directory, print,
            is_alone=is_alone, deadline=TaskDeadline(0, None),
        )  # fmt: skip


REFUSED_LINE = Line(
    "worker a cannot take part: no rule for 'sort'", unready_reason="no rule for 'sort'"
)
FAILED_END = CoordinatorEnded(1, "worker 'a': no rule for 'sort'")
READY_LINE = Line("worker b ready on cpu")


def test_error_that_fit_raises_is_not_printed(tmp_path, capsys):
    for lines in ([REFUSED_LINE], []):
        with pytest.raises(SamestepError, match=r"^worker 'a': no rule for 'sort'$"):
            FakeCoordinator(lines, FAILED_END).handle_events(tmp_path)
        assert capsys.readouterr() == ("", "")


def test_refusal_of_a_worker_is_printed_unless_fit_raises_it(tmp_path, capsys):
    FakeCoordinator([REFUSED_LINE, READY_LINE], CoordinatorEnded(0)).handle_events(tmp_path)
    assert capsys.readouterr() == (f"{REFUSED_LINE.text}\n{READY_LINE.text}\n", "")
    FakeCoordinator([REFUSED_LINE], CoordinatorEnded(0)).handle_events(tmp_path)
    assert capsys.readouterr() == (f"{REFUSED_LINE.text}\n", "")
    with pytest.raises(SamestepError):
        FakeCoordinator([REFUSED_LINE], FAILED_END).handle_events(tmp_path, is_alone=False)
    assert capsys.readouterr() == (f"{REFUSED_LINE.text}\n", "")


def test_resume_advice_is_a_call_of_fit(tmp_path, capsys):
    advice = f"fit(..., directory={str(tmp_path)!r}, resume=True)"
    with pytest.raises(SamestepError) as error:
        FakeCoordinator([], CoordinatorEnded(1, "lost", is_resumable=True)).handle_events(tmp_path)
    assert str(error.value) == f"lost; resume it: {advice}"
    FakeCoordinator([], CoordinatorEnded(0, is_resumable=True)).handle_events(tmp_path)
    assert capsys.readouterr().out == f"resume it: {advice}\n"


def test_unresponsive_coordinator_is_drained_twice_and_then_killed(tmp_path, monkeypatch):
    """Whether or not the worker of this script is the only one."""
    monkeypatch.setattr(fitting, "_END_TIMEOUT_S", 0.05)
    for is_alone in (True, False):
        hanging = FakeCoordinator([WorkerEnded(Unreachable("no coordinator answers"))])
        with pytest.raises(Unreachable, match="no coordinator answers"):
            hanging.handle_events(tmp_path, is_alone=is_alone)
        assert hanging.drain_count == 2
    with pytest.raises(KeyboardInterrupt):
        FakeCoordinator([Interrupted(), Interrupted()]).handle_events(tmp_path)


@pytest.mark.parametrize("phase", ["build", "start"])
@pytest.mark.parametrize("caller", ["a script", "a notebook"])
def test_early_interrupt_prints_one_line_and_leaves_no_run_directory(
    phase, caller, interrupt, monkeypatch, capsys
):
    def build():
        if phase == "build":
            interrupt()
        return make_task()

    main = types.ModuleType("__main__")
    if caller == "a script":
        main.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(CoordinatorSubprocess, "wait_until_listening", interrupt)
    with pytest.raises(BaseException) as error:  # noqa: PT011 -- its type is checked below
        samestep.fit(build, steps=1, batch=4, device="cpu")
    if caller == "a script":
        assert isinstance(error.value, SystemExit)
        assert error.value.code == 130
    else:  # a notebook's other cells must continue
        assert error.type is KeyboardInterrupt
    assert capsys.readouterr().err == "samestep: interrupted; this fit has ended\n"
    assert not list(Path("runs").glob("*"))
