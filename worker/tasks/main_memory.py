"""Whether a model can be read at all: every worker has it in float32 in main memory for a while."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from protocol import limits
from protocol.errors import MainMemoryTooSmall

_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")
_ONE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


def refuse_what_does_not_fit(place: str, proc: Path = _PROC, groups: Path = _GROUPS) -> None:
    """Say so before anything is read; what is not known to be too much is tried.

    Args:
        place: Where the model is: a directory of safetensors, or anything else.
        proc: Where procfs is.
        groups: Where the tree of control groups (version 2) is.

    Raises:
        MainMemoryTooSmall: It needs more than this machine, or the control group, can give.
    """
    try:
        needed = float32_bytes(Path(place))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return  # who reads it says what is wrong with it
    most = _most(proc, groups)
    if most is not None and needed > most:
        raise MainMemoryTooSmall(needed, most)


def float32_bytes(directory: Path) -> int:
    """Of all tensors in a model's directory; 0 where it has no safetensors of the usual names."""
    files = [directory / _ONE]
    if (directory / _INDEX).is_file():
        named = json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = [directory / name for name in sorted(set(named.values()))]
    elements = 0
    for file in files:
        if file.is_file():
            with safe_open(file, "np") as tensors:
                elements += sum(math.prod(tensors.get_slice(n).get_shape()) for n in tensors.keys())  # noqa: SIM118
    return 4 * elements


def _most(proc: Path, groups: Path) -> int | None:
    """What could be had: free or reclaimable memory and swap, within the group's bound."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        kib = {key: int(value.split()[0]) for key, value in (line.split(":") for line in lines)}
        most = (kib["MemAvailable"] + kib.get("SwapFree", 0)) * limits.KIB
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        own = (proc / "self" / "cgroup").read_text().splitlines()
        path = next(line.partition("::")[2] for line in own if line.startswith("0::"))
        bound = (groups / path.lstrip("/") / "memory.max").read_text().strip()
    except (OSError, StopIteration):
        return most
    return most if bound == "max" else min(most, int(bound))
