"""The manifest: layout of blocks, metrics, and invalid documents."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.base import limits
from protocol.base.errors import MessageError
from protocol.spec.manifest import Block, Export, Manifest, Metric, Ratio, TensorSpec

BLOCK = Block(
    name="layer.0",
    kind="block",
    tensors=(
        TensorSpec(name="w", shape=(2, 3)),
        TensorSpec(name="scale", shape=()),
        TensorSpec(name="none", shape=(0, 4)),
        TensorSpec(name="b", shape=(3,)),
    ),
)
MANIFEST = Manifest(
    blocks=(BLOCK,),
    train_samples=10,
    evaluation_parts=2,
    metrics=(Metric(name="accuracy", numerator={"correct": 1}, denominator={"samples": 1}),),
    digests={"data": "00ff"},
    export=Export(names={"w": "weight"}, files={"config.json": "{}"}),
)


def flat_block(elements):
    return Block(name="b", kind="block", tensors=(TensorSpec(name="t", shape=(elements,)),))


def changed_manifest(**parts):
    return json.dumps(json.loads(MANIFEST.to_bytes()) | parts).encode()


def test_tensors_are_contiguous():
    assert BLOCK.elements == 10
    tensor_ranges = [(tensor.name, part.start, part.stop) for tensor, part in BLOCK.slices()]
    assert tensor_ranges == [("w", 0, 6), ("scale", 6, 7), ("none", 7, 7), ("b", 7, 10)]
    assert MANIFEST.elements == 10


@given(st.integers(0, 5 * limits.CHUNK_ELEMENTS))
def test_chunks_cover_a_block_exactly_and_none_is_too_large(elements):
    block = flat_block(elements)
    offset = 0
    for chunk in range(block.chunks):
        part = block.chunk_slice(chunk)
        assert part.start == offset
        assert part.stop - part.start <= limits.CHUNK_ELEMENTS
        assert part.stop > offset or elements == 0
        offset = part.stop
    assert offset == elements


@pytest.mark.parametrize(
    ("elements", "chunks"),
    [
        (0, 1),
        (1, 1),
        (limits.SMALL_CHUNK_ELEMENTS, 1),
        (limits.SMALL_CHUNK_ELEMENTS + 1, 2),
        (limits.CHUNK_ELEMENTS, 4),
        (4 * limits.CHUNK_ELEMENTS, 4),
        (4 * limits.CHUNK_ELEMENTS + 1, 5),
    ],
)
def test_chunk_count_depends_on_the_size_of_the_block(elements, chunks):
    assert flat_block(elements).chunks == chunks


def test_ratio_divides_its_sums():
    accuracy = MANIFEST.metrics[0]
    assert accuracy.value({"correct": 3, "samples": 4}) == 0.75
    assert math.isnan(accuracy.value({}))
    assert math.isnan(accuracy.value({"correct": 3}))
    share = Ratio(numerator={"hit": 2}, denominator={"hit": 2, "missed": 1})
    assert share.value({}) == 0.0
    assert accuracy.value({"samples": 4}) == 0.0


def test_f1_is_made_of_sums():
    f1 = Metric(name="f1", numerator={"tp": 2}, denominator={"tp": 2, "fp": 1, "fn": 1})
    assert f1.value({"tp": 6, "fp": 2, "fn": 4}) == pytest.approx(12 / 18)


def test_metric_without_a_denominator_is_a_count():
    assert Metric(name="hits", numerator={"tp": 1}, detail=True).value({"tp": 7}) == 7


def test_metric_may_be_the_mean_of_ratios():
    half = Ratio(numerator={"a": 1}, denominator={"b": 1})
    ratio = Ratio(numerator={"b": 1}, denominator={"b": 1})
    assert Metric(name="mean", mean_of=(half, ratio)).value({"a": 1, "b": 2}) == 0.75
    for large_value in (math.inf, 1e308):
        metric = Metric(name="mean", mean_of=(half, half, half))
        assert metric.value({"a": large_value, "b": 0.5}) == math.inf
    opposite = Ratio(numerator={"a": -1}, denominator={"b": 1})
    assert math.isnan(Metric(name="m", mean_of=(half, opposite)).value({"a": math.inf, "b": 1}))
    for rule in ({}, {"numerator": {"a": 1}, "mean_of": (half,)}):
        with pytest.raises(ValidationError, match="a numerator, mean_of, pearson or spearman"):
            Metric.model_validate({"name": "mean"} | rule)


def test_perplexity_does_not_overflow():
    metric = Metric(
        name="perplexity", numerator={"loss": 1}, denominator={"tokens": 1}, exponential=True
    )
    assert metric.value({"loss": 2.0, "tokens": 4}) == pytest.approx(math.exp(0.5))
    assert math.isfinite(metric.value({"loss": 1e9, "tokens": 1}))


def test_round_trip_and_digest():
    repeat = Manifest.from_bytes(memoryview(MANIFEST.to_bytes()))
    assert repeat == MANIFEST
    assert repeat.to_bytes() == MANIFEST.to_bytes()
    assert repeat.digest() == MANIFEST.digest()


def test_reading_a_property_changes_neither_document_nor_equality():
    fresh_manifest = Manifest.from_bytes(MANIFEST.to_bytes())
    before = fresh_manifest.to_bytes()
    assert fresh_manifest.blocks[0].elements == 10
    assert fresh_manifest.to_bytes() == before
    assert fresh_manifest == Manifest.from_bytes(before)


@pytest.mark.parametrize(
    "parts",
    [
        {"train_samples": 11},
        {"evaluation_parts": 3},
        {"digests": {"data": "00fe"}},
        {"metrics": []},
        {"notes": {"texts_truncated": 1}},
        {"blocks": [flat_block(10).model_dump()]},
    ],
)
def test_every_part_changes_the_digest(parts):
    assert Manifest.from_bytes(changed_manifest(**parts)).digest() != MANIFEST.digest()


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        MANIFEST.to_bytes()[:-1],
        changed_manifest(surprise=1),
        changed_manifest(train_samples=0),
        changed_manifest(train_samples="ten"),
        changed_manifest(blocks=[]),
        changed_manifest(blocks=[{"name": "b", "kind": "block", "tensors": []}]),
        changed_manifest(
            blocks=[{"name": "b", "kind": "layer", "tensors": [{"name": "t", "shape": []}]}]
        ),
        changed_manifest(
            blocks=[{"name": "b", "kind": "block", "tensors": [{"name": "t", "shape": [-1]}]}]
        ),
        changed_manifest(blocks=[flat_block(1).model_dump()] * 2),
        changed_manifest(export={"directory": "../up"}),
    ],
)
def test_invalid_manifest_is_a_message_error(document):
    with pytest.raises(MessageError, match="expected a manifest") as error_info:
        Manifest.from_bytes(document)
    assert "\n" not in str(error_info.value)


def test_error_names_the_location():
    with pytest.raises(MessageError, match="'train_samples'"):
        Manifest.from_bytes(changed_manifest(train_samples=0))


@pytest.mark.parametrize(
    "name", ["", "..", ".hidden", "a/b/c", "../b", "a/.b", "a/", "a\\b", "/abs", "a\n", "x" * 101]
)
@pytest.mark.parametrize("field", ["directory", "weights_file", "files"])
def test_an_export_writes_plain_names_only(name, field):
    value = {name: ""} if field == "files" else name
    with pytest.raises(ValidationError, match="plain file name"):
        Export.model_validate({field: value})


def test_a_text_file_of_an_export_may_be_one_folder_below():
    Export(files={"1_Pooling/config.json": ""})
    with pytest.raises(ValidationError, match="plain file name"):
        Export(directory="a/b")


def test_duplicate_tensor_is_refused():
    with pytest.raises(ValidationError, match="distinct names of tensors"):
        Manifest(blocks=(flat_block(1), flat_block(2)), train_samples=1)


def test_duplicate_metric_is_refused():
    duplicates = (
        Metric(name="f1[a]", numerator={"x": 1}),
        Metric(name="f1[a]", numerator={"y": 1}),
    )
    with pytest.raises(ValidationError, match="expected distinct names of metrics"):
        Manifest(blocks=MANIFEST.blocks, train_samples=1, metrics=duplicates)
