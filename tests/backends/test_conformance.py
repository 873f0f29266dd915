"""Requirements on every backend, tested with a small model on each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch, BlockAdded, BlockGradient, Loss, Program, Trainable
from backends.base.subtree_gradients import HostSums, SubtreeGradients
from backends.registry import choose
from backends.wgpu.device.adapters import adapters
from protocol.base.errors import SamestepError
from protocol.exact.reduction.absent import is_absent
from protocol.spec.manifest import Block, TensorSpec
from tests.tested_backend import BACKEND

BACKENDS = ["scripted", "vulkan", *sorted({"cpu", BACKEND})]
WIDTH = 6


class SmallModel(nn.Module):
    """A model with tied first and last layers, a layer that forward leaves out, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        y: torch.Tensor = self.last(x)
        return y


def squared_error(module: nn.Module, arrays: Any) -> torch.Tensor:
    error: torch.Tensor = module(arrays["x"]) - arrays["y"]
    return (error**2).sum()


def blocks_of(module: nn.Module) -> tuple[Block, ...]:
    """Make one block for each module that owns parameters."""
    groups: dict[str, list[TensorSpec]] = {}
    for name, parameter in module.named_parameters():
        spec = TensorSpec(name=name, shape=tuple(parameter.shape))
        groups.setdefault(name.rpartition(".")[0], []).append(spec)
    return tuple(
        Block(name=name, kind="block", tensors=tuple(specs)) for name, specs in groups.items()
    )


def make_trainable() -> Trainable:
    torch.manual_seed(1)
    module = SmallModel()
    evaluate = lambda m, a: {"loss": float(squared_error(m, a))}  # noqa: E731
    return Trainable(blocks_of(module), module, squared_error, evaluate)


def make_batch(samples: int = 4, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, WIDTH)).astype(np.float32)
    y = rng.standard_normal((samples, WIDTH)).astype(np.float32)
    return Batch({"x": x, "y": y}, float(samples))


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> str:
    name = str(request.param)
    if name == "vulkan" and isinstance(reason := adapters(), str):
        pytest.skip(reason)
    return name


@pytest.fixture(scope="module")
def program(backend) -> Iterator[Program]:
    """Compile a program that all tests share, so no test may change its parameters."""
    compiled = choose(backend).backend.compile(make_trainable(), make_batch())
    yield compiled
    compiled.close()


def compute(program: Program, batch: Batch, seed: int) -> tuple[list[BlockGradient], Loss]:
    """Return the gradients and the loss of one microbatch."""
    *gradients, loss = program.gradients([(batch, seed)])
    assert isinstance(loss, Loss)
    assert all(isinstance(item, BlockGradient) for item in gradients)
    return gradients, loss  # type: ignore[return-value]


def values_bytes(gradients: list[BlockGradient]) -> list[bytes]:
    return [item.values.tobytes() for item in gradients]


def test_each_block_arrives_once_in_reverse_order_then_the_loss(program):
    blocks = make_trainable().blocks
    gradients, loss = compute(program, make_batch(), 3)
    assert [item.block for item in gradients] == list(reversed(range(len(blocks))))
    assert [len(item.values) for item in gradients] == [b.elements for b in reversed(blocks)]
    assert loss.weight == 4.0
    assert np.isfinite(loss.loss_sum)


def test_gradients_are_flat_finite_float32_arrays_that_the_receiver_owns(program):
    first, _ = compute(program, make_batch(), 3)
    first_bits = values_bytes(first)
    second, _ = compute(program, make_batch(), 3)
    for item in (*first, *second):
        assert item.values.dtype == np.float32
        assert item.values.ndim == 1
        assert item.values.flags.writeable
        assert np.isfinite(item.values).all()
    for item in second:
        item.values.fill(7.0)
    assert values_bytes(first) == first_bits
    assert values_bytes(compute(program, make_batch(), 3)[0]) == first_bits


@pytest.mark.parametrize("leaves", [1, 3])
def test_only_unreached_parameters_have_absent_gradients(program, backend, leaves):
    if backend == "scripted":
        pytest.skip("a scripted gradient has no absent tensors")
    blocks = make_trainable().blocks
    subtree = [(make_batch(seed=seed), seed) for seed in range(leaves)]
    gradients = [item for item in program.gradients(subtree) if isinstance(item, BlockGradient)]
    unreached = {
        tensor.name
        for item in gradients
        for tensor, part in blocks[item.block].slices()
        if is_absent(item.values[part])
    }
    assert unreached == {"unused.weight", "unused.bias"}


