"""Digests of trainable state: BLAKE3 over names, shapes and values, one answer on every machine.

The encoding is unambiguous: everything of variable length comes after its length. Integers are
little-endian and unsigned.

    tensors   label, u64 count, then by sorted name: u32 name bytes, name in UTF-8,
              u32 dimensions, u64 each dimension, the values as little-endian float32 in C order
    state     label, u64 step, u64 optimizer step, u32 groups, then for each group in order:
              u32 name bytes, name, 32 bytes digest of its tensors

`label` is a fixed text, so that a digest of one kind is never one of the other.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from protocol.spec.manifest import Block

Named = Mapping[str, NDArray[np.float32]]

_TENSORS_LABEL: Final = b"samestep tensors 1\n"
_STATE_LABEL: Final = b"samestep state 1\n"


def weights_digest(named: Named) -> str:
    """Digest of float32 tensors of any shape, by name; 64 hex digits."""
    return _tensors(named).hex()


def state_digest(step: int, optimizer_step: int, groups: Sequence[tuple[str, str]]) -> str:
    """Digest of everything that decides the next step; 64 hex digits.

    Args:
        step: Steps taken or skipped.
        optimizer_step: Updates taken.
        groups: Kind and `weights_digest` of its tensors, in a fixed order: parameters, then each
            moment.
    """
    hasher = blake3(_STATE_LABEL)
    hasher.update(struct.pack("<QQI", step, optimizer_step, len(groups)))
    for kind, digest in groups:
        name = kind.encode()
        hasher.update(struct.pack("<I", len(name)) + name + bytes.fromhex(digest))
    return hasher.hexdigest()


def block_digest(block: Block, average: NDArray[np.float32]) -> str:
    """Digest of one block's averaged gradients, flat float32, by tensor name."""
    return weights_digest(
        {tensor.name: average[part].reshape(tensor.shape) for tensor, part in block.slices()}
    )


def averages_digest(block_digests: Iterable[str]) -> str:
    """BLAKE3 over the hex digests of all blocks in order: what a commit carries."""
    return blake3("".join(block_digests).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Streamed:
    """An array that is larger than memory: parts of it in order, taken once."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Iterable[NDArray[Any]]


def digest_arrays(arrays: Mapping[str, NDArray[Any] | Streamed]) -> str:
    """BLAKE3 over sorted names, types, shapes and little-endian bytes in C order.

    Says whether two machines have read the same.
    """
    hasher = blake3()
    for name in sorted(arrays):
        given = arrays[name]
        array = given if isinstance(given, Streamed) else np.ascontiguousarray(given)
        dtype = array.dtype.newbyteorder("<")
        hasher.update(f"{name}\0{dtype.str}\0{array.shape}\0".encode())
        for part in array.parts if isinstance(array, Streamed) else (array,):
            little = part.astype(dtype, copy=False)
            hasher.update(little.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _tensors(named: Named) -> bytes:
    hasher = blake3(_TENSORS_LABEL)
    hasher.update(struct.pack("<Q", len(named)))
    for name in sorted(named):
        array = named[name]
        assert array.dtype == np.float32
        text = name.encode()
        hasher.update(struct.pack("<I", len(text)) + text)
        hasher.update(struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape))
        hasher.update(_little_endian(array))
    return hasher.digest()


def _little_endian(array: NDArray[np.float32]) -> memoryview:
    """The values' bytes; a copy only if the array is not contiguous or the machine big-endian."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if sys.byteorder == "big":
        flat = flat.byteswap()
    return flat.view(np.uint8).data
