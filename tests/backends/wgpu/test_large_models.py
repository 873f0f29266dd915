"""Memory of models too large for this machine: estimates from plans, without weights."""

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
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.weights.quantized_base import BaseLayout
from tests.backends.wgpu.products import small_tiles

TOKENS = 512
EIGHT_GB = 8 * 10**9
LAYERS = 36
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


def account(base_dtype, layers, *, checkpointing):
    """Estimate a microbatch of 1 x 512 tokens for this many layers of Qwen3-4B with LoRA."""
    config = QWEN3_4B(num_hidden_layers=layers)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
        if checkpointing:
            model.gradient_checkpointing_enable()
        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        module = get_peft_model(model, lora)
    model.model.rotary_emb = Qwen3RotaryEmbedding(config)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    ids = torch.zeros((1, TOKENS), dtype=torch.int64)
    templates = Templates(cooperative=True, matmul=small_tiles)
    arrays = {"input_ids": ids, "labels": ids}
    capture = capture_step(module, loss, trained, arrays, templates.fuses)
    tensors = named_tensors(module)
    base = BaseLayout(module, base_dtype)
    constants = {name: t for name, t in tensors.items() if name in dict(module.named_buffers())}
    plan = lower_to_plan(capture, base, constants, templates, [[*range(1 + len(trained))]])
    sizes = {name: base.nbytes(name) or 4 * t.numel() for name, t in tensors.items()}
    return estimate(plan, sizes)


def extrapolate(value, shallow, deep, layers=LAYERS):
    """Extrapolate to this number of layers: each further one takes what the second two take."""
    return value(deep) + (layers - 4) * (value(deep) - value(shallow)) / 2


@pytest.mark.slow
def test_qwen3_4b_in_int8_with_checkpointing_fits_in_8_gb():
    """From two and four of its layers; the test below shows that the others take the same."""
    shallow, deep = (account("int8", layers, checkpointing=True) for layers in (2, 4))
    assert extrapolate(lambda needed: needed.total, shallow, deep) <= EIGHT_GB * (1 - FREE_SHARE)
    assert 5e9 < extrapolate(lambda needed: needed.weights, shallow, deep) < 6e9
    assert deep.largest_buffer[0] <= 2**31, "what one binding may have"


@pytest.mark.slow
@pytest.mark.parametrize("layers", [8, pytest.param(LAYERS, marks=pytest.mark.release)])
def test_every_layer_of_qwen3_4b_takes_the_same(layers):
    shallow, deep = (account("int8", number, checkpointing=True) for number in (2, 4))
    memory = account("int8", layers, checkpointing=True)
    assert memory.total <= EIGHT_GB * (1 - FREE_SHARE)
    assert memory.largest_buffer[0] <= 2**31
    expected = extrapolate(lambda each: each.total, shallow, deep, layers)
    assert memory.total == pytest.approx(expected, rel=0.01)
