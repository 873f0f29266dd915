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
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from safetensors.numpy import load_file

from backends.registry import refuse_missing
from coordinator.operator.control_client import request
from protocol.base.address import parse_address
from protocol.base.duty import Duty
from protocol.base.errors import (
    DataError,
    ExitCode,
    Mismatch,
    RunFailed,
    SamestepError,
    UsageError,
    error_for,
)
from protocol.base.regular_file import read_json
from protocol.command.output import open_standard_streams
from protocol.exact.digest import weights_digest
from protocol.host.allocator import keep_freed_memory, keep_freed_memory_no_more
from protocol.host.scratch import ScratchDirectory
from protocol.host.secret_file import join_token_file, state_home
from protocol.spec.idle_keys import TASK_SECTIONS
from protocol.spec.run_spec import RunSpec, parse_run_spec
from samestep import script
from samestep.arguments import Arguments
from samestep.data_digest import SECONDS
from samestep.fitted import FittedTask
from samestep.kept_run import KeptRun
from samestep.optimizers import optimizer_of
from samestep.own_coordinator import (
    LAST_WORDS,
    CoordinatorEnded,
    Happened,
    Interrupted,
    Line,
    OwnCoordinator,
    interrupts_into,
    show,
    usual_bind,
)
from samestep.own_worker import OwnWorker, StandsStill, WorkerEnded, told
from samestep.result import FitResult, read_history
from samestep.words import for_a_script, in_a_scripts_words
from worker.joining.credentials import WorkerCredentials
from worker.shell.client import FindAgain, Target

_OWN_KEYS: Final = {
    "name", "task", "seed", "batch", "optimizer", "steps", "epochs", "evaluate_every", "options",
    "data",
}  # fmt: skip
_OF_OTHER_TASKS: Final = {"init_from"}.union(*TASK_SECTIONS.values()) - _OWN_KEYS
_IN_FLOAT16: Final = {"config": {"model_type": "script"}, "precision": "float16"}
"""A section `model`: by it the coordinator scales losses. What the model is says the script."""
_SUBMIT_TIMEOUT_S: Final = 600.0
_GO_ON: Final = "; go on with it: "
"""In a line of the coordinator, before its advice."""
_UNFIT: Final = " cannot take part: "
"""Likewise, before the reason of a worker."""


@dataclass(frozen=True, slots=True)
class Joining:
    """How a process that `worker SCRIPT` has started takes part.

    Attributes:
        find: Gives the coordinator's address; may look for it.
        name: This worker's.
        find_again: Looks for it once more, where it was found on the network.
    """

    find: Callable[[], tuple[str, int]]
    name: str
    backend: str
    device: int | str | None
    retry_for_s: float
    credentials: WorkerCredentials
    duty: Duty
    tell: Callable[[str], None]
    find_again: FindAgain | None = None


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
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
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
        precision: What forward may compute in. In float16 losses are scaled, and a step that
            overflows is taken again with half the scale.
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
    open_standard_streams()
    arguments = Arguments.of(
        options=options, steps=steps, epochs=epochs, batch=batch, microbatch=microbatch,
        optimizer=optimizer, seed=seed, evaluate_every=evaluate_every, precision=precision,
        workers=workers, device=device, directory=directory, resume=resume, control=control,
        name=name, settings=settings,
    )  # fmt: skip
    running = script.called(script.Script.running(), _function(build))
    with running as call, _torch_as_it_was(), _memory_kept():
        return _join(call, _JOINING[0]) if _JOINING else _begin(call, arguments)


def _function(build: object) -> Callable[..., object]:
    if not callable(build):
        raise DataError(
            f"expected a function that gives a samestep.Task, got {type(build).__name__}: write "
            "def build(): return samestep.Task(...) and fit(build)"
        )
    if torch.is_inference_mode_enabled():
        raise UsageError(
            "fit: expected a call outside of torch.inference_mode, got one inside of it: what is "
            "made there takes no gradient; call fit before or after it"
        )
    return build


def keeps_the_run(control: str | None) -> bool:
    """Whether a `fit` of this process has a directory: it neither joins nor submits."""
    return not _JOINING and not (control or os.environ.get("SAMESTEP_CONTROL"))


