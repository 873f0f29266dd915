"""Embeddings of samples as bytes: one row per sample, with all fields of the sample.

A loss over the whole step reads the rows of the step, in the order of microbatches. Rows are joined
by position and never added. Their values are float32 and int64 in little-endian order: the codecs
of the exchange do not apply, since rounded embeddings could not be compared with recomputed ones.
The rows of a step are small compared with the gradients of a whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.base.errors import DataError
from protocol.spec.manifest import EmbeddingLayout

Rows = NDArray[np.uint8]
"""uint8, shape (samples, bytes per sample)."""
_DTYPES: Final = {"float32": "<f4", "int64": "<i8"}


def row_dtype(layout: EmbeddingLayout) -> np.dtype[Any]:
    """Return the packed numpy dtype of a row."""
    return np.dtype([(field.name, _DTYPES[field.dtype], field.shape) for field in layout.fields])


def join_fields(layout: EmbeddingLayout, fields: Mapping[str, NDArray[Any]]) -> Rows:
    """Return the rows of fields, each field of shape (samples, ...).

    Raises:
        DataError: A field is missing, or has another shape or dtype than in the layout.
    """
    dtype = row_dtype(layout)
    samples = len(fields[layout.fields[0].name]) if layout.fields[0].name in fields else 0
    rows = np.empty(samples, dtype)
    for field in layout.fields:
        values = fields.get(field.name)
        expected = (samples, *field.shape)
        if values is None or values.shape != expected or values.dtype != field.dtype:
            actual = "none" if values is None else f"{values.dtype} {values.shape}"
            raise DataError(
                f"embed: expected {field.name!r} as {field.dtype} {expected}, got {actual}; its "
                "shape without the samples must be the same for every microbatch"
            )
        rows[field.name] = values
    return rows.view(np.uint8).reshape(samples, dtype.itemsize)


def split_fields(layout: EmbeddingLayout, rows: Rows) -> dict[str, NDArray[Any]]:
    """Return the fields of rows as contiguous arrays, each of shape (samples, ...)."""
    dtype = row_dtype(layout)
    records = np.ascontiguousarray(rows).reshape(-1).view(dtype)
    return {field.name: np.ascontiguousarray(records[field.name]) for field in layout.fields}


def are_finite(layout: EmbeddingLayout, content: NDArray[np.uint8]) -> bool:
    """Return whether all embeddings are finite.

    Args:
        layout: The layout of the rows.
        content: The rows as flat bytes.
    """
    records = content.view(row_dtype(layout))
    floats = (field.name for field in layout.fields if field.dtype == "float32")
    return all(bool(np.isfinite(records[name]).all()) for name in floats)
