"""The errors that samestep raises, and how they are described to people.

SamestepError
├── UsageError            exit 2   invalid input from the user
│   ├── RunSpecError               an unknown key, a value out of range, a missing file
│   ├── QueueFull                  the queue of runs is full
│   └── DataError                  an unusable data set, label or model source
├── RunFailed             exit 1   the run failed, or is halted at exit
│   └── Superseded                 another coordinator has taken over the run's directory
├── Unreachable           exit 69  no answer from the address, or no such device
│   └── BackendUnavailable         a backend that was named cannot be used here
├── DeviceError           exit 1   a device was lost or ran out of memory while computing
│   ├── DeviceOutOfMemory          it has too little memory
│   └── SubnormalsFlushed          a thread flushes subnormal numbers, which changes bits
├── TooLittleMemory       exit 1   this machine has too little memory
│   ├── MainMemoryTooSmall         for the model; another machine may have enough
│   └── SharedMemoryFull           for what a worker's device processes share
├── NotAuthorized         exit 77  the other side rejected our credentials
├── Mismatch              exit 78  versions, manifests or configurations differ
│   ├── ScriptMissing              the worker lacks the script that defines the run's model
│   └── ScriptDiffers              the worker has another version of that script
├── StorageFailed         exit 1   a write failed: disk full, read-only or gone
├── StorageDamaged        exit 1   a file does not contain what was written to it
└── ProtocolError
    ├── LocalProtocolError         we tried to send something invalid: our bug
    └── RemoteProtocolError        the peer sent something invalid: its connection is closed
        ├── FrameError             not a frame: wrong magic, length or checksum
        │   └── VersionMismatch    exit 78  the peer speaks another protocol version
        ├── MessageError           not a valid message of the frame's tag
        └── OutOfOrder             a valid message that does not fit the current state

An error's text states what was expected, what was found and in which file or from which peer, and
what to do.
"""

from __future__ import annotations

import errno
import re
from enum import IntEnum
from pathlib import PurePath
from typing import Final

from protocol.base.limits import byte_size


class ExitCode(IntEnum):
    """Exit codes of all commands; those from 64 on follow BSD's sysexits."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 69
    NOT_AUTHORIZED = 77
    MISMATCH = 78
    INTERRUPTED = 130


_ROOT: Final = PurePath(__file__).parents[2]
_PACKAGES: Final = frozenset({"backends", "coordinator", "protocol", "samestep", "worker"})
_LIBRARIES: Final = frozenset({"site-packages", "dist-packages", PurePath(re.__file__).parts[-3]})
"""Names of the folders of installed packages and of the standard library."""

NO_MEMORY: Final = "not enough main memory is available"
OUT_OF_THREADS: Final = (
    "the system's limit on threads is reached; raise it (ulimit -u, TasksMax= of the unit, "
    "--pids-limit of the container), or run fewer processes"
)
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


class SamestepError(Exception):
    """Root of the tree; `exit_code` is the exit code of a command that fails with this error."""

    exit_code = ExitCode.FAILED


class UsageError(SamestepError):
    """The user's input cannot be used."""

    exit_code = ExitCode.USAGE


class RunSpecError(UsageError):
    """The run spec has an unknown key, an invalid value, or names a missing file."""


class QueueFull(UsageError):
    """The queue of runs is full; another run can be submitted once one of them has started."""


class DataError(UsageError):
    """A data set, a label or a model source cannot be used."""


class RunFailed(SamestepError):
    """The run failed, or is halted when the command ends."""


class Superseded(RunFailed):
    """Another coordinator has taken over the run's directory."""


class Unreachable(SamestepError):
    """No coordinator answers at the address, or there is no such device."""

    exit_code = ExitCode.UNREACHABLE


class BackendUnavailable(Unreachable):
    """A backend that was named cannot be used on this machine.

    Attributes:
        backend: The backend's name.
        reason: The reason, and what the user can do.
    """

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(backend, reason)
        self.backend = backend
        self.reason = reason

    def __str__(self) -> str:
        return f"backend {self.backend!r} is not usable here: {self.reason}"


class DeviceError(SamestepError):
    """A device was lost or ran out of memory.

    Attributes:
        device: The device's name.
        reason: What happened, as the driver reports it.
    """

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(device, reason)
        self.device = device
        self.reason = reason

    def __str__(self) -> str:
        return f"device {self.device!r} failed: {self.reason}"


class DeviceOutOfMemory(DeviceError):
    """A device has too little memory for one operation; smaller operations still succeed."""


class SubnormalsFlushed(DeviceError):
    """A thread flushes subnormal numbers to zero, which would change the bits of the update.

    Attributes:
        device: Where the thread runs.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, "it flushes subnormal numbers to zero")

    def __str__(self) -> str:
        return (
            f"{self.device} flushes subnormal numbers to zero, which changes bits: remove "
            "torch.set_flush_denormal(True), or the library that was built with -ffast-math"
        )


class TooLittleMemory(SamestepError):
    """This machine has too little memory.

    Attributes:
        needed_bytes: Memory that is needed.
        free_bytes: Memory that is available.
    """

    text = "{needed} is needed, {free} is available"

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(needed_bytes, free_bytes)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        needed, free = byte_size(self.needed_bytes), byte_size(self.free_bytes)
        return self.text.format(needed=needed, free=free)


class MainMemoryTooSmall(TooLittleMemory):
    """The model in float32 does not fit this machine's main memory."""

    text = (
        "reading the model takes {needed} of main memory, only {free} is available; close other "
        "programs, or add memory or swap"
    )


