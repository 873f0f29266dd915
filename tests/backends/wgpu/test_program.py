"""Whole models on the device against torch on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import fx, nn

from backends.base.interface import Batch, BlockGradient, Loss, Trainable
from backends.losses import vocabulary_loss
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.capture.capture import capture_step
from backends.wgpu.device.adapters import adapters
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.device.packing import seed_words, to_words
from backends.wgpu.graph import threefry
from backends.wgpu.graph.values import NoRule, combine_errors
from backends.wgpu.lowering.estimate import FREE_SHARE, Estimate, has_room
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import DataError, DeviceError, SamestepError
from tests.backends.wgpu.small_models import (
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
from worker.tasks.language.causal_lm import token_loss


@pytest.fixture
def compile_program(device) -> Iterator[Any]:
    """Provide a function that compiles a task; its programs are closed after the test."""
    programs: list[CompiledProgram] = []

    def compile_for_device(job: Trainable, example: Batch) -> CompiledProgram:
        kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)
        program = CompiledProgram(device, job, kernel_options, adds_on_device=True)
        programs.append(program)
        program.check(example)
        return program

    yield compile_for_device
    for program in programs:
        program.close()


@pytest.fixture(scope="module")
def llama_program(device) -> Iterator[CompiledProgram]:
    """Provide a program that tests share and must not change, because a capture is slow."""
    yield from _compile_and_close(device, trainable(llama(), next_token_loss), token_batch())


@pytest.fixture(scope="module")
def bert_program(device) -> Iterator[CompiledProgram]:
    """Provide a shared program of a model with dropout."""
    yield from _compile_and_close(device, trainable(bert(dropout=0.1), class_loss), labeled_batch())


def _compile_and_close(device: Any, job: Trainable, example: Batch) -> Iterator[CompiledProgram]:
    kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(device, job, kernel_options, adds_on_device=True)
    program.check(example)
    yield program
    program.close()


def chunked_loss(module: Any, arrays: Any, loss: Any) -> torch.Tensor:
    """Compute the loss with the logits of 7 tokens at a time."""
    with (
        mock.patch.object(vocabulary_loss, "tokens_per_part", return_value=7),
        vocabulary_loss.compute_large_logits_in_parts(module),
    ):
        result: torch.Tensor = loss(module, arrays)
    return result


def transformers_loss(module: Any, arrays: Any) -> torch.Tensor:
    """Return the loss that the model of transformers computes, as a sum."""
    ids, labels = arrays["input_ids"], arrays["labels"]
    result: torch.Tensor = module(
        input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=1, **UNCACHED
    ).loss
    return result


UNCACHED: dict[str, Any] = {"use_cache": False}
MODELS: dict[str, Any] = {
    "Qwen3 with LoRA": (qwen3_with_lora, next_token_loss, token_batch),
    "Llama with tied embeddings": (
        lambda: llama(tie_word_embeddings=True), next_token_loss, token_batch,
    ),
    "BERT": (bert, class_loss, labeled_batch),
    "chunked loss": (
        qwen3_with_lora,
        partial(chunked_loss, loss=partial(token_loss, options=UNCACHED)),
        token_batch,
    ),
    "chunked loss of transformers": (
        llama, partial(chunked_loss, loss=transformers_loss), token_batch,
    ),
    "fused attention": (lambda: llama(attn_implementation="sdpa"), next_token_loss, token_batch),
}  # fmt: skip
SLOW = {"fused attention", "Llama with tied embeddings", "Qwen3 with LoRA"}
"""Models that `test_attention` or `test_split_tables` covers too."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS],
)
def test_gradients_equal_those_of_the_cpu_and_are_reproducible(compile_program, name):
    make_model, loss, make_batch = MODELS[name]
    module = make_model()
    job = trainable(module, loss)
    program = compile_program(job, make_batch())
    first = gradients(program, make_batch())
    repeat = gradients(program, make_batch(), seed=5)  # without dropout the seed has no effect
    assert_equals_cpu(module, job.blocks, loss, make_batch(), first)
    assert all(first[block].tobytes() == repeat[block].tobytes() for block in first)
    last_batch = make_batch(samples=1, length=8)  # another shape
    assert_equals_cpu(module, job.blocks, loss, last_batch, gradients(program, last_batch))


