"""Whole models on the device against torch's CPU."""

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
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import DataError, DeviceError, SamestepError
from tests.backends.wgpu.small_models import (
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
from worker.tasks.language.causal_lm import token_loss


@pytest.fixture
def compiled(device) -> Iterator[Any]:
    programs: list[CompiledProgram] = []

    def compile_(job: Trainable, example: Batch) -> CompiledProgram:
        template = Templates(not device.adapter.software, MatmulTuner(device).shader)
        program = CompiledProgram(device, job, template, adds_on_device=True)
        programs.append(program)
        program.check(example)
        return program

    yield compile_
    for program in programs:
        program.close()


@pytest.fixture(scope="module")
def of_a_llama(device) -> Iterator[CompiledProgram]:
    """Shared by tests that do not change it, because a capture takes longer than a step."""
    yield from _compiled(device, trainable(llama(), next_token_loss), text())


@pytest.fixture(scope="module")
def of_a_bert(device) -> Iterator[CompiledProgram]:
    """The same, with dropout."""
    yield from _compiled(device, trainable(bert(dropout=0.1), class_loss), labeled())


def _compiled(device: Any, job: Trainable, example: Batch) -> Iterator[CompiledProgram]:
    template = Templates(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(device, job, template, adds_on_device=True)
    program.check(example)
    yield program
    program.close()


def in_parts(module: Any, arrays: Any, loss: Any) -> torch.Tensor:
    """The loss, of 7 tokens at a time."""
    with (
        mock.patch.object(vocabulary_loss, "tokens_per_part", return_value=7),
        vocabulary_loss.compute_large_logits_in_parts(module),
    ):
        result: torch.Tensor = loss(module, arrays)
    return result


def transformers_loss(module: Any, arrays: Any) -> torch.Tensor:
    """The model's own, as a sum."""
    ids, labels = arrays["input_ids"], arrays["labels"]
    result: torch.Tensor = module(
        input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=1, **UNCACHED
    ).loss
    return result


UNCACHED: dict[str, Any] = {"use_cache": False}
MODELS: dict[str, Any] = {
    "a Qwen3 with LoRA": (qwen3_with_lora, next_token_loss, text),
    "a Llama whose embeddings are its head": (
        lambda: llama(tie_word_embeddings=True), next_token_loss, text,
    ),
    "a BERT, embeddings too": (bert, class_loss, labeled),
    "a loss of a few tokens at a time": (
        qwen3_with_lora, partial(in_parts, loss=partial(token_loss, options=UNCACHED)), text,
    ),
    "a loss of transformers, a few tokens at a time": (
        llama, partial(in_parts, loss=transformers_loss), text,
    ),
    "fused attention": (lambda: llama(attn_implementation="sdpa"), next_token_loss, text),
}  # fmt: skip
LIKE_OTHERS = (
    "fused attention", "a Llama whose embeddings are its head", "a Qwen3 with LoRA",
)  # fmt: skip
"""Also used in test_attention and test_split_tables."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in LIKE_OTHERS else []) for n in MODELS],
)
def test_gradients_are_those_of_the_cpu_and_the_same_again(compiled, name):
    make_model, loss, batch = MODELS[name]
    module = make_model()
    job = trainable(module, loss)
    program = compiled(job, batch())
    first = gradients(program, batch())
    repeat = gradients(program, batch(), seed=5)
    assert_like_the_cpu(module, job.blocks, loss, batch(), first)
    assert all(first[n].tobytes() == repeat[n].tobytes() for n in first)
    # A shorter last microbatch of another length.
    other = batch(samples=1, length=8)
    assert_like_the_cpu(module, job.blocks, loss, other, gradients(program, other))


def test_checkpointing_gives_the_same_bits_in_less_memory(compiled):
    results = []
    for checkpoint in (False, True):
        module = llama(layers=4)
        if checkpoint:
            module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        program = compiled(trainable(module, next_token_loss), text())
        results.append((gradients(program, text()), program.estimates[0].activations))
        assert any(getattr(m, "gradient_checkpointing", False) for m in module.modules()) == (
            checkpoint
        )
    assert re.match(r"[\d.]+ MiB \(weights [\d.]+ MiB, activations ", program.memory)
    (baseline, baseline_bytes), (checkpointed, checkpointed_bytes) = results
    assert all(baseline[n].tobytes() == checkpointed[n].tobytes() for n in baseline)
    assert checkpointed_bytes < 0.7 * baseline_bytes


def test_loaded_values_take_effect_and_evaluation_runs_on_the_device(compiled):
    def evaluate(module: nn.Module, arrays: Any) -> dict[str, float]:
        return {"loss": float(next_token_loss(module, arrays))}

    module = llama()
    job = trainable(module, next_token_loss, evaluate=evaluate)
    program = compiled(job, text())
    draws = np.random.default_rng(1)
    values = [draws.normal(0, 0.05, block.elements).astype(np.float32) for block in job.blocks]
    before = program.evaluate(text())["loss"]
    program.load(values)
    for array in values:
        array.fill(9.0)
    after = program.evaluate(text())["loss"]
    (*_, loss) = program.gradients([(text(), 0)])
    assert after != before
    with torch.no_grad():  # the host's copy has the values too
        module.eval()
        assert after == pytest.approx(evaluate(module, _tensors(text()))["loss"], rel=1e-6)
    assert loss.loss_sum == pytest.approx(after, rel=1e-6)


def test_unsupported_evaluation_is_refused_before_training():
    """Evaluation is compiled before training starts."""

    def evaluate(module: Any, arrays: Any) -> dict[str, float]:
        return {"norm": float(module.lm_head(arrays["input_ids"].float()).norm())}

    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    backend = VulkanBackend()
    with pytest.raises(SamestepError, match="got one that reads its 'lm_head'"):
        backend.compile(
            trainable(llama(), next_token_loss, evaluate=evaluate), text(), (), [text(length=8)]
        )


@pytest.mark.slow
def test_evaluation_with_parts_of_the_model_is_refused(compiled):
    def evaluate(module: Any, arrays: Any) -> dict[str, float]:
        return {"norm": float(module.lm_head(arrays["input_ids"].float()).norm())}

    program = compiled(trainable(llama(), next_token_loss, evaluate=evaluate), text())
    with pytest.raises(SamestepError, match="got one that reads its 'lm_head'"):
        program.evaluate(text())


class Dropped(nn.Module):
    """Layers whose gradient shows the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(2))
        self.outside = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.outside(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(40))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x * self.scale)


