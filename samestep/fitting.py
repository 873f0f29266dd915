"""`samestep.fit`: trains a model, alone or with others, and gives it back.

The process that calls it is a worker. Alone it also starts a coordinator, as a process of its own,
so that other workers can join while the run goes on; or it gives the run to a coordinator that
serves; or, started by `worker SCRIPT`, it joins a run of the same script.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.numpy import load_file

from coordinator.operator.control_client import request
from protocol.base.address import parse_address
from protocol.base.duty import Duty
from protocol.base.errors import DataError, ExitCode, RunFailed, UsageError
from protocol.exact.digest import weights_digest
from protocol.host.secret_file import join_token_file, state_home
from protocol.spec.run_spec import RunSpec, parse_run_spec
from samestep import script
from samestep.fitted import FittedTask
from samestep.own_coordinator import (
    CoordinatorEnded,
    Happened,
    Line,
    OwnCoordinator,
    show,
    usual_bind,
)
from samestep.own_worker import OwnWorker, StandsStill, WorkerEnded, told
from samestep.refusals import optimizer_of
from samestep.result import FitResult, read_history
from worker.joining.credentials import WorkerCredentials
from worker.shell.client import Target

_OWN_KEYS: Final = {
    "name", "task", "seed", "batch", "optimizer", "steps", "evaluate_every", "options", "data",
}  # fmt: skip
_SUBMIT_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Joining:
    """How a process that `worker SCRIPT` has started takes part.

    Attributes:
        find: Gives the coordinator's address; may look for it.
        name: This worker's.
    """

    find: Callable[[], tuple[str, int]]
    name: str
    backend: str
    device: int | str | None
    retry_for_s: float
    credentials: WorkerCredentials
    duty: Duty
    tell: Callable[[str], None]


_LISTENED: list[str] = []
"""Where the coordinator of the last `fit` listened to workers: those of the next one go there."""

_JOINING: list[Joining] = []
"""Of this process, if it was started to join."""


def fit(
    build: Callable[..., object],
    *,
    options: Mapping[str, object] | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch: int = 32,
    microbatch: int | None = None,
    optimizer: object = "adamw",
    seed: int = 0,
    evaluate_every: int = 0,
    precision: Literal["float32", "bfloat16"] = "float32",
    workers: int | None = None,
    device: str | None = None,
    directory: Path | str | None = None,
    resume: bool = False,
    control: str | None = None,
    name: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> FitResult:
    """Train what `build` gives, on this machine and on all that join, with the same bits on each.

    Args:
        build: Gives a `samestep.Task`; called with `options` if it takes an argument, with torch
            seeded. Every worker calls it.
        options: What `build` is to know, the same on every worker: plain values, as in JSON.
        steps: Optimizer steps; or say `epochs`, passes over the training samples.
        epochs: See `steps`.
        batch: Samples of a step, whatever the number of workers.
        microbatch: Samples that a worker computes at once. Default: an eighth of the batch.
        optimizer: `adamw`, `momentum` or `sgd`, or such a section of a run spec as a mapping.
        seed: Of initial values, order of samples, dropout, and random collators.
        evaluate_every: Steps between two measurements on `held_out`; 0: at the end only.
        precision: What forward may compute in.
        workers: Begin when so many are there. Default: $SAMESTEP_EXPECT_WORKERS, or 1.
        device: Of this worker. Default: $SAMESTEP_BACKEND, or auto.
        directory: Of the run. Default: a new one in `runs/`.
        resume: Go on with the run in `directory`, if there is one.
        control: Of a serving coordinator, to give the run to. Default: $SAMESTEP_CONTROL; without
            it a coordinator is started, which listens to workers at $SAMESTEP_BIND.
        name: Of the run. Default: the script's.
        settings: More keys of a run spec, such as {"checkpoint": {"every": 100}}.

    Raises:
        SamestepError: Something cannot be used, in one line that says what to write instead.
    """
    wanted = _Wanted(
        options, steps, epochs, batch, microbatch, optimizer, seed, evaluate_every, precision, name,
        settings,
    )  # fmt: skip
    how = _How(workers, device, directory, resume, control)
    with script.called(script.Script.running(), _function(build)) as call, _torch_as_it_was():
        return _join(call, _JOINING[0]) if _JOINING else _begin(call, wanted, how)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The arguments of `fit` that a run spec is made of."""

    options: Mapping[str, object] | None
    steps: int | None
    epochs: float | None
    batch: int
    microbatch: int | None
    optimizer: object
    seed: int
    evaluate_every: int
    precision: str
    name: str | None
    settings: Mapping[str, object] | None

    def document(self, of: script.Script, call: int) -> dict[str, Any]:
        """The run spec but for its steps."""
        said = {"name": of.name, "digest": of.digest, "call": call}
        return {
            **_further(self.settings),
            "task": script.TASK,
            "name": self.name or _run_name(of),
            "seed": self.seed,
            "batch": _batch(self.batch, self.microbatch),
            "optimizer": optimizer_of(self.optimizer),
            "evaluate_every": self.evaluate_every,
            "options": {
                "script": said,
                "options": _plain(self.options or {}),
                "precision": self.precision,
            },
            **({} if of.path is None else {"data": {"train": str(of.path)}}),
        }