def _begin(call: script.Call, arguments: Arguments) -> FitResult:
    _refuse_what_does_not_go_together(call, arguments)
    try:
        kept = KeptRun.find(Path(arguments.directory)) if arguments.resume else None
        if kept is not None:
            call.number = kept.call or call.number
        spec, task = _built(call, arguments, kept)
        call.ready = (spec, task)
        served = arguments.served
        if served is not None:
            return _submitted(call, spec, arguments, served)
        if kept is not None:
            kept.check(spec)
            if kept.finished:
                call.task(spec)
                told = f"the run in {str(kept.directory)!r} has finished; nothing is to be done"
                show(Line(told, fault=False))
                return _result(call, kept.directory, joined=False)
        return _alone(call, spec, arguments)
    except KeyboardInterrupt as interrupt:
        why = str(interrupt) or "nothing of this fit goes on"
        show(Line(f"samestep: interrupted; {why}", fault=True))
        if call.script.path is None:
            raise  # a notebook goes on with its other cells
        raise SystemExit(ExitCode.INTERRUPTED) from None


def _refuse_what_does_not_go_together(call: script.Call, arguments: Arguments) -> None:
    """Before anything is built.

    Raises:
        UsageError: Something would be without effect, or begin what was to go on.
        BackendUnavailable: The device that was asked for is not here.
    """
    if arguments.options and not script.takes_options(call.build):
        raise UsageError(
            "options: expected build to take them, got one that takes none: write "
            "def build(options), or leave them out"
        )
    if arguments.served is not None:
        if arguments.resume or arguments.directory is not None or arguments.workers is not None:
            raise UsageError(
                "workers, directory and resume are for a coordinator of one's own; one that serves "
                "was told how many workers to wait for and where it keeps runs, and goes on with "
                "one by `coordinator resume RUN`"
            )
    elif arguments.resume and arguments.directory is None:
        raise UsageError(
            "resume: expected the directory of the run to go on with, got none: write "
            "fit(..., directory=DIR, resume=True)"
        )
    elif arguments.resume and not os.path.isdir(arguments.directory):  # noqa: PTH112 -- a long name
        raise UsageError(
            f"resume: expected a run to go on with in {str(arguments.directory)!r}, found no such "
            "directory; leave out resume=True to begin one there"
        )
    refuse_missing(*arguments.backend)
    _ = arguments.expected_workers


def join_from_now_on(joining: Joining) -> None:
    """Every `fit` of this process joins the run of a coordinator."""
    _JOINING[:] = [joining]


# The run spec.


