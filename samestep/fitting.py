"""`samestep.fit`: trains a model on this machine and on all machines that join, and returns it.

The calling process is a worker. By default it also starts a coordinator as a subprocess, so that
other workers can join during the run. With `control` it submits the run to a running coordinator;
started by `worker SCRIPT`, it joins a run of the same script.
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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from safetensors.numpy import load_file

from backends.registry import refuse_missing_device, restore_torch_settings
from coordinator.operator.control_client import request
from protocol.base.address import parse_address
from protocol.base.errors import (
    DataError,
    ExitCode,
    Mismatch,
    RunFailed,
    SamestepError,
    Unreachable,
    UsageError,
)
from protocol.base.option_names import options_as_arguments
from protocol.base.regular_file import read_json
from protocol.cli.output import open_standard_streams
from protocol.exact.digest import weights_digest
from protocol.machine.allocator import keep_freed_memory, stop_keeping_freed_memory
from protocol.machine.secret_file import join_token_file, state_home
from protocol.spec.manifest import INITIAL_ENTRIES, SCRIPT_DIRECTORY
from protocol.spec.run_spec import SECTIONS, RunSpec, parse_run_spec
from samestep import script
from samestep.arguments import EDITED, Arguments
from samestep.coordinator_subprocess import (
    CoordinatorEnded,
    CoordinatorSubprocess,
    EventQueue,
    Interrupted,
    Line,
    NewRow,
    WorkersChanged,
    default_bind,
    error_from,
    queue_interrupts,
    show,
)
from samestep.edited_script import report_edit, with_gradient_report
from samestep.existing_run import ExistingRun
from samestep.result import FitResult, OnLog, read_history
from samestep.script_devices import devices_of
from samestep.served_device import ServedDevice, served_device
from samestep.srun import SrunStep, TaskDeadline
from samestep.worker_thread import Stalled, WorkerEnded, WorkerThread, one_line
from worker.join.credentials import WorkerCredentials
from worker.scripts.data_digest import SECONDS
from worker.scripts.launch import JoinOptions, join_options
from worker.scripts.script_task import ScriptTask
from worker.shell.client import Target

_ARGUMENT_KEYS: Final = {
    "name", "task", "seed", "batch", "optimizer", "steps", "epochs", "evaluate_every", "options",
    "data",
}  # fmt: skip
_UNSUPPORTED_KEYS: Final = {"init_from", *SECTIONS} - _ARGUMENT_KEYS
_FLOAT16_MODEL: Final = {"config": {"model_type": "script"}, "precision": "float16"}
"""The section `model` that makes the coordinator scale losses; the script defines the model."""
_SUBMIT_TIMEOUT_S: Final = 600.0
_POLL_INTERVAL_S: Final = 1.0
_MINIMUM_PATIENCE_S: Final = 10.0
"""Minimum time that a worker waits for a run: the coordinator offers it at once unless it is
busy."""
_END_TIMEOUT_S: Final = 60.0
"""How long to wait for the end of a coordinator whose run has failed."""
_END_AT_ONCE_TIMEOUT_S: Final = 5.0
"""How long to wait for the end of a coordinator after the user's second signal."""

_LAST_ADDRESS: list[str] = []
"""Address of the last `fit`'s coordinator; the next one listens there, so that workers reconnect.
"""


