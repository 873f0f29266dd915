"""Captured logits: fixed-size records in memory and on the wire, Parquet files on disk.

A record is padded with zeros after the sample's last row, so a microbatch has the same bytes on
every worker. A file has one row for each sample, in row groups that are read at once:

    sample_id    int64
    input_ids    list of int32: the sample's tokens; row t below is about token t + 1
    loss_mask    list of uint8: 1 where a row counts
    topk_ids     list of binaries of k token ids: uint16 if the vocabulary allows, else uint32
    topk_logits  list of binaries of k float16, minus the largest logit of the row
    lse_1, lse_T lists of float32: log-sum-exp of all logits minus the largest of the row, at
                 temperature 1 and at the capture's temperature

`CaptureMetadata` is the file's metadata. Files have zstd compression, no dictionaries and no
statistics, so that the same records give the same bytes with the same pyarrow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.base.errors import DataError
from protocol.base.fields import Digest
from protocol.spec.manifest import CaptureLayout

Records = NDArray[np.void]
"""Shape (samples,), of the dtype `record_dtype`."""


def record_dtype(layout: CaptureLayout) -> np.dtype[np.void]:
    """Return the dtype of one sample with at most L rows of k logits.

    `rows`: number of rows; those after it are zero. `input_ids` (L + 1): row t is about token
    t + 1. `loss_mask` (L): 1 where a row counts in the loss. `topk_ids` and `topk_logits` (L, k).
    `lse_1` and `lse_T` (L): log-sum-exp of all logits minus the row's largest, at temperature 1
    and at the capture's temperature.
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
    """View bytes as records, without a copy."""
    return np.frombuffer(content, record_dtype(layout))


METADATA: Final = b"samestep"
FORMAT: Final = 1
_COLUMNS: Final = (
    "sample_id", "input_ids", "loss_mask", "topk_ids", "topk_logits", "lse_1", "lse_T",
)  # fmt: skip


class CaptureMetadata(BaseModel):
    """The metadata that every file of a capture has.

    Attributes:
        teacher: Digest of the teacher's weights.
        tokenizer: Digest of the tokenizer's vocabulary (`vocabulary_digest`).
        layout: Which logits are captured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    teacher: Digest
    tokenizer: Digest
    layout: CaptureLayout


def pyarrow_modules(reason: str = "logits are stored as Parquet") -> tuple[Any, Any]:
    """Import pyarrow and pyarrow.parquet.

    Args:
        reason: Why pyarrow is needed, for the error.

    Raises:
        DataError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 -- 0.3 s, and an extra
        import pyarrow.parquet as pq  # noqa: PLC0415 -- likewise
    except ModuleNotFoundError:
        raise DataError(f"{reason}; pip install 'samestep[logits]' (pyarrow)") from None
    return pa, pq


def write_logits(path: Path, facts: CaptureMetadata, groups: Iterable[Records]) -> None:
    """Write one file, a row group for each array of records.

    Raises:
        OSError: Writing to the disk failed.
        DataError: pyarrow is not installed.
    """
    pa, pq = pyarrow_modules()
    schema = _make_schema(pa, facts)
    with pq.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=False, write_statistics=False
    ) as writer:
        for records in groups:
            writer.write_table(_make_table(pa, schema, records), len(records))


