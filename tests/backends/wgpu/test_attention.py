"""Fused attention against torch on the CPU: masks, grouped heads, whole models, and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from backends.base.interface import Batch
from backends.wgpu.capture.attention import should_fuse
from backends.wgpu.capture.capture import Capture, capture_forward, capture_step
from backends.wgpu.graph.opaque import ATTENTION, ATTENTION_KEYS, ATTENTION_QUERIES
from backends.wgpu.lowering.estimate import estimate
from backends.wgpu.lowering.fusion import ATTENTIONS
from backends.wgpu.lowering.lowered_plan import lower_to_plan
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from backends.wgpu.shaders.attention.problem import AttentionSizes
from backends.wgpu.weights.quantized_base import BaseLayout
from tests.backends.wgpu.examples import examples
from tests.backends.wgpu.on_device import Function, on_device
from tests.backends.wgpu.products import small_tiles
from tests.backends.wgpu.small_models import (
    TOKENS,
    assert_equals_cpu,
    bert,
    class_loss,
    gradients,
    labeled_batch,
    llama,
    next_token_loss,
    qwen3_with_lora,
    token_batch,
    trainable,
)

RELATIVE_TOLERANCE = 1e-5


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def always_fuse(sizes: AttentionSizes) -> bool:
    """Return True: attention of any size is fused."""
    del sizes
    return True


def attention_with_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad_output: torch.Tensor,
    mask: torch.Tensor | None = None, **keywords: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the output, and the gradients of query, key and value."""
    with torch.enable_grad():
        q, k, v = leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        result = functional.scaled_dot_product_attention(q, k, v, mask, **keywords)
        return result.detach(), *torch.autograd.grad((result * grad_output).sum(), leaves)


def assert_equals_torch(
    device: Any, *tensors: torch.Tensor, cooperative: bool = True, **keywords: Any
) -> None:
    """Compare the output and the gradients with torch's."""

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return attention_with_gradients(*inputs, **keywords)

    # Torch's CPU flash kernel loses the sum of a row whose scores are all the lowest float.
    with sdpa_kernel(SDPBackend.MATH):
        expected = function(*tensors)
    results = on_device(device, function, tensors, cooperative=cooperative)
    for actual, reference in zip(results, expected, strict=True):
        assert actual.shape == reference.shape
        assert_close(actual, reference)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    difference = float((actual - expected).norm())
    assert difference <= RELATIVE_TOLERANCE * max(float(expected.norm()), 1e-3)


@pytest.mark.parametrize("cooperative", [True, False], ids=["fused", "written out"])
@examples(2)
@given(
    heads=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70), st.sampled_from([4, 8, 20, 36, 64])),
    mask_type=st.sampled_from(["none", "causal", "boolean", "additive"]),
    is_broadcast=st.tuples(*[st.booleans()] * 4),
    omitted_dims=st.integers(0, 2),
)
def test_attention_of_any_shape_and_mask(  # noqa: PLR0917
    device, cooperative, heads, sizes, mask_type, is_broadcast, omitted_dims
):
    """Includes single rows, partial tiles, more queries than keys, shared key heads, and masks that
    are broadcast along any of batch, heads, queries and keys."""
    batch, groups, heads_per_group = heads
    queries, keys, head_size = sizes
    operands = [
        random_tensor(batch, groups * heads_per_group, queries, head_size),
        random_tensor(batch, groups, keys, head_size, seed=1),
        random_tensor(batch, groups, keys, head_size, seed=2),
        random_tensor(batch, groups * heads_per_group, queries, head_size, seed=3),
    ]
    if mask_type in {"boolean", "additive"}:
        full_shape = (batch, groups * heads_per_group, queries, keys)
        mask_shape = [
            1 if is_one else size for is_one, size in zip(is_broadcast, full_shape, strict=True)
        ]
        mask = random_tensor(*mask_shape[omitted_dims:], seed=4)
        operands.append(mask > -0.5 if mask_type == "boolean" else mask)
    keywords = {"is_causal": mask_type == "causal", "enable_gqa": heads_per_group > 1}
    assert_equals_torch(device, *operands, cooperative=cooperative, **keywords)