def test_checkpointing_gives_the_same_bits_in_less_memory(compile_program):
    results = []
    for is_checkpointed in (False, True):
        module = llama(layers=4)
        if is_checkpointed:
            module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        program = compile_program(trainable(module, next_token_loss), token_batch())
        results.append((gradients(program, token_batch()), program.estimates[0].activations))
        flags = [getattr(part, "gradient_checkpointing", False) for part in module.modules()]
        assert any(flags) == is_checkpointed, "compiling does not change the model's setting"
    assert re.match(r"[\d.]+ MiB \(weights [\d.]+ MiB, activations ", program.memory)
    (baseline, baseline_bytes), (checkpointed, checkpointed_bytes) = results
    assert all(baseline[block].tobytes() == checkpointed[block].tobytes() for block in baseline)
    assert checkpointed_bytes < 0.7 * baseline_bytes


def test_loaded_values_affect_gradients_and_evaluation(compile_program):
    def evaluate(module: nn.Module, arrays: Any) -> dict[str, float]:
        return {"loss": float(next_token_loss(module, arrays))}

    module = llama()
    job = trainable(module, next_token_loss, evaluate=evaluate)
    program = compile_program(job, token_batch())
    rng = np.random.default_rng(1)
    values = [rng.normal(0, 0.05, block.elements).astype(np.float32) for block in job.blocks]
    before = program.evaluate(token_batch())["loss"]
    program.load(values)
    for array in values:
        array.fill(9.0)  # the program must have copied the values
    after = program.evaluate(token_batch())["loss"]
    (*_, loss) = program.gradients([(token_batch(), 0)])
    assert after != before
    with torch.no_grad():  # the module on the host has the loaded values too
        module.eval()
        assert after == pytest.approx(evaluate(module, to_tensors(token_batch()))["loss"], rel=1e-6)
    assert loss.loss_sum == pytest.approx(after, rel=1e-6)


def test_unsupported_evaluation_is_refused_before_training():
    def evaluate(module: Any, arrays: Any) -> dict[str, float]:
        return {"norm": float(module.lm_head(arrays["input_ids"].float()).norm())}

    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    backend = VulkanBackend()
    with pytest.raises(SamestepError, match="got one that reads its 'lm_head'"):
        backend.compile(
            trainable(llama(), next_token_loss, evaluate=evaluate),
            token_batch(),
            (),
            [token_batch(length=8)],
        )


@pytest.mark.slow
def test_evaluation_that_calls_a_submodule_is_refused(compile_program):
    def evaluate(module: Any, arrays: Any) -> dict[str, float]:
        return {"norm": float(module.lm_head(arrays["input_ids"].float()).norm())}

    program = compile_program(trainable(llama(), next_token_loss, evaluate=evaluate), token_batch())
    with pytest.raises(SamestepError, match="got one that reads its 'lm_head'"):
        program.evaluate(token_batch())


