"""Check that main memory can hold a model before it is loaded or created.

Tensors that are not stored in float32 are converted in main memory. Float32 tensors stay in the
mapped file, whose pages the system can drop.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from protocol.base.errors import MainMemoryTooSmall
from protocol.machine.allocator import give_back_freed_memory
from protocol.machine.memory import GROUPS, PROC, read_memory
from protocol.spec.sections.model import BaseDtype
from worker.models.base_tensors import base_tensors


def check_model_fits(
    path: str, proc: Path = PROC, control_groups: Path = GROUPS, base_dtype: BaseDtype = "float32"
) -> None:
    """Check a model's size before loading; a model of unknown size passes the check.

    Args:
        path: The model: a directory of safetensors, or any other source.
        proc: Mount point of procfs.
        control_groups: Mount point of the control groups (version 2).
        base_dtype: Stored dtype of the base's matrices; embeddings are float32.

    Raises:
        MainMemoryTooSmall: The model needs more memory than the machine or the control group has
            available.
    """
    try:
        needed_bytes = converted_bytes(Path(path), base_dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return  # loading it will report the error
    check_bytes_fit(needed_bytes, proc, control_groups)


def check_bytes_fit(needed_bytes: int, proc: Path = PROC, groups: Path = GROUPS) -> None:
    """Check that main memory has this many bytes; see `check_model_fits`."""
    give_back_freed_memory()  # from an earlier run's model
    try:
        available = read_memory(proc, groups).available
    except (OSError, ValueError):
        return
    if needed_bytes > available:
        raise MainMemoryTooSmall(needed_bytes, available)


def converted_bytes(directory: Path, base_dtype: BaseDtype = "float32") -> int:
    """Return the size after conversion of a directory's tensors that are not stored in float32.

    The size is 0 if the directory has no safetensors of the usual names.
    """
    return sum(
        tensor.bytes_in(base_dtype)
        for tensor in base_tensors(directory).values()
        if tensor.dtype != "F32"
    )
