"""Digests of trainable state, the same on every machine.

Digests that people compare (of weights and averaged gradients) are BLAKE3 over names, shapes and
values. The state digest, which replicas compare after every step, covers parameters and moments:
with AdamW three times as many bytes. It guards against faults, not against forgery: a member that
lies can send any digest. So it is BLAKE3 over XXH3-128 hashes of the values, at several times the
speed. Names and shapes are in the manifest, which all members agree on before the first step.

The encoding is unambiguous: each part of variable length is preceded by its length. Integers are
unsigned and little-endian, values are float32 and little-endian.

    tensors   label, u64 count, then by sorted name: u32 name bytes, name in UTF-8,
              u32 dimensions, u64 each dimension, the values in C order
    state     label, u64 step, u64 optimizer step, u32 kinds, then for each kind in order:
              u32 name bytes, name, u32 blocks, then for each block: u64 count of values, and
              16 bytes XXH3-128 of each 256 KiB of them (in xxHash's canonical, big-endian form)
    state 1   label, u64 step, u64 optimizer step, u32 kinds, then for each kind in order:
              u32 name bytes, name, 32 bytes digest of the kind's tensors

A kind is a kind of state arrays (`replica.PartKind`), such as parameters. `label` is a fixed text,
so that digests of different formats differ. "state 1" is the format for a
run's initial state, and for every state in run directories that older releases wrote.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from xxhash import xxh3_128

from protocol.exact.kernels.library import (
    HASHED_BYTES,
    library_for,
    threads_for,
)
from protocol.spec.manifest import Block

NamedTensors = Mapping[str, NDArray[np.float32]]

_TENSORS_LABEL: Final = b"samestep tensors 1\n"
_STATE_LABEL: Final = b"samestep state 2\n"
_STATE_1_LABEL: Final = b"samestep state 1\n"


def weights_digest(tensors: NamedTensors) -> str:
    """Digest named float32 tensors of any shape, in 64 hex digits."""
    return _digest_tensors(tensors).hex()


def state_digest(
    step: int,
    optimizer_step: int,
    kinds: Collection[tuple[str, Sequence[NDArray[np.float32]]]],
    hashes: Mapping[tuple[str, int], bytes] | None = None,
) -> str:
    """Digest everything that determines the next step, in 64 hex digits.

    Args:
        step: Steps applied or skipped.
        optimizer_step: Steps applied.
        kinds: Kinds with one flat float32 array per block each, in a fixed order: parameters, then
            each moment.
        hashes: Known `piece_hashes`, by kind and number of block.
    """
    hashes = hashes or {}
    hasher = blake3(_STATE_LABEL + struct.pack("<QQI", step, optimizer_step, len(kinds)))
    for kind, arrays in kinds:
        name = kind.encode()
        hasher.update(struct.pack("<I", len(name)) + name + struct.pack("<I", len(arrays)))
        for block, array in enumerate(arrays):
            pieces = hashes.get((kind, block)) or piece_hashes(array)
            hasher.update(struct.pack("<Q", array.size) + pieces)
    return hasher.hexdigest()


def piece_hashes(array: NDArray[np.float32]) -> bytes:
    """Return the XXH3-128 hash of each `HASHED_BYTES` of a float32 array, joined."""
    hashes = np.empty((pieces_of(array.size), 16), np.uint8)
    write_piece_hashes(array, hashes)
    return hashes.tobytes()


def pieces_of(elements: int) -> int:
    """Return the number of pieces of an array in `piece_hashes`."""
    return -(-elements * 4 // HASHED_BYTES)


def write_piece_hashes(array: NDArray[np.float32], hashes: NDArray[np.uint8]) -> None:
    """Hash each piece of a float32 array in C order; `hashes` has shape (pieces, 16)."""
    if (library := library_for(array)) is not None:
        library.hash_pieces(array, hashes)
        return
    data = _little_endian(array)
    for number, piece_hash in enumerate(hashes):
        start = number * HASHED_BYTES
        piece_hash[:] = np.frombuffer(
            xxh3_128(data[start : start + HASHED_BYTES]).digest(), np.uint8
        )


def state_digest_1(
    step: int, optimizer_step: int, kinds: Collection[tuple[str, NamedTensors]]
) -> str:
    """Digest a state in format 1, in 64 hex digits.

    Args:
        step: Steps applied or skipped.
        optimizer_step: Steps applied.
        kinds: Kinds with their named tensors, in a fixed order: parameters, then each moment.
    """
    hasher = blake3(_STATE_1_LABEL + struct.pack("<QQI", step, optimizer_step, len(kinds)))
    for kind, tensors in kinds:
        name = kind.encode()
        hasher.update(struct.pack("<I", len(name)) + name + _digest_tensors(tensors))
    return hasher.hexdigest()


def block_digest(block: Block, average: NDArray[np.float32]) -> str:
    """Digest a block's averaged gradients, flat float32, by tensor name."""
    return weights_digest(
        {tensor.name: average[part].reshape(tensor.shape) for tensor, part in block.slices()}
    )


def averages_digest(block_digests: Iterable[str]) -> str:
    """Digest the hex digests of all blocks in order; commits carry the result."""
    return blake3("".join(block_digests).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class StreamedArray:
    """An array that may be larger than memory: an iterable of its parts in order, consumed once."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Iterable[NDArray[Any]]


def digest_arrays(arrays: Mapping[str, NDArray[Any] | StreamedArray]) -> str:
    """Digest sorted names, dtypes, shapes and little-endian bytes in C order.

    Used to check that two machines have read the same data.
    """
    hasher = blake3()
    for name in sorted(arrays):
        source = arrays[name]
        array = source if isinstance(source, StreamedArray) else np.ascontiguousarray(source)
        dtype = array.dtype.newbyteorder("<")
        hasher.update(f"{name}\0{dtype.str}\0{array.shape}\0".encode())
        for part in array.parts if isinstance(array, StreamedArray) else (array,):
            little_endian = part.astype(dtype, copy=False)
            hasher.update(little_endian.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _digest_tensors(tensors: NamedTensors) -> bytes:
    elements = sum(array.size for array in tensors.values())
    hasher = blake3(_TENSORS_LABEL, max_threads=threads_for(elements))
    hasher.update(struct.pack("<Q", len(tensors)))
    for name in sorted(tensors):
        array = tensors[name]
        assert array.dtype == np.float32
        text = name.encode()
        hasher.update(struct.pack("<I", len(text)) + text)
        hasher.update(struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape))
        hasher.update(_little_endian(array))
    return hasher.digest()


def _little_endian(array: NDArray[np.float32]) -> memoryview:
    """Return the values' bytes, copied only if not contiguous or on a big-endian machine."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if sys.byteorder == "big":
        flat = flat.byteswap()
    return flat.view(np.uint8).data
