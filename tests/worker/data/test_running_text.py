"""Running text as tokens: each document begins and ends with the tokenizer's marks, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.small_chat import save_chat_tokenizer
from worker.data.language_data import read_language_data
from worker.models.tokens import IGNORED_LABEL, load_tokenizer, marks_around_text
from worker.results.generate import prompt_tokens

BEGIN, END = 1, 2
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> Path:
    """A tokenizer that begins texts with a mark, and one that does not."""
    directory: Path = tmp_path_factory.mktemp("tokenizers")
    save_chat_tokenizer(directory / "plain", template=None)
    tokenizer = save_chat_tokenizer(directory / "bracketed", template=None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", BEGIN)]
    )
    tokenizer.save_pretrained(directory / "bracketed")
    return directory


def spec_of(tokenizer: Path, train: Path, **data: Any) -> RunSpec:
    return parse_run_spec({
        "task": "causal-lm", "steps": 1, "seed": 3, "model": {"config": LLAMA},
        "tokenizer": {"source": str(tokenizer)}, "batch": {"samples": 2, "microbatch": 2},
        "data": {"train": str(train), "max_tokens": 16, "holdout": 0.0, **data},
    })  # fmt: skip


def documents(directory: Path) -> Path:
    path = directory / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"What is {n}? " * n}) + "\n" for n in range(1, 9)))
    return path


def inputs_and_labels(spec: RunSpec) -> list[tuple[list[int], list[int]]]:
    """Return the inputs and labels of every sample."""
    samples = read_language_data(spec, 0.0).train
    batch = samples.batch(np.arange(len(samples)))
    assert batch.weight == (batch.arrays["labels"] != IGNORED_LABEL).sum()
    return list(
        zip(batch.arrays["input_ids"].tolist(), batch.arrays["labels"].tolist(), strict=True)
    )


def test_marks_are_those_of_the_tokenizer(tokenizers):
    assert marks_around_text(load_tokenizer(str(tokenizers / "bracketed"))) == ([BEGIN], [END])
    assert marks_around_text(load_tokenizer(str(tokenizers / "plain"))) == ([], [END])


@pytest.mark.parametrize("packing", [False, True])
def test_document_starts_with_its_unpredicted_mark(tokenizers, tmp_path, packing):
    train = documents(tmp_path)
    samples = inputs_and_labels(spec_of(tokenizers / "bracketed", train, packing=packing))
    without_marks = inputs_and_labels(spec_of(tokenizers / "plain", train, packing=packing))
    assert sum(read.count(BEGIN) for read, _ in samples) == 8
    assert not any(BEGIN in labels for _, labels in samples)
    end_counts = [sum(labels.count(END) for _, labels in each) for each in (samples, without_marks)]
    assert end_counts == [8, 8]
    # The first token of each text is predicted from the mark.
    counts = [
        sum(len(x) - x.count(IGNORED_LABEL) for _, x in each) for each in (samples, without_marks)
    ]
    assert counts[0] == counts[1] + (8 if packing else 1)


def test_a_prompt_begins_as_a_document_does(tokenizers, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"text": "What is 1 plus 2?"}) + "\n")
    for name in ("bracketed", "plain"):
        read, _ = inputs_and_labels(spec_of(tokenizers / name, path))[0]
        prompt = prompt_tokens(load_tokenizer(str(tokenizers / name)), "What is 1 plus 2?", None)
        assert read[: len(prompt)] == prompt
        assert (prompt[0] == BEGIN) == (name == "bracketed")


@pytest.mark.parametrize("packing", [False, True])
def test_single_file_has_one_begin_and_one_end_mark(tokenizers, tmp_path, packing):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"What is {n} plus {n}?\n" for n in range(900)))
    samples = inputs_and_labels(spec_of(tokenizers / "bracketed", path, packing=packing))
    assert sum(labels.count(END) for _, labels in samples) == 1
    assert sum(read.count(BEGIN) for read, _ in samples) == 1
    assert samples[0][0][0] == BEGIN or packing
