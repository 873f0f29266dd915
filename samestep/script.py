"""The script that a run's model comes from, and the task class that its run spec names.

A run of `fit` says in its options which script it is of, by BLAKE3 of the bytes, and the how
manieth `fit` of that script. Whoever takes part has called the same `fit` of the same bytes, or
was told to accept a script from the coordinator.
"""

from __future__ import annotations

import inspect
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3

from protocol.base.errors import (
    NO_MEMORY,
    DataError,
    SamestepError,
    ScriptDiffers,
    ScriptMissing,
    in_words,
)
from protocol.base.regular_file import read_regular
from protocol.host.memory import figures_of
from protocol.spec.run_spec import RunSpec
from samestep.fitted import FittedTask
from samestep.own_names import ours
from samestep.refusals import task_of

TASK: Final = "samestep.script:FitTask"
"""What a run spec of `fit` names."""

Build = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Script:
    """A file that calls `fit`.

    Attributes:
        path: Where it is here; None for a notebook or a prompt.
        digest: BLAKE3 of its bytes, 64 hex digits; empty without a file.
    """

    path: Path | None
    digest: str

    @property
    def name(self) -> str:
        return self.path.name if self.path is not None else "a notebook"

    @staticmethod
    def at(path: Path) -> Script:
        """The script in a file.

        Raises:
            DataError: It cannot be read.
        """
        try:
            return Script(path.resolve(), blake3(read_regular(path)).hexdigest())
        except OSError as error:
            raise DataError(f"cannot read the script {str(path)!r}: {error.strerror}") from None

    @staticmethod
    def running() -> Script:
        """The one that this process was started with."""
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None or not Path(file).is_file():
            return Script(None, "")
        return Script.at(Path(file))

    def modules_digest(self) -> str:
        """Digest of what the script has imported from beside itself; empty if nothing."""
        if self.path is None:
            return ""
        home, found = self.path.parent, {}
        for module in list(sys.modules.values()):
            path = Path(getattr(module, "__file__", None) or "").resolve()  # as `home` is
            others = ours(path) or "site-packages" in path.parts
            beside = path != self.path and path.suffix == ".py" and path.is_relative_to(home)
            if beside and not others and path.is_file():
                found[path.relative_to(home).as_posix()] = path
        hasher = blake3()
        for name, path in sorted(found.items()):
            hasher.update(f"{name}\0{blake3(path.read_bytes()).hexdigest()}\0".encode())
        return hasher.hexdigest() if found else ""


@dataclass(slots=True)
class Call:
    """A call of `fit` that goes on in this process.

    Attributes:
        script: Where it stands.
        number: The how manieth of the script, from 1.
        build: The user's.
        built: The task once it is built; of the newest run spec.
        ready: Built already, for a spec of these options; taken once.
    """

    script: Script
    number: int
    build: Build
    built: FittedTask | None = None
    ready: tuple[RunSpec, FittedTask] | None = None

    def task(self, spec: RunSpec) -> FittedTask:
        """The task of this run.

        Raises:
            SamestepError: It is of another script or call, or cannot be built.
        """
        if self.ready is not None and self.ready[0].options == spec.options:
            self.built, self.ready = self.ready[1], None
        else:
            self.built = build_task(self.build, spec, self.script)
        return self.built


@dataclass(slots=True)
class _Here:
    """What this process is to run."""

    call: Call | None = None
    calls: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_HERE: Final = _Here()
_ACCEPT: Final = "SAMESTEP_ACCEPT_SCRIPTS"
"""In the environment, which processes of several devices inherit."""
_LOOKING = threading.local()


class _ReachedError(BaseException):
    """Ends a script that is run for its `build` alone."""

    def __init__(self, build: Build) -> None:
        self.build = build


def accept_scripts() -> None:
    """From now on this process, and each that it starts for a device, runs scripts that its
    coordinator sends."""
    os.environ[_ACCEPT] = "1"