class LogitsFile:
    """One file of a capture, open for reading; not thread-safe.

    Attributes:
        facts: The metadata of the capture.
        row_groups: Samples per row group.

    Raises:
        DataError: The file does not contain captured logits, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        pa, pq = pyarrow_modules()
        self._path = path
        self._pa = pa
        try:
            self._file = pq.ParquetFile(path, memory_map=False, pre_buffer=False)
        except FileNotFoundError:
            raise DataError(
                f"expected a file of captured logits at {str(path)!r}, found no such file"
            ) from None
        except (pa.ArrowException, OSError, struct.error) as error:
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"expected logits as Parquet in {str(path)!r}, got: {words}") from None
        self.facts = self._read_facts()
        metadata = self._file.metadata
        self.row_groups = tuple(
            int(metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)
        )

    def close(self) -> None:
        self._file.close()

    def records(self, group: int) -> Records:
        """Read the samples of one row group.

        Raises:
            DataError: The bytes are damaged.
        """
        try:
            table = self._file.read_row_group(group, use_threads=False)
            return _parse_records(table, self.facts.layout)
        except (self._pa.ArrowException, OSError, ValueError) as error:
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"the logits in {str(self._path)!r} are damaged (row group {group}): {words}; "
                "restore the file from a copy"
            ) from None

    def _read_facts(self) -> CaptureMetadata:
        names = tuple(self._file.schema_arrow.names)
        metadata = (self._file.metadata.metadata or {}).get(METADATA)
        if metadata is None or names != _COLUMNS:
            raise DataError(
                f"expected captured logits in {str(self._path)!r}, got Parquet with the columns "
                f"{', '.join(names)[:200]}"
            )
        try:
            return CaptureMetadata.model_validate_json(metadata, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(str(part) for part in first["loc"])
            raise DataError(
                f"expected captured logits of this release in {str(self._path)!r}: {location}: "
                f"{first['msg']}"
            ) from None


def _make_schema(pa: Any, facts: CaptureMetadata) -> Any:
    layout = facts.layout
    data_types = {
        "sample_id": pa.int64(),
        "input_ids": _list_type(pa, pa.int32()),
        "loss_mask": _list_type(pa, pa.uint8()),
        "topk_ids": _list_type(pa, pa.binary(layout.top_k * layout.id_bytes)),
        "topk_logits": _list_type(pa, pa.binary(layout.top_k * 2)),
        "lse_1": _list_type(pa, pa.float32()),
        "lse_T": _list_type(pa, pa.float32()),
    }
    fields = [pa.field(name, data_types[name], nullable=False) for name in _COLUMNS]
    return pa.schema(fields, metadata={METADATA: facts.model_dump_json().encode()})


def _list_type(pa: Any, data_type: Any) -> Any:
    return pa.list_(pa.field("element", data_type, nullable=False))


def _make_table(pa: Any, schema: Any, records: Records) -> Any:
    rows = records["rows"].astype(np.int64)
    columns = [pa.array(records["sample_id"])]
    for name in _COLUMNS[1:]:
        counts = rows + 1 if name == "input_ids" else rows
        values = records[name]
        flat = values[np.arange(values.shape[1]) < counts[:, None]]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        data_type = schema.field(name).type
        columns.append(
            pa.ListArray.from_arrays(
                pa.array(offsets), _flat_array(pa, data_type.value_type, flat), data_type
            )
        )
    return pa.Table.from_arrays(columns, schema=schema)


def _flat_array(pa: Any, data_type: Any, values: NDArray[Any]) -> Any:
    if values.ndim == 1:
        return pa.array(np.ascontiguousarray(values), data_type)
    content = pa.py_buffer(np.ascontiguousarray(values).tobytes())
    return pa.FixedSizeBinaryArray.from_buffers(data_type, len(values), [None, content])


def _parse_records(table: Any, layout: CaptureLayout) -> Records:
    records = np.zeros(table.num_rows, record_dtype(layout))
    records["sample_id"] = table.column("sample_id").to_numpy()
    for name in _COLUMNS[1:]:
        lists = table.column(name).combine_chunks()
        counts = lists.value_lengths().to_numpy()
        if name == "loss_mask":
            records["rows"] = counts
        column = records[name]
        expected = records["rows"].astype(np.int64) if name != "input_ids" else counts
        if (counts != expected).any() or counts.max(initial=0) > column.shape[1]:
            raise ValueError(f"the lists of {name} have lengths that do not fit")
        flat = lists.flatten()
        dtype = column.dtype
        if column.ndim == 2:
            values = flat.to_numpy(zero_copy_only=False)
        else:
            content = flat.buffers()[1]
            width = layout.top_k * dtype.itemsize
            start = flat.offset * width
            raw = np.frombuffer(content, np.uint8)[start : start + len(flat) * width]
            values = raw.view(dtype).reshape(len(flat), layout.top_k)
        column[np.arange(column.shape[1]) < counts[:, None]] = values
    if (
        table.column("input_ids").combine_chunks().value_lengths().to_numpy()
        != records["rows"].astype(np.int64) + 1
    ).any():
        raise ValueError("the lists of input_ids have lengths that do not fit")
    return records
