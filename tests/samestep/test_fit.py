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
FEW: dict[str, Any] = {
    "batch": 8,
    "microbatch": 4,
    "device": "cpu",
    "optimizer": {"name": "sgd", "lr": 0.1},
}


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def squares(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()


def line(**overrides):
    return samestep.Task(**{
        "module": nn.Linear(1, 1), "train": TensorDataset(X, 2 * X), "loss": squares, **overrides,
    })  # fmt: skip


def test_returns_the_trained_module_and_the_outcome(capsys):
    deterministic = torch.get_deterministic_debug_mode()
    task = line(
        held_out=TensorDataset(X[:10], 2 * X[:10]),
        metrics={"near": lambda module, batch: ((module(batch[0]) - batch[1]).abs() < 9).sum()},
    )
    result = samestep.fit(lambda: task, epochs=2, evaluate_every=3, name="line", **FEW)
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
    """It must not end the thread of the device: the run would wait for ever."""
    metric_calls: list[None] = []

    def fails_late(module, batch):
        metric_calls.append(None)
        if len(metric_calls) > 6:
            raise error
        return (module(batch[0]) - batch[1]).abs().sum()

    task = line(held_out=TensorDataset(X[:10], 2 * X[:10]), metrics={"far": fails_late})
    with pytest.raises(UsageError, match=f"the task's code raised {error.__name__} in test_fit"):
        samestep.fit(lambda: task, steps=50, evaluate_every=1, **FEW)


def test_default_port_taken_meanwhile_is_replaced_by_a_free_one(monkeypatch):
    """Nobody chose it: two scripts that start together both find it free."""
    monkeypatch.delenv("SAMESTEP_BIND")
    with socket.create_server(("127.0.0.1", 0)) as other:
        usual = other.getsockname()
        monkeypatch.setattr(coordinator_subprocess, "_DEFAULT_ADDRESS", usual)
        answers = [f"127.0.0.1:{usual[1]}"]
        monkeypatch.setattr(
            fitting, "default_bind", lambda: answers.pop() if answers else default_bind()
        )
        result = samestep.fit(line, steps=1, **FEW)
    assert result.outcome == "finished"
    assert not fitting._LAST_ADDRESS[0].endswith(f":{usual[1]}")


def test_returned_module_has_its_frozen_weights_and_can_be_trained_again():
    frozen = nn.Linear(1, 4).requires_grad_(False)
    module = nn.Sequential(frozen, nn.Linear(4, 1))
    before = frozen.weight.clone()
    for name in ("first", "second"):
        options = {**FEW, "device": "vulkan"}
        samestep.fit(lambda: line(module=module), steps=2, directory=name, **options)
        assert torch.equal(frozen.weight, before)
        assert module(X).isfinite().all()


def test_finished_run_is_returned_again(capsys):
    first = samestep.fit(line, steps=3, directory="done", **FEW)
    lines = capsys.readouterr().out.splitlines()
    end_index = next(n for n, line in enumerate(lines) if line.startswith("finished: 3 of 3"))
    assert not [line for line in lines[:end_index] if " left: " in line], "nobody is missed"
    repeat = samestep.fit(line, steps=3, directory="done", resume=True, **FEW)
    assert (repeat.digest, repeat.steps, repeat.outcome) == (first.digest, 3, "finished")
    assert repeat.history == first.history
    assert repeat.module is not first.module
    assert values_of(repeat.module) == values_of(first.module)
    assert capsys.readouterr().out == "the run in 'done' has finished; nothing left to do\n"


def test_finished_run_continues_for_more_steps_like_a_longer_run(capsys):
    uninterrupted = samestep.fit(line, steps=6, **FEW)
    samestep.fit(line, steps=3, directory="more", **FEW)
    capsys.readouterr()
    rest = samestep.fit(line, steps=6, directory="more", resume=True, **FEW)
    assert (rest.outcome, rest.steps, rest.digest) == ("finished", 6, uninterrupted.digest)
    assert len(rest.history) == 6
    output = capsys.readouterr().out
    assert "the run in 'more' continues with steps: 3 -> 6\n" in output
    assert "learning rates" not in output
    with pytest.raises(UsageError, match=r"steps: the run has taken 6 steps, .* has 5: set steps"):
        samestep.fit(line, steps=5, directory="more", resume=True, **FEW)


def test_longer_schedule_is_not_silently_another_run(capsys):
    falling = {**FEW, "optimizer": {"name": "sgd", "lr": 0.1, "schedule": "linear"}}
    samestep.fit(line, steps=2, directory="falling", **falling)
    rest = samestep.fit(line, steps=4, directory="falling", resume=True, **falling)
    assert [row["learning_rate"] for row in rest.history] == pytest.approx([0.1, 0.05, 0.05, 0.025])
    output = capsys.readouterr().out
    assert "from step 2 on: the result is not that of one run with these arguments" in output


def test_a_schedule_whose_rates_weigh_the_average_cannot_change():
    schedule_free = {**FEW, "optimizer": {"name": "schedule-free", "lr": 0.1}}
    samestep.fit(line, steps=1, directory="free", **schedule_free)
    schedule_free["optimizer"] = {"name": "schedule-free", "lr": 0.2}
    with pytest.raises(Mismatch, match=r"another optimizer.lr .*, steps \(1, now 2\)"):
        samestep.fit(line, steps=2, directory="free", resume=True, **schedule_free)


def values_of(module):
    return {name: value.tolist() for name, value in module.state_dict().items()}


def test_resuming_with_other_arguments_names_what_may_not_change(of_an_older_default):
    """The steps and the learning rate may change; they are not blamed."""
    changes = {
        "steps": 7,
        "optimizer": {"name": "sgd", "lr": 0.2},
        "settings": {"log": "checkpoint"},
    }
    with pytest.raises(
        Mismatch, match=r"^resume: .*'older'.* another .*; use the same"
    ) as error_info:
        samestep.fit(line, **{**FEW, "directory": of_an_older_default, **changes}, resume=True)
    message = str(error_info.value)
    assert "another log ('full', now 'checkpoint');" in message
    assert "steps" not in message
    assert "optimizer.lr" not in message
    assert "--" not in message


def test_resume_is_not_recommended_for_other_data(of_an_older_default, capsys):
    other = partial(line, train=TensorDataset(X, 3 * X))
    capsys.readouterr()
    with pytest.raises(
        Mismatch, match="resume: expected the data that the run in 'older' began with, got others"
    ):
        samestep.fit(other, steps=20, directory=of_an_older_default, resume=True, **FEW)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UsageError, match="of another run spec: choose another directory"):
        samestep.fit(other, steps=21, directory=of_an_older_default, **FEW)


