"""A loss computed a few tokens at a time equals the loss of all tokens, and needs less memory."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from backends.base.interface import Batch, BlockGradient, Trainable
from backends.eager.eager import EagerBackend
from backends.losses import logits_in_parts, vocabulary_loss
from backends.losses.logits_in_parts import LogitsInParts
from backends.losses.vocabulary_loss import tokens_per_part
from protocol.spec.sections.model import LoraSpec
from tests.small_heads import (
    LABELED_LOSS,
    TARGET_LOSS,
    TOKEN_LOSS,
    LargestTensor,
    bart,
    bert,
    cohere,
    distil_loss,
    distillation_loss,
    gemma,
    llama,
    padded_texts,
    pairs,
    t5,
    texts,
    texts_with_teacher,
)
from tests.tested_backend import BACKEND
from worker.models.blocks import cut_into_blocks
from worker.models.lora import Lora
from worker.tasks.language.dpo import dpo_loss

CHUNK_TOKENS = 10
"""Tokens per part. The 48 tokens of a batch are no multiple of it, so the last part is shorter."""
FLOAT32_TOLERANCE = 1e-5
"""Largest difference relative to a gradient's norm; a loss may differ by a tenth of this.

Matrix products of a few tokens add in another order than products of all tokens."""


@pytest.fixture
def in_parts(monkeypatch) -> None:
    """Compute the logits of `CHUNK_TOKENS` tokens at a time."""
    monkeypatch.setattr(vocabulary_loss, "tokens_per_part", lambda _: CHUNK_TOKENS)


def add_lora(model: Any, added_tokens: Any = (), **lora_options: Any) -> Any:
    """Return the model with LoRA of rank 4 whose B matrices are random, not zero."""
    lora = LoraSpec(r=4, **lora_options)
    module = Lora(model, lora, "CAUSAL_LM", [], seed=0, added_tokens=added_tokens).module
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return module


def gradients(module: Any, loss: Any, microbatch: Batch, backend: str, **options: Any) -> Any:
    """Return the loss sum and the gradients of all blocks."""
    program = EagerBackend(backend).compile(
        Trainable(cut_into_blocks(module), module, loss, **options), microbatch
    )
    items = list(program.gradients([(microbatch, 0)]))
    program.close()
    return items[-1].loss_sum, [i.values for i in items if isinstance(i, BlockGradient)]  # type: ignore[union-attr]


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "full training": (llama, TOKEN_LOSS, texts, {}),
    "full training, tied": (lambda: llama(tie_word_embeddings=True), TOKEN_LOSS, texts, {}),
    "capped logits": (gemma, TOKEN_LOSS, texts, {}),
    "scaled logits": (cohere, TOKEN_LOSS, texts, {}),
    "LoRA on int4": (lambda: add_lora(llama()), TOKEN_LOSS, texts, {"base_dtype": "int4"}),
    "LoRA of the head": (
        lambda: add_lora(llama(), targets=("q_proj", "lm_head")), TOKEN_LOSS, texts, {},
    ),
    "added tokens": (lambda: add_lora(llama(), (90, 91, 95)), TOKEN_LOSS, texts, {}),
    "added tokens, tied": (
        lambda: add_lora(llama(tie_word_embeddings=True), (90, 91, 95)), TOKEN_LOSS, texts, {},
    ),
    "preferences": (lambda: add_lora(llama()), partial(dpo_loss, beta=0.1, options={}), pairs, {}),
    "masked": (bert, LABELED_LOSS, padded_texts, {}),
    "T5, tied": (t5, TARGET_LOSS, padded_texts, {}),
    "T5": (lambda: t5(tied=False), TARGET_LOSS, padded_texts, {}),
    "BART": (bart, TARGET_LOSS, padded_texts, {}),
    "distilled": (llama, distil_loss(), texts_with_teacher, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_in_parts_equals_the_loss_of_all_tokens_and_repeats_its_bits(case, monkeypatch):
    make, loss, microbatch, options = CASES[case]
    whole = gradients(make(), loss, microbatch(), BACKEND, **options)
    monkeypatch.setattr(vocabulary_loss, "tokens_per_part", lambda _: CHUNK_TOKENS)
    with mock.patch.object(logits_in_parts, "checkpoint", side_effect=checkpoint) as computed:
        parts = gradients(make(), loss, microbatch(), BACKEND, **options)
    assert computed.call_count >= 48 // CHUNK_TOKENS
    repeated = gradients(make(), loss, microbatch(), BACKEND, **options)
    assert parts[0] == pytest.approx(whole[0], rel=FLOAT32_TOLERANCE / 10)
    for actual, expected in zip(parts[1], whole[1], strict=True):
        assert np.linalg.norm(actual - expected) <= FLOAT32_TOLERANCE * np.linalg.norm(expected)
    assert [block.tobytes() for block in parts[1]] == [block.tobytes() for block in repeated[1]]
    assert parts[0] == repeated[0]


@pytest.mark.parametrize("case", ["full training", "masked", "T5", "BART", "distilled"])
def test_loss_of_few_logits_has_the_bits_of_plain_torch_code(case):
    """Logits of up to `LOGITS_AT_ONCE` elements are not computed in parts."""
    make, loss, microbatch, options = CASES[case]
    [loss_sum, blocks], plain = (
        gradients(make(), loss, microbatch(), BACKEND, **options),
        gradients(make(), partial(plain_loss, case=case), microbatch(), BACKEND, **options),
    )
    assert loss_sum == plain[0]
    assert [block.tobytes() for block in blocks] == [block.tobytes() for block in plain[1]]


def plain_loss(module: Any, arrays: Any, case: str) -> torch.Tensor:
    """Return the loss as plain torch code computes it."""
    inputs = {"input_ids": arrays["input_ids"]}
    if "attention_mask" in arrays:
        inputs["attention_mask"] = arrays["attention_mask"]
    labels = arrays["labels"]
    if case in {"T5", "BART"}:
        before = torch.where(labels[:, :-1] == -100, 0, labels[:, :-1])
        inputs["decoder_input_ids"] = torch.cat([torch.zeros_like(labels[:, :1]), before], dim=1)
        inputs["use_cache"] = False
    logits = module(**inputs).logits.float()
    if case == "distilled":
        return distillation_loss().total(logits, arrays)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class MixingHead(torch.nn.Linear):
    """A head whose logits depend on earlier tokens."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states + states.cumsum(-2) / 2)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("form", ["class", "instance", "within an adapter"])
