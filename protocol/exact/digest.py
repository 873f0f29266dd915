"""Digests of trainable state, the same on every machine.

What people compare and prove (weights, averaged gradients) is BLAKE3 over names, shapes and values.
The state digest, which replicas compare after every step, reads three times as many bytes. It
guards against faults, not against forgery: a member that lies can send any digest. So it is BLAKE3
over XXH3-128 hashes of the values, at several times the speed; the manifest, which all members
agree on before the first step, has names and shapes.

The encoding is unambiguous: the length of everything variable precedes it. Integers are unsigned
and little-endian, values are float32 and little-endian.

    tensors   label, u64 count, then by sorted name: u32 name bytes, name in UTF-8,
              u32 dimensions, u64 each dimension, the values in C order
    state     label, u64 step, u64 optimizer step, u32 kinds, then for each kind in order:
              u32 name bytes, name, u32 blocks, 16 bytes XXH3-128 of each block's values
              (in xxHash's canonical, big-endian form)
    state 1   label, u64 step, u64 optimizer step, u32 kinds, then for each kind in order:
              u32 name bytes, name, 32 bytes digest of its tensors

`label` is a fixed text, which separates digests of different kinds. "state 1" is that of a run's
initial state, and of every state in run directories that older releases wrote.
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

from protocol.exact.kernels.library import threads_for
from protocol.spec.manifest import Block

Named = Mapping[str, NDArray[np.float32]]

_TENSORS_LABEL: Final = b"samestep tensors 1\n"
_STATE_LABEL: Final = b"samestep state 2\n"
_STATE_1_LABEL: Final = b"samestep state 1\n"
_XXH3_PIECE_BYTES: Final = 8 << 20
"""Between two pieces another thread may have the interpreter: xxhash keeps it."""


def weights_digest(named: Named) -> str:
    """Digest named float32 tensors of any shape, in 64 hex digits."""
    return _tensors(named).hex()


def state_digest(
    step: int, optimizer_step: int, kinds: Collection[tuple[str, Sequence[NDArray[np.float32]]]]
) -> str:
    """Digest everything that determines the next step, in 64 hex digits.

    Args:
        step: Steps applied or skipped.
        optimizer_step: Steps applied.
        kinds: Kinds with one flat float32 array per block each, in a fixed order: parameters, then
            each moment.
    """
    hasher = blake3(_STATE_LABEL + struct.pack("<QQI", step, optimizer_step, len(kinds)))
    for kind, arrays in kinds:
        name = kind.encode()
        hasher.update(struct.pack("<I", len(name)) + name + struct.pack("<I", len(arrays)))
        for array in arrays:
            hasher.update(_xxh3(_little_endian(array)))
    return hasher.hexdigest()


def state_digest_1(step: int, optimizer_step: int, kinds: Collection[tuple[str, Named]]) -> str:
    """Digest a state as format 1 has it, in 64 hex digits.

    Args:
        step: Steps applied or skipped.
        optimizer_step: Steps applied.
        kinds: Kinds with their named tensors, in a fixed order: parameters, then each moment.
    """
    hasher = blake3(_STATE_1_LABEL + struct.pack("<QQI", step, optimizer_step, len(kinds)))
    for kind, named in kinds:
        name = kind.encode()
        hasher.update(struct.pack("<I", len(name)) + name + _tensors(named))
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
class Streamed:
    """An array larger than memory: an iterable of its parts in order, consumed once."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Iterable[NDArray[Any]]


def digest_arrays(arrays: Mapping[str, NDArray[Any] | Streamed]) -> str:
    """Digest sorted names, dtypes, shapes and little-endian bytes in C order.

    Used to check that two machines have read the same data.
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
    elements = sum(array.size for array in named.values())
    hasher = blake3(_TENSORS_LABEL, max_threads=threads_for(elements))
    hasher.update(struct.pack("<Q", len(named)))
    for name in sorted(named):
        array = named[name]
        assert array.dtype == np.float32
        text = name.encode()
        hasher.update(struct.pack("<I", len(text)) + text)
        hasher.update(struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape))
        hasher.update(_little_endian(array))
    return hasher.digest()


def _xxh3(values: memoryview) -> bytes:
    hasher = xxh3_128()
    for start in range(0, len(values), _XXH3_PIECE_BYTES):
        hasher.update(values[start : start + _XXH3_PIECE_BYTES])
    return hasher.digest()


def _little_endian(array: NDArray[np.float32]) -> memoryview:
    """Return the values' bytes, copied only if not contiguous or on a big-endian machine."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if sys.byteorder == "big":
        flat = flat.byteswap()
    return flat.view(np.uint8).data
