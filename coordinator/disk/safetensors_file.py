"""Float32 tensors as a safetensors file, written and read piece by piece.

    u64 header bytes | header | values
    header   JSON, padded with spaces to a multiple of 8 bytes: {"__metadata__": {...},
             NAME: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...}

Little-endian, tensors sorted by name, as https://github.com/huggingface/safetensors#format says and
the library's writer does. That writer builds the whole file in memory first, and blocks all other
threads meanwhile: for seconds, with a large state.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from coordinator.disk.durable_file import open_to_read, storage_errors
from protocol.base.errors import StorageDamaged
from protocol.base.regular_file import parse_json

_PIECE_BYTES: Final = 8 << 20
_ALIGNMENT_BYTES: Final = 8


def safetensors_pieces(
    tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    """Yield the file's bytes in order.

    Args:
        tensors: Contiguous tensors of any shape, by name; they must not change meanwhile.
        metadata: A single entry: the order of several would be undefined.

    Yields:
        Pieces of at most 8 MiB; on a little-endian machine views of the tensors, not copies.
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
        for offset in range(0, raw.nbytes, _PIECE_BYTES):
            yield raw[offset : offset + _PIECE_BYTES]


class SafetensorsFile:
    """An open file with random access to its tensors; stays readable after it is removed.

    Attributes:
        shapes: Shapes of the float32 tensors, by name.

    Args:
        path: The file's name.

    Raises:
        StorageDamaged: The file is not a safetensors file.
        StorageFailed: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage_errors("read", path):
            self._fd = open_to_read(path)
        try:
            with storage_errors("read", path):
                header, self._start = self._read_header()
            self._begins, self.shapes = self._tensors_of(header)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read_into(self, name: str, start: int, out: NDArray[np.float32]) -> None:
        """Fill a flat array with the tensor's elements from `start` on.

        Raises:
            StorageDamaged: The file was truncated.
            StorageFailed: The file cannot be read.
        """
        raw, offset = out.view(np.uint8).data, self._start + self._begins[name] + start * 4
        with storage_errors("read", self._path):
            while raw:
                count = os.preadv(self._fd, [raw[:_PIECE_BYTES]], offset)
                if not count:
                    raise self._damaged("it was truncated")
                raw, offset = raw[count:], offset + count
        if sys.byteorder == "big":
            out.byteswap(inplace=True)

    def _read_header(self) -> tuple[Any, int]:
        size = os.fstat(self._fd).st_size
        length = os.pread(self._fd, 8, 0)
        count = struct.unpack("<Q", length)[0] if len(length) == 8 else size
        if count > size - 8:
            raise self._damaged("its header is longer than the file")
        try:
            return parse_json(os.pread(self._fd, count, 8)), 8 + count
        except ValueError:
            raise self._damaged("its header is not JSON") from None

    def _tensors_of(self, header: Any) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        available = os.fstat(self._fd).st_size - self._start
        try:
            tensors = {
                name: (*entry["data_offsets"], tuple(map(int, entry["shape"])))
                for name, entry in header.items()
                if name != "__metadata__" and entry["dtype"] == "F32"
            }
            fits = all(
                0 <= begin <= end <= available and end - begin == math.prod(shape) * 4
                for begin, end, shape in tensors.values()
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise self._damaged("its header does not fit the file")
        begins = {name: begin for name, (begin, _, _) in tensors.items()}
        return begins, {name: shape for name, (_, _, shape) in tensors.items()}

    def _damaged(self, reason: str) -> StorageDamaged:
        return StorageDamaged(str(self._path), "", reason)