def test_logits_of_a_head_that_mixes_tokens_are_a_tensor(form):
    model: Any = llama()
    mixing = MixingHead(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    if form == "instance":
        model.lm_head.forward = partial(MixingHead.forward.__get__(mixing))
    elif form == "class":
        model.lm_head = mixing
    else:
        model.lm_head = torch.nn.Sequential(mixing)
        model.lm_head.out_features = mixing.out_features
    ids = torch.arange(48).reshape(4, 12) % 7
    expected = model(input_ids=ids).logits
    logits = vocabulary_loss.logits_of(model, {"input_ids": ids})
    assert isinstance(logits, torch.Tensor)
    assert torch.equal(logits, expected)


def test_backward_repeats_the_dropout_of_a_head(monkeypatch):
    def block_gradients() -> Any:
        module = add_lora(llama(), targets=("q_proj", "lm_head"), dropout=0.5)
        return gradients(module, TOKEN_LOSS, texts(), BACKEND, unit="microbatch")[1]

    recomputed = block_gradients()
    monkeypatch.setattr(logits_in_parts, "checkpoint", lambda f, *args, **_: f(*args))
    stored = block_gradients()
    assert [block.tobytes() for block in recomputed] == [block.tobytes() for block in stored]


FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (llama, TOKEN_LOSS, texts),
    "gemma": (gemma, TOKEN_LOSS, texts),
    "cohere": (cohere, TOKEN_LOSS, texts),
    "bert": (bert, LABELED_LOSS, padded_texts),
    "t5": (t5, TARGET_LOSS, padded_texts),
    "bart": (bart, TARGET_LOSS, padded_texts),
}


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_those_of_transformers(family):
    """The loss is the mean loss of transformers times the number of labels."""
    make, loss, microbatch = FAMILIES[family]
    arrays = {name: torch.tensor(array) for name, array in microbatch().arrays.items()}
    labels = arrays["labels"]
    count = int((labels != -100).sum())
    expected, model = make(), make()
    inputs = {name: array for name, array in arrays.items() if name != "labels"}
    shifted = {"shift_labels": labels} if loss is TOKEN_LOSS else {}
    mean = expected(**inputs, labels=labels, **shifted).loss
    (mean * count).backward()
    total = loss(model, arrays)
    total.backward()
    assert float(total.detach()) == pytest.approx(float(mean.detach()) * count, rel=1e-6)
    assert_same_gradients(model, expected)


