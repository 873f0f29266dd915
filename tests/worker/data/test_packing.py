"""Packing and grouping: every piece once, the same sums as unpacked, and less padding."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base.interface import BlockGradient, Loss
from protocol.base.errors import DataError
from protocol.exact.samples import SampleOrder
from protocol.spec.run_spec import parse_run_spec
from tests.small_chat import conversation, save_chat_tokenizer, write_jsonl
from worker.data.disk_arrays import DiskArrays
from worker.data.language_data import CutDocuments, TextStream, read_language_data
from worker.data.packing import PackedSamples, check_packing, pack_pieces
from worker.models.tokens import IGNORED_LABEL
from worker.tasks.registry import build

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.3,
}  # fmt: skip
ROWS = [{"messages": conversation(number)} for number in range(12)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> dict[str, Any]:
    """A run spec of conversations."""
    directory: Path = tmp_path_factory.mktemp("chat")
    save_chat_tokenizer(directory / "chat")
    return {
        "task": "causal-lm", "steps": 1, "seed": 3, "model": {"config": LLAMA},
        "tokenizer": {"source": str(directory / "chat")},
        "data": {
            "train": str(write_jsonl(directory / "a.jsonl", ROWS)), "format": "messages",
            "max_tokens": 256, "holdout": 0.0,
        },
        "batch": {"samples": 2, "microbatch": 1},
    }  # fmt: skip


def changed_spec(document: dict[str, Any], **data: Any) -> dict[str, Any]:
    other = copy.deepcopy(document)
    other["data"].update(data)
    return other


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(0, 9))
def test_every_piece_is_in_one_sample(lengths, seed):
    packs = pack_pieces(np.array(lengths), 20, seed)
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    sums = [sum(lengths[number] for number in pack) for pack in packs]
    assert max(sums) <= 20
    # No two samples would fit into one.
    assert all(a + b > 20 for n, a in enumerate(sums) for b in sums[:n])
    assert pack_pieces(np.array(lengths), 20, seed) == packs


@given(st.lists(st.lists(st.integers(0, 99), max_size=30), max_size=9), st.integers(2, 9))
def test_every_token_of_a_document_but_its_first_is_predicted_once(documents, length):
    stream = DiskArrays("<u4", np.int64)
    for document in documents:
        stream.append(np.array(document, np.int64))
    cut = CutDocuments.of(TextStream(stream), length)
    pairs = [
        pair
        for number in range(len(cut.lengths))
        for pair in zip(*(array.tolist() for array in cut.piece(number)), strict=True)
    ]
    expected = [pair for one in documents for pair in itertools.pairwise(one)]
    assert pairs == expected
    assert all(0 < n <= length for n in cut.lengths)


def losses(task: Any) -> tuple[float, float, dict[str, np.ndarray]]:
    """Return loss, weight and gradients summed over all samples."""
    from backends.registry import choose

    program = choose("cpu").backend.compile(task.trainable, task.batch([0]))
    program.load(task.initial_parameters())
    leaves = [(task.batch([n]), 1) for n in range(task.manifest.train_samples)]
    *items, total = program.gradients(leaves)
    program.close()
    assert isinstance(total, Loss)
    gradients = {str(item.block): item.values for item in items if isinstance(item, BlockGradient)}
    return total.loss_sum, total.weight, gradients


def test_packed_sums_equal_unpacked_sums(chat):
    unpacked_sums = losses(build(parse_run_spec(chat)))
    task = build(parse_run_spec(changed_spec(chat, packing=True)))
    assert task.manifest.train_samples < len(ROWS) // 2
    assert task.manifest.notes["packed_samples"] == task.manifest.train_samples
    packed_sums = losses(task)
    assert packed_sums[1] == unpacked_sums[1]
    assert packed_sums[0] == pytest.approx(unpacked_sums[0], rel=1e-5)
    for block, values in unpacked_sums[2].items():
        scale = np.abs(values).max()
        np.testing.assert_allclose(packed_sums[2][block] / scale, values / scale, atol=1e-5)


def test_running_text_is_packed_by_document(chat, tmp_path):
    rows = [{"text": f"{n} is one number. " * (n % 7 + 1)} for n in range(20)]
    text = {
        "train": str(write_jsonl(tmp_path / "t.jsonl", rows)),
        "format": "text",
        "max_tokens": 64,
    }
    data = read_language_data(parse_run_spec(changed_spec(chat, **text, packing=True)), 0.2)
    assert isinstance(data.train, PackedSamples)
    assert isinstance(data.held_out, PackedSamples)
    batch = data.train.batch(slice(None))
    starts = (batch.arrays["position_ids"] == 0) & (batch.arrays["labels"] != IGNORED_LABEL)
    assert starts.sum() >= 16  # one per document; some are split
    tokens = [data.tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in rows]
    held_out = data.held_out.batch(slice(None)).weight
    assert batch.weight + held_out == sum(map(len, tokens))  # the end token is predicted, too


def test_a_model_that_sees_across_documents_is_refused():
    import torch

    class LeakyModel(torch.nn.Module):
        def forward(self, input_ids: Any, position_ids: Any = None) -> Any:
            del position_ids
            return SimpleNamespace(logits=input_ids.float().cumsum(1)[..., None])

    class RigidModel(torch.nn.Module):
        def forward(self, input_ids: Any) -> Any:
            return SimpleNamespace(logits=input_ids.float()[..., None])

    with pytest.raises(DataError, match=r"attend to each other: --set data"):
        check_packing(LeakyModel(), 100, {})
    with pytest.raises(DataError, match="takes position_ids for packing, got one that does not"):
        check_packing(RigidModel(), 100, {})


def padding(spec: Any, samples: Any) -> int:
    order = SampleOrder(spec.seed, len(samples), spec.batch, grouped=spec.groups_by_length)
    parts = [p for step in range(order.steps_per_epoch) for p in order.microbatches(step)]
    assert sorted(n for part in parts for n in part) == list(range(len(samples)))
    element_count = sum(samples.batch(np.array(part)).arrays["input_ids"].size for part in parts)
    return element_count - int(samples.lengths.sum())


def test_grouping_leaves_less_than_half_of_the_padding(chat, tmp_path):
    random = np.random.default_rng(0)
    word_counts = np.minimum(np.exp(random.normal(2.0, 1.2, 400)).astype(int) + 1, 200)
    rows = [
        {"messages": [
            {"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes " * count},
        ]}
        for n, count in enumerate(word_counts.tolist())
    ]  # fmt: skip
    data = {"train": str(write_jsonl(tmp_path / "s.jsonl", rows)), "max_tokens": 4096}
    padding_of = {}
    for grouped in (False, True):
        document = changed_spec(chat, **data, group_by_length=grouped)
        spec = parse_run_spec({**document, "batch": {"samples": 32, "microbatch": 8}})
        padding_of[grouped] = padding(spec, read_language_data(spec, 0.0).train)
    assert padding_of[True] <= 0.5 * padding_of[False]


def test_a_validation_file_is_evaluated(chat, tmp_path):
    valid = write_jsonl(tmp_path / "v.jsonl", [ROWS[3], {"messages": conversation(40)}])
    document = changed_spec(chat, validation=str(valid))
    document["data"].pop("holdout")
    data = read_language_data(parse_run_spec(document), 0.2)
    assert (len(data.train), len(data.held_out)) == (12, 2)
    assert data.digests["validation"] != data.digests["data"]
    assert data.notes["of_them_trained_on_too"] == 1