def _document(
    arguments: Arguments, of: script.Script, call: int, kept: KeptRun | None
) -> dict[str, Any]:
    """The run spec but for its steps."""
    microbatch = arguments.microbatch
    if microbatch is None:
        microbatch = max(1, arguments.batch // 8)
    return {
        # A step waits for no gradients to be written; settings={"log": "full"} keeps them. A run
        # goes on as it was begun, by whatever default.
        "log": "checkpoint" if kept is None else kept.spec.log,
        **_further(arguments.settings),
        "task": script.TASK,
        "name": _run_name(of) if arguments.name is None else arguments.name,
        "seed": arguments.seed,
        "batch": {"samples": arguments.batch, "microbatch": microbatch},
        "optimizer": optimizer_of(arguments.optimizer),
        "evaluate_every": arguments.evaluate_every,
        "options": {
            "script": {"name": of.name, "digest": of.digest, "call": call},
            "options": _plain(arguments.options or {}),
            "precision": arguments.precision,
            **_parts_read(kept),
        },
        **({"model": _IN_FLOAT16} if arguments.precision == "float16" else {}),
        **({} if of.path is None else {"data": {"train": str(of.path)}}),
    }


def _parts_read(kept: KeptRun | None) -> dict[str, Any]:
    """What is read of the data before a run begins: see `samestep.data_digest`."""
    read = {} if kept is None else kept.spec.options.get("read")
    return {} if read is None else {"read": read}


def _say_what_was_not_read(task: FittedTask) -> None:
    for name, digest in task.read.items():
        if digest.read < digest.samples:
            show(Line(
                f"samestep: {digest.read} of {digest.samples} samples of {name} are compared "
                f"between workers, which took {SECONDS:.0f} s; see that the others are the same "
                "everywhere", fault=False,
            ))  # fmt: skip


def _further(settings: Mapping[str, object] | None) -> dict[str, Any]:
    given = _plain(settings or {})
    if both := sorted(_OWN_KEYS & set(given)):
        raise DataError(
            f"settings: expected further keys of a run spec, got {both[0]!r}: fit has that as an "
            "argument of its own"
        )
    if idle := sorted(_OF_OTHER_TASKS & set(given)):
        raise DataError(
            f"settings: a script has no use for {idle[0]!r}: its model and its data are what build "
            "gives, so leave it out"
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
    call: script.Call, arguments: Arguments, kept: KeptRun | None
) -> tuple[RunSpec, FittedTask]:
    """The task, built here before anything starts, and the whole run spec."""
    document = _document(arguments, call.script, call.number, kept)
    steps = arguments.steps
    first = parse_run_spec({**document, "steps": 1 if steps is None else steps})
    task = script.build_task(call.build, first, call.script)
    samples = task.manifest.train_samples
    if samples < first.batch.microbatch:
        raise DataError(
            f"expected at least a microbatch of {first.batch.microbatch} training samples, got "
            f"{samples}: lower batch= or microbatch="
        )
    if arguments.evaluate_every and task.user.held_out is None:
        raise DataError(
            f"evaluate_every: expected something to measure on, got {arguments.evaluate_every} and "
            "no held_out: give samestep.Task(held_out=...), or leave out evaluate_every"
        )
    if arguments.epochs is not None:
        steps = math.ceil(arguments.epochs * math.ceil(samples / first.batch.samples))
    if kept is None:
        document["options"]["read"] = {name: each.parts for name, each in task.read.items()}
        _say_what_was_not_read(task)
    return parse_run_spec({**document, "steps": steps}), task


# With a coordinator of one's own.


def _alone(call: script.Call, spec: RunSpec, arguments: Arguments) -> FitResult:
    alone = arguments.expected_workers == 1
    options = [
        "--control", "127.0.0.1:0", "--expect-workers", str(arguments.expected_workers),
        *(["--resume"] if arguments.resume else []),
    ]  # fmt: skip
    document = json.loads(spec.to_bytes())
    with (
        _own_directory(arguments.directory, spec.name) as directory,
        ScratchDirectory() as home,
        contextlib.ExitStack() as stack,
    ):

        def start(bind: str) -> tuple[OwnCoordinator, tuple[str, int], Happened]:
            happened: Happened = queue.SimpleQueue()
            given = ["--bind", bind, *options, "--out", str(directory)]
            coordinator = OwnCoordinator(document, Path(home), given, happened)
            address = stack.enter_context(coordinator).listening()
            _LISTENED[:] = [f"{bind.rpartition(':')[0]}:{address[1]}"]
            return coordinator, address, happened

        coordinator, address, happened = _start_where_free(start)
        _say_how_to_join(call, coordinator.first_lines)
        credentials = WorkerCredentials(join_token_file(state_home()))
        resumed = arguments.resume
        worker = _worker(call, arguments.backend, address, credentials, happened)
        try:
            with interrupts_into(happened):
                _until_over(coordinator, worker, happened, directory, alone=alone, resumed=resumed)
        finally:
            worker.end()
        if not (directory / "result.json").exists():
            raise KeyboardInterrupt  # before the first step
    return _result(call, directory, joined=False)


_Started = TypeVar("_Started")


def _start_where_free(start: Callable[[str], _Started]) -> _Started:
    """Start a coordinator at the address that was asked for, else at the usual one, or at a free
    port if that is taken: by now, or until the coordinator gets to it."""
    asked = os.environ.get("SAMESTEP_BIND")
    if _LISTENED or asked:
        return start(_LISTENED[-1] if _LISTENED else str(asked))
    bind = usual_bind()
    try:
        return start(bind)
    except SamestepError:
        free = usual_bind()
        if free == bind:
            raise
        return start(free)


def _has_saved(directory: Path) -> bool:
    return (directory / "checkpoints").exists()


@contextmanager
def _own_directory(given: Path | str | None, name: str) -> Iterator[Path]:
    """The one that is given, or a new one: gone again if nothing was trained at an interrupt."""
    if given is not None:
        yield Path(given)
        return
    directory = new_directory(Path("runs"), name)
    try:
        yield directory
    except KeyboardInterrupt:
        if not _has_saved(directory):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _until_over(
    coordinator: OwnCoordinator,
    worker: OwnWorker,
    happened: Happened,
    directory: Path,
    *,
    alone: bool,
    resumed: bool,
) -> None:
    """Show what is said until the coordinator has ended.

    Raises:
        RunFailed: The run has halted, and there is nobody else who waits for an operator.
        SamestepError: The run failed, or this worker did and was alone.
        KeyboardInterrupt: It was interrupted twice.
    """
    failed: Exception | None = None
    held: list[Line] = []
    interrupts = 0
    while True:
        event = happened.get()
        if isinstance(event, Line):
            held.append(event)
            if _may_be_raised(event, alone=alone):
                continue
            _show(held, directory, refused=isinstance(failed, Mismatch))
        match event:
            case Interrupted():
                interrupts += 1
                coordinator.drain()
            case WorkerEnded(error=Exception() as error) if worker.ended is None:
                failed = error
                if alone:
                    coordinator.drain()
                    coordinator.drain()
                else:
                    show(Line(f"samestep: {told(error)}", fault=True))
            case StandsStill() if alone:
                failed = RunFailed(
                    f"halted: {event.reason}; if this machine is to blame, {_way_on(directory)} "
                    "takes that step again once that is mended; with another script, other data or "
                    "arguments begin in another directory"
                )
                coordinator.drain()
            case CoordinatorEnded(code):
                if code and interrupts > 1:
                    _show(held, directory)
                    way_on = f"ended at once; {_way_on(directory)} goes on from what was saved"
                    raise KeyboardInterrupt(way_on if _has_saved(directory) else "")
                raised = failed if alone else None
                if raised is None and code:
                    raised = coordinator.error(code)
                refused = alone and isinstance(failed, Mismatch)
                _end_with(raised, held, directory, refused=refused, resumed=resumed)
                return


def _end_with(
    raised: Exception | None, held: list[Line], directory: Path, *, refused: bool, resumed: bool
) -> None:
    """Show what is left of what was said, and raise what the run has ended with, if anything."""
    if raised is None:
        _show(held, directory)
        return
    held = [line for line in held if not _says(raised, line)]
    _show(held, directory, refused=refused)
    if not refused:
        raise _with_our_way_on_after(raised, directory)
    if not resumed:
        raise raised
    raise Mismatch(
        f"{raised}; the run in {str(directory)!r} goes on with what it was begun with: give that, "
        "or another directory"
    ) from raised


def _may_be_raised(line: Line, *, alone: bool) -> bool:
    """Whether `fit` may raise what the line says, if the run ends with it: then once is enough."""
    last = line.fault and line.text.startswith(LAST_WORDS)
    return last or (alone and _UNFIT in line.text)


def _show(lines: list[Line], directory: Path, *, refused: bool = False) -> None:
    """And none of them again. What was refused once is refused again: then there is no way on."""
    for line in lines:
        show(_without_a_way_on(line) if refused else _with_our_way_on(line, directory))
    lines.clear()


def _says(error: Exception, line: Line) -> bool:
    """Whether the error has in it what the line is about."""
    _, _, reason = line.text.partition(_UNFIT)
    return in_a_scripts_words(reason or line.text.removeprefix(LAST_WORDS)) in str(error)


def _way_on(directory: Path) -> str:
    return f"fit(..., directory={str(directory)!r}, resume=True)"


def _with_our_way_on(line: Line, directory: Path) -> Line:
    """The coordinator names its own command, with ports that were free this time."""
    text, advice, _ = line.text.partition(_GO_ON)
    return Line(f"{text}{advice}{_way_on(directory)}", line.fault) if advice else line


def _with_our_way_on_after(error: Exception, directory: Path) -> Exception:
    """Likewise, where what a coordinator has ended with is raised."""
    text = _with_our_way_on(Line(str(error), fault=True), directory).text
    if text == str(error) or not isinstance(error, SamestepError):
        return error
    return error_for(error.exit_code, text)


def _without_a_way_on(line: Line) -> Line:
    return Line(line.text.partition(_GO_ON)[0], line.fault)


def _say_how_to_join(call: script.Call, lines: list[str]) -> None:
    for line in lines:
        joins = "worker --coordinator" in line
        if joins and call.script.path is None:
            continue  # nobody else has the model of a notebook
        show(Line(f"{line} {call.script.name}" if joins else line, fault=False))


def _worker(
    call: script.Call,
    backend: tuple[str, int | str | None],
    address: tuple[str, int],
    credentials: WorkerCredentials,
    happened: Happened,
) -> OwnWorker:
    host = socket.gethostname().partition(".")[0] or "worker"
    name, device = backend
    target = Target(*address, f"{host}-{call.script.name}", name, 300.0)
    return OwnWorker(target, device, credentials, _say_nothing, happened)


def _say_nothing(text: str) -> None:
    """The coordinator tells of this worker too."""


def new_directory(below: Path, name: str, remedy: str = "write fit(..., directory=DIR)") -> Path:
    """Make one with the first number that is free: two calls never have the same.

    Raises:
        UsageError: It cannot be made.
    """
    try:
        below.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = below / f"{name}-{number}"
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise UsageError(
            f"expected a directory that can be written for runs, got {str(below)!r} "
            f"({error.strerror}); {remedy}"
        ) from None
    raise AssertionError


def _result(call: script.Call, directory: Path, *, joined: bool) -> FitResult:
    document = read_json(directory / "result.json")
    task = call.built
    assert task is not None, "whoever has computed has built"
    task.load(load_file(directory / task.manifest.export.directory / "model.safetensors"))
    digest = weights_digest(task.trained())
    if digest != document["weights_digest"]:
        raise RunFailed(f"what lies in {str(directory)!r} is not what was trained")
    return FitResult(
        task.user.module, read_history(directory), _figures(document["eval"]), digest,
        document["steps"], document["outcome"], directory, joined,
    )  # fmt: skip


def _figures(told: Mapping[str, float | None]) -> dict[str, float]:
    """Held-out figures; a message and a file have none that is not finite."""
    return {name: math.nan if value is None else value for name, value in told.items()}


# With a coordinator that serves.


def _submitted(call: script.Call, spec: RunSpec, arguments: Arguments, control: str) -> FitResult:
    status = _answer(request(control, "GET", "/status"))
    address = parse_address(status["address"], "control", 9000)
    happened: Happened = queue.SimpleQueue()
    worker = _worker(call, arguments.backend, address, WorkerCredentials(), happened)
    try:
        document = {"run": json.loads(spec.to_bytes())}
        answer = _answer(request(control, "POST", "/submit", document, _SUBMIT_TIMEOUT_S))
        show(Line(f"run {answer['run_id']} submitted; coordinator status tells more", fault=False))
        with interrupts_into(happened):
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
        event = happened.get()
        if isinstance(event, Interrupted):
            interrupted = True
            worker.drain()
        elif isinstance(event, WorkerEnded):
            if event.error is not None and worker.ended is None:
                raise event.error
            if interrupted and worker.ended is None:
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
    if isinstance(answers[0], SamestepError):
        raise for_a_script(answers[0])
    if isinstance(answers[0], Exception):
        raise answers[0]
    return dict(answers[0])


# With a run that another process has started.


def _join(call: script.Call, joining: Joining) -> FitResult:
    happened: Happened = queue.SimpleQueue()
    target = Target(
        *joining.find(), joining.name, joining.backend, joining.retry_for_s, joining.duty
    )
    worker = OwnWorker(
        target, joining.device, joining.credentials, joining.tell, happened,
        find_again=joining.find_again,
    )  # fmt: skip
    try:
        with interrupts_into(happened):
            _follow(worker, happened)
    finally:
        worker.end()
    return _as_joined(call, worker)


def _as_joined(call: script.Call, worker: OwnWorker) -> FitResult:
    task, ended = call.built, worker.ended
    if ended is None:
        raise RunFailed("this worker left before the run was over")
    if task is None or ended.outcome == "failed":
        raise RunFailed(ended.reason)
    tensors = task.trained()
    digest = weights_digest(tensors)
    if digest != ended.weights:
        raise RunFailed(
            f"the run is over ({ended.reason}) and has weights {ended.weights or 'none'}, this "
            f"worker has {digest}: it had not got so far; take what was trained from the run's "
            "directory"
        )
    task.load(tensors)
    history = tuple(row for _, row in sorted(worker.rows.items()))
    steps = int(history[-1]["step"]) if history else 0
    return FitResult(
        task.user.module, history, _figures(ended.metrics), digest, steps, ended.outcome, None,
        joined=True,
    )  # fmt: skip


@contextmanager
def _memory_kept() -> Iterator[None]:
    """Each step's arrays are as large as those of the step before: what they lay in is not given
    back in between. A backend's thread and the engine's would fault in all of it anew."""
    keep_freed_memory()
    try:
        yield
    finally:
        keep_freed_memory_no_more()


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """What a backend sets for the process, it has no more afterwards; and what the script draws
    next is what it would have drawn without `fit`."""
    drawn = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    on_cards = torch.cuda.get_rng_state_all() if _has_cards() else None
    cudnn = torch.backends.cudnn
    sdp = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    half_sums = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    benchmark, tf32 = cudnn.benchmark, cudnn.allow_tf32
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
        cudnn.benchmark, cudnn.allow_tf32 = benchmark, tf32
        torch.backends.cuda.enable_cudnn_sdp(sdp)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = half_sums
        torch.set_rng_state(drawn[0])
        np.random.set_state(drawn[1])  # noqa: NPY002
        random.setstate(drawn[2])
        if on_cards is not None:
            torch.cuda.set_rng_state_all(on_cards)
        elif _has_cards():  # since this fit: as if the script's own seed had just reached them
            torch.cuda.manual_seed_all(torch.initial_seed())


def _has_cards() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