def assert_same_gradients(model: Any, expected: Any) -> None:
    for (name, parameter), reference in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        assert (parameter.grad is None) == (reference.grad is None), name
        if parameter.grad is not None:
            difference = torch.linalg.norm(parameter.grad - reference.grad)
            assert difference <= FLOAT32_TOLERANCE * torch.linalg.norm(reference.grad) + 1e-9, name


LARGE_VOCABULARY = 4096
LARGE_CASES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (llama, TOKEN_LOSS, texts),
    "bert": (bert, LABELED_LOSS, padded_texts),
    "t5": (t5, TARGET_LOSS, padded_texts),
    "bart": (bart, TARGET_LOSS, padded_texts),
    "distilled": (llama, distil_loss(LARGE_VOCABULARY), texts_with_teacher),
}


@pytest.mark.parametrize("case", LARGE_CASES)
def test_largest_tensor_is_the_logits_of_one_part(case, monkeypatch):
    make, loss, microbatch = LARGE_CASES[case]
    model = make(LARGE_VOCABULARY)
    # Only the last norm is trained: its gradient needs the head, and is small itself.
    model.requires_grad_(requires_grad=False)
    norms = [weight for name, weight in model.named_parameters() if "norm" in name.lower()]
    norms[-1].requires_grad_(requires_grad=True)
    arrays = {
        name: torch.tensor(array) for name, array in microbatch(LARGE_VOCABULARY).arrays.items()
    }
    largest_elements = []
    # All 48 tokens; then one more than the hidden size, so that the head's weight is smaller.
    for chunk_tokens in (1 << 20, 33):
        monkeypatch.setattr(vocabulary_loss, "tokens_per_part", lambda _, count=chunk_tokens: count)
        with LargestTensor() as in_training:
            loss(model, arrays).backward()
        with LargestTensor() as in_evaluation, torch.no_grad():
            loss(model, arrays)
        assert in_evaluation.elements == in_training.elements
        largest_elements.append(in_training.elements)
    assert largest_elements == [48 * LARGE_VOCABULARY, 33 * LARGE_VOCABULARY]


def test_changes_of_inputs_after_the_head_do_not_change_the_logits():
    states, scale, bias = torch.ones(4, 3), torch.tensor(2.0), torch.ones(5)
    head = torch.nn.Linear(3, 5, bias=False).requires_grad_(False)
    logits: Any = LogitsInParts.of(head, states, 5, 2)
    logits = logits * scale + bias
    expected = head(states) * scale + bias
    for tensor in (states, scale, bias):
        tensor.fill_(7)
    [first, second] = logits.compute(lambda part: part)
    assert torch.equal(torch.cat([first, second]), expected)


def test_vocabulary_alone_decides_the_number_of_tokens_at_once():
    token_counts = [tokens_per_part(size) for size in (512, 32_000, 49_152, 151_936, 2_000_000)]
    assert token_counts == [65_536, 1024, 640, 192, 64]
