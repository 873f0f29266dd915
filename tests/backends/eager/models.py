"""Gradients of model families on the tested device match the CPU's and are reproducible.

Not part of the default suite, because it is slow: tests/standin/test_standin.py runs these tests on
the stand-in accelerator, benchmarks/cards.py on a real card.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from backends.base.interface import Batch, BlockGradient, Loss, Trainable
from backends.eager.eager import EagerBackend
from protocol.spec.sections.model import LoraSpec
from tests.tested_backend import BACKEND
from worker.models.blocks import cut_into_blocks
from worker.models.lora import Lora, TaskType

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
DECODER: dict[str, Any] = {
    **SIZES, "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 32,
}  # fmt: skip
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LABELS: dict[str, Any] = {"num_labels": 3}
MODEL_FACTORIES: dict[str, Callable[[str], Any]] = {
    "Llama": lambda attention: transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**DECODER), attn_implementation=attention
    ),
    "Qwen": lambda attention: transformers.Qwen3ForCausalLM._from_config(
        transformers.Qwen3Config(**DECODER), attn_implementation=attention
    ),
    "BERT": lambda attention: transformers.BertForSequenceClassification._from_config(
        transformers.BertConfig(**SIZES, **NO_DROPOUT, **LABELS, vocab_size=96),
        attn_implementation=attention,
    ),
    "ViT": lambda attention: transformers.ViTForImageClassification._from_config(
        transformers.ViTConfig(**SIZES, **NO_DROPOUT, **LABELS, image_size=16, patch_size=4),
        attn_implementation=attention,
    ),
}
LORA: dict[str, dict[str, Any]] = {
    f"LoRA, {base_dtype}": {"base_dtype": base_dtype}
    for base_dtype in ("float32", "bfloat16", "float16", "int8", "int4", "nf4", "q8_0")
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"lora": False},
    "full, bfloat16": {"lora": False, "precision": "bfloat16"},
    "full, SDPA": {"lora": False, "attention": "sdpa"},
    "full, gradient checkpointing": {"lora": False, "gradient_checkpointing": True},
    **LORA,
    "LoRA, int4, SDPA, bfloat16, gradient checkpointing": {
        "base_dtype": "int4", "attention": "sdpa", "precision": "bfloat16",
        "gradient_checkpointing": True,
    },
}  # fmt: skip


def batch(family: str, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any]
    if family == "ViT":
        arrays = {"pixel_values": rng.standard_normal((2, 3, 16, 16)).astype(np.float32)}
    else:
        arrays = {"input_ids": rng.integers(0, 96, (2, 24))}
    if family in ("BERT", "ViT"):
        return Batch({**arrays, "labels": rng.integers(0, 3, 2)}, 2.0)
    return Batch(arrays, 2 * 23.0)  # the last of 24 tokens has no successor to predict


def loss(module: torch.nn.Module, arrays: Any) -> torch.Tensor:
    fields = dict(arrays)
    labels = fields.pop("labels", None)
    logits = module(**fields).logits.float()
    if labels is None:
        logits, labels = logits[:, :-1].flatten(0, 1), fields["input_ids"][:, 1:].flatten()
    return functional.cross_entropy(logits, labels, reduction="sum")


def trainable(
    family: str,
    *,
    lora: bool = True,
    attention: str = "eager",
    gradient_checkpointing: bool = False,
    **options: Any,
) -> Trainable:
    torch.manual_seed(0)
    module = MODEL_FACTORIES[family](attention)
    if gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        spec = LoraSpec(r=4, targets="all-linear")
        is_decoder = family in ("Llama", "Qwen")
        task_type: TaskType = "CAUSAL_LM" if is_decoder else "MASKED_LM"
        module = Lora(module, spec, task_type, [], seed=0).module
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "lora_B" in name:  # with zeros the gradient of A would vanish
                    parameter.normal_(0.0, 0.1)
    return Trainable(cut_into_blocks(module), module, loss, threads=1, **options)


def gradients(device: str, family: str, variant: dict[str, Any]) -> tuple[list[Any], float]:
    """Return the gradients of all blocks and the loss sum, over three microbatches."""
    program = EagerBackend(device).compile(trainable(family, **variant), batch(family, 0))
    items = list(program.gradients([(batch(family, seed), seed) for seed in range(3)]))
    program.close()
    *blocks, total = items
    assert isinstance(total, Loss)
    del program
    gc.collect()
    return [block.values for block in blocks if isinstance(block, BlockGradient)], total.loss_sum


_distances: dict[str, float] = {}
"""By variant, the largest relative distance from the CPU's gradients over all families."""


@pytest.fixture(scope="module", autouse=True)
def _print_distances(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for variant, distance in _distances.items():
            sys.stdout.write(f"\n{variant}: {distance:.1e} or less from the CPU's gradients")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", MODEL_FACTORIES)
def test_gradients_match_the_cpu_and_are_reproducible(family, variant):
    cpu_gradients, cpu_loss = gradients("cpu", family, VARIANTS[variant])
    device_gradients, device_loss = gradients(BACKEND, family, VARIANTS[variant])
    repeated_gradients, repeated_loss = gradients(BACKEND, family, VARIANTS[variant])
    assert [a.tobytes() for a in device_gradients] == [a.tobytes() for a in repeated_gradients]
    assert device_loss == repeated_loss
    is_half = VARIANTS[variant].get("precision") == "bfloat16"
    assert device_loss == pytest.approx(cpu_loss, rel=2e-2 if is_half else 1e-5)
    reference, actual = np.concatenate(cpu_gradients), np.concatenate(device_gradients)
    distance = np.linalg.norm(actual - reference) / np.linalg.norm(reference)
    _distances[variant] = max(float(distance), _distances.get(variant, 0.0))
    assert distance < (0.1 if is_half else 1e-4)
