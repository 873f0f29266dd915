"""`samestep.fit` in this process: results, interrupts, resuming, serving coordinators."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from protocol.base.errors import ExitCode, Mismatch, SamestepError, Unreachable, UsageError
from samestep import coordinator_subprocess, fitting
from samestep.coordinator_subprocess import default_bind, show
from samestep.fitting import new_directory
from tests.cluster import Cluster
from tests.processes import PATIENCE_S

X = torch.linspace(-1, 1, 24)[:, None]
FIT_OPTIONS: dict[str, Any] = {
    "batch": 8,
    "microbatch": 4,
    "device": "cpu",
    "optimizer": {"name": "sgd", "lr": 0.1},
}


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def squares(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()


def line_task(**changes):
    return samestep.Task(**{
        "module": nn.Linear(1, 1), "train": TensorDataset(X, 2 * X), "loss": squares, **changes,
    })  # fmt: skip


def test_fit_returns_the_trained_module_and_the_outcome(capsys):
    deterministic = torch.get_deterministic_debug_mode()
    task = line_task(
        held_out=TensorDataset(X[:10], 2 * X[:10]),
        metrics={"near": lambda module, batch: ((module(batch[0]) - batch[1]).abs() < 9).sum()},
    )
    result = samestep.fit(lambda: task, epochs=2, evaluate_every=3, name="line", **FIT_OPTIONS)
    assert result.module is task.module
    assert (result.steps, result.outcome, result.joined) == (6, "finished", False)
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "learning_rate", "grad_norm"} <= set(result.history[0])
    assert "held_out_near" in result.history[2]
    assert result.metrics["near"] == 1.0
    with torch.no_grad():
        error = float(squares(result.module, (X[:10], 2 * X[:10]))) / 10
    assert result.metrics["loss"] == pytest.approx(error, rel=1e-5)
    assert result.directory is not None
    assert (result.directory / "result.json").is_file()
    assert "training starts" in capsys.readouterr().out
    assert torch.get_deterministic_debug_mode() == deterministic


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
def test_error_that_ends_a_program_ends_the_run(error):
    """If it ended the device's thread, the run would wait forever."""
    metric_calls: list[None] = []

    def raise_late(module, batch):
        metric_calls.append(None)
        if len(metric_calls) > 6:  # after the trials before training
            raise error
        return (module(batch[0]) - batch[1]).abs().sum()

    task = line_task(held_out=TensorDataset(X[:10], 2 * X[:10]), metrics={"far": raise_late})
    with pytest.raises(UsageError, match=f"the task's code raised {error.__name__} in test_fit"):
        samestep.fit(lambda: task, steps=50, evaluate_every=1, **FIT_OPTIONS)


def test_default_port_that_is_taken_meanwhile_is_replaced_by_a_free_one(monkeypatch):
    """Two scripts that start together may both find the default port free."""
    monkeypatch.delenv("SAMESTEP_BIND")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        default_address = listener.getsockname()
        monkeypatch.setattr(coordinator_subprocess, "_DEFAULT_ADDRESS", default_address)
        taken_addresses = [f"127.0.0.1:{default_address[1]}"]
        monkeypatch.setattr(
            fitting,
            "default_bind",
            lambda: taken_addresses.pop() if taken_addresses else default_bind(),
        )
        result = samestep.fit(line_task, steps=1, **FIT_OPTIONS)
    assert result.outcome == "finished"
    assert not fitting._LAST_ADDRESS[0].endswith(f":{default_address[1]}")


def test_returned_module_has_its_frozen_weights_and_can_be_trained_again():
    frozen = nn.Linear(1, 4).requires_grad_(False)
    module = nn.Sequential(frozen, nn.Linear(4, 1))
    before = frozen.weight.clone()
    for name in ("first", "second"):
        options = {**FIT_OPTIONS, "device": "vulkan"}
        samestep.fit(lambda: line_task(module=module), steps=2, directory=name, **options)
        assert torch.equal(frozen.weight, before)
        assert module(X).isfinite().all()