@contextmanager
def called(script: Script, build: Build) -> Iterator[Call]:
    """While a `fit` goes on; ends a script that is run for its `build` alone.

    Raises:
        DataError: Another goes on already.
    """
    if getattr(_LOOKING, "call", 0):
        _LOOKING.call -= 1
        if _LOOKING.call:
            raise DataError("only the first fit of a script that was sent can be joined")
        raise _ReachedError(build)
    if not _HERE.lock.acquire(blocking=False):
        raise DataError("expected one fit at a time, got one inside of another: call them in turn")
    try:
        _HERE.calls += 1
        _HERE.call = Call(script, _HERE.calls, build)
        yield _HERE.call
    finally:
        _HERE.call = None
        _HERE.lock.release()


def build_task(build: Build, spec: RunSpec, script: Script) -> FittedTask:
    """Call the user's `build`, seeded, and look at what it gives.

    Raises:
        SamestepError: It cannot be trained, or `build` raised.
    """
    torch.manual_seed(spec.seed)
    options = spec.options.get("options", {})
    try:
        built = build(options) if takes_options(build) else build()
    except SamestepError:
        raise
    except Exception as error:
        if in_words(error) == NO_MEMORY:
            raise DataError(f"what build makes: {NO_MEMORY}{figures_of(error)}") from error
        raise DataError(f"build raised {type(error).__name__}: {error}") from error
    digests = {"script": script.digest} if script.digest else {}
    if modules := script.modules_digest():
        digests["modules beside the script"] = modules
    return FittedTask(task_of(built), spec, digests)


def takes_options(build: Build) -> bool:
    """Whether `build` is to be given the options."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        each.name == "options" or (each.kind in kinds and each.default is inspect.Parameter.empty)
        for each in inspect.signature(build).parameters.values()
    )


class FitTask:
    """Gives the task of the `fit` that goes on in this process: see `worker.tasks.own`."""

    def __new__(cls, spec: RunSpec) -> Any:
        """The task itself."""
        said = spec.options.get("script") or {}
        name, digest = str(said.get("name")), str(said.get("digest"))
        call = _HERE.call
        if call is None:
            return _sent(spec, name, digest)
        if digest != call.script.digest:
            raise ScriptDiffers(
                f"the run is of the script {name!r} ({digest[:12] or 'a notebook'}), this worker's "
                f"{call.script.name!r} ({call.script.digest[:12]}) differs: copy that one here"
            )
        if said.get("call") != call.number:
            raise ScriptDiffers(
                f"the run is of fit number {said.get('call')} of {name!r}, this worker is at "
                f"number {call.number}: start it before the first one ends"
            )
        return call.task(spec)

    def initial_parameters(self) -> None: ...
    def batch(self) -> None: ...
    def evaluation_batch(self) -> None: ...


def _sent(spec: RunSpec, name: str, digest: str) -> FittedTask:
    """From the script that the coordinator has sent, if this worker accepts any."""
    if not digest:
        raise ScriptMissing(
            "the run's model is in a notebook, where others cannot take part: put it in a script"
        )
    if os.environ.get(_ACCEPT) != "1" or spec.data is None:
        raise ScriptMissing(
            f"the run's model is in the script {name!r}, which this worker was not given: start "
            f"it with `worker {name}`, or with --accept-scripts to run what its coordinator sends"
        )
    script = Script.at(Path(os.path.realpath(spec.data.train)))
    if script.digest != digest:
        raise ScriptDiffers(f"expected the script {name!r} as the run has it, got another one")
    _LOOKING.call = 1
    try:
        runpy.run_path(str(spec.data.train), run_name="__main__")
    except _ReachedError as reached:
        return build_task(reached.build, spec, script)
    finally:
        _LOOKING.call = 0
    raise DataError(f"the script {name!r} has ended without a samestep.fit")


def calls() -> int:
    """How many times `fit` was called in this process."""
    return _HERE.calls
