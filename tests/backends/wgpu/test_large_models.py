"""Estimated memory of a model that is too large for a test machine, from plans without weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from backends.wgpu.capture.capture import capture_step
from backends.wgpu.capture.substitution import named_tensors
from backends.wgpu.lowering.estimate import FREE_SHARE, estimate
from backends.wgpu.lowering.lowered_plan import lower_to_plan
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.weights.quantized_base import BaseLayout
from tests.backends.wgpu.products import small_tiles

TOKENS = 512
CARD_BYTES = 8 * 10**9
LARGEST_BINDING_BYTES = 2**31
LAYERS = 36
"""Layers of Qwen3-4B."""
QWEN3_4B = partial(
    Qwen3Config,
    vocab_size=151_936,
    hidden_size=2560,
    intermediate_size=9728,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    use_cache=False,
)


def loss(module, arrays):
    logits = module(input_ids=arrays["input_ids"], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), reduction="sum"
    )


def estimate_qwen3_4b(layers):
    """Estimate the memory of a microbatch of 1 x 512 tokens, for some layers of Qwen3-4B.

    The base is int8, with LoRA and checkpointing.
    """
    config = QWEN3_4B(num_hidden_layers=layers)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
        model.gradient_checkpointing_enable()
        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        module = get_peft_model(model, lora)
    model.model.rotary_emb = Qwen3RotaryEmbedding(config)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    ids = torch.zeros((1, TOKENS), dtype=torch.int64)
    kernel_options = KernelOptions(cooperative=True, matmul=small_tiles)
    arrays = {"input_ids": ids, "labels": ids}
    capture = capture_step(module, loss, trained, arrays, kernel_options.fuses)
    tensors, buffers = named_tensors(module), dict(module.named_buffers())
    base = BaseLayout(module, "int8")
    constants = {name: buffer for name, buffer in tensors.items() if name in buffers}
    plan = lower_to_plan(capture, base, constants, kernel_options, [[*range(1 + len(trained))]])
    sizes = {name: base.nbytes(name) or 4 * tensor.numel() for name, tensor in tensors.items()}
    return estimate(plan, sizes)


def extrapolate(two_layers, four_layers, layers=LAYERS):
    """Extrapolate a number of bytes linearly to more layers."""
    return four_layers + (layers - 4) * (four_layers - two_layers) / 2


@pytest.mark.slow
def test_qwen3_4b_in_int8_with_checkpointing_fits_in_8_gb():
    """Extrapolates from two and four layers; the test below shows that memory grows linearly."""
    two, four = (estimate_qwen3_4b(layers) for layers in (2, 4))
    assert extrapolate(two.total, four.total) <= CARD_BYTES * (1 - FREE_SHARE)
    assert 5e9 < extrapolate(two.weights, four.weights) < 6e9
    assert four.largest_buffer[0] <= LARGEST_BINDING_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("layers", [8, pytest.param(LAYERS, marks=pytest.mark.release)])
def test_memory_of_qwen3_4b_is_linear_in_layers(layers):
    two, four, memory = (estimate_qwen3_4b(number) for number in (2, 4, layers))
    assert memory.total <= CARD_BYTES * (1 - FREE_SHARE)
    assert memory.largest_buffer[0] <= LARGEST_BINDING_BYTES
    expected = extrapolate(two.total, four.total, layers)
    assert memory.total == pytest.approx(expected, rel=0.01)