@pytest.mark.parametrize("cooperative", [True, False], ids=["fused", "written out"])
@pytest.mark.parametrize("mask_type", ["boolean", "minus infinity", "lowest float"])
def test_fully_masked_rows_and_tiles(device, cooperative, mask_type):
    """As in torch, a row without visible keys gives zeros, but the mean of all values if the mask
    adds the lowest float."""
    visible = torch.ones(2, 1, 70, 100, dtype=torch.bool).tril(2).triu(-5)
    visible[1, 0, :3] = False
    hidden_value = -math.inf if mask_type == "minus infinity" else torch.finfo(torch.float32).min
    additive = torch.zeros(visible.shape).masked_fill(~visible, hidden_value)
    mask = visible if mask_type == "boolean" else additive
    q, k, v, grad_output = (random_tensor(2, 2, n, 8, seed=n) for n in (70, 100, 100, 70))
    expected = functional.scaled_dot_product_attention(q, k, v, mask)
    assert bool((expected[1, :, :3] == 0).all()) == (mask_type != "lowest float")
    assert_equals_torch(device, q, k, v, grad_output, mask, cooperative=cooperative)


@pytest.mark.parametrize(
    "selected_cases",
    [
        pytest.param(slice(1), id="slices of one projection"),
        pytest.param(slice(1, None), id="unaligned", marks=pytest.mark.slow),
    ],
)
def test_operands_are_read_in_place(device, selected_cases):
    """Heads are slices of one projection, aligned to four elements or not; masks vary by head, row
    or key."""
    q, k, v = random_tensor(2, 40, 3, 3, 16).unbind(2)  # (2, 40, 3, 16) each
    grad_output = random_tensor(2, 3, 40, 16, seed=1)
    padded_heads = random_tensor(2, 3, 40, 19, seed=2)

    def function(
        projection: torch.Tensor, grad_output: torch.Tensor, padded_heads: torch.Tensor
    ) -> Any:
        q, k, v = (x.transpose(1, 2) for x in projection.unbind(2))
        unaligned = padded_heads[..., 3:]
        cases: list[Callable[[], Any]] = [
            lambda: attention_with_gradients(q, k, v, grad_output, unaligned[..., :1] > 0),
            lambda: attention_with_gradients(
                unaligned, k.mT.contiguous().mT, v, grad_output, (padded_heads[:1, :, :1, :1] * 2)
            ),
            lambda: attention_with_gradients(
                q, unaligned, v, grad_output, unaligned[0, 0] @ unaligned[0, 0].T > 0, scale=0.5
            ),
        ]
        return tuple(result for compute in cases[selected_cases] for result in compute())

    tensors = (torch.stack([q, k, v], 2), grad_output, padded_heads)
    results = on_device(device, function, tensors, cooperative=True)
    for actual, expected in zip(results, function(*tensors), strict=True):
        assert_close(actual, expected)


@pytest.mark.slow
def test_large_heads_with_a_larger_maximum_in_each_tile(device):
    """Each tile rescales the sums of the tiles before."""
    key = random_tensor(1, 1, 150, 128) + torch.linspace(0, 3, 150)[:, None]
    query = random_tensor(1, 2, 10, 128, seed=1).abs()
    value, grad_output = random_tensor(1, 1, 150, 128, seed=2), random_tensor(1, 2, 10, 128, seed=3)
    assert_equals_torch(device, query, key, value, grad_output, enable_gqa=True)


def operators_of(capture: Capture) -> set[Any]:
    """Return the operators of a capture and its layers."""
    graphs = [capture.graph, *(kind.graph for kind in capture.kinds)]
    return {node.target for graph in graphs for node in graph.graph.nodes}


@pytest.mark.parametrize(
    ("change", "is_fused"),
    [
        ({}, True),
        ({"dropout_p": 0.5}, False),
        ({"size": 6}, False),
        ({"size": 132}, False),
        ({"dims": 3}, False),
        ({"is_mask_trained": True}, False),
    ],
)
def test_unsupported_attention_is_not_fused(change, is_fused):
    """The kernels support neither dropout, nor other head sizes than multiples of 4 up to 128, nor
    three dimensions, nor a trained mask."""
    keywords = dict(change)
    shape = (2, 3, 5, keywords.pop("size", 8))[-keywords.pop("dims", 4) :]
    is_mask_trained = keywords.pop("is_mask_trained", False)

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            mask = mask.requires_grad_(is_mask_trained)
            return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, **keywords)

    operands = (random_tensor(*shape), random_tensor(5, 5))
    operators = operators_of(capture_forward(Function(function), operands, {}, always_fuse))
    assert (ATTENTION in operators) == is_fused