class NestedDropout(nn.Module):
    """Dropout in two layers and around them; the gradients of the scales show the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaleWithDropout() for _ in range(2))
        self.outside = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.outside(x)


class ScaleWithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(40))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x * self.scale)


def test_dropout_masks_equal_those_of_the_host(compile_program):
    """The first seed of a microbatch is for draws outside layers, the others for one layer each."""

    def loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return module(arrays["x"]).sum()

    x = np.ones((3, 40), np.float32)
    batch = Batch({"x": x}, 3.0)
    program = compile_program(trainable(NestedDropout(), loss), batch)
    for seed in (1, 2**63 + 9):
        seeds = seed_words(seed, 3)

        def dropout_mask(number: int, rate: float, seeds: Any = seeds) -> Any:
            words = threefry.words((int(seeds[number, 0]), int(seeds[number, 1])), 0, x.size)
            mask = words >= threefry.threshold(rate)
            return (mask / np.float32(1 - rate)).reshape(x.shape)

        outside, first, second = (
            dropout_mask(0, 0.25), dropout_mask(1, 0.5), dropout_mask(2, 0.5)
        )  # fmt: skip
        after_first_layer = x + first
        actual = gradients(program, batch, seed)
        expected = (outside * second * after_first_layer).sum(0)
        np.testing.assert_allclose(actual[1], expected, rtol=1e-6)
        grad_of_first_layer = outside * (1 + second)
        expected = (grad_of_first_layer * first).sum(0)
        np.testing.assert_allclose(actual[0], expected, rtol=1e-6)


class Stack(nn.Module):
    """Layers that are called in order."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SelectedColumns(nn.Module):
    """A layer whose forward uses a Python list of integers."""

    def __init__(self, columns: list[int]) -> None:
        super().__init__()
        self.columns = columns
        self.scale = nn.Parameter(torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = x[:, self.columns] * self.scale[[1, 2]]
        return x + columns.sum(1, keepdim=True) * torch.tensor([0.5, 1.0, 2.0, 4.0])


@pytest.mark.parametrize("columns", [[[1, -1], [1, -1]], [[1, -1], [0, 2]]])
def test_layers_with_lists_of_integers(compile_program, columns):
    """The lists are equal in both layers, or not."""
    module = Stack(nn.ModuleList(SelectedColumns(each) for each in columns))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    job, batch = trainable(module, sum_of_squares), Batch({"x": x}, 3.0)
    actual = gradients(compile_program(job, batch), batch)
    assert_equals_cpu(module, job.blocks, sum_of_squares, batch, actual)


class WithConstantResult(SelectedColumns):
    """A layer whose second result is a constant."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), torch.ones(4).cumsum(0)


class ConstantStack(Stack):
    """Multiplies by the constant result of each layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, constant = layer(x)
            x = x * constant
        return x


def test_layers_may_return_constants(compile_program):
    module = ConstantStack(nn.ModuleList(WithConstantResult([1, 2]) for _ in range(3)))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    job, batch = trainable(module, sum_of_squares), Batch({"x": x}, 3.0)
    assert_equals_cpu(
        module, job.blocks, sum_of_squares, batch, gradients(compile_program(job, batch), batch)
    )


def test_subtree_uses_one_upload_per_microbatch_and_one_readback_per_block(bert_program, device):
    program, blocks = bert_program, trainable(bert(), class_loss).blocks

    def count_transfers(leaves: int) -> tuple[int, int]:
        uploads, readbacks = device.counts.uploads, device.counts.readbacks
        stream = program.gradients([(labeled_batch(seed=leaf), leaf) for leaf in range(leaves)])
        assert stream.sums is None, "the device adds the sums"
        for _ in stream:
            pass
        return device.counts.uploads - uploads, device.counts.readbacks - readbacks

    for leaves in (2, 5, 8):
        assert count_transfers(leaves) == (leaves, len(blocks))


def test_the_host_adds_sums_without_exact_additions_or_memory(device):
    """Memory suffices if it is unknown (0), or if 5% remain free."""
    job = trainable(llama(), next_token_loss)
    kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)
    inexact = CompiledProgram(device, job, kernel_options, adds_on_device=False)
    assert inexact.gradients([(token_batch(), 0)] * 2).sums is not None
    inexact.close()
    estimates = [Estimate(10, 60, 5, (0, ""))]
    assert has_room(estimates, 20, 100)
    assert not has_room(estimates, 21, 100)
    assert has_room(estimates, 21, 0)


@pytest.mark.slow
def test_memory_of_sums_is_released_for_a_larger_plan(device, monkeypatch):
    """A subtree keeps this memory until its sums are complete."""
    small_batch, large_batch = token_batch(length=8), token_batch(length=30)
    job = trainable(llama(layers=1), next_token_loss)
    kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)

    def new_program() -> CompiledProgram:
        program = CompiledProgram(device, job, kernel_options, adds_on_device=True)
        program.check(small_batch)
        return program

    def run(stream: Any) -> None:
        assert len(list(stream)) >= len(job.blocks)

    measured = new_program()
    measured.check(large_batch)
    memory_bytes = int((measured.estimates[-1].total + 1000) / (1 - FREE_SHARE))
    monkeypatch.setattr(device, "adapter", replace(device.adapter, memory_bytes=memory_bytes))
    program = new_program()
    subtree = program.gradients([(small_batch, 0), (small_batch, 1)])
    assert subtree.sums is None, "the device adds the sums"
    run(subtree)
    run(program.gradients([(large_batch, 0)]))
    assert program.gradients([(small_batch, 0), (small_batch, 1)]).sums is not None
    assert program._sums is not None
    assert not program._sums.reserved_bytes
    second_program = new_program()
    with pytest.raises(DeviceError, match="needs the memory that holds the sums"):
        run(second_program.gradients([(small_batch, 0), (large_batch, 1)]))
    for each in (measured, program, second_program):
        each.close()


