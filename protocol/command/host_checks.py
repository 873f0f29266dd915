"""Checks of the machine that both daemons' doctors make; each says what to do.

Nothing here changes anything that stays: a file written to see whether one can be is gone again.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from protocol import PROTOCOL_VERSION, __version__
from protocol.base.byte_size import byte_size
from protocol.base.errors import UsageError
from protocol.command.doctor import Finding, failure, ok, warning
from protocol.host.memory import GROUPS, PROC, killed_for_memory, read_memory

_MADE_S: Final = 1_767_225_600.0
"""2026-01-01: a clock that is before this release is wrong."""
_TIME_ERROR: Final = 5
"""adjtimex(2): the clock is not synchronized."""
_SHARED: Final = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "glusterfs", "fuse.glusterfs"}


def release() -> Finding:
    """Which samestep and which Python run here."""
    python = ".".join(map(str, sys.version_info[:3]))
    found = f"samestep {__version__}, protocol version {PROTOCOL_VERSION}, Python {python}"
    try:
        installed = metadata.version("samestep")
    except metadata.PackageNotFoundError:
        return warning(
            "release",
            f"{found}; not installed as a package, so what it needs is not known",
            "bash deploy/environment.sh run",
        )
    if installed != __version__:
        advice = "reinstall it, or leave the other one out of PYTHONPATH"
        return failure("release", f"{found}, but the package installed is {installed}", advice)
    return ok("release", found)


def packages(extras: Sequence[str] = (), optional: Sequence[str] = ()) -> Iterator[Finding]:
    """Whether what this package needs is there, in versions that will do.

    Args:
        extras: What has to be there besides the base.
        optional: Extras that may be missing, but not in other versions.
    """
    try:
        requirements = [Requirement(line) for line in metadata.requires("samestep") or ()]
    except metadata.PackageNotFoundError:
        return  # `release` has said so
    wrong = [text for extra in ("", *extras) for text in _unmet(requirements, extra)]
    for extra in optional:
        unmet = list(_unmet(requirements, extra))
        wrong += [text for text in unmet if not text.endswith("is missing")]
    if wrong:
        also = f"[{','.join(extras)}]" if extras else ""
        yield failure("packages", ", ".join(wrong), f"pip install 'samestep{also}', or make the "
                      "environment anew with deploy/environment.sh")  # fmt: skip
    else:
        yield ok("packages", "all there")


def _unmet(requirements: Iterable[Requirement], extra: str) -> Iterator[str]:
    """What is missing or of another version, of an extra alone, or of the base if it is empty."""
    for requirement in requirements:
        marker = requirement.marker
        of_base = marker is None or marker.evaluate({"extra": ""})
        asked = marker is None or marker.evaluate({"extra": extra})
        if requirement.name == "samestep" or not asked or (extra and of_base):
            continue
        try:
            held = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(held, prereleases=True):
            yield f"{requirement.name} is {held}, expected {requirement.specifier}"


def clock(now_s: float | None = None, *, synchronized: bool | None = None) -> Finding:
    """Nothing that is trained depends on it, and no certificate; journals and logs do.

    Args:
        now_s: Seconds since 1970; None for the system's.
        synchronized: None to ask the kernel.
    """
    now_s = time.time() if now_s is None else now_s
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if synchronized is None:
        synchronized = _synchronized()
    advice = "timedatectl set-ntp true (Debian: apt install systemd-timesyncd)"
    if now_s < _MADE_S:
        return warning("clock", f"{shown} is before this release was made", advice)
    if not synchronized:
        note = "not synchronized, so times in journals and logs will not agree between machines"
        return warning("clock", f"{shown}, {note}", advice)
    return ok("clock", f"{shown}, synchronized")


def open_files(needed: int, enough: int) -> Finding:
    """The limit of file descriptors.

    Args:
        needed: With fewer it cannot work.
        enough: For everything within our own limits.
    """
    try:
        import resource  # noqa: PLC0415 -- not for every system
    except ImportError:
        return ok("open files", "this system sets no limit that can be asked for")
    held, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if held == resource.RLIM_INFINITY or held >= enough:
        return ok("open files", f"up to {'any number' if held < 0 else held}")
    advice = f"ulimit -n {enough}, or LimitNOFILE={enough} in its unit"
    make = failure if held < needed else warning
    return make("open files", f"up to {held}, where {enough} may be needed", advice)


def memory(least_bytes: int, proc: Path = PROC, groups: Path = GROUPS) -> Finding:
    """What is free, of the machine and of this process's control group.

    Args:
        least_bytes: Less is worth a warning.
        proc: Where procfs is.
        groups: Where the tree of control groups (version 2) is.
    """
    try:
        found = read_memory(proc, groups)
    except (OSError, ValueError):
        advice = "nothing: a model that does not fit ends in the allocator's own error"
        return warning("memory", "this system does not tell it as Linux does", advice)
    free, of = found.free, "this machine"
    if found.left_in_group is not None and found.left_in_group < free:
        free, of = found.left_in_group, "its control group"
    said = f"{byte_size(free)} free in {of}"
    if free < least_bytes:
        advice = f"end something or add memory; less than {byte_size(least_bytes)} is little"
        return warning("memory", said, advice)
    return ok("memory", said)


def killed(proc: Path = PROC, groups: Path = GROUPS) -> Finding:
    """Whom the kernel has killed for want of memory.

    Args:
        proc: Where procfs is.
        groups: Where the tree of control groups (either version) is.
    """
    counts = killed_for_memory(proc, groups)
    if count := counts.get("group", 0):
        return warning(
            "killed for memory", f"{count} processes of this control group, by the kernel",
            "raise the memory limit of the unit or container, or give it less to do",
        )  # fmt: skip
    since = f"{counts.get('machine')} processes since this machine's start"
    return ok("killed for memory", since if counts.get("machine") else "nobody, as far as is told")


def directory(check: str, path: Path, least_bytes: int, elsewhere: str) -> Iterator[Finding]:
    """Whether files can be kept in a directory, which need not be there yet, and on what.

    Args:
        check: The check's name.
        path: The directory.
        least_bytes: Less free space is worth a warning.
        elsewhere: What to set or give to have it in another place.
    """
    there = nearest(path)
    shown = repr(str(path)) if there == path else f"{str(path)!r} (not made yet)"
    try:
        # The system takes it away again, also if this process is killed.
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
        free = _free_bytes(there)
    except OSError as error:
        advice = f"let this user write there and make room, or choose another: {elsewhere}"
        yield failure(check, f"cannot write in {str(there)!r}: {error.strerror or error}", advice)
        return
    kind = _file_system(there)
    found = f"{shown}: {byte_size(free)} free"
    if kind == "tmpfs":
        yield warning(check, f"{found}, in memory: gone after a restart", elsewhere)
    elif kind in _SHARED:
        yield warning(
            check, f"{found}, on a {kind} mount: locks and syncs may not hold there", elsewhere
        )
    elif free < least_bytes:
        little = f"less than {byte_size(least_bytes)} is little; make room, or {elsewhere}"
        yield warning(check, found, little)
    else:
        yield ok(check, found)


def _synchronized() -> bool:
    """What the kernel says of the clock; taken for granted where it cannot be asked."""
    try:
        answer: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (AttributeError, OSError, TypeError):
        return True
    return answer != _TIME_ERROR


def nearest(path: Path) -> Path:
    """The path, or the closest directory above it that is there.

    Raises:
        UsageError: It is relative to a working directory that was removed.
    """
    try:
        path = path.absolute()
    except FileNotFoundError:
        raise UsageError(
            f"expected a working directory for {str(path)!r}, but this one was removed; "
            "change to another (cd)"
        ) from None
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def _file_system(path: Path) -> str:
    """The kind of file system that a path is on, as the kernel names it."""
    device = path.stat().st_dev
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        major, _, minor = fields.split()[2].partition(":")
        if os.makedev(int(major), int(minor)) == device:
            return rest.split()[0]
    return ""
