"""The script that defines a run's model, and the task class that its run spec names.

The options of a run of `fit` identify the script by the BLAKE3 of its bytes, and the call by its
number within the script. A worker takes part if it has reached the same call of the same script, or
if it accepts scripts from its coordinator.
"""

from __future__ import annotations

import inspect
import os
import random
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3

from backends.registry import trial_device
from protocol.base.errors import (
    NO_MEMORY,
    DataError,
    SamestepError,
    ScriptDiffers,
    ScriptMissing,
    describe_error,
)
from protocol.base.regular_file import read_regular
from protocol.machine.memory import describe_shortage
from protocol.spec.cross_check import CrossCheck
from protocol.spec.run_spec import RunSpec
from samestep.name_conflicts import is_samestep_file
from samestep.result import FitResult
from samestep.srun import SrunStep
from worker.scripts.checks import check_task
from worker.scripts.launch import accepts_scripts
from worker.scripts.script_task import ScriptTask

TASK: Final = "samestep.script:FitTask"
"""The task that a run spec of `fit` names."""

MODULES: Final = "modules beside the script"
"""Name of the digest of these modules in the manifest."""

Build = Callable[..., object]
_CPU: Final = ("cpu", None)


@dataclass(frozen=True, slots=True)
class Script:
    """A file that calls `fit`.

    Attributes:
        path: The file's path on this machine; None for a notebook or a prompt.
        digest: BLAKE3 of the file's bytes, 64 hex digits; empty without a file.
        first_modules: For an edited script that replaces that of a run: the digest of the modules
            beside the script when the run began.
        first_cross_check: Likewise, the values that workers compared when the run began.
    """

    path: Path | None
    digest: str
    first_modules: str | None = None
    first_cross_check: CrossCheck | None = None

    @property
    def name(self) -> str:
        return self.path.name if self.path is not None else "a notebook"

    @staticmethod
    def at(path: Path) -> Script:
        """Read a script.

        Raises:
            DataError: The file cannot be read.
        """
        try:
            return Script(path.resolve(), blake3(read_regular(path)).hexdigest())
        except OSError as error:
            raise DataError(f"cannot read the script {str(path)!r}: {error.strerror}") from None

    @staticmethod
    def of_process() -> Script:
        """Return the script that this process was started with."""
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None or not Path(file).is_file():
            return Script(None, "")
        return Script.at(Path(file))

    def modules_digest(self) -> str:
        """Return the digest of the modules that the script imported from its own folder; empty if
        there are none."""
        if self.first_modules is not None:
            return self.first_modules
        if self.path is None:
            return ""
        home, modules = self.path.parent, {}
        folder_prefix = os.path.join(home, "")  # noqa: PTH118 -- thousands of modules: as text
        for module in list(sys.modules.values()):
            file = _real_path(getattr(module, "__file__", None) or "")  # as `home` is
            if not (file.startswith(folder_prefix) and file.endswith(".py")):
                continue
            path = Path(file)
            is_excluded = (
                path == self.path or is_samestep_file(path) or "site-packages" in path.parts
            )
            if not is_excluded and path.is_file():
                modules[path.relative_to(home).as_posix()] = path
        hasher = blake3()
        for name, path in sorted(modules.items()):
            hasher.update(f"{name}\0{blake3(path.read_bytes()).hexdigest()}\0".encode())
        return hasher.hexdigest() if modules else ""


@cache
def _real_path(file: str) -> str:
    """Resolve symbolic links; cached, because imported modules do not move."""
    return os.path.realpath(file)


@dataclass(slots=True)
class Call:
    """The call of `fit` in progress in this process.

    Attributes:
        script: The script that calls `fit`.
        number: Number of the call within the script, counted from 1; a resumed run has the number
            of its first start.
        position: Number of the call in this process, counted from 1.
        build: The user's function that returns the task.
        backend: Name and device of this process's backend, on which a task is tried.
        built_task: The task that was built last; None before.
        prepared: A task built in advance, for a run spec with the same options; used once.
        step: The Slurm step whose tasks make this call together; None for a single process.
        directories: The run's directory of each earlier call that has one, by position.
        stands_for: The script of the resumed run, if this script was edited since then.
    """

    script: Script
    number: int
    position: int
    build: Build
    backend: tuple[str, int | str | None] = _CPU
    built_task: ScriptTask | None = None
    prepared: tuple[RunSpec, ScriptTask] | None = None
    step: SrunStep | None = None
    directories: dict[int, Path] = field(default_factory=dict)
    stands_for: Script | None = None

    @property
    def run_script(self) -> Script:
        """The script that the run spec names."""
        return self.stands_for or self.script

    def note_directory(self, result: FitResult) -> FitResult:
        """Remember where this call's run is, for the device processes of a later call."""
        if result.directory is not None:
            self.directories[self.position] = result.directory
        return result

    def task(self, spec: RunSpec) -> ScriptTask:
        """Build the task of a run spec, or use the prepared task.

        Raises:
            SamestepError: The task cannot be built.
        """
        if self.prepared is not None and self.prepared[0].options == spec.options:
            self.built_task, self.prepared = self.prepared[1], None
        else:
            self.built_task = build_task(self.build, spec, self.run_script, self.backend)
        return self.built_task


@dataclass(slots=True)
class _ProcessState:
    """State of this process: the call in progress, and the calls so far."""

    call: Call | None = None
    calls: int = 0
    directories: dict[int, Path] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_STATE: Final = _ProcessState()