def test_microbatch_uses_one_upload_and_one_readback_per_block(bert_program, device):
    gradients(bert_program, labeled_batch())
    uploads, readbacks = device.counts.uploads, device.counts.readbacks
    gradients(bert_program, labeled_batch(seed=1))
    assert device.counts.uploads - uploads == 1
    assert device.counts.readbacks - readbacks == len(trainable(bert(), class_loss).blocks)


def test_gradients_arrive_before_backward_of_earlier_blocks(compile_program, device):
    """When the first gradient arrives, submissions for half of the blocks are still to come."""
    job = trainable(llama(layers=8), next_token_loss)
    program = compile_program(job, token_batch())
    gradients(program, token_batch())
    for leaves in (1, 2):
        submissions_before = device.counts.submissions
        stream = program.gradients([(token_batch(), leaf) for leaf in range(leaves)])
        for _ in range(leaves):
            next(stream)
            first_submissions = device.counts.submissions - submissions_before
            for _ in job.blocks[1:]:
                next(stream)
            all_submissions = device.counts.submissions - submissions_before
            assert first_submissions <= all_submissions - len(job.blocks) // 2
            submissions_before = device.counts.submissions
        assert isinstance(next(stream), Loss)


def test_gradients_arrive_in_reverse_order_of_blocks_and_the_loss_last(llama_program):
    blocks = trainable(llama(), next_token_loss).blocks
    items = list(llama_program.gradients([(token_batch(), 0)]))
    numbers = [item.block for item in items if isinstance(item, BlockGradient)]
    assert numbers == list(reversed(range(len(blocks))))
    assert len(blocks) > 2
    assert isinstance(items[-1], Loss)


class NestedSort(nn.Module):
    """Sorts in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Sort())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Sort(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(-1).values


class Branching(nn.Linear):
    """Branches on a tensor's value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class CallCounter(nn.Linear):
    """Counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class WithBatchNorm(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.norm = nn.BatchNorm1d(4)


class WithGradientHook(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.register_hook(lambda gradient: 2 * gradient)


class Lookup(nn.Module):
    """A table with these options; by default lookup counts divide its gradients."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 4, **(options or {"scale_grad_by_freq": True}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows((x > 0).long()[:, 0])


def sum_of_squares(module: nn.Module, arrays: Any) -> torch.Tensor:
    return (module(arrays["x"]) ** 2).sum()


@pytest.mark.parametrize(
    ("module", "loss", "message"),
    [
        (NestedSort, sum_of_squares, r"no rule for 'sort.default', .* shape \[2, 4\] in inner.1"),
        (lambda: Branching(4, 4), sum_of_squares, "cannot capture .*reads a tensor's value"),
        (CallCounter, sum_of_squares, "changes in forward"),
        (WithBatchNorm, sum_of_squares, "running statistics"),
        (WithGradientHook, sum_of_squares, "'weight' has a hook on its gradient"),
        (Lookup, sum_of_squares, "divides gradients by how often"),
        (lambda: Lookup(sparse=True), sum_of_squares, "'rows' has sparse .*leave out sparse=True"),
        (
            lambda: nn.Linear(4, 4),
            lambda m, a: sum_of_squares(m, a) / len(a["x"]),
            "summed over samples",
        ),
        (lambda: nn.Linear(4, 4), lambda m, a: m(a["x"]).sum(1), "one sum"),
        (lambda: nn.Linear(4, 4).half(), sum_of_squares, "got torch.float16"),
        (lambda: nn.Linear(4, 4).double(), sum_of_squares, "got torch.float64"),
    ],
)
def test_unsupported_modules_are_refused_before_training(compile_program, module, loss, message):
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    with pytest.raises(SamestepError, match=message):
        compile_program(trainable(module(), loss), Batch({"x": x}, 2.0))


def noisy_loss(module: nn.Module, arrays: Any) -> torch.Tensor:
    return ((module(arrays["x"]) - torch.randn_like(arrays["x"])) ** 2).sum()


