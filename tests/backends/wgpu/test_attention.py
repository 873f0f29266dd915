"""Fused attention against torch on the CPU: masks, grouped heads, whole models, memory."""

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
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.program import CompiledProgram
from backends.wgpu.shaders.attention.problem import AttentionSizes
from backends.wgpu.weights.quantized_base import BaseLayout
from tests.backends.wgpu.examples import examples
from tests.backends.wgpu.on_device import Function, on_device
from tests.backends.wgpu.products import small_tiles
from tests.backends.wgpu.small_models import (
    TOKENS,
    assert_like_the_cpu,
    bert,
    class_loss,
    gradients,
    labeled,
    llama,
    next_token_loss,
    qwen3_with_lora,
    text,
    trainable,
)

FEW = examples(2)
WITHIN = 1e-5


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fused(sizes: AttentionSizes) -> bool:
    del sizes
    return True


def with_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tangent: torch.Tensor,
    mask: torch.Tensor | None = None, **keywords: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    with torch.enable_grad():
        q, k, v = leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        result = functional.scaled_dot_product_attention(q, k, v, mask, **keywords)
        return result.detach(), *torch.autograd.grad((result * tangent).sum(), leaves)


def agree(device: Any, *tensors: torch.Tensor, cooperative: bool = True, **keywords: Any) -> None:
    """Compare output and gradients with torch."""

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return with_gradients(*inputs, **keywords)

    # Torch's CPU flash kernel loses the sum of a row whose scores are all the lowest float.
    with sdpa_kernel(SDPBackend.MATH):
        expected = function(*tensors)
    actual = on_device(device, function, tensors, cooperative=cooperative)
    for one, reference in zip(actual, expected, strict=True):
        assert one.shape == reference.shape
        assert float((one - reference).norm()) <= WITHIN * max(float(reference.norm()), 1e-3)


@pytest.mark.parametrize("cooperative", [True, False], ids=["fused", "written out"])
@FEW
@given(
    heads=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70), st.sampled_from([4, 8, 20, 36, 64])),
    kind=st.sampled_from(["plain", "causal", "truth", "added"]),
    thin=st.tuples(*[st.booleans()] * 4),
    lead=st.integers(0, 2),
)
def test_any_shape_and_mask(device, cooperative, heads, sizes, kind, thin, lead):  # noqa: PLR0917
    """Single rows, partial tiles, more queries than keys, shared key heads; a mask for all or some
    of the batch, heads, queries and keys."""
    batch, groups, shared = heads
    queries, keys, size = sizes
    operands = [
        drawn(batch, groups * shared, queries, size),
        drawn(batch, groups, keys, size, seed=1),
        drawn(batch, groups, keys, size, seed=2),
        drawn(batch, groups * shared, queries, size, seed=3),
    ]
    if kind in {"truth", "added"}:
        full_shape = (batch, groups * shared, queries, keys)
        shape = [1 if one else size for one, size in zip(thin, full_shape, strict=True)][lead:]
        mask = drawn(*shape, seed=4)
        operands.append(mask > -0.5 if kind == "truth" else mask)
    words = {"is_causal": kind == "causal", "enable_gqa": shared > 1}
    agree(device, *operands, cooperative=cooperative, **words)


@pytest.mark.parametrize("cooperative", [True, False], ids=["fused", "written out"])
@pytest.mark.parametrize("hide", ["truth", "minus infinity", "lowest"])
def test_fully_masked_rows_and_tiles(device, cooperative, hide):
    """A window mask. Zeros where nothing is visible, the mean where all scores are the lowest
    float."""
    visible = torch.ones(2, 1, 70, 100, dtype=torch.bool).tril(2).triu(-5)
    visible[1, 0, :3] = False
    fill = -math.inf if hide == "minus infinity" else torch.finfo(torch.float32).min
    mask = visible if hide == "truth" else torch.zeros(visible.shape).masked_fill(~visible, fill)
    q, k, v, tangent = (drawn(2, 2, n, 8, seed=n) for n in (70, 100, 100, 70))
    expected = functional.scaled_dot_product_attention(q, k, v, mask)
    assert bool((expected[1, :, :3] == 0).all()) == (hide != "lowest")
    agree(device, q, k, v, tangent, mask, cooperative=cooperative)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(slice(1), id="cut out of one"),
        pytest.param(slice(1, None), id="odd", marks=pytest.mark.slow),
    ],
)
def test_operands_are_read_in_place(device, case):
    """Heads cut out of one projection, in aligned vectors of four or not; masks by head, row or
    key."""
    q, k, v = drawn(2, 40, 3, 3, 16).unbind(2)  # (2, 40, 3, 16) each
    tangent = drawn(2, 3, 40, 16, seed=1)
    padded_heads = drawn(2, 3, 40, 19, seed=2)

    def function(packed: torch.Tensor, tangent: torch.Tensor, padded_heads: torch.Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
        odd_heads = padded_heads[..., 3:]
        cases: list[Callable[[], Any]] = [
            lambda: with_gradients(q, k, v, tangent, odd_heads[..., :1] > 0),
            lambda: with_gradients(
                odd_heads, k.mT.contiguous().mT, v, tangent, (padded_heads[:1, :, :1, :1] * 2)
            ),
            lambda: with_gradients(
                q, odd_heads, v, tangent, odd_heads[0, 0] @ odd_heads[0, 0].T > 0, scale=0.5
            ),
        ]
        return tuple(each for case_inputs in cases[case] for each in case_inputs())

    tensors = (torch.stack([q, k, v], 2), tangent, padded_heads)
    actual = on_device(device, function, tensors, cooperative=True)
    for one, expected in zip(actual, function(*tensors), strict=True):
        assert float((one - expected).norm()) <= WITHIN * max(float(expected.norm()), 1e-3)


@pytest.mark.slow
def test_large_heads_with_maxima_that_grow_by_tile(device):
    key = drawn(1, 1, 150, 128) + torch.linspace(0, 3, 150)[:, None]
    query = drawn(1, 2, 10, 128, seed=1).abs()
    value, tangent = drawn(1, 1, 150, 128, seed=2), drawn(1, 2, 10, 128, seed=3)
    agree(device, query, key, value, tangent, enable_gqa=True)


def targets(capture: Capture) -> set[Any]:
    graphs = [capture.graph, *(kind.graph for kind in capture.kinds)]
    return {node.target for graph in graphs for node in graph.graph.nodes}


@pytest.mark.parametrize(
    ("change", "one_piece"),
    [
        ({}, True),
        ({"dropout_p": 0.5}, False),
        ({"size": 6}, False),
        ({"size": 132}, False),
        ({"dims": 3}, False),
        ({"learned": True}, False),
    ],
)
def test_unsupported_attention_is_not_fused(change, one_piece):
    """Dropped weights, odd or large heads, no batch, a learned mask."""
    change = dict(change)
    shape = (2, 3, 5, change.pop("size", 8))[-change.pop("dims", 4) :]
    learned = change.pop("learned", False)

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            mask = mask.requires_grad_(learned)
            return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, **change)

    operands = (drawn(*shape), drawn(5, 5))
    operators = targets(capture_forward(Function(function), operands, {}, fused))
    assert (ATTENTION in operators) == one_piece


