"""Checks that main memory can hold a model before it is loaded or created.

Tensors that are not stored in float32 are converted in main memory; float32 ones stay in the mapped
file, whose pages the system can drop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from backends.base.quantize import STORAGE, group_of, stored_bytes
from protocol.base.errors import MainMemoryTooSmall
from protocol.base.regular_file import read_json
from protocol.machine.allocator import give_back_freed_memory
from protocol.machine.memory import GROUPS, PROC, read_memory
from protocol.spec.sections.model import BaseDtype

_ONE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


def check_model_fits(
    path: str, proc: Path = PROC, groups: Path = GROUPS, base_dtype: BaseDtype = "float32"
) -> None:
    """Check a model's size before loading; a model of unknown size passes.

    Args:
        path: The model: a directory of safetensors, or anything else.
        proc: Mount point of procfs.
        groups: Mount point of the control groups (version 2).
        base_dtype: Stored dtype of matrices; embeddings are float32.

    Raises:
        MainMemoryTooSmall: It needs more than the machine or the control group has.
    """
    try:
        needed = converted_bytes(Path(path), base_dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return  # loading it will report the error
    check_bytes_fit(needed, proc, groups)


def check_bytes_fit(needed: int, proc: Path = PROC, groups: Path = GROUPS) -> None:
    """Check a number of bytes; arguments and errors as for `check_model_fits`."""
    give_back_freed_memory()  # of an earlier run's model
    try:
        most = read_memory(proc, groups).most
    except (OSError, ValueError):
        return
    if needed > most:
        raise MainMemoryTooSmall(needed, most)


def converted_bytes(directory: Path, base_dtype: BaseDtype = "float32") -> int:
    """Bytes of a directory's tensors that are not stored in float32, after conversion.

    0 if it has no safetensors of the usual names.
    """
    return sum(
        bytes_in(name, shape, base_dtype)
        for name, shape, dtype in stored_tensors(directory)
        if dtype != "F32"
    )


def stored_tensors(directory: Path) -> Iterator[tuple[str, list[int], str]]:
    """Yield name, shape and dtype (as safetensors says it) of a directory's tensors, unread."""
    files = [directory / _ONE]
    if (directory / _INDEX).is_file():
        named = read_json(directory / _INDEX)["weight_map"]
        files = [directory / name for name in sorted(set(named.values()))]
    for file in files:
        if file.is_file():
            with safe_open(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 -- no mapping
                    part = tensors.get_slice(name)
                    yield name, part.get_shape(), part.get_dtype()


def is_narrow(name: str, shape: Sequence[int], base_dtype: BaseDtype) -> bool:
    """Whether a tensor of the base is stored in fewer bits; embeddings and vectors are not."""
    is_matrix = len(shape) == 2 and "embed" not in name
    return base_dtype != "float32" and is_matrix and bool(group_of(shape[1]))


def bytes_in(name: str, shape: Sequence[int], base_dtype: BaseDtype) -> int:
    """Bytes of a tensor of the base, as it is stored to compute."""
    if is_narrow(name, shape, base_dtype):
        return stored_bytes(shape[0], shape[1], STORAGE[base_dtype])
    return 4 * math.prod(shape)
