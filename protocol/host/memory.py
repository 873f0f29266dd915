"""Main memory: the machine's, what this process's control group (version 2) may take of it, and
whom the kernel has killed for want of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.base import limits
from protocol.base.byte_size import byte_size

PROC: Final = Path("/proc")
GROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes.

    Attributes:
        free: Of the machine's, unused or reclaimable.
        free_swap: Of its swap.
        bound: That the group may take; None if nothing bounds it.
        swap_bound: That it may take of swap; likewise.
        used: That the group has taken; None if that is not told.
    """

    free: int
    free_swap: int
    bound: int | None
    swap_bound: int | None
    used: int | None

    @property
    def left_in_group(self) -> int | None:
        """What the group may still take; None if nothing bounds it."""
        if self.bound is None or self.used is None:
            return None
        return max(0, self.bound - self.used)

    @property
    def most(self) -> int:
        """What could be had at the most, with swap, if the group gave back all it has taken."""
        most = self.free + self.free_swap
        if self.bound is None or self.swap_bound is None:
            return most
        return min(most, self.bound + self.swap_bound)


def read_memory(proc: Path = PROC, groups: Path = GROUPS) -> Memory:
    """Look at what there is now.

    Args:
        proc: Where procfs is.
        groups: Where the tree of control groups is.

    Raises:
        OSError: There is no procfs.
        ValueError: It is not as Linux has it.
    """
    lines = (proc / "meminfo").read_text().splitlines()
    try:
        kib = {key: int(value.split()[0]) for key, value in (line.split(":") for line in lines)}
        free, swap = kib["MemAvailable"] * limits.KIB, kib.get("SwapFree", 0) * limits.KIB
    except (KeyError, IndexError) as error:
        raise ValueError(f"expected MemAvailable in {proc / 'meminfo'}") from error
    try:
        own = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        own = []
    path = next((line.partition("::")[2] for line in own if line.startswith("0::")), None)
    if path is None:
        return Memory(free, swap, None, None, None)
    group = groups / path.lstrip("/")
    names = ("memory.max", "memory.swap.max", "memory.current")
    return Memory(free, swap, *(_number(group / name) for name in names))


def killed_for_memory(proc: Path = PROC, groups: Path = GROUPS) -> dict[str, int]:
    """How many processes the kernel has killed for want of memory, as far as it tells: `group`, of
    this process's control group (version 2 or 1); `machine`, since that has started.

    Args:
        proc: Where procfs is.
        groups: Where the tree of control groups is.
    """
    files = {"machine": [proc / "vmstat"], "group": list(_event_files(proc, groups))}
    found = {where: _first_count(each) for where, each in files.items()}
    return {where: count for where, count in found.items() if count is not None}


def killed_more(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Whether the kernel has killed somebody between two answers of `killed_for_memory`."""
    return any(now.get(where, 0) > count for where, count in before.items())


def _event_files(proc: Path, groups: Path) -> Iterator[Path]:
    """Where a group's kills may be counted; in a container its path may be the host's."""
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
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            if found is not None:
                return int(found[1])
    return None


def asked_bytes(error: BaseException) -> int | None:
    """How much memory could not be had at once, where torch or numpy says so."""
    found = re.search(r"tried to allocate ([0-9]+) bytes", str(error))
    if found is not None:
        return int(found[1])
    shape, kind = getattr(error, "shape", None), getattr(error, "dtype", None)
    if not isinstance(shape, tuple) or kind is None:
        return None
    return int(math.prod(shape) * kind.itemsize)


def figures_of(error: BaseException, proc: Path = PROC, groups: Path = GROUPS) -> str:
    """How much there was to be and how much there is, as the rest of a line; places as of
    `read_memory`."""
    asked = asked_bytes(error)
    needed = "" if asked is None else f": {byte_size(asked)} at once"
    if (addresses := _address_limit()) is not None:
        held = f"this process is held to {byte_size(addresses)} of addresses"
        return f"{needed}; {held}: ulimit -v unlimited, or train a smaller model"
    try:
        there = f"; {byte_size(read_memory(proc, groups).most)} can be had"
    except (OSError, ValueError):
        there = ""  # not on this system
    return f"{needed}{there}: end other programs, add memory or swap, or train a smaller model"


def _address_limit() -> int | None:
    """What `ulimit -v` lets this process map; None where nothing bounds it."""
    try:
        import resource  # noqa: PLC0415 -- not for every system
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _number(file: Path) -> int | None:
    """What a file of a control group holds; None where it is missing or says `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