@pytest.fixture
def of_an_older_default():
    """Make the directory of a run that began with another log mode, and halted."""

    def once_not_finite(module, batch):
        return squares(module, batch) * (float("nan") if is_call(module, 22) else 1.0)

    build, settings = partial(line, loss=once_not_finite), {"log": "full"}
    with pytest.raises(SamestepError, match="halted"):
        samestep.fit(build, steps=20, directory="older", settings=settings, **FEW)
    return "older"


def test_run_continues_with_its_original_log_mode(of_an_older_default):
    uninterrupted = samestep.fit(line, steps=20, **FEW)
    rest = samestep.fit(line, steps=20, directory=of_an_older_default, resume=True, **FEW)
    assert (rest.outcome, rest.digest) == ("finished", uninterrupted.digest)


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("x" * 300, "expected a name that a file can have, .* too long$"),
        ("file", "choose one that this user can write to: directory=DIR$"),
    ],
)
def test_invalid_directory_is_refused_in_terms_of_the_script(directory, message):
    Path("file").touch()
    with pytest.raises(UsageError, match=message):
        samestep.fit(line, steps=3, directory=directory, **FEW)
    with pytest.raises(UsageError, match="found no such directory"):
        samestep.fit(line, steps=3, directory=directory, resume=True, **FEW)


def test_missing_coordinator_is_reported_in_terms_of_the_script():
    with pytest.raises(Unreachable, match=r'name its address with control="HOST:PORT"$'):
        samestep.fit(line, steps=3, control="127.0.0.1:1", **FEW)


def calls_before():
    """Count calls in a file, because a loss that keeps a counter is refused."""
    with Path("calls").open("ab") as file:
        file.write(b".")
        return file.tell() - 1


def is_call(module, number):
    """In float32 the loss is computed twice when it is built, eleven times on the device, once per
    microbatch, and once after each of two steps; other trials are in float64."""
    return module.weight.dtype == torch.float32 and calls_before() == number


SENT = threading.Event()
"""The call at which the test below interrupts."""


def test_an_interrupt_drains_and_the_run_continues_with_the_same_bits(interrupt, monkeypatch):
    """The interrupt arrives while a line is shown, in the middle of the caller of `fit`."""

    def show_slowly(line):
        if "training starts" in line.text:
            SENT.wait(PATIENCE_S)
        show(line)

    def loss(module, batch):
        if is_call(module, 22):
            interrupt()
            SENT.set()
        return squares(module, batch)

    SENT.clear()

    uninterrupted = samestep.fit(line, steps=40, **FEW)
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "show", show_slowly)
        drained = samestep.fit(lambda: line(loss=loss), steps=40, directory="part", **FEW)
    assert drained.outcome == "drained"
    assert 0 < drained.steps < 40
    rest = samestep.fit(line, steps=40, directory="part", resume=True, **FEW)
    assert (rest.outcome, rest.steps, rest.digest) == ("finished", 40, uninterrupted.digest)
    assert len(rest.history) == 40