def fit(
    build: Callable[..., object],
    *,
    options: Mapping[str, object] | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch: int = 32,
    microbatch: int | None = None,
    optimizer: object = "adamw",
    scheduler: object = None,
    scheduler_interval: Literal["step", "epoch"] = "step",
    seed: int = 0,
    evaluate_every: int = 0,
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    workers: int | None = None,
    device: str | None = None,
    directory: Path | str | None = None,
    resume: bool | Literal["edited"] = False,
    control: str | None = None,
    name: str | None = None,
    settings: Mapping[str, object] | None = None,
    on_log: OnLog | None = None,
) -> FitResult:
    """Train the task that `build` returns, with the same bits on every machine that takes part.

    Args:
        build: Returns a `samestep.Task`. Every worker calls it, with generators seeded, and with
            `options` if it takes an argument.
        options: Options for `build`, the same on every worker: values that JSON can represent.
        steps: Optimizer steps; give either `steps` or `epochs`.
        epochs: Passes over the training samples.
        batch: Samples per step, for any number of workers.
        microbatch: Samples that a worker computes at once. Default: an eighth of the batch.
        optimizer: A name, such as `adamw`, `momentum` or `sgd`; a run spec's section as a mapping;
            or a torch optimizer, or a function of the module that returns one, which is translated.
        scheduler: A scheduler of that optimizer, or a function of it that returns one.
        scheduler_interval: Whether the scheduler steps after each step or after each epoch.
        seed: Seeds initial values, order of samples, dropout, and random collators.
        evaluate_every: Steps between evaluations on `held_out`; 0: only at the end.
        precision: Precision of forward and backward; in float16 losses are scaled.
        workers: Workers to wait for. Default: $SAMESTEP_EXPECT_WORKERS, a Slurm step's tasks, or 1.
        device: This worker's device; `cuda0-3` names several. Default: $SAMESTEP_BACKEND, or auto.
        directory: Directory of the run. Default: a new one in `runs/`.
        resume: Resume the run in `directory`; "edited": even if the code was edited since then.
        control: Control port of a running coordinator. Default: $SAMESTEP_CONTROL; without it a
            coordinator is started, which listens at $SAMESTEP_BIND.
        name: Name of the run. Default: the script's name.
        settings: More keys of the run spec, such as {"checkpoint": {"every": 100}}.
        on_log: Called with each new row of the history, of a committed step or an evaluation.

    Raises:
        SamestepError: The run cannot start, or it failed; one line says what to do.
    """
    named_arguments = {**locals()}
    joined_by = _note_call()
    build = _check_build(named_arguments.pop("build"))
    call_context = script.called(script.Script.of_process(), build)
    arguments = Arguments.of(**named_arguments)
    with call_context as call, _preserving_torch_state(), _keeping_freed_memory():
        return call.note_directory(_take_part(call, arguments, joined_by))


def _note_call() -> JoinOptions | None:
    """Note that `fit` was called, and return the options of `worker SCRIPT` if that started it."""
    open_standard_streams()
    if (joined_by := join_options()) is not None:
        joined_by.fit_was_called = True
    return joined_by


def _take_part(call: script.Call, arguments: Arguments, joined_by: JoinOptions | None) -> FitResult:
    """Serve a device, join a run, or begin one; in a Slurm step, task 0 begins the run."""
    if (served := served_device()) is not None:
        return _serve(call, served)
    if joined_by is not None:
        return _join(call, joined_by, arguments.on_log)
    step = SrunStep.of()
    if step is None:
        return _begin(call, arguments)
    step = call.step = replace(step, call=call.number)
    if not step.is_leader:
        return _join(call, step.join_options(*arguments.backend), arguments.on_log)
    with step.reporting_failures():
        return _begin(call, arguments)


def _serve(call: script.Call, served: ServedDevice) -> FitResult:
    """Serve one device of the `fit` of another process, or return the result of an earlier call.

    Raises:
        DataError: The directory of that call's run cannot be read.
    """
    start = served.start
    if call.position == start.position:
        start.apply(call)
        call.backend = served.backend, served.device
        served.serve()
    directory = Path(start.directories[call.position - 1])
    existing = ExistingRun.find(directory)
    if existing is None:
        raise DataError(
            f"expected the run of call {call.position} of fit in {str(directory)!r}, where the "
            "processes of several devices read its result, found none: keep it there until the "
            "script ends, or name one device"
        )
    call.task(existing.spec)
    return _result(call, directory, has_joined=False)


def _check_build(build: object) -> Callable[..., object]:
    if not callable(build):
        raise DataError(
            f"expected a function that returns a samestep.Task, got {type(build).__name__}: write "
            "def build(): return samestep.Task(...) and fit(build)"
        )
    if torch.is_inference_mode_enabled():
        raise UsageError(
            "fit: expected a call outside torch.inference_mode, got one inside it, where tensors "
            "have no gradient: call fit before or after it"
        )
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise UsageError(
            "fit: expected a call outside torch.autocast, got one inside it, where it would not "
            'affect training: write fit(..., precision="bfloat16") or "float16"'
        )
    return build


def writes_run_directory(control: str | None) -> bool:
    """Return whether a `fit` of this process writes a run directory: it neither joins a run nor
    submits one."""
    step = SrunStep.of()
    joins = join_options() is not None or (step is not None and not step.is_leader)
    joins = joins or served_device() is not None
    return not joins and not (control or os.environ.get("SAMESTEP_CONTROL"))