def test_custom_attention_formula_is_kept():
    """Gemma 2 caps its scores."""
    config = transformers.Gemma2Config(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.Gemma2ForCausalLM(config)
    arrays = {"input_ids": torch.zeros((2, 8), dtype=torch.int64)}
    capture = capture_forward(model, (), arrays, fused)
    assert len(capture.kinds) == 2
    assert not targets(capture) & ATTENTIONS


def padded_loss(module: nn.Module, arrays: Any) -> torch.Tensor:
    """Texts with padded ends, which a mask hides."""
    logits = module(
        input_ids=arrays["input_ids"], attention_mask=(arrays["labels"] >= 0).long()
    ).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


MODELS: dict[str, Any] = {
    "a padded Qwen3 with LoRA, added masks": (qwen3_with_lora, "eager", padded_loss, text),
    "a BERT, truth values": (bert, "sdpa", class_loss, labeled),
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
    program, trained_gradients = trained(device, job, batch())
    assert_like_the_cpu(module, job.blocks, loss, batch(), trained_gradients)
    repeat = gradients(program, batch(), seed=5)
    program.close()
    assert all(trained_gradients[n].tobytes() == repeat[n].tobytes() for n in trained_gradients)


def assert_fused(module: nn.Module, loss: Any, batch: Batch) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    names = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
    operators = targets(capture_step(module, loss, names, arrays, fused))
    assert operators >= {ATTENTION, ATTENTION_QUERIES, ATTENTION_KEYS}
    assert torch.ops.aten.bmm.default not in operators


def trained(device: Any, job: Any, batch: Batch) -> tuple[CompiledProgram, Any]:
    """As on a GPU."""
    templates = Templates(cooperative=True, matmul=small_tiles)
    program = CompiledProgram(device, job, templates, adds_on_device=True)
    program.check(batch)
    return program, gradients(program, batch)


@pytest.mark.slow
def test_checkpointing_computes_the_same_bits(device):
    results = []
    for checkpoint in (False, True):
        module = llama(attn_implementation="sdpa")
        assert_fused(module, next_token_loss, text())
        if checkpoint:
            module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        job = trainable(module, next_token_loss)
        program, actual = trained(device, job, text())
        results.append(actual)
        program.close()
    assert_like_the_cpu(module, job.blocks, next_token_loss, text(), results[0])
    without_checkpoints, checkpointed = results
    assert all(
        without_checkpoints[n].tobytes() == checkpointed[n].tobytes() for n in without_checkpoints
    )


def step_bytes(length: int, *, cooperative: bool) -> int:
    """Activations and constants of a training step of four small layers."""
    module = llama(layers=4, max_position_embeddings=length)
    names = [name for name, _ in module.named_parameters()]
    batch = text(1, length)
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    templates = Templates(cooperative=cooperative, matmul=small_tiles)
    capture = capture_step(module, next_token_loss, names, arrays, templates.fuses)
    constants = dict(module.named_buffers())
    base = BaseLayout(module, "float32")
    plan = lower_to_plan(capture, base, constants, templates, [[*range(1 + len(names))]])
    sizes = {name: 4 * t.numel() for name, t in [*module.named_parameters(), *constants.items()]}
    memory = estimate(plan, sizes)
    return memory.activations + memory.transfers


@pytest.mark.parametrize("length", [512, pytest.param(2048, marks=pytest.mark.slow)])
def test_memory_grows_with_the_length_but_for_one_mask(length):
    mask = 4 * length**2
    assert step_bytes(length, cooperative=True) < 4 * mask + 4 * length * 4_000
    assert step_bytes(length, cooperative=False) > 16 * mask, "four layers' scores of four heads"


def test_fusing_threshold():
    long = AttentionSizes(2, 16, 4, 2048, 2048, 64)
    assert should_fuse(AttentionSizes(1, 1, 1, 1, 1, 4), cooperative=True)
    assert not should_fuse(AttentionSizes(8, 16, 4, 512, 512, 64), cooperative=False)
    assert should_fuse(long, cooperative=False), "the scores of a layer are 512 MiB"
    endless = AttentionSizes(1, 16, 1, 40_000, 40_000, 64)
    assert not should_fuse(endless, cooperative=False), "its loops would be cut short"
