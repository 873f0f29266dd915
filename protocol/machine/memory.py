"""Read the main memory of the machine and of this process's control group, and count OOM kills."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.base import limits
from protocol.base.limits import byte_size

PROC: Final = Path("/proc")
GROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine and of this process's control group, in bytes.

    Attributes:
        free: The machine's memory that is unused or reclaimable.
        free_swap: The machine's free swap.
        limit: The control group's limit on memory; None if it has none.
        swap_limit: The control group's limit on swap; None if it has none.
        used: Memory that the control group uses; None if unknown.
    """

    free: int
    free_swap: int
    limit: int | None
    swap_limit: int | None
    used: int | None

    @property
    def left_in_group(self) -> int | None:
        """Memory that the control group may still allocate; None if it has no limit."""
        if self.limit is None or self.used is None:
            return None
        return max(0, self.limit - self.used)

    @property
    def available(self) -> int:
        """Free memory and swap of the machine, at most the limits of the control group."""
        available = self.free + self.free_swap
        if self.limit is None or self.swap_limit is None:
            return available
        return min(available, self.limit + self.swap_limit)


def read_memory(proc: Path = PROC, groups: Path = GROUPS) -> Memory:
    """Read the memory of the machine and of this process's control group.

    Args:
        proc: The root of procfs.
        groups: The root of the control group tree (version 2).

    Raises:
        OSError: There is no procfs.
        ValueError: /proc/meminfo does not have Linux's format.
    """
    lines = (proc / "meminfo").read_text().splitlines()
    try:
        kib = {key: int(value.split()[0]) for key, value in (line.split(":") for line in lines)}
        free, swap = kib["MemAvailable"] * limits.KIB, kib.get("SwapFree", 0) * limits.KIB
    except (KeyError, IndexError) as error:
        raise ValueError(f"expected MemAvailable in {proc / 'meminfo'}") from error
    try:
        group_lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        group_lines = []
    path = next((line.partition("::")[2] for line in group_lines if line.startswith("0::")), None)
    if path is None:
        return Memory(free, swap, None, None, None)
    group = groups / path.lstrip("/")
    names = ("memory.max", "memory.swap.max", "memory.current")
    return Memory(free, swap, *(_number(group / name) for name in names))


def count_oom_kills(proc: Path = PROC, groups: Path = GROUPS) -> dict[str, int]:
    """Count the kills by the OOM killer, where the kernel reports them.

    Args:
        proc: The root of procfs.
        groups: The root of the control group tree (version 2 or 1).

    Returns:
        `group`: kills in this process's control group; `machine`: kills since boot.
    """
    files = {"machine": [proc / "vmstat"], "group": list(_event_files(proc, groups))}
    counts = {scope: _first_count(paths) for scope, paths in files.items()}
    return {scope: count for scope, count in counts.items() if count is not None}


def has_new_kills(earlier: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Return whether the OOM killer has struck between two results of `count_oom_kills`."""
    return any(now.get(scope, 0) > count for scope, count in earlier.items())


def _event_files(proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the files that can have the count of the group's kills.

    In a container, /proc may show the path that the group has on the host.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"
            yield groups / "memory" / "memory.oom_control"


def _first_count(files: Iterable[Path]) -> int | None:
    for file in files:
        with suppress(OSError):
            match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            if match is not None:
                return int(match[1])
    return None


def requested_bytes(error: BaseException) -> int | None:
    """Return the size of the allocation that failed; None if torch or numpy does not report it."""
    match = re.search(r"tried to allocate ([0-9]+) bytes", str(error))
    if match is not None:
        return int(match[1])
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return None
    return int(math.prod(shape) * dtype.itemsize)


def describe_shortage(error: BaseException, proc: Path = PROC, groups: Path = GROUPS) -> str:
    """Return the end of an error's line: needed and available memory, and what to do."""
    nbytes = requested_bytes(error)
    needed_text = "" if nbytes is None else f": tried to allocate {byte_size(nbytes)}"
    if (addresses := _address_limit()) is not None:
        limit = f"this process may map {byte_size(addresses)}"
        return f"{needed_text}; {limit}: run ulimit -v unlimited, or train a smaller model"
    try:
        free = f"; only {byte_size(read_memory(proc, groups).available)} is free"
    except (OSError, ValueError):
        free = ""  # this system has no procfs
    return (
        f"{needed_text}{free}: close other programs, add memory or swap, or train a smaller model"
    )


def _address_limit() -> int | None:
    """Return the limit on this process's address space (`ulimit -v`); None if it has none."""
    try:
        import resource  # noqa: PLC0415 -- Windows lacks this module
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _number(file: Path) -> int | None:
    """Read a number from a control group's file; None if it is missing or `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