def _begin(call: script.Call, arguments: Arguments) -> FitResult:
    _check_combination(call, arguments)
    call.backend = arguments.backend
    try:
        existing_run = ExistingRun.find(Path(arguments.directory)) if arguments.resume else None
        if existing_run is not None:
            call.number = existing_run.call or call.number
            may_be_edited = arguments.resume == EDITED
            call.stands_for = existing_run.script_for(call.script, may_be_edited=may_be_edited)
        spec, task = _build(call, arguments, existing_run)
        call.prepared = (spec, task)
        if arguments.several_devices:
            call.task(spec)  # each device's process builds its own; the result goes into this one
        control_address = arguments.control_address
        if control_address is not None:
            return _submit(call, spec, arguments, control_address)
        if existing_run is None:
            return _with_local_coordinator(call, spec, arguments, arguments.on_log)
        return _resume(call, arguments, existing_run, spec, task)
    except KeyboardInterrupt as interrupt:
        reason = str(interrupt) or "this fit has ended"
        show(Line(f"samestep: interrupted; {reason}", is_error=True))
        if call.script.path is None:
            raise  # a notebook keeps running
        raise SystemExit(ExitCode.INTERRUPTED) from None


def _resume(
    call: script.Call,
    arguments: Arguments,
    existing_run: ExistingRun,
    spec: RunSpec,
    task: ScriptTask,
) -> FitResult:
    """Continue a run, or return its result if it has finished.

    Raises:
        Mismatch: Its script, arguments or data are not those that it began with.
    """
    changes = existing_run.check(spec)
    if existing_run.is_finished and not changes:
        call.task(spec)
        text = f"the run in {str(existing_run.directory)!r} has finished; nothing left to do"
        show(Line(text))
        return _result(call, existing_run.directory, has_joined=False)
    existing_run.check_inputs(task.manifest)
    if changes:
        _report_changes(existing_run, spec, changes, task.manifest.epoch_samples)
    on_log = arguments.on_log
    if call.stands_for is not None and report_edit(call, existing_run, task.cross_check):
        on_log = with_gradient_report(call, existing_run, on_log)
    return _with_local_coordinator(call, spec, arguments, on_log)


def _check_combination(call: script.Call, arguments: Arguments) -> None:
    """Check combinations of arguments before the task is built.

    Raises:
        DataError: The optimizer or scheduler cannot be translated.
        UsageError: An argument has no effect, or there is no run to resume.
        BackendUnavailable: This machine does not have the device.
    """
    if arguments.options and not script.takes_options(call.build):
        raise UsageError(
            "options: expected build to take an argument, got one that takes none: write "
            "def build(options), or leave options out"
        )
    if arguments.control_address is not None:
        if arguments.resume or arguments.directory is not None or arguments.workers is not None:
            raise UsageError(
                "workers, directory, resume: expected none of them with control, as the running "
                "coordinator has its own settings for these: leave them out; to resume a run, "
                "use `coordinator resume RUN`"
            )
    elif arguments.resume and arguments.directory is None:
        raise UsageError(
            "resume: expected the directory of the run to resume, got none: write "
            "fit(..., directory=DIR, resume=True)"
        )
    elif arguments.resume and not os.path.isdir(arguments.directory):  # noqa: PTH112 -- a long name
        raise UsageError(
            f"resume: expected a run to resume in {str(arguments.directory)!r}, found no such "
            "directory; leave out resume=True to start one there"
        )
    arguments.optimizer_arguments.check()
    name, first_device = arguments.backend
    for device in arguments.several_devices or (first_device,):
        refuse_missing_device(name, device)
    _ = arguments.expected_workers  # raises if the variable is invalid


# The run spec.