def test_interrupt_before_the_first_step_leaves_nothing(interrupt, capsys, monkeypatch):
    # as in a script
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)

    def loss(module, batch):
        if is_call(module, 5):  # the worker's call: its device checks the model's output
            interrupt()
        return squares(module, batch)

    with pytest.raises(SystemExit) as error:
        samestep.fit(lambda: line(loss=loss), steps=20, **FEW)
    assert error.value.code == ExitCode.INTERRUPTED
    assert "this fit has ended" in capsys.readouterr().err
    assert not [*Path("runs").iterdir()]


def test_halt_ends_the_call_and_the_run_continues_after_a_repair():
    def once_not_finite(module, batch):
        return squares(module, batch) * (float("nan") if is_call(module, 22) else 1.0)

    uninterrupted = samestep.fit(line, steps=20, **FEW)
    with pytest.raises(SamestepError, match=r"halted: .*non-finite.*resume=True") as error_info:
        samestep.fit(lambda: line(loss=once_not_finite), steps=20, name="nan", **FEW)
    assert "directory='runs/nan-1'" in str(error_info.value)
    assert "if script, data or arguments did, change them and start in another" in str(
        error_info.value
    )
    rest = samestep.fit(line, steps=20, directory="runs/nan-1", resume=True, name="nan", **FEW)
    assert (rest.outcome, rest.digest) == ("finished", uninterrupted.digest)


def test_data_that_changes_after_some_steps_is_refused():
    """By a counter in a file, where no check looks."""

    def collate(items):
        x, y = (torch.stack(each) for each in zip(*items, strict=True))
        return [x, y + (calls_before() > 200)]

    with pytest.raises(SamestepError, match="the batch of the same samples changed during"):
        samestep.fit(lambda: line(collate=collate), steps=90, **FEW)


def test_float16_scales_its_losses_and_repeats_an_overflowing_step(capsys):
    """With float16, an error of about 1000 times the first scale, 65536, overflows."""
    far_targets = TensorDataset(X, 1000 * X)
    float32_result, half = (
        samestep.fit(lambda: line(train=far_targets), steps=6, precision=precision, **FEW)
        for precision in ("float32", "float16")
    )
    output = capsys.readouterr().out
    assert "step 0: overflow in float16; repeated with loss scale 32768" in output
    for loss, exact in zip(half.history, float32_result.history, strict=True):
        assert loss["loss"] == pytest.approx(exact["loss"], rel=1e-2)
    assert half.digest != float32_result.digest


def test_concurrent_calls_have_different_directories(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        directories = list(
            threads.map(lambda _: new_directory(tmp_path / "runs", "line"), range(40))
        )
    assert len(set(directories)) == 40


def test_random_collators_draw_by_the_microbatchs_seed():
    def noisy(items):
        x = torch.stack([item[0] for item in items])
        y = torch.stack([item[1] for item in items])
        return {"x": x + torch.rand_like(x), "y": y}

    def by_seed(items, seed):
        torch.manual_seed(seed)
        return noisy(items)

    def loss(module, batch):
        return ((module(batch["x"]) - batch["y"]) ** 2).sum()

    first, repeat, other = (
        samestep.fit(lambda c=c: line(collate=c, loss=loss), steps=4, **FEW).digest
        for c in (noisy, noisy, by_seed)
    )
    assert first == repeat == other


def test_notebook_without_a_file_and_with_a_running_loop(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does

    async def cell():
        return samestep.fit(line, steps=2, **FEW)

    result = asyncio.run(cell())
    assert (result.outcome, result.steps) == ("finished", 2)
    output = capsys.readouterr().out
    assert "training starts" in output
    assert "\x1b" not in output
    assert "worker --coordinator" not in output


def test_submits_the_run_to_a_serving_coordinator(tmp_path):
    with Cluster(tmp_path / "served", "--expect-workers", "1") as cluster:
        result = samestep.fit(line, steps=3, control=cluster.address["control"], **FEW)
        cluster.ask("POST", "/drain", {})
        cluster.wait_for_exit(cluster.coordinator)
    assert result.digest == samestep.fit(line, steps=3, **FEW).digest
    assert result.directory is not None
    assert result.directory.is_relative_to(tmp_path / "served")