@dataclass(frozen=True, slots=True)
class _How:
    """The others: who takes part, and where the run is kept."""

    workers: int | None
    device: str | None
    directory: Path | str | None
    resume: bool
    control: str | None

    @property
    def expected(self) -> int:
        return self.workers or int(os.environ.get("SAMESTEP_EXPECT_WORKERS", "1"))

    @property
    def backend(self) -> str:
        return self.device or os.environ.get("SAMESTEP_BACKEND", "auto")


def _function(build: object) -> Callable[..., object]:
    if not callable(build):
        raise DataError(
            f"expected a function that gives a samestep.Task, got {type(build).__name__}: write "
            "def build(): return samestep.Task(...) and fit(build)"
        )
    return build


def keeps_the_run(control: str | None) -> bool:
    """Whether a `fit` of this process has a directory: it neither joins nor submits."""
    return not _JOINING and not (control or os.environ.get("SAMESTEP_CONTROL"))


def _number_before(directory: Path) -> int:
    """The how manieth fit the run in a directory is of; 0 without one."""
    try:
        document = json.loads((directory / "run.json").read_bytes())
        return int(document["spec"]["options"]["script"]["call"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # whoever reads it for the run will say what is wrong with it


def _begin(call: script.Call, wanted: _Wanted, how: _How) -> FitResult:
    if how.resume and how.directory is not None:
        call.number = _number_before(Path(how.directory)) or call.number
    document = wanted.document(call.script, call.number)
    spec, task = _built(call, document, wanted.steps, wanted.epochs)
    call.ready = (spec, task)
    served = how.control or os.environ.get("SAMESTEP_CONTROL")
    return _submitted(call, spec, how, served) if served else _alone(call, spec, how)


def join_from_now_on(joining: Joining) -> None:
    """Every `fit` of this process joins the run of a coordinator."""
    _JOINING[:] = [joining]


# The run spec.


def _batch(samples: int, microbatch: int | None) -> dict[str, int]:
    return {"samples": samples, "microbatch": microbatch or max(1, samples // 8)}


def _further(settings: Mapping[str, object] | None) -> dict[str, Any]:
    given = _plain(settings or {})
    if both := sorted(_OWN_KEYS & set(given)):
        raise DataError(
            f"settings: expected further keys of a run spec, got {both[0]!r}: fit has that as an "
            "argument of its own"
        )
    return given


def _plain(options: object) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise DataError(f"expected options by name, got {type(options).__name__}")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(options), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"expected options as JSON has them ({error}): give numbers, texts and lists, and make "
            "models and tensors inside build"
        ) from None
    return copied


def _run_name(of: script.Script) -> str:
    plain = "".join(c if c.isalnum() and c.isascii() else "-" for c in of.name.removesuffix(".py"))
    return plain.strip("-")[:48] or "fit"


def _built(
    call: script.Call, document: dict[str, Any], steps: int | None, epochs: float | None
) -> tuple[RunSpec, FittedTask]:
    """The task, built here before anything starts, and the whole run spec."""
    if (steps is None) == (epochs is None):
        raise DataError("expected either steps= or epochs=: how long is to be trained?")
    first = parse_run_spec({**document, "steps": steps or 1})
    task = script.build_task(call.build, first, call.script)
    samples = task.manifest.train_samples
    if samples < first.batch.microbatch:
        raise DataError(
            f"expected at least a microbatch of {first.batch.microbatch} training samples, got "
            f"{samples}: lower batch= or microbatch="
        )
    if epochs is not None:
        steps = max(1, math.ceil(epochs * math.ceil(samples / first.batch.samples)))
    return first.model_copy(update={"steps": steps}), task


# With a coordinator of one's own.


def _alone(call: script.Call, spec: RunSpec, how: _How) -> FitResult:
    happened: Happened = queue.SimpleQueue()
    bind = os.environ.get("SAMESTEP_BIND") or usual_bind()
    bind = _LISTENED[-1] if _LISTENED else bind
    directory = Path(how.directory or new_directory(Path("runs"), spec.name))
    options = [
        "--bind", bind, "--control", "127.0.0.1:0", "--expect-workers", str(how.expected),
        "--out", str(directory), *(["--resume"] if how.resume else []),
    ]  # fmt: skip
    document = json.loads(spec.to_bytes())
    with (
        tempfile.TemporaryDirectory(prefix="samestep-") as home,
        OwnCoordinator(document, Path(home), options, happened) as coordinator,
    ):
        address = coordinator.listening()
        _LISTENED[:] = [f"{bind.rpartition(':')[0]}:{address[1]}"]
        _say_how_to_join(call, coordinator.first_lines)
        credentials = WorkerCredentials(join_token_file(state_home()))
        worker = _worker(call, how.backend, address, credentials, happened)
        try:
            code = _until_over(coordinator, worker, happened, directory, alone=how.expected == 1)
        finally:
            worker.end()
        if code:
            raise coordinator.error(code)
    return _result(call, directory, joined=False)


def _until_over(
    coordinator: OwnCoordinator,
    worker: OwnWorker,
    happened: Happened,
    directory: Path,
    *,
    alone: bool,
) -> int:
    """Show what is said until the coordinator has ended; its exit code.

    Raises:
        RunFailed: The run has halted, and there is nobody else who waits for an operator.
    """
    failed: Exception | None = None
    while True:
        try:
            event = happened.get()
        except KeyboardInterrupt:
            coordinator.drain()
            continue
        match event:
            case Line():
                show(event)
            case WorkerEnded(error=Exception() as error) if not worker.over:
                show(Line(f"samestep: {told(error)}", fault=True))
                failed = error
                if alone:
                    coordinator.drain()
                    coordinator.drain()
            case StandsStill() if alone:
                failed = RunFailed(
                    f"halted: {event.reason}; once that is mended, fit(..., "
                    f"directory={str(directory)!r}, resume=True) takes that step again"
                )
                coordinator.drain()
            case CoordinatorEnded():
                if failed is not None and alone:
                    raise failed
                return event.exit_code


def _say_how_to_join(call: script.Call, lines: list[str]) -> None:
    for line in lines:
        joins = "worker --coordinator" in line
        if joins and call.script.path is None:
            continue  # nobody else has the model of a notebook
        show(Line(f"{line} {call.script.name}" if joins else line, fault=False))


def _worker(
    call: script.Call,
    device: str,
    address: tuple[str, int],
    credentials: WorkerCredentials,
    happened: Happened,
) -> OwnWorker:
    host = socket.gethostname().partition(".")[0] or "worker"
    target = Target(*address, f"{host}-{call.script.name}", device, 300.0)
    return OwnWorker(target, None, credentials, _say_nothing, happened)


def _say_nothing(text: str) -> None:
    """The coordinator tells of this worker too."""


def new_directory(below: Path, name: str) -> Path:
    """One that is made here, with the first number that is free: two calls never have the same."""
    for number in itertools.count(1):
        path = below / f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError


def _result(call: script.Call, directory: Path, *, joined: bool) -> FitResult:
    document = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    task = call.built
    assert task is not None, "whoever has computed has built"
    task.load(load_file(directory / task.manifest.export.directory / "model.safetensors"))
    digest = weights_digest(task.trained())
    if digest != document["weights_digest"]:
        raise RunFailed(f"what lies in {str(directory)!r} is not what was trained")
    figures = {name: v for name, v in document["eval"].items() if v is not None}
    return FitResult(
        task.user.module, read_history(directory), figures, digest, document["steps"],
        document["outcome"], directory, joined,
    )  # fmt: skip


# With a coordinator that serves.


def _submitted(call: script.Call, spec: RunSpec, how: _How, control: str) -> FitResult:
    if how.resume or how.directory is not None:
        raise UsageError(
            "directory and resume are for a coordinator of one's own; one that serves keeps runs "
            "where it was told, and goes on with one by `coordinator resume RUN`"
        )
    status = _answer(request(control, "GET", "/status"))
    address = parse_address(status["address"], "--control", 9000)
    happened: Happened = queue.SimpleQueue()
    worker = _worker(call, how.backend, address, WorkerCredentials(), happened)
    try:
        document = {"run": json.loads(spec.to_bytes())}
        answer = _answer(request(control, "POST", "/submit", document, _SUBMIT_TIMEOUT_S))
        show(Line(f"run {answer['run_id']} submitted; coordinator status tells more", fault=False))
        _follow(worker, happened)
        status = _answer(request(control, "GET", "/status"))
    finally:
        worker.end()
    directory = Path(status.get("directory", ""))
    if status.get("run_id") == answer["run_id"] and (directory / "result.json").is_file():
        if status["phase"] == "failed":
            raise RunFailed(str(status["reason"]))
        return _result(call, directory, joined=False)
    return _as_joined(call, worker)


def _follow(worker: OwnWorker, happened: Happened) -> None:
    """Until the run is over, or this worker can take no part in it.

    Raises:
        SamestepError: It cannot.
        SystemExit: It was interrupted, and has left the run to the others.
    """
    interrupted = False
    while True:
        try:
            event = happened.get()
        except KeyboardInterrupt:
            interrupted = True
            worker.drain()
            continue
        if isinstance(event, WorkerEnded):
            if event.error is not None and not worker.over:
                raise event.error
            if interrupted and not worker.over:
                raise SystemExit(ExitCode.OK)
            return


def _answer(work: Any) -> dict[str, Any]:
    """Also where an event loop runs already, as in a notebook."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(asyncio.run(work))
        except Exception as error:  # noqa: BLE001 -- raised again by the caller
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(answers[0], Exception):
        raise answers[0]
    return dict(answers[0])


# With a run that another process has started.


def _join(call: script.Call, joining: Joining) -> FitResult:
    happened: Happened = queue.SimpleQueue()
    target = Target(
        *joining.find(), joining.name, joining.backend, joining.retry_for_s, joining.duty
    )
    worker = OwnWorker(target, joining.device, joining.credentials, joining.tell, happened)
    try:
        _follow(worker, happened)
    finally:
        worker.end()
    return _as_joined(call, worker)


def _as_joined(call: script.Call, worker: OwnWorker) -> FitResult:
    task = call.built
    if task is None or not worker.over:
        raise RunFailed(worker.over or "this worker left before the run was over")
    tensors = task.trained()
    task.load(tensors)
    history = tuple(row for _, row in sorted(worker.rows.items()))
    steps = int(history[-1]["step"]) if history else 0
    return FitResult(
        task.user.module, history, {}, weights_digest(tensors), steps, "finished", None, joined=True
    )


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """What a backend sets for the process, it has no more afterwards."""
    mode = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    matmul, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(matmul)
        torch.set_num_threads(threads)