def test_finished_run_is_returned_again(capsys):
    first = samestep.fit(line_task, steps=3, directory="done", **FIT_OPTIONS)
    lines = capsys.readouterr().out.splitlines()
    end_index = next(n for n, line in enumerate(lines) if line.startswith("finished: 3 of 3"))
    assert not [line for line in lines[:end_index] if " left: " in line], "no worker leaves early"
    repeat = samestep.fit(line_task, steps=3, directory="done", resume=True, **FIT_OPTIONS)
    assert (repeat.digest, repeat.steps, repeat.outcome) == (first.digest, 3, "finished")
    assert repeat.history == first.history
    assert repeat.module is not first.module
    assert values_of(repeat.module) == values_of(first.module)
    assert capsys.readouterr().out == "the run in 'done' has finished; nothing left to do\n"


def test_finished_run_continues_for_more_steps_like_a_longer_run(capsys):
    uninterrupted = samestep.fit(line_task, steps=6, **FIT_OPTIONS)
    samestep.fit(line_task, steps=3, directory="more", **FIT_OPTIONS)
    capsys.readouterr()
    resumed = samestep.fit(line_task, steps=6, directory="more", resume=True, **FIT_OPTIONS)
    assert (resumed.outcome, resumed.steps, resumed.digest) == ("finished", 6, uninterrupted.digest)
    assert len(resumed.history) == 6
    output = capsys.readouterr().out
    assert "the run in 'more' continues with steps: 3 -> 6\n" in output
    assert "learning rates" not in output
    with pytest.raises(UsageError, match=r"steps: the run has taken 6 steps, .* has 5: set steps"):
        samestep.fit(line_task, steps=5, directory="more", resume=True, **FIT_OPTIONS)


def test_resuming_with_a_longer_schedule_reports_that_the_result_differs(capsys):
    falling = {**FIT_OPTIONS, "optimizer": {"name": "sgd", "lr": 0.1, "schedule": "linear"}}
    samestep.fit(line_task, steps=2, directory="falling", **falling)
    resumed = samestep.fit(line_task, steps=4, directory="falling", resume=True, **falling)
    assert [row["learning_rate"] for row in resumed.history] == pytest.approx(
        [0.1, 0.05, 0.05, 0.025]
    )
    output = capsys.readouterr().out
    assert "from step 2 on: the result is not that of one run with these arguments" in output


def test_learning_rates_that_weight_an_average_cannot_change():
    schedule_free = {**FIT_OPTIONS, "optimizer": {"name": "schedule-free", "lr": 0.1}}
    samestep.fit(line_task, steps=1, directory="free", **schedule_free)
    schedule_free["optimizer"] = {"name": "schedule-free", "lr": 0.2}
    with pytest.raises(Mismatch, match=r"another optimizer.lr .*, steps \(1, now 2\)"):
        samestep.fit(line_task, steps=2, directory="free", resume=True, **schedule_free)


def values_of(module):
    return {name: value.tolist() for name, value in module.state_dict().items()}


def test_error_for_changed_arguments_names_only_those_that_may_not_change(halted_full_log_run):
    """The steps and the learning rate may change."""
    changes = {
        "steps": 7,
        "optimizer": {"name": "sgd", "lr": 0.2},
        "settings": {"log": "checkpoint"},
    }
    with pytest.raises(
        Mismatch, match=r"^resume: .*'older'.* another .*; use the same"
    ) as error_info:
        samestep.fit(
            line_task, **{**FIT_OPTIONS, "directory": halted_full_log_run, **changes}, resume=True
        )
    message = str(error_info.value)
    assert "another log ('full', now 'checkpoint');" in message
    assert "steps" not in message
    assert "optimizer.lr" not in message
    assert "--" not in message


def test_resume_is_not_recommended_for_other_data(halted_full_log_run, capsys):
    other = partial(line_task, train=TensorDataset(X, 3 * X))
    capsys.readouterr()
    with pytest.raises(
        Mismatch, match="resume: expected the data that the run in 'older' began with, got others"
    ):
        samestep.fit(other, steps=20, directory=halted_full_log_run, resume=True, **FIT_OPTIONS)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UsageError, match="of another run spec: choose another directory"):
        samestep.fit(other, steps=21, directory=halted_full_log_run, **FIT_OPTIONS)