def gradient_penalty(module: nn.Module, arrays: Any) -> torch.Tensor:
    x = arrays["x"].requires_grad_()
    return (torch.autograd.grad(module(x).sum(), x, create_graph=True)[0] ** 2).sum()


def test_a_loss_may_draw_or_differentiate(compile_program):
    """An evaluation may not differentiate, as it receives only outputs of the device."""
    x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)

    def evaluate(module: Any, arrays: Any) -> dict[str, float]:
        return {"penalty": float(gradient_penalty(module, arrays))}

    for loss in (noisy_loss, gradient_penalty):
        job = trainable(nn.Linear(4, 4), loss, evaluate=evaluate)
        program = compile_program(job, Batch({"x": x}, 4.0))
        assert program.gradients_of(Batch({"x": x}, 4.0), 1)["weight"].any()
        with pytest.raises(SamestepError, match="got a derivative with respect"):
            program.evaluate(Batch({"x": x}, 4.0))


class UnsupportedOperators(nn.Module):
    """Uses several operators without a rule, and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).cummax(-1).values
        for _ in range(2):
            x = x.sort(-1).values
        return x.cummin(-1).values


def test_all_operators_without_a_rule_are_named_once(compile_program):
    """They occur in repeated layers, which are lowered separately, and in the code around them."""
    module = nn.Sequential(
        UnsupportedOperators(), UnsupportedOperators(), nn.Sequential(nn.Linear(4, 4), Sort())
    )
    x = np.ones((2, 4), np.float32)

    def median_loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return module(arrays["x"]).median(-1).values.sum()

    with pytest.raises(SamestepError) as error:
        compile_program(trainable(module, median_loss), Batch({"x": x}, 2.0))
    message = str(error.value)
    for operator in ("cummax.default", "sort.default", "cummin.default", "median.dim"):
        assert message.count(f"'{operator}'") == 1
    assert "which gives shape [2, 4] in 0; nor for 'sort.default'" in message
    assert message.endswith("; use a cpu or cuda worker for this model")
    assert "\n" not in message


class WeightNorm(nn.Module):
    """Computes weight norm in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.g * self.v / self.v.norm(dim=1, keepdim=True)
        return nn.functional.linear(x, weight)


