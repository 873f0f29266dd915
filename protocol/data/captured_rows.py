"""Captured samples in memory and as they travel: one fixed-size record each, numpy's own layout.

What is beyond a sample's last row is zeros, so a microbatch has the same bytes wherever it was
computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.spec.capture_layout import CaptureLayout

Records = NDArray[np.void]
"""Shape (samples,), of the dtype `record_dtype`."""


def record_dtype(layout: CaptureLayout) -> np.dtype[np.void]:
    """One sample; L rows of k logits.

    `rows` of the L count. `input_ids` (L + 1): row t is about token t + 1. `loss_mask` (L): 1 where
    a row counts. `topk_ids` and `topk_logits` (L, k). `lse_1` and `lse_T` (L): log-sum-exp of all
    logits, less the row's largest, at temperature 1 and at the capture's.
    """
    length, k = layout.tokens, layout.top_k
    fields: list[tuple[Any, ...]] = [
        ("sample_id", "<i8"),
        ("rows", "<u4"),
        ("input_ids", "<i4", (length + 1,)),
        ("loss_mask", "u1", (length,)),
        ("topk_ids", f"<u{layout.id_bytes}", (length, k)),
        ("topk_logits", "<f2", (length, k)),
        ("lse_1", "<f4", (length,)),
        ("lse_T", "<f4", (length,)),
    ]
    dtype = np.dtype(fields)
    assert dtype.itemsize == layout.sample_bytes
    return dtype


def records_of(content: bytes | NDArray[np.uint8], layout: CaptureLayout) -> Records:
    """Records from their bytes; not copied."""
    return np.frombuffer(content, record_dtype(layout))
