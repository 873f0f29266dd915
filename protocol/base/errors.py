"""Every error that samestep raises on purpose.

SamestepError
├── UsageError            exit 2   what the user gave cannot be used
│   ├── RunSpecError               an unknown key, a value out of range, a missing file
│   ├── QueueFull                  no more runs may wait
│   └── DataError                  a data set, label or model source that cannot be used
├── RunFailed             exit 1   the run failed or is halted at exit
│   └── Superseded                 another coordinator has the run's directory
├── Unreachable           exit 69  nothing answers at the address, or a device is not there
│   └── BackendUnavailable         a named backend cannot be used here, with the reason
├── DeviceError           exit 1   a device was lost, or has no memory left, while it computed
│   └── SubnormalsFlushed          a thread takes subnormal numbers for zeros: other bits
├── MainMemoryTooSmall    exit 1   this machine has no room to read the model; others may
├── SharedMemoryFull      exit 1   nor for what the processes of a host hand to one another
├── NotAuthorised         exit 77  the other side does not accept who we are
├── Mismatch              exit 78  versions, manifests or configurations differ
│   ├── ScriptMissing              a worker lacks the script that a run's model comes from
│   └── ScriptDiffers              it has another one than the run
├── StorageFailed         exit 1   nothing can be written just now: full, read-only, gone
├── StorageDamaged        exit 1   a file does not hold what was written to it
└── ProtocolError
    ├── LocalProtocolError         we tried to send what the protocol forbids: our bug
    └── RemoteProtocolError        the peer sent what the protocol forbids: its connection ends
        ├── FrameError             the bytes are no frame: magic, length, checksum
        │   └── VersionMismatch    exit 78  the other side speaks another protocol version
        ├── MessageError           the frame holds no valid message of its tag
        └── OutOfPlace             a valid message that does not fit the present state

The text of an error says what was expected, what came, from whom, and what to do.
"""

from __future__ import annotations

import errno
import re
from enum import IntEnum
from pathlib import PurePath
from typing import Final

from protocol.base.byte_size import byte_size


class ExitCode(IntEnum):
    """Exit codes of both commands (the upper ones follow BSD's sysexits)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 69
    NOT_AUTHORISED = 77
    MISMATCH = 78
    INTERRUPTED = 130


_ROOT: Final = PurePath(__file__).parents[2]
_ROOMS: Final = frozenset({"backends", "coordinator", "protocol", "samestep", "worker"})
_LIBRARIES: Final = frozenset({"site-packages", "dist-packages", PurePath(re.__file__).parts[-3]})
"""Folders of installed packages, and the standard library's."""

NO_MEMORY: Final = "it takes more main memory than can be had"
OUT_OF_THREADS: Final = (
    "the system lets this process start no more threads: raise the limit (ulimit -u, TasksMax= of "
    "its unit, --pids-limit of its container), or run fewer processes"
)
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


class SamestepError(Exception):
    """Root of the tree; `exit_code` is what a command ends with when it stops for this error."""

    exit_code = ExitCode.FAILED


class UsageError(SamestepError):
    """What the user gave cannot be used."""

    exit_code = ExitCode.USAGE


class RunSpecError(UsageError):
    """The run spec has an unknown key, a wrong value, or names a file that is not there."""


class QueueFull(UsageError):
    """As many runs wait as may; another can be submitted once one of them has begun."""


class DataError(UsageError):
    """A data set, a label or a model source cannot be used."""


class RunFailed(SamestepError):
    """The run failed, or is halted when the command ends."""


class Superseded(RunFailed):
    """Another coordinator has the directory of the run."""


class Unreachable(SamestepError):
    """Nothing usable answers: no coordinator at the address, or no such device."""

    exit_code = ExitCode.UNREACHABLE


class BackendUnavailable(Unreachable):
    """A backend that was asked for by name cannot be used on this machine.

    Attributes:
        backend: The backend's name.
        reason: Why, in words a user can act on.
    """

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(backend, reason)
        self.backend = backend
        self.reason = reason

    def __str__(self) -> str:
        return f"backend {self.backend!r} is not usable here: {self.reason}"


class DeviceError(SamestepError):
    """A device stopped computing: it was lost, or has no memory left.

    Attributes:
        device: The device's name.
        reason: What happened, as the driver says it.
    """

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(device, reason)
        self.device = device
        self.reason = reason

    def __str__(self) -> str:
        return f"the device {self.device!r} failed: {self.reason}"


class SubnormalsFlushed(DeviceError):
    """A thread takes subnormal numbers for zeros, which the exact update must not.

    Attributes:
        device: What the thread belongs to.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, "it takes subnormal numbers for zeros")

    def __str__(self) -> str:
        return (
            f"{self.device} takes subnormal numbers for zeros, so its bits would differ: leave out "
            "torch.set_flush_denormal(True), or the library that was built with -ffast-math"
        )


class MainMemoryTooSmall(SamestepError):
    """This machine cannot even read the model; others may.

    Attributes:
        needed_bytes: For the model in float32.
        free_bytes: What there is.
    """

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(needed_bytes, free_bytes)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        needed, free = byte_size(self.needed_bytes), byte_size(self.free_bytes)
        return (
            f"reading the model takes {needed} of main memory, and {free} can be had: end other "
            "programs, or add memory or swap"
        )


class SharedMemoryFull(SamestepError):
    """There is no memory for what the processes of one host share.

    Attributes:
        needed_bytes: Of one process, with what it has.
        free_bytes: What there is beside that.
    """

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(needed_bytes, free_bytes)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        needed, free = byte_size(self.needed_bytes), byte_size(self.free_bytes)
        return (
            f"sharing gradients between the processes of this host takes {needed} of memory for "
            f"one of them, and {free} can be had: end other programs, raise the memory limit of "
            "the unit or container, or name fewer devices in --gpus"
        )


class NotAuthorised(SamestepError):
    """The other side does not accept who we are."""

    exit_code = ExitCode.NOT_AUTHORISED


class Mismatch(SamestepError):
    """Versions, manifests or configurations of the two sides differ."""

    exit_code = ExitCode.MISMATCH


class ScriptMissing(Mismatch):
    """A run's model comes from a script that this worker was not given; others may have it."""


