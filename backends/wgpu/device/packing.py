"""Convert host values to the device's 4-byte words, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from backends.base.interface import Array
from protocol.base.errors import DataError

Words = NDArray[np.uint32]

_MIN_INTEGER: Final = -(2**31)
_MAX_INTEGER: Final = 2**31 - 1


def pack(
    names: Sequence[str],
    offsets: Sequence[int | None],
    count: int,
    arrays: Mapping[str, NDArray[Any]],
    seeds: Words,
) -> Words:
    """Pack a microbatch's arrays and seeds into one upload.

    Args:
        names: Names of the arrays, in the order of offsets.
        offsets: Offset of each array and, last, of the seeds; None for values that are not read.
        count: Total number of words.
        arrays: Arrays by name.
        seeds: Seeds, of any shape.

    Raises:
        DataError: An integer does not fit in 32 bits.
    """
    words = np.zeros(count, np.uint32)
    values = [to_words(arrays[name], name) for name in names] + [seeds.reshape(-1)]
    for offset, value in zip(offsets, values, strict=True):
        if offset is not None:
            words[offset : offset + value.size] = value
    return words


def to_words(array: NDArray[Any], name: str = "a tensor") -> Words:
    """Flatten an array; floats become float32, booleans and integers 32-bit integers.

    Raises:
        DataError: An integer does not fit.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "f":
        return flat.astype(np.float32, copy=False).view(np.uint32)
    if flat.dtype.itemsize > 4 and flat.size:
        low, high = int(flat.min()), int(flat.max())
        if low < _MIN_INTEGER or high > _MAX_INTEGER:
            raise DataError(
                f"expected integers of at most 32 bits in {name}, got {low} to {high}, which the "
                "vulkan backend does not support; make them smaller, or use a cpu or cuda worker"
            )
    return flat.astype(np.int32).view(np.uint32)


def tensor_words(tensor: torch.Tensor, *, keeps_float16: bool = False) -> Words:
    """Convert a module's tensor or a graph's constant; with `keeps_float16`, float16 stays
    float16."""
    value = tensor.detach()
    if keeps_float16 and value.dtype == torch.float16:
        bits = np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint16)
        return np.concatenate([bits, np.zeros(-bits.size % 2, np.uint16)]).view(np.uint32)
    return to_words((value.float() if value.dtype.is_floating_point else value).numpy())


def from_words(array: Array, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Convert words that were read back as float32 to a tensor."""
    if dtype.is_floating_point:
        return torch.from_numpy(array).reshape(shape).to(dtype)
    return torch.from_numpy(array.view(np.int32)).reshape(shape).to(dtype)


def seed_words(seed: int, count: int) -> Words:
    """Derive `count` seeds of two words each, shape (count, 2)."""
    key = (seed % 2**64).to_bytes(8, "little")
    digest = blake3(b"samestep dropout" + key).digest(length=8 * count)
    return np.frombuffer(digest, "<u4").astype(np.uint32).reshape(count, 2)
