"""DistillKit's layout, packed here as its own code does it, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.base.errors import DataError
from protocol.data.capture_index import read_index
from protocol.data.logits_file import pyarrow_modules
from worker.distillation.captured_samples import CapturedSamples
from worker.distillation.distillkit import (
    Compression,
    import_distillkit,
    log_probabilities,
    unpacked,
)

VOCABULARY, K = 300, 6
EXACT = {"d": VOCABULARY, "k": K, "exact_k": K, "exact_dtype": "float16", "delta_encoding": False}


def bits_of(number: int, count: int) -> str:
    return format(number, f"0{count}b")


def packed(numbers: list[int], bits: int) -> list[int]:
    stream = "".join(bits_of(number, bits) for number in numbers)
    stream += "0" * (-len(stream) % 8)
    return [int(stream[at : at + 8], 2) for at in range(0, len(stream), 8)]


@pytest.mark.parametrize("bits", [1, 7, 8, 9, 17])
def test_numbers_are_unpacked(bits):
    numbers = [pow(3, n, 2**bits) for n in range(11)]
    content = np.array([packed(numbers, bits)], np.uint8)
    assert unpacked(content, bits, 11).tolist() == [numbers]


def test_polynomial_residuals_and_differences():
    how = Compression.model_validate({
        "d": 64, "k": 5, "exact_k": 1, "exact_dtype": "float32", "polynomial_terms": [0, "sqrt"],
        "term_dtype": "float32", "delta_encoding": True,
        "residual_bins": [{"scale_dtype": "float16", "element_bits": 3, "num_elements": 2}],
    })  # fmt: skip
    raw = np.array([-0.5, -1.0, 0.25], "<f4").tobytes()
    raw += np.array([0.5], "<f2").tobytes() + bytes(packed([7, 0], 3))
    found = log_probabilities(np.frombuffer(raw, np.uint8)[None], how)[0]
    fit = -1.0 + 0.25 * np.sqrt(np.arange(4))
    fit[:2] += 0.5 * (np.array([7, 0]) - 4)
    assert found == pytest.approx(np.cumsum([-0.5, *fit]))


@pytest.fixture
def place(tmp_path) -> Path:
    """Three samples of 4, 1 and 6 tokens, and what else is needed."""
    pa, pq = pyarrow_modules()
    random = np.random.default_rng(0)
    columns: dict[str, list[Any]] = {
        "input_ids": [], "compressed_logprobs": [], "bytepacked_indices": []
    }  # fmt: skip
    for count in (4, 1, 6):
        columns["input_ids"].append(random.integers(0, VOCABULARY, count).tolist())
        logs = -np.sort(random.random((count - 1, K)) * 9)
        ids = [random.permutation(VOCABULARY)[:K].tolist() for _ in logs]
        columns["compressed_logprobs"].append([list(row.astype("<f2").tobytes()) for row in logs])
        columns["bytepacked_indices"].append([packed(row, 9) for row in ids])
    lists = pa.list_(pa.list_(pa.uint8()))
    table = pa.table({
        "input_ids": pa.array(columns["input_ids"], pa.list_(pa.uint64())),
        "compressed_logprobs": pa.array(columns["compressed_logprobs"], lists),
        "bytepacked_indices": pa.array(columns["bytepacked_indices"], lists),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "data_0.parquet")
    tokens = {f"t{number}": number for number in range(VOCABULARY)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    (tmp_path / "config.yaml").write_text(json.dumps(EXACT))
    return tmp_path


def imported(place: Path) -> Path:
    files = [place / "data_0.parquet", place / "data_0.parquet"]
    return import_distillkit(files, place / "config.yaml", place, place / "out")


def test_what_it_says_is_kept(place):
    _, pq = pyarrow_modules()
    table = pq.read_table(place / "data_0.parquet").to_pylist()
    samples = CapturedSamples(imported(place))
    assert samples.index.samples == 4  # one token says nothing
    assert samples.index.facts.layout.tokens == 5
    for record, row in zip(samples.read([0, 1]), [table[0], table[2]], strict=True):
        rows = int(record["rows"])
        assert record["input_ids"][: rows + 1].tolist() == row["input_ids"]
        for at in range(rows):
            raw = bytes(row["compressed_logprobs"][at])
            said = np.frombuffer(raw, "<f2").astype(np.float64)
            found = record["topk_logits"][at].astype(np.float64) - record["lse_1"][at]
            assert found == pytest.approx(said, abs=2e-3)
            numbers = packed(record["topk_ids"][at].tolist(), 9)
            assert numbers == row["bytepacked_indices"][at]
    again = read_index(place / "out")
    assert again.files[0].row_groups == (4,)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"exact_dtype": "float32"}, "expected 7 bytes of numbers and 24 of log-probabilities"),
        ({"k": 3}, "expected exact_k and the bins to hold at most k"),
        ({"surplus": 1}, "expected DistillKit's compression"),
    ],
)
def test_another_configuration_is_one_line(place, change, told):
    (place / "config.yaml").write_text(json.dumps(EXACT | change))
    with pytest.raises(DataError, match=told):
        imported(place)
    assert not (place / "out" / "capture.json").exists()


def test_every_key_that_is_missing_is_named(place):
    for written in ("{}", "exact_dtype: float32"):
        (place / "config.yaml").write_text(written)
        with pytest.raises(DataError) as told:
            imported(place)
        assert str(told.value).endswith(
            "the key 'd' is missing; the key 'k' is missing; the key 'exact_k' is missing"
        )


def test_a_tokenizer_with_fewer_tokens_is_one_line(place):
    (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 5}}}))
    with pytest.raises(DataError, match="expected tokens below 6, the tokenizer's"):
        imported(place)


def test_another_parquet_is_one_line(place):
    pa, pq = pyarrow_modules()
    pq.write_table(pa.table({"text": ["x"]}), place / "data_0.parquet")
    with pytest.raises(DataError, match=r"expected DistillKit's columns .* got text"):
        imported(place)
    (place / "data_0.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match="expected Parquet in"):
        imported(place)
