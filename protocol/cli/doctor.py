"""`coordinator doctor` and `worker doctor`: the runner, and the checks that both share.

A check leaves no file behind: a file written to test a directory is removed again.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from packaging.requirements import Requirement

from protocol import PROTOCOL_VERSION, __version__
from protocol.base.errors import ExitCode, UsageError
from protocol.base.limits import byte_size
from protocol.exact.kernels.library import native_name, why_not_native
from protocol.machine.memory import GROUPS, PROC, count_oom_kills, read_memory

Outcome = Literal["ok", "warning", "failure"]
_RELEASE_TIME_S: Final = 1_767_225_600.0
"""2026-01-01, before this release: an earlier clock is wrong."""
_TIME_ERROR: Final = 5
"""adjtimex(2): the clock is not synchronized."""
_SHARED_FILE_SYSTEMS: Final = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "fuse.sshfs",
    "glusterfs",
    "fuse.glusterfs",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: The check's name; stable, for scripts.
        outcome: A failure keeps the daemon from working; a warning is worth a look.
        observation: The state that the check observed; `found` in the JSON document.
        advice: What to do; empty if nothing needs to be done.
    """

    check: str
    outcome: Outcome
    observation: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the finding as an entry of the JSON document."""
        return {
            "check": self.check, "outcome": self.outcome, "found": self.observation,
            "advice": self.advice,
        }  # fmt: skip

    def line(self) -> str:
        """Format the finding for a person."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.outcome:<8} {self.check}: {self.observation}{advice}"


def ok(check: str, observation: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, "ok", observation)


def warning(check: str, observation: str, advice: str) -> Finding:
    """Return a finding that does not keep the daemon from working."""
    return Finding(check, "warning", observation, advice)


def failure(check: str, observation: str, advice: str = "") -> Finding:
    """Return a finding that keeps the daemon from working; `observation` may include advice."""
    return Finding(check, "failure", observation, advice)


def report_findings(
    findings: Iterable[Finding], echo: Callable[[str], None], *, as_json: bool
) -> ExitCode:
    """Run the checks and print their findings, each at once, or all as one JSON document.

    Args:
        findings: An iterator that runs each check when it yields the finding.
        echo: Prints a line.
        as_json: Print one document at the end, with `ok` and `checks`.

    Returns:
        FAILED if there is a failure; warnings do not count.
    """
    all_findings: list[Finding] = []
    for finding in findings:
        all_findings.append(finding)
        if not as_json:
            echo(finding.line())
    is_ok = all(finding.outcome != "failure" for finding in all_findings)
    if as_json:
        echo(
            json.dumps(
                {
                    "ok": is_ok,
                    "checks": [finding.to_json() for finding in all_findings],
                },
                indent=2,
            )
        )
    return ExitCode.OK if is_ok else ExitCode.FAILED


# Checks of the machine.


def check_release() -> Finding:
    """Report the versions of samestep, the protocol and Python."""
    python = ".".join(map(str, sys.version_info[:3]))
    versions = f"samestep {__version__}, protocol version {PROTOCOL_VERSION}, Python {python}"
    try:
        installed = metadata.version("samestep")
    except metadata.PackageNotFoundError:
        return warning(
            "release",
            f"{versions}; not installed as a package, so its requirements are not known",
            "bash deploy/environment.sh run",
        )
    if installed != __version__:
        advice = "reinstall it, or leave the other one out of PYTHONPATH"
        return failure("release", f"{versions}, but the package installed is {installed}", advice)
    return ok("release", versions)


def check_packages(extras: Sequence[str] = (), optional: Sequence[str] = ()) -> Iterator[Finding]:
    """Check that required packages are installed in compatible versions.

    Args:
        extras: Extras that are required besides the base.
        optional: Extras that may be missing, but not incompatible.
    """
    try:
        requirements = [Requirement(line) for line in metadata.requires("samestep") or ()]
    except metadata.PackageNotFoundError:
        return  # `check_release` reports it
    faults = [text for extra in ("", *extras) for text in _unmet(requirements, extra)]
    for extra in optional:
        unmet = list(_unmet(requirements, extra))
        faults += [text for text in unmet if not text.endswith("is missing")]
    if faults:
        also = f"[{','.join(extras)}]" if extras else ""
        yield failure("packages", ", ".join(faults), f"pip install 'samestep{also}', or recreate "
                                                    "the environment with "
                                                    "deploy/environment.sh")  # fmt: skip
    else:
        yield ok("packages", "all installed")


def check_kernels() -> Finding:
    """Check that updates, sums and codecs run in native code."""
    if reason := why_not_native():
        state, _, advice = reason.removeprefix("native kernels: ").partition("; ")
        return warning("kernels", state, advice)
    return ok("kernels", f"native, {native_name()}")


