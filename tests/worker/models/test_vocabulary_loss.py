"""The loss of a few tokens at a time is that of all at once, on every backend, in less memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backends.base.interface import Batch, BlockGradient, Trainable
from backends.eager.eager import EagerBackend
from protocol.spec.sections.model import LoraSpec
from tests.tested_backend import KIND
from worker.models import vocabulary_loss
from worker.models.blocks import cut_into_blocks
from worker.models.lora import Lora
from worker.models.vocabulary_loss import HeadObserver, tokens_at_once
from worker.tasks.language.causal_lm import token_loss
from worker.tasks.language.dpo import dpo_loss

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
AT_ONCE = 10
"""Of 48 tokens: the last part is shorter."""


def llama(**sizes: Any) -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **sizes}))


def batch(*, pairs: bool = False) -> Batch:
    ids = np.random.default_rng(1).integers(0, 96, (2, 24))
    labels = np.where(ids % 5 == 0, -100, np.roll(ids, -1, axis=1))
    shape = (1, 2, 24) if pairs else (2, 24)
    return Batch({"input_ids": ids.reshape(shape), "labels": labels.reshape(shape)}, 2.0)


def adapted(model: Any, **how: Any) -> Any:
    module = Lora(model, LoraSpec(r=4, **how), "CAUSAL_LM", [], seed=0).module
    with torch.no_grad():
        for name, each in module.named_parameters():
            if "lora_B" in name:
                each.normal_(0.0, 0.1)
    return module


def gradients(module: Any, loss: Any, microbatch: Batch, backend: str, **how: Any) -> Any:
    program = EagerBackend(backend).compile(
        Trainable(cut_into_blocks(module), module, loss, **how), microbatch
    )
    items = list(program.gradients([(microbatch, 0)]))
    program.close()
    return items[-1].loss_sum, [i.values for i in items if isinstance(i, BlockGradient)]  # type: ignore[union-attr]


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "in full": (llama, token_loss, {}),
    "in full, tied": (lambda: llama(tie_word_embeddings=True), token_loss, {}),
    "LoRA on int4": (lambda: adapted(llama()), token_loss, {"base_dtype": "int4"}),
    "a head with LoRA": (lambda: adapted(llama(), targets=("q_proj", "lm_head")), token_loss, {}),
    "preferences": (lambda: adapted(llama()), partial(dpo_loss, beta=0.1), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_all_tokens_at_once(case):
    make, loss, how = CASES[case]
    microbatch = batch(pairs=case == "preferences")
    whole, parts = (
        gradients(make(), partial(loss, options={}, at_once=at_once), microbatch, KIND, **how)
        for at_once in (0, AT_ONCE)
    )
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    for one, other in zip(parts[1], whole[1], strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


def test_a_head_s_dropout_is_drawn_once(monkeypatch):
    def parts() -> Any:
        module = adapted(llama(), targets=("q_proj", "lm_head"), dropout=0.5)
        loss = partial(token_loss, options={}, at_once=AT_ONCE)
        return gradients(module, loss, batch(), KIND, unit="microbatch")[1]

    again = parts()
    monkeypatch.setattr(vocabulary_loss, "checkpoint", lambda f, *args, **_: f(*args))
    assert [each.tobytes() for each in parts()] == [each.tobytes() for each in again]


def test_loss_is_that_of_transformers():
    model, microbatch = llama(), batch()
    ids, labels = (torch.tensor(microbatch.arrays[name]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=labels, shift_labels=labels).loss)
    loss = token_loss(model, {"input_ids": ids, "labels": labels}, {}, AT_ONCE)
    mean = float(loss.detach()) / int((labels != -100).sum())
    assert mean == pytest.approx(expected, rel=1e-5)


class LargestTensor(TorchDispatchMode):
    """Watches forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return results


def test_logits_are_those_of_a_few_tokens_in_forward_and_backward():
    model = llama(vocab_size=4096)
    model.requires_grad_(requires_grad=False)
    model.model.norm.weight.requires_grad_(requires_grad=True)
    arrays = {name: torch.tensor(array) for name, array in batch().arrays.items()}
    largest = []
    for at_once in (0, 33):
        with LargestTensor() as largest_tensor:
            token_loss(model, arrays, {}, at_once).backward()
        largest.append(largest_tensor.elements)
    assert largest == [48 * 4096, 4096 * 33]


@pytest.mark.parametrize(
    ("config", "is_last"),
    [
        (transformers.LlamaConfig(**SIZES), True),
        (transformers.Qwen3Config(**SIZES), True),
        (transformers.Gemma2Config(**SIZES, head_dim=8), False),  # caps them
        (transformers.CohereConfig(**SIZES), False),  # scales them
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_that_changes_its_logits_behind_the_head_is_computed_as_a_whole(config, is_last):
    kind: Any = transformers.AutoModelForCausalLM
    model, head = kind.from_config(config), HeadObserver()
    with head.watching(model):
        model(input_ids=torch.arange(8)[None], use_cache=False)
    assert head.is_last == is_last


def test_how_many_tokens_is_decided_by_the_vocabulary_alone():
    token_counts = [tokens_at_once(size) for size in (512, 32_000, 49_152, 151_936, 2_000_000)]
    assert token_counts == [65_536, 1024, 640, 192, 64]