_SEARCH = threading.local()
"""`_SEARCH.is_active` is true in a thread that runs a script only to find its `build`."""


class _BuildFoundError(BaseException):
    """Stops a script that is run only to find its `build`."""

    def __init__(self, build: Build) -> None:
        self.build = build


@contextmanager
def called(script: Script, build: Build) -> Iterator[Call]:
    """Note a call of `fit` as in progress until the block ends.

    In a script that is run only to find its `build`, raise an exception that carries it.

    Raises:
        DataError: Another call is in progress.
    """
    if getattr(_SEARCH, "is_active", False):
        raise _BuildFoundError(build)
    if not _STATE.lock.acquire(blocking=False):
        raise DataError("expected one fit at a time, got one within another: call them in sequence")
    try:
        _STATE.calls += 1
        number = _STATE.calls
        _STATE.call = Call(script, number, number, build, directories=_STATE.directories)
        yield _STATE.call
    finally:
        _STATE.call = None
        _STATE.lock.release()


def build_task(
    build: Build, spec: RunSpec, script: Script, backend: tuple[str, int | str | None] = _CPU
) -> ScriptTask:
    """Call the user's `build` with global generators seeded, and check the task that it returns.

    Raises:
        SamestepError: `build` raised, or its task cannot be trained.
        DeviceError: The backend's device fails, or has too little memory to try the task.
    """
    torch.manual_seed(spec.seed)
    np.random.seed(spec.seed % 2**32)  # noqa: NPY002 -- the global generator is what scripts use
    random.seed(spec.seed)
    options = spec.options.get("options", {})
    try:
        user_task = build(options) if takes_options(build) else build()
    except SamestepError:
        raise
    except Exception as error:
        if describe_error(error) == NO_MEMORY:
            raise DataError(f"build: {NO_MEMORY}{describe_shortage(error)}") from error
        raise DataError(f"build raised {type(error).__name__}: {error}") from error
    digests = {"script": script.digest} if script.digest else {}
    if modules := script.modules_digest():
        digests[MODULES] = modules
    with trial_device(*backend) as device:
        return ScriptTask(check_task(user_task), spec, digests, device, script.first_cross_check)


def takes_options(build: Build) -> bool:
    """Return whether `build` takes the options as an argument."""
    positional_kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return any(
        parameter.name == "options"
        or (parameter.kind in positional_kinds and parameter.default is inspect.Parameter.empty)
        for parameter in inspect.signature(build).parameters.values()
    )


class FitTask:
    """Returns the task of the `fit` call in progress in this process: see
    `worker.tasks.registry`."""

    def __new__(cls, spec: RunSpec) -> Any:
        """Return the task of a run spec."""
        identity = spec.options.get("script") or {}
        name, digest = str(identity.get("name")), str(identity.get("digest"))
        call = _STATE.call
        if call is None:
            return _task_of_sent_script(spec, name, digest, int(identity.get("call") or 1))
        script = call.run_script
        if digest != script.digest:
            raise ScriptDiffers(
                f"expected the script {name!r} of the run ({digest[:12] or 'a notebook'}), got "
                f"{script.name!r} ({script.digest[:12]}): copy the run's script here"
            )
        if identity.get("call") != call.number:
            raise ScriptDiffers(
                f"expected call number {identity.get('call')} of fit in {name!r}, this worker is "
                f"at number {call.number}: start it before the run's first call ends"
            )
        return call.task(spec)

    def initial_parameters(self) -> None: ...
    def batch(self) -> None: ...
    def evaluation_batch(self) -> None: ...


def _task_of_sent_script(spec: RunSpec, name: str, digest: str, call_number: int) -> ScriptTask:
    """Build the task from the script that the coordinator sent, if this worker accepts scripts."""
    if not digest:
        raise ScriptMissing(
            "expected a run whose model is in a script, got one in a notebook, which other workers "
            "cannot join: move the model to a script"
        )
    if accepts_scripts() and call_number > 1:
        raise ScriptMissing(
            f"expected the first fit of the script {name!r}, got its fit number {call_number}, "
            f"which needs the result of the earlier ones: start this worker with `worker {name}`"
        )
    if not accepts_scripts() or spec.data is None:
        raise ScriptMissing(
            f"this worker does not have the script {name!r} of the run's model: start it with "
            f"`worker {name}`, or with --accept-scripts to run scripts that the coordinator sends"
        )
    script = Script.at(Path(os.path.realpath(spec.data.train)))
    if script.digest != digest:
        raise ScriptDiffers(
            f"expected the script {name!r} with digest {digest[:12]}, got {script.digest[:12]}: "
            "restore the coordinator's file, or submit a new run"
        )
    _SEARCH.is_active = True
    try:
        runpy.run_path(str(spec.data.train), run_name="__main__")
    except _BuildFoundError as stop:
        return build_task(stop.build, spec, script)
    except SystemExit:
        pass  # SystemExit would end only the device's thread
    except ModuleNotFoundError as error:
        raise ScriptMissing(
            f"expected the modules that the script {name!r} imports, got none named "
            f"{error.name!r}: install it here, or copy the script with the modules beside it and "
            f"start this worker with `worker {name}`"
        ) from None
    finally:
        _SEARCH.is_active = False
    raise DataError(
        f"expected a call of samestep.fit in the script {name!r}, which ended without one"
    )
