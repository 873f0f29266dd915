"""Quantize the weights of a frozen base one at a time, as they are read from a mapped file.

A weight is read in parts, by several threads, and its pages of the file are released as soon as it
is quantized. So memory holds the quantized base, one original weight and a few parts, for models of
any size.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch

from backends.quantization.quantize import (
    QuantizedMatrix,
    Storage,
    group_size,
    quantize,
    stored_bytes,
)
from protocol.machine.mapped_pages import release_mapped_pages
from protocol.machine.processor import usable_cores

_ELEMENTS_AT_ONCE: Final = 1 << 18
"""Approximate number of elements that a thread quantizes at a time."""
_MOST_THREADS: Final = 4
PART_ELEMENTS: Final = 1 << 22
"""Elements of a quantized weight that a device other than the CPU dequantizes to float32 at a time
to convert the weight to half precision."""


def quantize_tensor(weight: torch.Tensor, storage: Storage) -> QuantizedMatrix:
    """Quantize a matrix, and release its pages if it is mapped from a file.

    Args:
        weight: A matrix of any float dtype, shape (rows, columns), with a multiple of 8 columns.
        storage: Any storage type except f32.

    Raises:
        DataError: A value is not finite, or out of range for f16 or bf16.
    """
    rows, columns = weight.shape
    group = 0 if storage in ("bf16", "f16") else group_size(columns, storage)
    scales = np.empty(rows * columns // group if group else 0, np.float32)
    words = np.empty(stored_bytes(rows, columns, storage) // 4 - len(scales), np.uint32)
    # No group reaches beyond a row, so quantizing in parts of whole rows does not change the bits.
    rows_per_part = max(1, _ELEMENTS_AT_ONCE // columns)

    def store(start: int) -> Storage:
        rows_of_part = weight[start : start + rows_per_part]
        part = quantize(rows_of_part.cpu().float().numpy(), storage)
        words[start * len(words) // rows :][: len(part.words)] = part.words
        scales[start * len(scales) // rows :][: len(part.scales)] = part.scales
        return part.storage

    starts = range(0, rows, rows_per_part)
    threads = min(_MOST_THREADS, usable_cores(), len(starts))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            part_storages = [*pool.map(store, starts)]
    else:
        part_storages = [store(part_start) for part_start in starts]
    release_pages(weight)
    return QuantizedMatrix(
        part_storages[0] if part_storages else storage, rows, columns, words, scales, group
    )


def release_pages(tensor: torch.Tensor) -> None:
    """Release a tensor's pages if it is mapped from a file; its values do not change."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        release_mapped_pages(tensor.data_ptr(), tensor.nbytes)