def test_only_the_seed_decides_the_random_draws(program):
    first, repeated, other = (
        values_bytes(compute(program, make_batch(), seed)[0]) for seed in (1, 1, 2)
    )
    assert first == repeated
    assert first != other


def test_next_microbatch_is_complete_after_an_early_close(program):
    complete = values_bytes(compute(program, make_batch(), 5)[0])
    for items in range(3):
        stream = program.gradients([(make_batch(seed=9), 8)])
        for _ in range(items):
            next(stream)
        stream.close()
        assert list(stream) == []
        assert values_bytes(compute(program, make_batch(), 5)[0]) == complete


def test_next_microbatch_is_complete_after_leaving_the_loop(program):
    complete = values_bytes(compute(program, make_batch(), 5)[0])
    for _ in program.gradients([(make_batch(seed=9), 8)]):
        break
    assert values_bytes(compute(program, make_batch(), 5)[0]) == complete


@pytest.mark.parametrize("leaves", [1, 2, 3, 7, 8])
def test_sums_of_a_subtree_follow_the_tree(program, leaves):
    blocks = make_trainable().blocks
    # The third batch has no samples.
    batches = [make_batch(0 if leaf == 2 else 4, seed=leaf) for leaf in range(leaves)]
    expected = HostSums(leaves, len(blocks))
    sums: dict[int, bytes] = {}
    loss: Loss | None = None
    for leaf, batch in enumerate(batches):
        gradients, single_loss = compute(program, batch, leaf)
        loss = expected.add_loss(leaf, single_loss.loss_sum, single_loss.weight)
        for item in gradients:
            total = expected.add(leaf, item.block, item.values)
            if total is not None:
                sums[item.block] = total.tobytes()
    for _ in range(2):  # the second subtree must not depend on the first
        items = list(program.gradients([(batch, leaf) for leaf, batch in enumerate(batches)]))
        additions = [BlockAdded(n) for n in reversed(range(len(blocks)))] * (leaves - 1)
        assert items[: len(additions)] == additions
        *gradients, last = items[len(additions) :]
        assert [item.block for item in gradients] == list(reversed(range(len(blocks))))
        assert {item.block: item.values.tobytes() for item in gradients} == sums
        assert last == loss


def test_next_subtree_is_complete_after_an_abandoned_one(program):
    def subtree_bits() -> list[bytes]:
        items = program.gradients([(make_batch(seed=leaf), leaf) for leaf in range(3)])
        return [item.values.tobytes() for item in items if isinstance(item, BlockGradient)]

    expected = subtree_bits()
    stream = program.gradients([(make_batch(seed=leaf), leaf) for leaf in (7, 8, 9)])
    items = iter(stream)
    for _ in range(len(make_trainable().blocks) + 1):
        next(items)
    stream.close()
    assert list(items) == []
    assert subtree_bits() == expected


def test_a_batch_may_have_fewer_samples_than_the_example(program):
    _, loss = compute(program, make_batch(samples=1), 0)
    assert loss.weight == 1.0


def test_load_refuses_arrays_of_a_wrong_number_or_size(program):
    sizes = [block.elements for block in make_trainable().blocks]
    for bad_sizes in (sizes[:-1], [size + 1 for size in sizes]):
        with pytest.raises(SamestepError, match="expected blocks of"):
            program.load([np.zeros(size, np.float32) for size in bad_sizes])


def test_evaluate_returns_finite_sums(program):
    sums = program.evaluate(make_batch())
    assert sums
    assert all(np.isfinite(value) for value in sums.values())


def test_a_second_thread_may_close_the_stream_while_the_device_computes(backend):
    """A halt must not wait for the end of a forward pass."""
    entered, release, has_compiled = (threading.Event() for _ in range(3))

    class SlowModel(SmallModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and has_compiled.is_set():
                entered.set()
                release.wait(30)
            return super().forward(x)

    module = SlowModel()
    trainable = Trainable(blocks_of(module), module, squared_error)
    name = "scripted:60000" if backend == "scripted" else backend
    program = choose(name).backend.compile(trainable, make_batch())
    has_compiled.set()
    stream = program.gradients([(make_batch(), 0)])
    assert isinstance(stream, SubtreeGradients)
    items: list[object] = []

    def receive() -> None:
        with contextlib.suppress(StopIteration):
            items.append(next(stream))

    receiver = threading.Thread(target=receive)
    receiver.start()
    if backend in {"cpu", BACKEND}:  # on Vulkan, forward is traced once and not called again
        assert entered.wait(30)
    release.set()
    stream.close()
    receiver.join(30)
    assert not receiver.is_alive()
    assert len(items) <= 1
    program.close()