def test_custom_attention_is_not_fused():
    """Gemma 2 caps its scores."""
    config = transformers.Gemma2Config(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.Gemma2ForCausalLM(config)
    arrays = {"input_ids": torch.zeros((2, 8), dtype=torch.int64)}
    capture = capture_forward(model, (), arrays, always_fuse)
    assert len(capture.kinds) == 2
    assert not operators_of(capture) & ATTENTIONS


def padded_loss(module: nn.Module, arrays: Any) -> torch.Tensor:
    """Return the loss of texts whose padded ends an attention mask hides."""
    logits = module(
        input_ids=arrays["input_ids"], attention_mask=(arrays["labels"] >= 0).long()
    ).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


MODELS: dict[str, Any] = {
    "Qwen3 with LoRA and additive masks": (qwen3_with_lora, "eager", padded_loss, token_batch),
    "BERT with boolean masks": (bert, "sdpa", class_loss, labeled_batch),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_use_fused_attention(name):
    make_model, implementation, loss, batch = MODELS[name]
    assert_fused(make_model(attn_implementation=implementation), loss, batch())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_fused_models_equal_the_cpu(device, name):
    make_model, implementation, loss, batch = MODELS[name]
    module = make_model(attn_implementation=implementation)
    job = trainable(module, loss)
    program, first = compile_for_gpu(device, job, batch())
    assert_equals_cpu(module, job.blocks, loss, batch(), first)
    repeat = gradients(program, batch(), seed=5)  # without dropout the seed has no effect
    program.close()
    assert all(first[block].tobytes() == repeat[block].tobytes() for block in first)


def assert_fused(module: nn.Module, loss: Any, batch: Batch) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    names = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
    operators = operators_of(capture_step(module, loss, names, arrays, always_fuse))
    assert operators >= {ATTENTION, ATTENTION_QUERIES, ATTENTION_KEYS}
    assert torch.ops.aten.bmm.default not in operators


def compile_for_gpu(device: Any, job: Any, batch: Batch) -> tuple[CompiledProgram, Any]:
    """Return a program with the kernels of a GPU, and its gradients."""
    kernel_options = KernelOptions(cooperative=True, matmul=small_tiles)
    program = CompiledProgram(device, job, kernel_options, adds_on_device=True)
    program.check(batch)
    return program, gradients(program, batch)


@pytest.mark.slow
def test_checkpointing_computes_the_same_bits(device):
    results = []
    for is_checkpointed in (False, True):
        module = llama(attn_implementation="sdpa")
        assert_fused(module, next_token_loss, token_batch())
        if is_checkpointed:
            module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        job = trainable(module, next_token_loss)
        program, block_gradients = compile_for_gpu(device, job, token_batch())
        results.append(block_gradients)
        program.close()
    assert_equals_cpu(module, job.blocks, next_token_loss, token_batch(), results[0])
    without, checkpointed = results
    assert all(without[block].tobytes() == checkpointed[block].tobytes() for block in without)


def step_bytes(length: int, *, cooperative: bool) -> int:
    """Return the bytes of activations and transfers of a training step of four small layers."""
    module = llama(layers=4, max_position_embeddings=length)
    names = [name for name, _ in module.named_parameters()]
    batch = token_batch(1, length)
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    kernel_options = KernelOptions(cooperative=cooperative, matmul=small_tiles)
    capture = capture_step(module, next_token_loss, names, arrays, kernel_options.fuses)
    constants = dict(module.named_buffers())
    base = BaseLayout(module, "float32")
    plan = lower_to_plan(capture, base, constants, kernel_options, [[*range(1 + len(names))]])
    sizes = {name: 4 * t.numel() for name, t in [*module.named_parameters(), *constants.items()]}
    memory = estimate(plan, sizes)
    return memory.activations + memory.transfers


@pytest.mark.parametrize("length", [512, pytest.param(2048, marks=pytest.mark.slow)])
def test_memory_of_fused_attention_is_linear_except_for_masks(length):
    """Without fusion, each of four layers stores the scores of four heads."""
    mask_bytes = 4 * length**2
    bytes_per_token = 16_000
    assert step_bytes(length, cooperative=True) < 4 * mask_bytes + length * bytes_per_token
    assert step_bytes(length, cooperative=False) > 16 * mask_bytes


def test_attention_is_fused_on_gpus_and_for_large_scores():
    large = AttentionSizes(2, 16, 4, 2048, 2048, 64)
    assert should_fuse(AttentionSizes(1, 1, 1, 1, 1, 4), cooperative=True)
    assert not should_fuse(AttentionSizes(8, 16, 4, 512, 512, 64), cooperative=False)
    assert should_fuse(large, cooperative=False), "the scores take 512 MiB"
    too_long = AttentionSizes(1, 16, 1, 40_000, 40_000, 64)
    assert not should_fuse(too_long, cooperative=False), "lavapipe would end its loops early"