class Spectrum(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(super().forward(x)).abs()


def test_refusals_suggest_replacements(compile_program):
    batch = Batch({"x": np.ones((2, 4), np.float32)}, 2.0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(SamestepError, match=r"compute weight norm in forward.* or use a cpu"):
        compile_program(trainable(normed, sum_of_squares), batch)
    compile_program(trainable(WeightNorm(), sum_of_squares), batch)
    with pytest.raises(SamestepError, match="compute Fourier transforms where the batch"):
        compile_program(trainable(Spectrum(4, 4), sum_of_squares), batch)


def test_many_operators_without_a_rule_are_named_in_part():
    """Only eight are named."""
    functions = (
        str.lower, str.upper, str.title, str.strip, str.split, str.join, str.find, str.index,
        str.count, str.format,
    )  # fmt: skip
    graph = fx.Graph()
    nodes = [graph.call_function(function) for function in functions]
    message = str(combine_errors([NoRule(node) for node in nodes]))
    assert message.count("<") == 8
    assert "and 2 more; use" in message


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_module_is_refused_in_one_line(compile_program):
    job, x = trainable(nn.Sequential(nn.Linear(4, 4)), sum_of_squares), np.ones((2, 4), np.float32)
    scripted: Any = torch.jit.script(job.module)
    with pytest.raises(SamestepError, match=r"torch\.jit\.script; pass the nn"):
        compile_program(replace(job, module=scripted), Batch({"x": x}, 2.0))


def test_a_float64_input_is_refused_by_name(compile_program):
    with pytest.raises(
        SamestepError, match=r"in the batch's input 'x', got float64; .*\.float\(\)"
    ):
        compile_program(
            trainable(nn.Linear(4, 4), sum_of_squares), Batch({"x": np.ones((2, 4))}, 2.0)
        )


def test_a_scalar_in_a_batch_is_an_input(compile_program):
    job = trainable(nn.Linear(4, 4), lambda m, a: sum_of_squares(m, a) * a["scale"])
    x = np.ones((2, 4), np.float32)
    half_batch, full_batch = (
        Batch({"x": x, "scale": np.array(scale, np.float32)}, 2.0) for scale in (0.5, 1.0)
    )
    program = compile_program(job, half_batch)
    *_, half_loss = program.gradients([(half_batch, 0)])
    *_, full_loss = program.gradients([(full_batch, 0)])
    assert full_loss.loss_sum == 2 * half_loss.loss_sum


def test_a_microbatch_without_samples_gives_zeros(compile_program):
    job = trainable(nn.Linear(4, 4), sum_of_squares)
    program = compile_program(job, Batch({"x": np.ones((2, 4), np.float32)}, 2.0))
    *blocks, loss = program.gradients([(Batch({"x": np.ones((0, 4), np.float32)}, 0.0), 0)])
    assert all(not item.values.any() for item in blocks)
    assert loss == Loss(0.0, 0.0)


def test_token_ids_beyond_the_vocabulary_or_32_bits_are_refused(llama_program):
    batch = token_batch()
    batch.arrays["input_ids"][0, 0] = 2**40
    with pytest.raises(
        DataError, match=r"'input_ids' has 1099511627776 at \[0, 0\], .* expected 0 to 96"
    ):
        llama_program.gradients([(batch, 0)])
    with pytest.raises(DataError, match="32 bits in input_ids"):
        to_words(batch.arrays["input_ids"], "input_ids")


@pytest.mark.parametrize(
    "module", [Branching(4, 4), nn.Sequential(Branching(4, 4)), nn.Sequential(nn.Linear(4, 4))]
)
def test_the_line_that_cannot_be_captured_is_named(module):
    """In the model, in a submodule, or in the loss if the model is one linear layer."""
    is_in_loss = isinstance(module, nn.Sequential) and type(module[0]) is nn.Linear

    def loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        y = module(arrays["x"]).sum()
        return y if not is_in_loss or y.item() else -y

    code = loss.__code__ if is_in_loss else Branching.forward.__code__
    line = code.co_firstlineno + (2 if is_in_loss else 1)
    name = next(name for name, _ in module.named_parameters())
    with pytest.raises(SamestepError, match=rf" in test_program\.py, line {line}: it reads a"):
        capture_step(module, loss, [name], {"x": torch.ones(2, 4)})


def to_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array) for name, array in batch.arrays.items()}


def packed_sequence(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    lengths = x[:, 0, 0].long() + 1
    return nn.utils.rnn.pack_padded_sequence(layer(x), lengths, batch_first=True).data


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda layer, x: layer(x) * float(x.mean()), r"reads a tensor's value, as \.item\(\)"),
        (lambda layer, x: layer(x)[x > 0], "a shape depends on a tensor's values"),
        (packed_sequence, "it packs sequences; pad them instead"),
    ],
)
def test_capture_error_states_the_reason(function, message):
    def loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return function(module, arrays["x"].requires_grad_()).sum()

    with pytest.raises(SamestepError, match=message) as error:
        capture_step(nn.Linear(4, 4), loss, ["weight"], {"x": torch.ones(2, 3, 4)})
    assert str(error.value).endswith("use a cpu or cuda worker for this model")
    assert "\n" not in str(error.value)


def test_a_loss_may_change_its_batch_in_place(compile_program):
    def in_place_loss(module, arrays):
        arrays["x"].add_(1.0)
        arrays["y"][:, 0].mul_(0.5)
        return ((module(arrays["x"]) - arrays["y"]) ** 2).sum()

    values = np.linspace(-1, 1, 4, dtype=np.float32)[:, None]
    batch = Batch({"x": values, "y": values.copy()}, 4)
    program = compile_program(trainable(nn.Linear(1, 1), in_place_loss), batch)
    first, repeat = (dict(program.gradients_of(batch, 0)) for _ in range(2))
    unchanged = np.linspace(-1, 1, 4, dtype=np.float32)[:, None]
    assert np.array_equal(batch.arrays["x"], unchanged)
    with torch.no_grad():
        weight, bias = (program._weights.module.get_parameter(n) for n in ("weight", "bias"))
        x = torch.tensor(values)
        expected = (((x + 1) * weight + bias - 0.5 * x) ** 2).sum()
    assert first[""] == repeat[""] == pytest.approx(float(expected), rel=1e-5)