class SharedMemoryFull(TooLittleMemory):
    """There is too little memory for the gradients that a worker's device processes share."""

    text = (
        "sharing gradients between this machine's processes takes {needed} of memory in one of "
        "them, only {free} is available; close other programs, raise the memory limit of the unit "
        "or container, or name fewer devices in --gpus"
    )


class NotAuthorized(SamestepError):
    """The other side rejected our credentials."""

    exit_code = ExitCode.NOT_AUTHORIZED


class Mismatch(SamestepError):
    """Versions, manifests or configurations of the two sides differ."""

    exit_code = ExitCode.MISMATCH


class ScriptMissing(Mismatch):
    """This worker lacks the script that defines the run's model; others may have it."""


class ScriptDiffers(Mismatch):
    """This worker's script differs from the run's, or has reached another call of `fit`."""


class StorageFailed(SamestepError):
    """A write failed; earlier data is intact, and a retry may succeed.

    Attributes:
        operation: The operation that failed: "append to", "sync".
        path: The file or directory.
        reason: What the system reports, and what to do.
    """

    def __init__(self, operation: str, path: str, reason: str) -> None:
        super().__init__(operation, path, reason)
        self.operation = operation
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot {self.operation} {self.path!r}: {self.reason}"


class StorageDamaged(SamestepError):
    """A file does not contain what was written to it.

    Attributes:
        path: The file.
        location: The location in the file: "byte 4096", "line 17"; empty for the whole file.
        reason: What was expected, and what was found.
    """

    def __init__(self, path: str, location: str, reason: str) -> None:
        super().__init__(path, location, reason)
        self.path = path
        self.location = location
        self.reason = reason

    def __str__(self) -> str:
        location_text = f" at {self.location}" if self.location else ""
        return f"{self.path!r} is damaged{location_text}: {self.reason}"


class ProtocolError(SamestepError):
    """A violation of the protocol."""


class LocalProtocolError(ProtocolError):
    """We tried to send something that the protocol forbids: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids; its connection is closed."""


class FrameError(RemoteProtocolError):
    """The bytes are not a frame: wrong magic, length or checksum."""


class VersionMismatch(FrameError):
    """The peer speaks another version of the protocol.

    Attributes:
        ours: Our version.
        theirs: The peer's version.
        reader: Our role, once known: "coordinator" or "worker"; empty before.
    """

    exit_code = ExitCode.MISMATCH

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(ours, theirs)
        self.ours = ours
        self.theirs = theirs
        self.reader = ""

    def __str__(self) -> str:
        # From the worker's view on both sides: the worker exits with this error and shows it.
        we, they = {
            "worker": ("this worker", "the coordinator"),
            "coordinator": ("the coordinator", "this worker"),
        }.get(self.reader, ("this side", "the other side"))
        older = we if self.theirs > self.ours else they
        return f"{we} speaks protocol version {self.ours}, {they} {self.theirs}: upgrade {older}"


class MessageError(RemoteProtocolError):
    """The frame does not contain a valid message of its tag."""


class OutOfOrder(RemoteProtocolError):
    """A valid message that does not fit the current term, step, subtree, shape or phase."""


def error_for(exit_code: int, text: str) -> SamestepError:
    """Return the error that another process reported by its exit code and text."""
    error_types: dict[int, type[SamestepError]] = {
        ExitCode.USAGE: UsageError,
        ExitCode.UNREACHABLE: Unreachable,
        ExitCode.NOT_AUTHORIZED: NotAuthorized,
        ExitCode.MISMATCH: Mismatch,
    }
    return error_types.get(exit_code, RunFailed)(text)


def describe_error(error: Exception) -> str:
    """Describe another library's error in part of a line: its type and first sentence."""
    text = " ".join(str(error).split())
    if is_out_of_threads(error):
        return OUT_OF_THREADS
    if isinstance(error, MemoryError) or "not enough memory" in text or "alloc_cpu" in text:
        return NO_MEMORY
    faults = getattr(error, "errors", None)
    if callable(faults) and isinstance(error, ValueError):  # pydantic's text has several lines
        first = faults()[0]
        key = ".".join(map(str, first["loc"]))
        return f"{key}: {first['msg']}" if key else str(first["msg"])
    text = re.split(r"(?<=[\w)'\"`])\. (?=[A-Z])", text)[0][:300]
    if isinstance(error, ValueError | OSError | ImportError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def lock_failure(error: OSError) -> str:
    """Describe why a file cannot be locked, in part of a line."""
    reason = error.strerror or str(error)
    if error.errno in _NO_LOCKS:
        return f"expected a file system with locks, such as a local disk, got none ({reason})"
    return reason


def is_out_of_threads(error: BaseException) -> bool:
    """Return whether the system refused to start a thread."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def describe_raised(error: BaseException) -> str:
    """Describe an error raised by the user's code in part of a line: type, text and location."""
    text = " ".join(str(error).split())[:300]
    type_name = type(error).__name__
    return (f"{type_name}: {text}" if text else type_name) + user_location(error)


def user_location(error: BaseException) -> str:
    """Return ` in x.py, line 9`, the innermost frame of the user's code; empty if there is none.

    Frames of samestep and of installed packages are not the user's.
    """
    location, trace = "", error.__traceback__
    while trace is not None:
        path = PurePath(trace.tb_frame.f_code.co_filename)
        is_samestep = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _PACKAGES
        if not (is_samestep or _LIBRARIES & set(path.parts) or path.name.startswith("<")):
            location = f" in {path.name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return location


def text_of(error: BaseException) -> str:
    """Return the error's text for people; an error that is not samestep's is an internal error."""
    if is_out_of_threads(error):
        return OUT_OF_THREADS
    return str(error) if isinstance(error, SamestepError) else f"internal error: {error!r}"
