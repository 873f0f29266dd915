"""Float32 tensors as a safetensors file, piece by piece.

    u64 header bytes | header | values
    header   JSON, padded with spaces to a multiple of 8 bytes: {"__metadata__": {...},
             NAME: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...}

Little-endian, tensors by name, as https://github.com/huggingface/safetensors#format has it and as
its own writer lays them out. That one makes all of a file in memory first, and lets no other
thread run meanwhile: seconds, with a large state.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

_PIECE_BYTES: Final = 8 << 20
_ALIGNMENT_BYTES: Final = 8


def safetensors_pieces(
    tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    """The file's bytes in order.

    Args:
        tensors: Contiguous, of any shape, by name; must not change meanwhile.
        metadata: One entry: of more the order would not be settled.

    Yields:
        At most 8 MiB at a time; on a little-endian machine the tensors' own memory, not a copy.
    """
    assert len(metadata) == 1
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for name in sorted(tensors):
        values = tensors[name]
        assert values.dtype == np.float32
        flat = np.ascontiguousarray(values).reshape(-1).astype("<f4", copy=False)
        raw = flat.view(np.uint8).data
        for at in range(0, raw.nbytes, _PIECE_BYTES):
            yield raw[at : at + _PIECE_BYTES]