def _document(
    arguments: Arguments, user_script: script.Script, call: int, existing_run: ExistingRun | None
) -> dict[str, Any]:
    """Return the run spec, without the number of steps and without a torch optimizer."""
    microbatch = arguments.microbatch
    if microbatch is None:
        microbatch = max(1, arguments.batch // 8)
    return {
        # By default no step waits for gradients to be written; settings={"log": "full"} writes
        # them. A resumed run keeps its setting, even if the default has changed.
        "log": "checkpoint" if existing_run is None else existing_run.spec.log,
        **_extra_keys(arguments.settings),
        "task": script.TASK,
        "name": _run_name(user_script) if arguments.name is None else arguments.name,
        "seed": arguments.seed,
        "batch": {"samples": arguments.batch, "microbatch": microbatch},
        "optimizer": arguments.optimizer_arguments.named_section(),
        "evaluate_every": arguments.evaluate_every,
        "options": {
            "script": {"name": user_script.name, "digest": user_script.digest, "call": call},
            "options": _as_json(arguments.options or {}),
            "precision": arguments.precision,
            **_digest_parts(existing_run),
        },
        **({"model": _FLOAT16_MODEL} if arguments.precision == "float16" else {}),
        **_script_file(user_script, existing_run),
    }


def _script_file(user_script: script.Script, existing_run: ExistingRun | None) -> dict[str, Any]:
    """Return the section `data`, which names the script: the coordinator sends it to workers that
    accept scripts."""
    if user_script.path is None:
        return {}
    if existing_run is not None and Path(existing_run.script_file).is_file():
        assert existing_run.spec.data is not None, "it names the script's file"
        return {"data": {"train": existing_run.spec.data.train}}
    return {"data": {"train": str(user_script.path)}}


def _with_script_copy(spec: RunSpec, user_script: script.Script, directory: Path) -> RunSpec:
    """Copy the script into a new run's directory, and return the run spec that names the copy.

    So the user can edit the script afterwards, and other workers still get the original.
    """
    if user_script.path is None or spec.data is None:
        return spec
    copy = directory.resolve() / SCRIPT_DIRECTORY / user_script.path.name
    try:
        if (
            not directory.is_dir()
            or {entry.name for entry in directory.iterdir()} <= INITIAL_ENTRIES
        ):
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(user_script.path.read_bytes())
        if script.Script.at(copy).digest != user_script.digest:
            return spec
    except (OSError, DataError):
        return spec  # the directory cannot be used for a new run: the coordinator reports why
    data = spec.data.model_copy(update={"train": str(copy)})
    return spec.model_copy(update={"data": data})


def _digest_parts(existing_run: ExistingRun | None) -> dict[str, Any]:
    """Return the key `read` of a resumed run's options: how much data its digests cover.

    See `worker.scripts.data_digest`.
    """
    parts_read = {} if existing_run is None else existing_run.spec.options.get("read")
    return {} if parts_read is None else {"read": parts_read}


def _report_sampled_digests(task: ScriptTask) -> None:
    for name, digest in task.sampled_digests.items():
        if digest.samples_read < digest.samples:
            show(Line(
                f"samestep: workers compare only {digest.samples_read} of {digest.samples} samples "
                f"of {name}, as reading took {SECONDS:.0f} s; make sure that all machines have the "
                "same data"
            ))  # fmt: skip


def _report_changes(
    existing_run: ExistingRun, spec: RunSpec, changes: tuple[str, ...], epoch_samples: int
) -> None:
    """Report the changes of a resumed run, and whether its result differs from that of a new run
    with the changed arguments."""
    show(Line(f"the run in {str(existing_run.directory)!r} continues with {', '.join(changes)}"))
    if first_changed_step := existing_run.first_changed_rate(spec, epoch_samples):
        show(Line(
            "samestep: the changed schedule has other learning rates for steps already taken, from "
            f"step {first_changed_step} on: the result is not that of one run with these arguments"
        ))  # fmt: skip


def _extra_keys(settings: Mapping[str, object] | None) -> dict[str, Any]:
    keys = _as_json(settings or {})
    keys.pop("optimizer", None)  # `OptimizerArguments` applies these keys
    if duplicate_keys := sorted(_ARGUMENT_KEYS & set(keys)):
        raise DataError(
            "settings: expected keys of a run spec that are no arguments of fit, got "
            f"{duplicate_keys[0]!r}: use the argument of fit"
        )
    if unused_keys := sorted(_UNSUPPORTED_KEYS & set(keys)):
        raise DataError(
            f"settings: expected keys that apply to a script, got {unused_keys[0]!r}: leave it "
            "out, as build defines model and data"
        )
    return keys


def _as_json(options: object) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise DataError(f"expected options by name, got {type(options).__name__}")
    try:
        json_options: dict[str, Any] = json.loads(json.dumps(dict(options), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"expected options that JSON can represent ({error}): give numbers, strings and lists, "
            "and create models and tensors inside build"
        ) from None
    return json_options


def _run_name(user_script: script.Script) -> str:
    ascii_name = "".join(
        char if char.isalnum() and char.isascii() else "-"
        for char in user_script.name.removesuffix(".py")
    )
    return ascii_name.strip("-")[:48] or "fit"


def _build(
    call: script.Call, arguments: Arguments, existing_run: ExistingRun | None
) -> tuple[RunSpec, ScriptTask]:
    """Build the task before the coordinator starts, and complete the run spec."""
    document = _document(arguments, call.run_script, call.number, existing_run)
    steps = arguments.steps
    trial_spec = parse_run_spec({**document, "steps": 1 if steps is None else steps})
    task = script.build_task(call.build, trial_spec, call.run_script, call.backend)
    if task.user.unit != "sample":
        document["batch"]["unit"] = task.user.unit
    samples = task.manifest.epoch_samples
    epoch_steps = math.ceil(samples / trial_spec.batch.samples)
    if samples < trial_spec.batch.microbatch:
        raise DataError(
            f"expected at least {trial_spec.batch.microbatch} training samples, one microbatch, "
            f"got {samples}: lower batch= or microbatch="
        )
    if arguments.evaluate_every and task.user.held_out is None:
        raise DataError(
            f"evaluate_every={arguments.evaluate_every}: expected held-out data, got none: give "
            "samestep.Task(held_out=...), or leave out evaluate_every"
        )
    if arguments.epochs is not None:
        steps = math.ceil(arguments.epochs * epoch_steps)
    assert steps is not None, "Arguments.of has checked it"
    document["optimizer"] = arguments.optimizer_arguments.section(
        task.user.module, steps, epoch_steps
    )
    if existing_run is None:
        document["options"]["read"] = {
            name: data_set.parts for name, data_set in task.sampled_digests.items()
        }
        _report_sampled_digests(task)
    return parse_run_spec({**document, "steps": steps}), task


# With a coordinator that fit starts.


def _with_local_coordinator(
    call: script.Call, spec: RunSpec, arguments: Arguments, on_log: OnLog | None
) -> FitResult:
    is_alone = arguments.expected_workers <= max(1, len(arguments.several_devices))
    request = {
        "script": "" if call.script.path is None else call.script.name,
        "expect_workers": arguments.expected_workers,
        "resume": bool(arguments.resume),
        "may_change": bool(arguments.resume),
        "records": on_log is not None,
    }
    with (
        _run_directory(arguments.directory, spec.name) as directory,
        contextlib.ExitStack() as stack,
    ):
        if not arguments.resume:
            spec = _with_script_copy(spec, call.script, directory)

        def start(bind: str) -> tuple[CoordinatorSubprocess, tuple[str, int], EventQueue]:
            event_queue: EventQueue = queue.SimpleQueue()
            run = json.loads(spec.to_bytes())
            start_request = {**request, "run": run, "bind": bind, "directory": str(directory)}
            coordinator = CoordinatorSubprocess(start_request, event_queue)
            address = stack.enter_context(coordinator).wait_until_listening()
            if step := call.step:
                step.publish(parse_address(bind, "SAMESTEP_BIND")[0], address[1])
            _LAST_ADDRESS[:] = [f"{bind.rpartition(':')[0]}:{address[1]}"]
            return coordinator, address, event_queue

        coordinator, address, event_queue = _start_where_free(start)
        credentials = WorkerCredentials(join_token_file(state_home()))
        worker = _worker(call, arguments, address, credentials, event_queue)
        try:
            with queue_interrupts(event_queue):
                log = _Log(on_log, coordinator.drain)
                _handle_events(
                    coordinator, worker, event_queue, directory, log.add_row,
                    is_alone=is_alone, deadline=_deadline(call, arguments),
                )  # fmt: skip
            if log.error is not None:
                raise log.error
        finally:
            worker.end()
        if not (directory / "result.json").exists():
            raise KeyboardInterrupt  # before the first step
    return _result(call, directory, has_joined=False)


def _deadline(call: script.Call, arguments: Arguments) -> TaskDeadline:
    """Return the deadline for the other tasks of a Slurm step, if the run waits for all of them."""
    step = call.step
    if step is not None and arguments.expected_workers == step.tasks:
        return TaskDeadline(step.tasks)
    return TaskDeadline(0, None)


_Coordinator = TypeVar("_Coordinator")


def _start_where_free(start: Callable[[str], _Coordinator]) -> _Coordinator:
    """Start a coordinator at $SAMESTEP_BIND, else at the default address or a free port.

    The default address may be in use, or another process may take it before the coordinator binds
    it.
    """
    step = SrunStep.of()
    requested_bind = os.environ.get("SAMESTEP_BIND") or (step.bind if step is not None else None)
    if _LAST_ADDRESS or requested_bind:
        return start(_LAST_ADDRESS[-1] if _LAST_ADDRESS else str(requested_bind))
    bind = default_bind()
    try:
        return start(bind)
    except SamestepError:
        other_bind = default_bind()
        if other_bind == bind:
            raise
        return start(other_bind)


def _has_checkpoint(directory: Path) -> bool:
    return (directory / "checkpoints").exists()


@contextmanager
def _run_directory(requested_directory: Path | str | None, name: str) -> Iterator[Path]:
    """Yield the requested directory, or a new one, which an interrupt before a checkpoint
    removes."""
    if requested_directory is not None:
        yield Path(requested_directory)
        return
    directory = new_directory(Path("runs"), name)
    try:
        yield directory
    except KeyboardInterrupt:
        if not _has_checkpoint(directory):
            shutil.rmtree(directory, ignore_errors=True)
        raise


class _Log:
    """Calls `on_log`; an error in it drains the run and is raised afterwards."""

    def __init__(self, on_log: OnLog | None, drain: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._on_log, self._drain = on_log, drain

    def add_row(self, row: Mapping[str, float]) -> None:
        if self._on_log is None or self.error is not None:
            return
        try:
            self._on_log(row)
        except Exception as error:  # noqa: BLE001 -- a user's function may raise any error
            self.error = error
            self._drain()


def _handle_events(
    coordinator: CoordinatorSubprocess,
    worker: WorkerThread,
    event_queue: EventQueue,
    directory: Path,
    on_log: OnLog,
    *,
    is_alone: bool,
    deadline: TaskDeadline,
) -> None:
    """Handle events until the coordinator has ended; print its lines.

    Raises:
        SamestepError: The run, its only worker or a task of this Slurm step failed.
        KeyboardInterrupt: The user interrupted twice.
    """
    failure: Exception | None = None
    pending_lines: list[Line] = []
    interrupts = 0
    end_deadline_s: float | None = None
    while True:
        is_waiting = end_deadline_s is None and not interrupts
        next_deadline_s = deadline.deadline_s if is_waiting else end_deadline_s
        try:
            event = event_queue.get(timeout=_remaining_s(next_deadline_s))
        except queue.Empty:
            if is_waiting:
                failure, end_deadline_s = deadline.error(), _end_at_once(coordinator)
            else:
                coordinator.kill()
                end_deadline_s = deadline.deadline_s = None
            continue
        match event:
            case Line():
                pending_lines.append(event)
                if not (is_alone and event.unready_reason):  # else `_end_with` may raise the reason
                    _show(pending_lines)
            case Interrupted():
                interrupts += 1
                coordinator.drain()
            case NewRow():
                on_log(event.row)
            case WorkersChanged(workers, has_started):
                deadline.update(workers, has_started=has_started)
            case WorkerEnded(error=Exception() as error) if worker.end_message is None:
                if is_alone or isinstance(error, Unreachable):  # the coordinator does not answer
                    failure = error
                    end_deadline_s = _end_at_once(coordinator)
                else:
                    show(Line(f"samestep: {one_line(error)}", is_error=True))
            case Stalled() if is_alone:
                failure = _halt_error(event.reason, directory)
                coordinator.drain()
            case CoordinatorEnded():
                if event.exit_code and interrupts > 1:
                    raise _interrupt_error(pending_lines, directory)
                _end_with(event, failure, pending_lines, directory)
                return
        if end_deadline_s is None and (failure is not None or interrupts > 1):
            end_deadline_s = _end_deadline_s(has_second_interrupt=interrupts > 1)


def _end_deadline_s(*, has_second_interrupt: bool) -> float:
    timeout_s = _END_AT_ONCE_TIMEOUT_S if has_second_interrupt else _END_TIMEOUT_S
    return time.monotonic() + timeout_s


def _interrupt_error(pending_lines: list[Line], directory: Path) -> KeyboardInterrupt:
    _show(pending_lines)
    text = f"ended at once; resume from the checkpoint: {_resume_call(directory)}"
    return KeyboardInterrupt(text if _has_checkpoint(directory) else "")


def _halt_error(reason: str, directory: Path) -> RunFailed:
    return RunFailed(
        f"halted: {reason}; if this machine caused it, fix it and repeat the step with "
        f"{_resume_call(directory)}; if script, data or arguments did, change them and start in "
        "another directory"
    )


def _remaining_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)


def _end_at_once(coordinator: CoordinatorSubprocess) -> float:
    """Tell a coordinator to end at once; return the deadline for its end."""
    coordinator.drain()
    coordinator.drain()
    return time.monotonic() + _END_TIMEOUT_S


def _end_with(
    end: CoordinatorEnded,
    failure: Exception | None,
    pending_lines: list[Line],
    directory: Path,
) -> None:
    """Print the remaining lines, and raise the error with which the run ended, if there is one."""
    failure_text = str(failure or end.reason)
    _show(
        [
            line
            for line in pending_lines
            if not failure_text or line.unready_reason not in failure_text
        ]
    )
    if failure is None:
        if end.exit_code < 0 and _has_checkpoint(directory):
            end = replace(end, is_resumable=True)
        if end.exit_code:
            raise error_from(end, _resume_call(directory))
        if end.is_resumable:
            show(Line(f"resume it: {_resume_call(directory)}"))
        return
    # A worker that was refused would be refused again: do not suggest to resume.
    is_refused = isinstance(failure, Mismatch)
    if end.reason not in failure_text:
        coordinator_error = error_from(end, "" if is_refused else _resume_call(directory))
        show(Line(f"coordinator: {coordinator_error}", is_error=True))
    raise failure


def _show(lines: list[Line]) -> None:
    """Print lines, and clear the list."""
    for line in lines:
        show(line)
    lines.clear()


def _resume_call(directory: Path) -> str:
    return f"fit(..., directory={str(directory)!r}, resume=True)"


def _worker(
    call: script.Call,
    arguments: Arguments,
    address: tuple[str, int],
    credentials: WorkerCredentials,
    event_queue: EventQueue,
    *,
    reports_rows: bool = False,
) -> WorkerThread:
    host = socket.gethostname().partition(".")[0] or "worker"
    name, device = arguments.backend
    target = Target(*address, f"{host}-{call.script.name}", name, 300.0)
    devices = None
    if several := arguments.several_devices:
        devices = devices_of(call, name, several)
    return WorkerThread(
        target, device, credentials, _discard, event_queue,
        devices=devices, reports_rows=reports_rows,
    )  # fmt: skip


def _discard(text: str) -> None:
    """Drop a line: the coordinator reports the events of this worker too."""


def new_directory(parent: Path, name: str, remedy: str = "write fit(..., directory=DIR)") -> Path:
    """Create a directory with the first free number, safely among concurrent processes.

    Raises:
        UsageError: The directory cannot be created.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = parent / f"{name}-{number}"
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise UsageError(
            f"expected a writable directory for runs, got {str(parent)!r} "
            f"({error.strerror}); {remedy}"
        ) from None
    raise AssertionError


def _result(call: script.Call, directory: Path, *, has_joined: bool) -> FitResult:
    document = read_json(directory / "result.json")
    task = call.built_task
    assert task is not None, "a worker builds the task before it computes"
    task.load(load_file(directory / task.manifest.export.directory / "model.safetensors"))
    digest = weights_digest(task.trained_tensors())
    if digest != document["weights_digest"]:
        raise RunFailed(
            f"expected weights with digest {document['weights_digest']} in {str(directory)!r}, got "
            f"{digest}: the files were changed; start the run in another directory"
        )
    return FitResult(
        task.user.module, read_history(directory), _metrics(document["eval"]), digest,
        document["steps"], document["outcome"], directory, has_joined,
    )  # fmt: skip


def _metrics(values: Mapping[str, float | None]) -> dict[str, float]:
    """Replace null, which stands for a non-finite value in messages and files, by NaN."""
    return {name: math.nan if value is None else value for name, value in values.items()}


# With a running coordinator.


def _submit(call: script.Call, spec: RunSpec, arguments: Arguments, control: str) -> FitResult:
    status = _run_async(request(control, "GET", "/status"))
    address = parse_address(status["address"], "control", 9000)
    if step := call.step:
        step.publish(*address)
    event_queue: EventQueue = queue.SimpleQueue()
    worker = _worker(
        call, arguments, address, WorkerCredentials(), event_queue,
        reports_rows=arguments.on_log is not None,
    )  # fmt: skip
    try:
        document = {"run": json.loads(spec.to_bytes())}
        answer = _run_async(request(control, "POST", "/submit", document, _SUBMIT_TIMEOUT_S))
        show(Line(f"run {answer['run_id']} submitted; see coordinator status"))
        with queue_interrupts(event_queue):
            _follow(worker, event_queue, arguments.on_log)
        status = _run_async(request(control, "GET", "/status"))
    finally:
        worker.end()
    directory = Path(status.get("directory", ""))
    if status.get("run_id") == answer["run_id"] and (directory / "result.json").is_file():
        if status["phase"] == "failed":
            raise RunFailed(str(status["reason"]))
        return _result(call, directory, has_joined=False)
    return _joined_result(call, worker)


def _follow(
    worker: WorkerThread,
    event_queue: EventQueue,
    on_log: OnLog | None,
    problem: Callable[[], SamestepError | None] = lambda: None,
) -> None:
    """Wait until the run is over or this worker has left it.

    Args:
        worker: This worker.
        event_queue: Its events.
        on_log: See `fit`.
        problem: Called about once a second; returns the error for which to stop waiting, or None.

    Raises:
        SamestepError: The worker failed or was refused, or `problem` returned this error.
        SystemExit: The user interrupted; the other workers continue the run.
        Exception: `on_log` raised it; the other workers continue the run.
    """
    was_interrupted = False
    while True:
        try:
            event = event_queue.get(timeout=_POLL_INTERVAL_S)
        except queue.Empty:
            if worker.end_message is None and (error := problem()) is not None:
                raise error from None
            continue
        if isinstance(event, Interrupted):
            was_interrupted = True
            worker.drain()
        elif isinstance(event, NewRow):
            if on_log is not None:
                on_log(event.row)
        elif isinstance(event, WorkerEnded):
            if event.error is not None and worker.end_message is None:
                raise event.error
            if was_interrupted and worker.end_message is None:
                raise SystemExit(ExitCode.OK)
            return


def _run_async(coroutine: Any) -> dict[str, Any]:
    """Run a coroutine in a new thread: in a notebook, this thread already runs an event loop."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(asyncio.run(coroutine))
        except Exception as error:  # noqa: BLE001 -- raised again by the caller
            answers.append(error)

    thread = threading.Thread(target=run)
    with options_as_arguments():
        thread.start()
        thread.join()
    if isinstance(answers[0], Exception):
        raise answers[0]
    return dict(answers[0])


# In a run that another process has started.


def _join(call: script.Call, joined_by: JoinOptions, on_log: OnLog | None) -> FitResult:
    call.backend = joined_by.backend, joined_by.device
    event_queue: EventQueue = queue.SimpleQueue()
    target = Target(
        *joined_by.find_coordinator(),
        joined_by.name,
        joined_by.backend,
        joined_by.retry_for_s,
        joined_by.duty,
    )
    worker = WorkerThread(
        target, joined_by.device, joined_by.credentials, joined_by.print_line, event_queue,
        search_again=joined_by.search_again, reports_rows=on_log is not None,
    )  # fmt: skip
    try:
        with queue_interrupts(event_queue):
            _follow(worker, event_queue, on_log, lambda: _reason_to_stop_waiting(worker, joined_by))
    finally:
        worker.end()
    return _joined_result(call, worker)


def _reason_to_stop_waiting(worker: WorkerThread, joined_by: JoinOptions) -> SamestepError | None:
    """Return why a worker that joins should stop waiting for a run; None to keep waiting.

    The `fit` that begins the run may have been refused. Its coordinator then ends, or, if it serves
    many runs, never receives this one.
    """
    if reason := joined_by.failure():
        return RunFailed(reason)
    patience_s = max(joined_by.retry_for_s, _MINIMUM_PATIENCE_S)
    if worker.idle_s < patience_s:
        return None
    return Unreachable(
        f"expected a run from the coordinator at {worker.address} within {patience_s:.0f} s, got "
        "none: the fit that begins it may have been refused (its output says why); start this "
        "worker when that run has begun"
    )


def _joined_result(call: script.Call, worker: WorkerThread) -> FitResult:
    task, end = call.built_task, worker.end_message
    if end is None:
        raise RunFailed("this worker left before the run was over")
    if task is None or end.outcome == "failed":
        raise RunFailed(end.reason)
    tensors = task.trained_tensors()
    digest = weights_digest(tensors)
    if digest != end.weights:
        raise RunFailed(
            f"the run is over ({end.reason}): expected weights {end.weights or 'none'}, this "
            f"worker has {digest}, as it had missed steps; take the weights from the run's "
            "directory"
        )
    task.load(tensors)
    history = tuple(row for _, row in sorted(worker.rows.items()))
    steps = int(history[-1]["step"]) if history else 0
    return FitResult(
        task.user.module, history, _metrics(end.metrics), digest, steps, end.outcome, None,
        joined=True,
    )  # fmt: skip


@contextmanager
def _keeping_freed_memory() -> Iterator[None]:
    """Keep freed memory in the process: the next step's arrays have the same sizes.

    If the memory were returned to the system, every step would fault its pages in again.
    """
    keep_freed_memory()
    try:
        yield
    finally:
        stop_keeping_freed_memory()


@contextmanager
def _preserving_torch_state() -> Iterator[None]:
    """Restore torch's settings, which backends change, and the state of all random generators."""
    host_states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    cards = _cards_in_use()
    card_states = (
        [] if cards is None else [cards.get_rng_state(card) for card in range(cards.device_count())]
    )
    current_card = None if cards is None else cards.current_device()
    try:
        with restore_torch_settings():
            yield
    finally:
        torch.set_rng_state(host_states[0])
        np.random.set_state(host_states[1])  # noqa: NPY002
        random.setstate(host_states[2])
        if cards is not None:
            for number, state in enumerate(card_states):
                cards.set_rng_state(state, number)
            cards.set_device(current_card)
        elif (
            cards := _cards_in_use()
        ) is not None:  # `fit` initialized them: seed them like the CPU
            cards.manual_seed_all(torch.initial_seed())
            cards.set_device(0)


def _cards_in_use() -> Any:
    """Return torch's module for this machine's cards (`torch.cuda`); None if it is not
    initialized."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == "mps":
        return None
    cards = torch.get_device_module(accelerator)
    return cards if cards.is_initialized() else None