def test_dropout_equals_the_host_for_each_seed(compiled):
    def loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return module(arrays["x"]).sum()

    x = np.ones((3, 40), np.float32)
    batch = Batch({"x": x}, 3.0)
    program = compiled(trainable(Dropped(), loss), batch)
    for seed in (1, 2**63 + 9):
        words = seed_words(seed, 3)

        def noise(number: int, drop: float, words: Any = words) -> Any:
            bits = threefry.words((int(words[number, 0]), int(words[number, 1])), 0, 120)
            is_kept = bits >= threefry.threshold(drop)
            return (is_kept / np.float32(1 - drop)).reshape(3, 40)

        outside, first, second = noise(0, 0.25), noise(1, 0.5), noise(2, 0.5)
        after_first = x + first
        actual = gradients(program, batch, seed)
        np.testing.assert_allclose(actual[1], (outside * second * after_first).sum(0), rtol=1e-6)
        tangent = outside * (1 + second)
        np.testing.assert_allclose(actual[0], (tangent * first).sum(0), rtol=1e-6)


class Stacked(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Picking(nn.Module):
    """A layer whose forward uses integers that no input holds."""

    def __init__(self, columns: list[int]) -> None:
        super().__init__()
        self.columns = columns
        self.scale = nn.Parameter(torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = x[:, self.columns] * self.scale[[1, 2]]
        return x + columns.sum(1, keepdim=True) * torch.tensor([0.5, 1.0, 2.0, 4.0])


@pytest.mark.parametrize("columns", [[[1, -1], [1, -1]], [[1, -1], [0, 2]]])
def test_layers_with_their_own_integers(compiled, columns):
    """Lists of integers, equal in both layers or not."""
    module = Stacked(nn.ModuleList(Picking(each) for each in columns))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    job, batch = trainable(module, total), Batch({"x": x}, 3.0)
    values_by_block = gradients(compiled(job, batch), batch)
    assert_like_the_cpu(module, job.blocks, total, batch, values_by_block)


class Counted(Picking):
    """A layer with one constant result."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), torch.ones(4).cumsum(0)


class Constants(Stacked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, constant = layer(x)
            x = x * constant
        return x


def test_layers_that_give_constants(compiled):
    module = Constants(nn.ModuleList(Counted([1, 2]) for _ in range(3)))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    job, batch = trainable(module, total), Batch({"x": x}, 3.0)
    assert_like_the_cpu(module, job.blocks, total, batch, gradients(compiled(job, batch), batch))


def test_subtree_uses_one_upload_per_microbatch_and_one_readback_per_block(of_a_bert, device):
    program, blocks = of_a_bert, trainable(bert(), class_loss).blocks

    def node(leaves: int) -> tuple[int, int]:
        before = (device.counts.uploads, device.counts.readbacks)
        stream = program.gradients([(labeled(seed=leaf), leaf) for leaf in range(leaves)])
        assert stream.sums is None, "added on the device"
        for _ in stream:
            pass
        return device.counts.uploads - before[0], device.counts.readbacks - before[1]

    for leaves in (2, 5, 8):
        assert node(leaves) == (leaves, len(blocks))


def test_sums_are_added_on_the_host_without_room_or_exactness(device):
    job = trainable(llama(), next_token_loss)
    template = Templates(not device.adapter.software, MatmulTuner(device).shader)
    inexact = CompiledProgram(device, job, template, adds_on_device=False)
    assert inexact.gradients([(text(), 0)] * 2).sums is not None
    inexact.close()
    memory = [Estimate(10, 60, 5, (0, ""))]
    assert has_room(memory, 20, 100)
    assert not has_room(memory, 21, 100)
    assert has_room(memory, 21, 0)


@pytest.mark.slow
def test_held_sums_yield_memory_to_a_plan(device, monkeypatch):
    small, large_batch = text(length=8), text(length=30)
    job = trainable(llama(layers=1), next_token_loss)
    template = Templates(not device.adapter.software, MatmulTuner(device).shader)

    def program() -> CompiledProgram:
        made = CompiledProgram(device, job, template, adds_on_device=True)
        made.check(small)
        return made

    def run(stream: Any) -> None:
        assert len(list(stream)) >= len(job.blocks)

    plain = program()
    plain.check(large_batch)
    room = int((plain.estimates[-1].total + 1000) / (1 - FREE_SHARE))
    monkeypatch.setattr(device, "adapter", replace(device.adapter, memory_bytes=room))
    between = program()
    node = between.gradients([(small, 0), (small, 1)])
    assert node.sums is None
    run(node)
    run(between.gradients([(large_batch, 0)]))
    assert between.gradients([(small, 0), (small, 1)]).sums is not None
    assert between._sums is not None
    assert not between._sums.reserved_bytes
    within = program()
    with pytest.raises(DeviceError, match="needs the memory that holds the sums"):
        run(within.gradients([(small, 0), (large_batch, 1)]))
    for each in (plain, between, within):
        each.close()


def test_one_upload_and_one_readback_per_block_for_a_microbatch(of_a_bert, device):
    gradients(of_a_bert, labeled())
    before = (device.counts.uploads, device.counts.readbacks)
    gradients(of_a_bert, labeled(seed=1))
    assert device.counts.uploads - before[0] == 1
    assert device.counts.readbacks - before[1] == len(trainable(bert(), class_loss).blocks)


def test_block_arrives_before_backward_of_earlier_blocks(compiled, device):
    job = trainable(llama(layers=8), next_token_loss)
    program = compiled(job, text())
    gradients(program, text())
    for leaves in (1, 2):
        before = device.counts.submissions
        stream = program.gradients([(text(), leaf) for leaf in range(leaves)])
        for _ in range(leaves):
            next(stream)
            submissions = device.counts.submissions - before
            for _ in job.blocks[1:]:
                next(stream)
            assert submissions <= device.counts.submissions - before - len(job.blocks) // 2
            before = device.counts.submissions
        assert isinstance(next(stream), Loss)


def test_blocks_come_in_reverse_order_and_the_loss_last(of_a_llama):
    blocks = trainable(llama(), next_token_loss).blocks
    items = list(of_a_llama.gradients([(text(), 0)]))
    numbers = [item.block for item in items if isinstance(item, BlockGradient)]
    assert numbers == list(reversed(range(len(blocks))))
    assert len(blocks) > 2
    assert isinstance(items[-1], Loss)


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Sorting())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Sorting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(-1).values


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Counting(nn.Linear):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Normed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.norm = nn.BatchNorm1d(4)


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.register_hook(lambda gradient: 2 * gradient)


class CountedRows(nn.Module):
    """Rows whose gradients are divided by their lookup counts, or other rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 4, **(options or {"scale_grad_by_freq": True}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows((x > 0).long()[:, 0])


def total(module: nn.Module, arrays: Any) -> torch.Tensor:
    return (module(arrays["x"]) ** 2).sum()


@pytest.mark.parametrize(
    ("module", "loss", "message"),
    [
        (Sorted, total, r"no rule for 'sort.default', .* shape \[2, 4\] in inner.1"),
        (lambda: Branching(4, 4), total, "cannot capture .*reads a tensor's value"),
        (Counting, total, "changes in forward"),
        (Normed, total, "running statistics"),
        (Hooked, total, "'weight' has a hook on its gradient"),
        (CountedRows, total, "divides gradients by how often"),
        (lambda: CountedRows(sparse=True), total, "'rows' has sparse .*leave out sparse=True"),
        (lambda: nn.Linear(4, 4), lambda m, a: total(m, a) / len(a["x"]), "summed over samples"),
        (lambda: nn.Linear(4, 4), lambda m, a: m(a["x"]).sum(1), "one sum"),
        (lambda: nn.Linear(4, 4).half(), total, "got torch.float16"),
        (lambda: nn.Linear(4, 4).double(), total, "got torch.float64"),
    ],
)
def test_unsupported_modules_are_refused_before_training(compiled, module, loss, message):
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    with pytest.raises(SamestepError, match=message):
        compiled(trainable(module(), loss), Batch({"x": x}, 2.0))


def noisy(module: nn.Module, arrays: Any) -> torch.Tensor:
    return ((module(arrays["x"]) - torch.randn_like(arrays["x"])) ** 2).sum()


def steep(module: nn.Module, arrays: Any) -> torch.Tensor:
    x = arrays["x"].requires_grad_()
    return (torch.autograd.grad(module(x).sum(), x, create_graph=True)[0] ** 2).sum()


def test_losses_that_draw_or_differentiate_are_trained(compiled):
    """An evaluation may not differentiate: it has only the device's outputs."""
    x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    for loss in (noisy, steep):
        job = trainable(nn.Linear(4, 4), loss, evaluate=lambda m, a: {"steep": float(steep(m, a))})
        program = compiled(job, Batch({"x": x}, 4.0))
        assert program.gradients_of(Batch({"x": x}, 4.0), 1)["weight"].any()
        with pytest.raises(SamestepError, match="got a derivative with respect"):
            program.evaluate(Batch({"x": x}, 4.0))


class Folding(nn.Module):
    """Like `Sorting`, with further operators that have no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).cummax(-1).values
        for _ in range(2):
            x = x.sort(-1).values
        return x.cummin(-1).values


def test_all_operators_without_a_rule_are_named_once(compiled):
    """From repeated layers, which are lowered one by one, and from the code around them."""
    module = nn.Sequential(Folding(), Folding(), nn.Sequential(nn.Linear(4, 4), Sorting()))
    x = np.ones((2, 4), np.float32)

    def unfolded(module: nn.Module, arrays: Any) -> torch.Tensor:
        return module(arrays["x"]).median(-1).values.sum()

    with pytest.raises(SamestepError) as error:
        compiled(trainable(module, unfolded), Batch({"x": x}, 2.0))
    text = str(error.value)
    for operator in ("cummax.default", "sort.default", "cummin.default", "median.dim"):
        assert text.count(f"'{operator}'") == 1
    assert "which gives shape [2, 4] in 0; nor for 'sort.default'" in text
    assert text.endswith("; use a cpu or cuda worker for this model")
    assert "\n" not in text


class Normalizing(nn.Module):
    """The computation of torch's weight norm, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.g * self.v / self.v.norm(dim=1, keepdim=True)
        return nn.functional.linear(x, weight)


class Spectrum(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(super().forward(x)).abs()


def test_refusal_suggests_replacement_operators(compiled):
    batch = Batch({"x": np.ones((2, 4), np.float32)}, 2.0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(SamestepError, match=r"compute weight norm in forward.* or use a cpu"):
        compiled(trainable(normed, total), batch)
    compiled(trainable(Normalizing(), total), batch)
    with pytest.raises(SamestepError, match="compute Fourier transforms where the batch"):
        compiled(trainable(Spectrum(4, 4), total), batch)


def test_many_operators_without_a_rule_are_named_in_part():
    unknown = (str.lower, str.upper, str.title, str.strip, str.split, str.join, str.find, str.index)
    graph = fx.Graph()
    nodes = [graph.call_function(each) for each in (*unknown, str.count, str.format)]
    text = str(combine_errors([NoRule(node) for node in nodes]))
    assert text.count("<") == 8
    assert "and 2 more; use" in text


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_module_is_refused_in_one_line(compiled):
    job, x = trainable(nn.Sequential(nn.Linear(4, 4)), total), np.ones((2, 4), np.float32)
    scripted: Any = torch.jit.script(job.module)
    with pytest.raises(SamestepError, match=r"torch\.jit\.script; pass the nn"):
        compiled(replace(job, module=scripted), Batch({"x": x}, 2.0))


def test_a_batch_in_float64_is_refused_by_its_input(compiled):
    with pytest.raises(
        SamestepError, match=r"in the batch's input 'x', got float64; .*\.float\(\)"
    ):
        compiled(trainable(nn.Linear(4, 4), total), Batch({"x": np.ones((2, 4))}, 2.0))


def test_scalar_in_a_batch_applies_to_all_samples(compiled):
    job = trainable(nn.Linear(4, 4), lambda m, a: total(m, a) * a["t"])
    x = np.ones((2, 4), np.float32)
    program = compiled(job, Batch({"x": x, "t": np.array(0.5, np.float32)}, 2.0))
    *_, half = program.gradients([(Batch({"x": x, "t": np.array(0.5, np.float32)}, 2.0), 0)])
    *_, full_batch = program.gradients([(Batch({"x": x, "t": np.array(1.0, np.float32)}, 2.0), 0)])
    assert full_batch.loss_sum == 2 * half.loss_sum


def test_a_microbatch_without_samples_counts_as_zeros(compiled):
    job = trainable(nn.Linear(4, 4), total)
    program = compiled(job, Batch({"x": np.ones((2, 4), np.float32)}, 2.0))
    *blocks, loss = program.gradients([(Batch({"x": np.ones((0, 4), np.float32)}, 0.0), 0)])
    assert all(not item.values.any() for item in blocks)
    assert loss == Loss(0.0, 0.0)


def test_numbers_that_do_not_fit_in_32_bits_are_refused(of_a_llama):
    batch = text()
    batch.arrays["input_ids"][0, 0] = 2**40
    with pytest.raises(
        DataError, match=r"'input_ids' has 1099511627776 at \[0, 0\], .* expected 0 to 96"
    ):
        of_a_llama.gradients([(batch, 0)])
    with pytest.raises(DataError, match="32 bits in input_ids"):
        to_words(batch.arrays["input_ids"], "input_ids")


@pytest.mark.parametrize(
    "module", [Branching(4, 4), nn.Sequential(Branching(4, 4)), nn.Sequential(nn.Linear(4, 4))]
)
def test_the_line_that_cannot_be_captured_is_named(module):
    """In the model itself, in a part of it, and in the loss."""
    of_the_loss = type(module[0]) is nn.Linear if isinstance(module, nn.Sequential) else False

    def loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        y = module(arrays["x"]).sum()
        return y if not of_the_loss or y.item() else -y

    code = loss.__code__ if of_the_loss else Branching.forward.__code__
    line = code.co_firstlineno + (2 if of_the_loss else 1)
    name = next(name for name, _ in module.named_parameters())
    with pytest.raises(SamestepError, match=rf" in test_program\.py, line {line}: it reads a"):
        capture_step(module, loss, [name], {"x": torch.ones(2, 4)})


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array) for name, array in batch.arrays.items()}


def _packed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    lengths = x[:, 0, 0].long() + 1
    return nn.utils.rnn.pack_padded_sequence(layer(x), lengths, batch_first=True).data


@pytest.mark.parametrize(
    ("function", "expected_text"),
    [
        (lambda layer, x: layer(x) * float(x.mean()), r"reads a tensor's value, as \.item\(\)"),
        (lambda layer, x: layer(x)[x > 0], "a shape depends on a tensor's values"),
        (_packed, "it packs sequences; pad them instead"),
    ],
)
def test_capture_error_quotes_the_user_s_code(function, expected_text):
    def loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return function(module, arrays["x"].requires_grad_()).sum()

    with pytest.raises(SamestepError, match=expected_text) as error:
        capture_step(nn.Linear(4, 4), loss, ["weight"], {"x": torch.ones(2, 3, 4)})
    assert str(error.value).endswith("use a cpu or cuda worker for this model")
    assert "\n" not in str(error.value)


def test_a_loss_may_change_its_batch_in_place(compiled):
    def in_place(module, arrays):
        arrays["x"].add_(1.0)
        arrays["y"][:, 0].mul_(0.5)
        return ((module(arrays["x"]) - arrays["y"]) ** 2).sum()

    values = np.linspace(-1, 1, 4, dtype=np.float32)[:, None]
    batch = Batch({"x": values, "y": values.copy()}, 4)
    program = compiled(trainable(nn.Linear(1, 1), in_place), batch)
    first, repeat = (dict(program.gradients_of(batch, 0)) for _ in range(2))
    assert np.array_equal(batch.arrays["x"], np.linspace(-1, 1, 4, dtype=np.float32)[:, None])
    with torch.no_grad():
        weight, bias = (program._weights.module.get_parameter(n) for n in ("weight", "bias"))
        x = torch.tensor(values)
        expected = (((x + 1) * weight + bias - 0.5 * x) ** 2).sum()
    assert first[""] == repeat[""] == pytest.approx(float(expected), rel=1e-5)
