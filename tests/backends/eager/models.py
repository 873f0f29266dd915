"""Model families on the tested device against the CPU, and repeated: too slow for the default
suite.

test_standin.py runs these on the stand-in accelerator, benchmarks/cards.py on a real card.
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
from tests.tested_backend import KIND
from worker.models.blocks import cut_into_blocks
from worker.models.lora import Lora, TaskType

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
DECODER: dict[str, Any] = {
    **SIZES, "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 32,
}  # fmt: skip
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LABELS: dict[str, Any] = {"num_labels": 3}
MAKE: dict[str, Callable[[str], Any]] = {
    "Llama": lambda attention: transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**DECODER), attn_implementation=attention
    ),
    "Qwen": lambda attention: transformers.Qwen3ForCausalLM._from_config(
        transformers.Qwen3Config(**DECODER), attn_implementation=attention
    ),
    "BERT": lambda attention: transformers.BertForSequenceClassification._from_config(
        transformers.BertConfig(**SIZES, **STILL, **LABELS, vocab_size=96),
        attn_implementation=attention,
    ),
    "ViT": lambda attention: transformers.ViTForImageClassification._from_config(
        transformers.ViTConfig(**SIZES, **STILL, **LABELS, image_size=16, patch_size=4),
        attn_implementation=attention,
    ),
}
LORA: dict[str, dict[str, Any]] = {
    f"LoRA, {base_dtype}": {"base_dtype": base_dtype}
    for base_dtype in ("float32", "bfloat16", "float16", "int8", "int4", "nf4", "q8_0")
}
HOW: dict[str, dict[str, Any]] = {
    "in full": {"lora": False},
    "in full, bfloat16": {"lora": False, "precision": "bfloat16"},
    "in full, SDPA": {"lora": False, "attention": "sdpa"},
    "in full, checkpointed": {"lora": False, "checkpoints": True},
    **LORA,
    "LoRA, int4, SDPA, bfloat16, checkpointed": {
        "base_dtype": "int4", "attention": "sdpa", "precision": "bfloat16", "checkpoints": True,
    },
}  # fmt: skip


def batch(family: str, seed: int) -> Batch:
    draws = np.random.default_rng(seed)
    arrays: dict[str, Any]
    if family == "ViT":
        arrays = {"pixel_values": draws.standard_normal((2, 3, 16, 16)).astype(np.float32)}
    else:
        arrays = {"input_ids": draws.integers(0, 96, (2, 24))}
    if family in ("BERT", "ViT"):
        return Batch({**arrays, "labels": draws.integers(0, 3, 2)}, 2.0)
    return Batch(arrays, 46.0)


def loss(module: torch.nn.Module, arrays: Any) -> torch.Tensor:
    fields = dict(arrays)
    labels = fields.pop("labels", None)
    logits = module(**fields).logits.float()
    if labels is None:
        logits, labels = logits[:, :-1].flatten(0, 1), fields["input_ids"][:, 1:].flatten()
    return functional.cross_entropy(logits, labels, reduction="sum")


def job(
    family: str, *, lora: bool = True, attention: str = "eager", checkpoints: bool = False,
    **options: Any,
) -> Trainable:  # fmt: skip
    torch.manual_seed(0)
    module = MAKE[family](attention)
    if checkpoints:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        spec = LoraSpec(r=4, targets="all-linear")
        is_decoder = family in ("Llama", "Qwen")
        kind: TaskType = "CAUSAL_LM" if is_decoder else "MASKED_LM"
        module = Lora(module, spec, kind, [], seed=0).module
        with torch.no_grad():
            for name, each in module.named_parameters():
                if "lora_B" in name:  # with zeros the gradient of A would vanish
                    each.normal_(0.0, 0.1)
    return Trainable(cut_into_blocks(module), module, loss, threads=1, **options)


def gradients(device: str, family: str, how: dict[str, Any]) -> tuple[list[Any], float]:
    program = EagerBackend(device).compile(job(family, **how), batch(family, 0))
    items = list(program.gradients([(batch(family, seed), seed) for seed in range(3)]))
    program.close()
    *blocks, total = items
    assert isinstance(total, Loss)
    del program
    gc.collect()
    return [each.values for each in blocks if isinstance(each, BlockGradient)], total.loss_sum


_distances: dict[str, float] = {}
"""Largest relative distance from the CPU's gradients over all families."""


@pytest.fixture(scope="module", autouse=True)
def _distances_are_shown(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for how, distance in _distances.items():
            sys.stdout.write(f"\n{how}: within {distance:.1e} of the CPU's gradients")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", MAKE)
def test_gradients_equal_the_cpu_and_repeat(family, how):
    expected, loss_of_cpu = gradients("cpu", family, HOW[how])
    on_device, loss_of_device = gradients(KIND, family, HOW[how])
    repeat, loss_again = gradients(KIND, family, HOW[how])
    assert [a.tobytes() for a in on_device] == [a.tobytes() for a in repeat]
    assert loss_of_device == loss_again
    is_half = HOW[how].get("precision") == "bfloat16"
    assert loss_of_device == pytest.approx(loss_of_cpu, rel=2e-2 if is_half else 1e-5)
    reference, actual = np.concatenate(expected), np.concatenate(on_device)
    distance = np.linalg.norm(actual - reference) / np.linalg.norm(reference)
    _distances[how] = max(float(distance), _distances.get(how, 0.0))
    assert distance < (0.1 if is_half else 1e-4)