@pytest.fixture
def halted_full_log_run():
    """Return the directory of a halted run whose log mode was set by an argument."""

    def diverge_once(module, batch):
        return squares(module, batch) * (float("nan") if is_call(module, 22) else 1.0)

    build, settings = partial(line_task, loss=diverge_once), {"log": "full"}
    with pytest.raises(SamestepError, match="halted"):
        samestep.fit(build, steps=20, directory="older", settings=settings, **FIT_OPTIONS)
    return "older"


def test_resumed_run_keeps_its_log_mode(halted_full_log_run):
    uninterrupted = samestep.fit(line_task, steps=20, **FIT_OPTIONS)
    resumed = samestep.fit(
        line_task, steps=20, directory=halted_full_log_run, resume=True, **FIT_OPTIONS
    )
    assert (resumed.outcome, resumed.digest) == ("finished", uninterrupted.digest)


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("x" * 300, "expected a name that a file can have, .* too long$"),
        ("file", "choose one that this user can write to: directory=DIR$"),
    ],
)
def test_error_for_an_invalid_directory_names_the_argument_of_fit(directory, message):
    Path("file").touch()
    with pytest.raises(UsageError, match=message):
        samestep.fit(line_task, steps=3, directory=directory, **FIT_OPTIONS)
    with pytest.raises(UsageError, match="found no such directory"):
        samestep.fit(line_task, steps=3, directory=directory, resume=True, **FIT_OPTIONS)


def test_error_for_a_missing_coordinator_names_the_argument_of_fit():
    with pytest.raises(Unreachable, match=r'name its address with control="HOST:PORT"$'):
        samestep.fit(line_task, steps=3, control="127.0.0.1:1", **FIT_OPTIONS)


def count_calls():
    """Return the number of earlier calls; it is in a file, as a loss with a counter is refused."""
    with Path("calls").open("ab") as file:
        file.write(b".")
        return file.tell() - 1


def is_call(module, number):
    """Return whether this is the loss's call `number` in float32, from 0.

    `fit` makes four such calls when it builds the task, and about a dozen when it tries the device:
    call 5 is such a trial, call 22 belongs to one of the first steps. Other trials use float64.
    """
    return module.weight.dtype == torch.float32 and count_calls() == number


INTERRUPT_SENT = threading.Event()
"""Set once the loss of the test below has sent the interrupt."""


def test_an_interrupt_drains_and_the_run_continues_with_the_same_bits(interrupt, monkeypatch):
    """The interrupt arrives while `fit` prints a line."""

    def show_slowly(line):
        if "training starts" in line.text:
            INTERRUPT_SENT.wait(PATIENCE_S)
        show(line)

    def loss(module, batch):
        if is_call(module, 22):
            interrupt()
            INTERRUPT_SENT.set()
        return squares(module, batch)

    INTERRUPT_SENT.clear()

    uninterrupted = samestep.fit(line_task, steps=40, **FIT_OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "show", show_slowly)
        drained = samestep.fit(
            lambda: line_task(loss=loss), steps=40, directory="part", **FIT_OPTIONS
        )
    assert drained.outcome == "drained"
    assert 0 < drained.steps < 40
    resumed = samestep.fit(line_task, steps=40, directory="part", resume=True, **FIT_OPTIONS)
    assert (resumed.outcome, resumed.steps, resumed.digest) == (
        "finished",
        40,
        uninterrupted.digest,
    )
    assert len(resumed.history) == 40


def test_interrupt_before_the_first_step_leaves_no_run_directory(interrupt, capsys, monkeypatch):
    # A main module with a file is a script; only scripts exit.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)

    def loss(module, batch):
        if is_call(module, 5):  # while the worker's device checks the model
            interrupt()
        return squares(module, batch)

    with pytest.raises(SystemExit) as error:
        samestep.fit(lambda: line_task(loss=loss), steps=20, **FIT_OPTIONS)
    assert error.value.code == ExitCode.INTERRUPTED
    assert "this fit has ended" in capsys.readouterr().err
    assert not [*Path("runs").iterdir()]


