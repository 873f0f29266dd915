"""Whether a model can be read or made at all: main memory has to hold it.

What is not stored in float32 is converted in main memory; what is stays in the mapped file, whose
pages the system can drop.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from backends.base.quantise import STORAGE, group_of, stored_bytes
from protocol.base.errors import MainMemoryTooSmall
from protocol.base.regular_file import read_json
from protocol.host.allocator import give_back_freed_memory
from protocol.host.memory import GROUPS, PROC, read_memory
from protocol.spec.run_spec import BaseDtype

_ONE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


def refuse_what_does_not_fit(
    place: str, proc: Path = PROC, groups: Path = GROUPS, base_dtype: BaseDtype = "float32"
) -> None:
    """Say so before anything is read; what is not known to be too much is tried.

    Args:
        place: Where the model is: a directory of safetensors, or anything else.
        proc: Where procfs is.
        groups: Where the tree of control groups (version 2) is.
        base_dtype: What matrices are stored in; embeddings are float32.

    Raises:
        MainMemoryTooSmall: It needs more than this machine, or the control group, can give.
    """
    try:
        needed = converted_bytes(Path(place), base_dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return  # who reads it says what is wrong with it
    refuse_more_than_there_is(needed, proc, groups)


def refuse_more_than_there_is(needed: int, proc: Path = PROC, groups: Path = GROUPS) -> None:
    """Say so of this many bytes; places and errors as of `refuse_what_does_not_fit`."""
    give_back_freed_memory()  # of an earlier run's model
    try:
        most = read_memory(proc, groups).most
    except (OSError, ValueError):
        return
    if needed > most:
        raise MainMemoryTooSmall(needed, most)


def converted_bytes(directory: Path, base_dtype: BaseDtype = "float32") -> int:
    """Of all tensors in a model's directory that are stored as anything but float32, converted.

    0 where it has no safetensors of the usual names.
    """
    files = [directory / _ONE]
    if (directory / _INDEX).is_file():
        named = read_json(directory / _INDEX)["weight_map"]
        files = [directory / name for name in sorted(set(named.values()))]
    needed = 0
    for file in files:
        if file.is_file():
            with safe_open(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 -- no mapping
                    part = tensors.get_slice(name)
                    if part.get_dtype() != "F32":
                        needed += _bytes(name, part.get_shape(), base_dtype)
    return needed


def _bytes(name: str, shape: list[int], base_dtype: BaseDtype) -> int:
    narrow = base_dtype != "float32" and len(shape) == 2 and "embed" not in name
    if narrow and group_of(shape[1]):
        return stored_bytes(shape[0], shape[1], STORAGE[base_dtype])
    return 4 * math.prod(shape)
