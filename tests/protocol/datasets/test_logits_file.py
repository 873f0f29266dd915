"""Files of captured logits: round trip, reproducible bytes, one-line errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.base.errors import DataError
from protocol.datasets.logits_file import (
    CaptureMetadata,
    LogitsFile,
    Records,
    pyarrow_modules,
    record_dtype,
    write_logits,
)
from protocol.spec.manifest import CaptureLayout


def iter_groups(records, size):
    return (records[offset : offset + size] for offset in range(0, len(records), size))


def random_records(layout: CaptureLayout, samples: int, seed: int = 0) -> Records:
    """Return records of random content and lengths."""
    random = np.random.default_rng(seed)
    records = np.zeros(samples, record_dtype(layout))
    records["sample_id"] = random.permutation(samples)
    records["rows"] = random.integers(0, layout.tokens + 1, samples)
    for name in ("input_ids", "topk_ids"):
        records[name] = random.integers(0, layout.vocabulary, records[name].shape)
    for name in ("topk_logits", "lse_1", "lse_T"):
        records[name] = -random.random(records[name].shape) * 20
    records["loss_mask"] = random.integers(0, 2, records["loss_mask"].shape)
    for name in (records.dtype.names or ())[2:]:
        longest = records[name].shape[1]
        extra = 1 if name == "input_ids" else 0
        records[name][np.arange(longest) >= records["rows"][:, None] + extra] = 0
    return records


def facts_of(layout: CaptureLayout) -> CaptureMetadata:
    return CaptureMetadata(teacher="a" * 64, tokenizer="b" * 64, layout=layout)


@given(
    st.builds(
        CaptureLayout,
        tokens=st.integers(1, 9),
        vocabulary=st.sampled_from([7, 2**16, 2**16 + 1]),
        top_k=st.integers(1, 5),
    ),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_logits_file_round_trip(tmp_path_factory, layout, samples, group, seed):
    records = random_records(layout, samples, seed)
    path = tmp_path_factory.mktemp("logits") / "x.parquet"
    write_logits(path, facts_of(layout), iter_groups(records, group))
    first = path.read_bytes()
    write_logits(path, facts_of(layout), iter_groups(records, group))
    assert path.read_bytes() == first
    file = LogitsFile(path)
    assert file.facts == facts_of(layout)
    assert sum(file.row_groups) == samples
    read_records = np.concatenate([file.records(group) for group in range(len(file.row_groups))])
    assert read_records.tobytes() == records.tobytes()


def test_bytes_per_token_match_the_design():
    assert CaptureLayout(tokens=1, vocabulary=2**16, top_k=64).logits_bytes == 264
    assert CaptureLayout(tokens=1, vocabulary=2**16, top_k=128).logits_bytes == 520
    assert CaptureLayout(tokens=1, vocabulary=2**16 + 1, top_k=64).logits_bytes == 392


@pytest.fixture
def complete_file(tmp_path):
    layout = CaptureLayout(tokens=8, vocabulary=300, top_k=4)
    path = tmp_path / "x.parquet"
    write_logits(path, facts_of(layout), iter_groups(random_records(layout, 40), 10))
    return path


@pytest.mark.parametrize("length", [0, 3, 100, -1])
def test_truncated_file_gives_a_one_line_error(complete_file, length):
    content = complete_file.read_bytes()
    complete_file.write_bytes(content[:length])
    with pytest.raises(DataError, match="expected logits as Parquet in") as error_info:
        LogitsFile(complete_file)
    assert "\n" not in str(error_info.value)


def test_changed_bytes_give_a_one_line_error(complete_file):
    content = bytearray(complete_file.read_bytes())
    content[40:400] = bytes(360)
    complete_file.write_bytes(content)
    file = LogitsFile(complete_file)
    with pytest.raises(DataError, match=r"are damaged \(row group 0\)") as error_info:
        file.records(0)
    assert "\n" not in str(error_info.value)


def test_parquet_file_of_another_layout_is_refused(tmp_path):
    pa, pq = pyarrow_modules()
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2]], "packed_indices": [[[1]]]}), path)
    with pytest.raises(DataError, match="with the columns input_ids, packed_indices"):
        LogitsFile(path)


def test_file_of_a_later_format_is_refused(complete_file):
    pa, pq = pyarrow_modules()
    table = pq.read_table(complete_file)
    metadata = table.schema.metadata[b"samestep"].replace(b'"format":1', b'"format":2')
    pq.write_table(table.replace_schema_metadata({b"samestep": metadata}), complete_file)
    with pytest.raises(DataError, match="of this release"):
        LogitsFile(complete_file)
    assert pa