def _unmet(requirements: Iterable[Requirement], extra: str) -> Iterator[str]:
    """Describe missing and incompatible requirements of an extra, or of the base if it is empty."""
    for requirement in requirements:
        marker = requirement.marker
        is_base = marker is None or marker.evaluate({"extra": ""})
        is_required = marker is None or marker.evaluate({"extra": extra})
        if requirement.name == "samestep" or not is_required or (extra and is_base):
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name} is {installed}, expected {requirement.specifier}"


def check_clock(now_s: float | None = None, *, synchronized: bool | None = None) -> Finding:
    """Check the clock, on which only the times in journals and logs depend.

    Args:
        now_s: Seconds since 1970; None to read the system's clock.
        synchronized: Whether the clock is synchronized; None to ask the kernel.
    """
    now_s = time.time() if now_s is None else now_s
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if synchronized is None:
        synchronized = _is_clock_synchronized()
    advice = "timedatectl set-ntp true (Debian: apt install systemd-timesyncd)"
    if now_s < _RELEASE_TIME_S:
        return warning("clock", f"{now} is before this release was made", advice)
    if not synchronized:
        note = "not synchronized, so times in journals and logs will not agree between machines"
        return warning("clock", f"{now}, {note}", advice)
    return ok("clock", f"{now}, synchronized")


def check_open_files(needed: int, enough: int) -> Finding:
    """Check the limit of file descriptors.

    Args:
        needed: The minimum.
        enough: The number that the largest supported run needs.
    """
    try:
        import resource  # noqa: PLC0415 -- not for every system
    except ImportError:
        return ok("open files", "this system reports no limit")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= enough:
        return ok("open files", f"up to {'any number' if limit < 0 else limit}")
    advice = f"ulimit -n {enough}, or LimitNOFILE={enough} in the service's unit"
    make = failure if limit < needed else warning
    return make("open files", f"up to {limit}, where {enough} may be needed", advice)


def check_memory(least_bytes: int, proc: Path = PROC, groups: Path = GROUPS) -> Finding:
    """Check the free memory of this machine and of this process's control group.

    Args:
        least_bytes: The check warns if less is free.
        proc: The root of procfs.
        groups: The root of the control group tree (version 2).
    """
    try:
        usage = read_memory(proc, groups)
    except (OSError, ValueError):
        advice = "nothing to do: a model that does not fit ends with the allocator's own error"
        return warning("memory", "not known: this system has no procfs, unlike Linux", advice)
    free, scope = usage.free, "this machine"
    if usage.left_in_group is not None and usage.left_in_group < free:
        free, scope = usage.left_in_group, "its control group"
    text = f"{byte_size(free)} free in {scope}"
    if free < least_bytes:
        advice = f"close programs or add memory; less than {byte_size(least_bytes)} is little"
        return warning("memory", text, advice)
    return ok("memory", text)


def check_oom_kills(proc: Path = PROC, groups: Path = GROUPS) -> Finding:
    """Check whether the kernel has killed processes for lack of memory.

    Args:
        proc: The root of procfs.
        groups: The root of the control group tree (version 2 or 1).
    """
    counts = count_oom_kills(proc, groups)
    if count := counts.get("group", 0):
        return warning(
            "killed for memory", f"{count} processes of this control group, by the kernel",
            "raise the memory limit of the unit or container, or lower batch.microbatch",
        )  # fmt: skip
    since = f"{counts.get('machine')} processes since this machine's start"
    return ok("killed for memory", since if counts.get("machine") else "none reported")


def check_directory(check: str, path: Path, least_bytes: int, elsewhere: str) -> Iterator[Finding]:
    """Check that a directory is writable, and check its file system; it need not exist yet.

    Args:
        check: The check's name.
        path: The directory.
        least_bytes: The check warns if less is free.
        elsewhere: The option or variable that names another directory.
    """
    folder = nearest_existing(path)
    name = repr(str(path)) if folder == path else f"{str(path)!r} (not created yet)"
    try:
        # The system removes the file, even if this process is killed.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
        free = _free_bytes(folder)
    except OSError as error:
        advice = f"let this user write there and make room, or choose another: {elsewhere}"
        yield failure(check, f"cannot write in {str(folder)!r}: {error.strerror or error}", advice)
        return
    file_system = _file_system(folder)
    space = f"{name}: {byte_size(free)} free"
    if file_system == "tmpfs":
        yield warning(check, f"{space}, in memory: gone after a restart", elsewhere)
    elif file_system in _SHARED_FILE_SYSTEMS:
        yield warning(
            check,
            f"{space}, on a {file_system} mount: locks and syncs may not hold there",
            elsewhere,
        )
    elif free < least_bytes:
        little = f"less than {byte_size(least_bytes)} is little; make room, or {elsewhere}"
        yield warning(check, space, little)
    else:
        yield ok(check, space)


def _is_clock_synchronized() -> bool:
    """Return whether the kernel reports a synchronized clock; True if it reports nothing."""
    try:
        answer: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (AttributeError, OSError, TypeError):
        return True
    return answer != _TIME_ERROR


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists.

    Raises:
        UsageError: The path is relative to a working directory that was removed.
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
    """Return the type of the file system that holds a path, as the kernel names it."""
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