def test_halt_ends_the_call_and_the_run_continues_after_a_repair():
    def diverge_once(module, batch):
        return squares(module, batch) * (float("nan") if is_call(module, 22) else 1.0)

    uninterrupted = samestep.fit(line_task, steps=20, **FIT_OPTIONS)
    with pytest.raises(SamestepError, match=r"halted: .*non-finite.*resume=True") as error_info:
        samestep.fit(lambda: line_task(loss=diverge_once), steps=20, name="nan", **FIT_OPTIONS)
    assert "directory='runs/nan-1'" in str(error_info.value)
    assert "if script, data or arguments did, change them and start in another" in str(
        error_info.value
    )
    resumed = samestep.fit(
        line_task, steps=20, directory="runs/nan-1", resume=True, name="nan", **FIT_OPTIONS
    )
    assert (resumed.outcome, resumed.digest) == ("finished", uninterrupted.digest)


def test_data_that_changes_after_some_steps_is_refused():
    """The state is a counter in a file, which the checks before training cannot find."""

    def collate(items):
        x, y = (torch.stack(each) for each in zip(*items, strict=True))
        return [x, y + (count_calls() > 200)]

    with pytest.raises(SamestepError, match="the batch of the same samples changed during"):
        samestep.fit(lambda: line_task(collate=collate), steps=90, **FIT_OPTIONS)


def test_float16_scales_its_losses_and_repeats_an_overflowing_step(capsys):
    """Errors of about 1000 times the first loss scale, 65536, overflow float16."""
    far_targets = TensorDataset(X, 1000 * X)
    float32_result, float16_result = (
        samestep.fit(
            lambda: line_task(train=far_targets), steps=6, precision=precision, **FIT_OPTIONS
        )
        for precision in ("float32", "float16")
    )
    output = capsys.readouterr().out
    assert "step 0: overflow in float16; repeated with loss scale 32768" in output
    for row, float32_row in zip(float16_result.history, float32_result.history, strict=True):
        assert row["loss"] == pytest.approx(float32_row["loss"], rel=1e-2)
    assert float16_result.digest != float32_result.digest


def test_concurrent_calls_have_different_directories(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        directories = list(
            threads.map(lambda _: new_directory(tmp_path / "runs", "line"), range(40))
        )
    assert len(set(directories)) == 40


def test_collators_draw_from_generators_seeded_for_the_microbatch():
    def add_noise(items):
        x = torch.stack([item[0] for item in items])
        y = torch.stack([item[1] for item in items])
        return {"x": x + torch.rand_like(x), "y": y}

    def add_noise_by_seed(items, seed):
        torch.manual_seed(seed)
        return add_noise(items)

    def loss(module, batch):
        return ((module(batch["x"]) - batch["y"]) ** 2).sum()

    first, repeat, with_seed_argument = (
        samestep.fit(
            lambda collate=collate: line_task(collate=collate, loss=loss), steps=4, **FIT_OPTIONS
        ).digest
        for collate in (add_noise, add_noise, add_noise_by_seed)
    )
    assert first == repeat == with_seed_argument


def test_fit_runs_in_a_notebook_whose_event_loop_is_running(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does

    async def cell():
        return samestep.fit(line_task, steps=2, **FIT_OPTIONS)

    result = asyncio.run(cell())
    assert (result.outcome, result.steps) == ("finished", 2)
    output = capsys.readouterr().out
    assert "training starts" in output
    assert "\x1b" not in output
    assert "worker --coordinator" not in output


def test_fit_submits_the_run_to_a_serving_coordinator(tmp_path):
    with Cluster(tmp_path / "served", "--expect-workers", "1") as cluster:
        result = samestep.fit(line_task, steps=3, control=cluster.address["control"], **FIT_OPTIONS)
        cluster.ask("POST", "/drain", {})
        cluster.wait_for_exit(cluster.coordinator)
    assert result.digest == samestep.fit(line_task, steps=3, **FIT_OPTIONS).digest
    assert result.directory is not None
    assert result.directory.is_relative_to(tmp_path / "served")