class ScriptDiffers(Mismatch):
    """This worker was given another script, or is elsewhere in it, than the run."""


class StorageFailed(SamestepError):
    """Nothing can be written just now; what was written before is whole, and a retry may succeed.

    Attributes:
        doing: What was tried: "append to", "sync".
        path: Of which file or directory.
        reason: What the system says, and what would mend it.
    """

    def __init__(self, doing: str, path: str, reason: str) -> None:
        super().__init__(doing, path, reason)
        self.doing = doing
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot {self.doing} {self.path!r}: {self.reason}"


class StorageDamaged(SamestepError):
    """A file does not hold what was written to it.

    Attributes:
        path: The file.
        place: Where in it: "byte 4096", "line 17"; empty for the whole of it.
        reason: What was expected, and what is there.
    """

    def __init__(self, path: str, place: str, reason: str) -> None:
        super().__init__(path, place, reason)
        self.path = path
        self.place = place
        self.reason = reason

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"{self.path!r} is damaged{where}: {self.reason}"


class ProtocolError(SamestepError):
    """Something that the protocol forbids."""


class LocalProtocolError(ProtocolError):
    """We tried to send what the protocol forbids: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids; its connection is closed."""


class FrameError(RemoteProtocolError):
    """The bytes are no frame: wrong magic, length or checksum."""


class VersionMismatch(FrameError):
    """The other side speaks another version of the protocol.

    Attributes:
        ours: This side's version.
        theirs: The other side's.
        reader: Which side "ours" is, once that is known: "coordinator" or "worker".
    """

    exit_code = ExitCode.MISMATCH

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(ours, theirs)
        self.ours = ours
        self.theirs = theirs
        self.reader = ""

    def __str__(self) -> str:
        # In a worker's words on both sides: it is the worker that ends for it, and is read there.
        we, they = {
            "worker": ("this worker", "the coordinator"),
            "coordinator": ("the coordinator", "this worker"),
        }.get(self.reader, ("this side", "the other side"))
        older = we if self.theirs > self.ours else they
        return f"{we} speaks protocol version {self.ours}, {they} {self.theirs}: upgrade {older}"


class MessageError(RemoteProtocolError):
    """The frame does not hold a valid message of its tag."""


class OutOfPlace(RemoteProtocolError):
    """A valid message that does not fit the present epoch, step, node, shape or phase."""


def error_for(exit_code: int, text: str) -> SamestepError:
    """The error that another process reported by its exit code, to be raised here as one's own."""
    kinds: dict[int, type[SamestepError]] = {
        ExitCode.USAGE: UsageError,
        ExitCode.UNREACHABLE: Unreachable,
        ExitCode.NOT_AUTHORISED: NotAuthorised,
        ExitCode.MISMATCH: Mismatch,
    }
    return kinds.get(exit_code, RunFailed)(text)


def in_words(error: Exception) -> str:
    """What another library raised, as a part of a line: its first sentence and what kind it is."""
    text = " ".join(str(error).split())
    if is_out_of_threads(error):
        return OUT_OF_THREADS
    if isinstance(error, MemoryError) or "not enough memory" in text or "alloc_cpu" in text:
        return NO_MEMORY
    found = getattr(error, "errors", None)
    if callable(found) and isinstance(error, ValueError):  # pydantic's, over several lines
        first = found()[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']}" if place else str(first["msg"])
    text = re.split(r"(?<=[\w)'\"`])\. (?=[A-Z])", text)[0][:300]
    if isinstance(error, ValueError | OSError | ImportError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def lock_failure(error: OSError) -> str:
    """Why a file cannot be locked, as a part of a line that goes on with what to do."""
    reason = error.strerror or str(error)
    if error.errno in _NO_LOCKS:
        return f"expected a file system with locks, as on a local disk, got one without ({reason})"
    return reason


def is_out_of_threads(error: BaseException) -> bool:
    """Whether the system refused a thread."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def raised_words(error: BaseException) -> str:
    """Its kind and text, and where in code of the user's, as a part of a line."""
    text = " ".join(str(error).split())[:300]
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind) + raised_at(error)


def raised_at(error: BaseException) -> str:
    """Where in code of the user's, as a part of a line: ` in x.py, line 9`; or nothing.

    That is the innermost frame that is neither ours nor of an installed package.
    """
    found, trace = "", error.__traceback__
    while trace is not None:
        path = PurePath(trace.tb_frame.f_code.co_filename)
        ours = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _ROOMS
        if not (ours or _LIBRARIES & set(path.parts) or path.name.startswith("<")):
            found = f" in {path.name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def text_of(error: BaseException) -> str:
    """What to tell people: anything but an error of ours is a fault in the program."""
    if is_out_of_threads(error):
        return OUT_OF_THREADS
    return str(error) if isinstance(error, SamestepError) else f"internal error: {error!r}"
