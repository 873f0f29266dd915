"""The eager backend against plain torch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backends.base.interface import (
    Array,
    Batch,
    BlockGradient,
    ComputesInPlace,
    Loss,
    LossFailed,
    Program,
    Trainable,
)
from backends.eager import numerics
from backends.eager.device_sums import join_parts
from backends.eager.eager import EagerBackend
from protocol.base.errors import SamestepError
from protocol.exact.reduction.absent import is_absent
from protocol.exact.replica import aligned_zeros
from protocol.spec.manifest import Block, TensorSpec
from tests.tested_backend import BACKEND

SAMPLES, WIDTH = 6, 5


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        y: torch.Tensor = self.last(self.dropout(torch.tanh(self.middle(x))))
        return y


class NetWithTiedWeights(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight


def loss_sum(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    error: torch.Tensor = module(arrays["x"]) - arrays["y"]
    return (error**2).sum()


def evaluate(module: nn.Module, arrays: Mapping[str, Any]) -> dict[str, float]:
    assert not torch.is_grad_enabled()
    return {"loss": float(loss_sum(module, arrays))}


def trainable(module: nn.Module, **changes: Any) -> Trainable:
    groups: dict[str, list[TensorSpec]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            spec = TensorSpec(name=name, shape=tuple(parameter.shape))
            groups.setdefault(name.partition(".")[0], []).append(spec)
    blocks = tuple(Block(name=n, kind="block", tensors=tuple(t)) for n, t in groups.items())
    return Trainable(**{"blocks": blocks, "module": module, "loss": loss_sum, **changes})


def batch(samples: int = SAMPLES, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, samples, WIDTH)).astype(np.float32)
    return Batch({"x": x, "y": y}, float(samples))


def compiled(job: Trainable, example: Batch | None = None) -> Program:
    return EagerBackend(BACKEND).compile(job, example or batch())


def by_block(program: Program, of: Batch, seed: int = 0) -> dict[int, Array]:
    items = program.gradients([(of, seed)])
    return {item.block: item.values for item in items if isinstance(item, BlockGradient)}


def plain_torch(module: nn.Module, job: Trainable, of: Batch) -> dict[int, Array]:
    module.zero_grad()
    loss_sum(module, {name: torch.tensor(a) for name, a in of.arrays.items()}).backward()
    parameters = dict(module.named_parameters())
    by_number = {}
    for number, block in enumerate(job.blocks):
        parts = []
        for spec in block.tensors:
            gradient = parameters[spec.name].grad
            zeros = torch.zeros(spec.shape)
            parts.append((zeros if gradient is None else gradient).reshape(-1).numpy())
        by_number[number] = np.concatenate(parts).copy()
    module.zero_grad()
    return by_number


@pytest.mark.parametrize("kind", [Net, NetWithTiedWeights])
def test_gradients_are_those_of_plain_torch(kind):
    torch.manual_seed(0)
    module = kind()
    job = trainable(module)
    expected = plain_torch(module, job, batch())
    program = compiled(job)
    actual = by_block(program, batch())
    program.close()
    assert actual.keys() == expected.keys()
    for number, values in expected.items():
        np.testing.assert_allclose(actual[number], values, rtol=1e-5, atol=1e-6)
    assert is_absent(actual[2]), "backward does not reach the unused layer"


@pytest.mark.skipif(BACKEND != "cpu", reason="a card has its own copy of the weights")
@pytest.mark.parametrize("kind", [Net, NetWithTiedWeights])
def test_shared_weights_use_the_arrays_and_keep_the_bits(kind):
    torch.manual_seed(0)
    module = kind()
    job = trainable(module)
    parameters = [aligned_zeros(block.elements) for block in job.blocks]
    names = dict(module.named_parameters())
    for block, values in zip(job.blocks, parameters, strict=True):
        for tensor, elements in block.slices():
            values[elements] = names[tensor.name].detach().numpy().reshape(-1)
    program = compiled(job)
    assert isinstance(program, ComputesInPlace)
    before = by_block(program, batch())
    program.share(parameters)
    after = by_block(program, batch())
    assert {n: x.tobytes() for n, x in after.items()} == {n: x.tobytes() for n, x in before.items()}
    shared = [
        names[tensor.name].data_ptr() == values[elements].ctypes.data
        for block, values in zip(job.blocks, parameters, strict=True)
        for tensor, elements in block.slices()
    ]
    assert shared[0], "the first tensor begins where its block does"
    assert not all(shared), "one of 25 values ends where the next would not be aligned"
    for values in parameters:
        np.multiply(values, np.float32(0.5), out=values)
    program.load(parameters)
    halves = {n: x.detach().numpy().copy() for n, x in names.items()}
    for block, values in zip(job.blocks, parameters, strict=True):
        for tensor, elements in block.slices():
            assert halves[tensor.name].reshape(-1).tobytes() == values[elements].tobytes()
    program.close()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_next_microbatch_uses_changed_shared_arrays(precision):
    """This holds also if torch keeps a low-precision copy of weights during computation."""
    torch.manual_seed(0)
    first, second = Net(), Net()
    job, other = (
        trainable(module, precision=precision, evaluate=evaluate) for module in (first, second)
    )
    shared = [aligned_zeros(block.elements) for block in job.blocks]
    sharing, copying = compiled(job), compiled(other)
    assert isinstance(sharing, ComputesInPlace)
    sharing.load(shared)
    sharing.share(shared)
    rng = np.random.default_rng(1)
    for _ in range(2):
        for values in shared:
            values[:] = rng.standard_normal(len(values)).astype(np.float32)
        sharing.load(shared)
        copying.load([values.copy() for values in shared])
        for program in (sharing, copying):
            program.loss_scale = 512.0 if precision == "float16" else 1.0
        actual, expected = by_block(sharing, batch()), by_block(copying, batch())
        assert [actual[n].tobytes() for n in actual] == [expected[n].tobytes() for n in actual]
        assert sharing.evaluate(batch()) == copying.evaluate(batch())
    sharing.close()
    copying.close()


class NetThatClampsWeights(Net):
    """A model whose forward clamps its own weights."""

    def __init__(self, *, from_start: bool, through_data: bool) -> None:
        super().__init__()
        self.changes, self._through_data = from_start, through_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            weight = self.middle.weight
            with torch.no_grad():
                (weight.data if self._through_data else weight).clamp_(-0.01, 0.01)
        return super().forward(x)


@pytest.mark.parametrize("through_data", [False, True])
def test_model_that_changes_its_weights_is_refused(through_data):
    with pytest.raises(SamestepError, match=r"'middle\.weight'.* is changed by the model's own"):
        compiled(trainable(NetThatClampsWeights(from_start=True, through_data=through_data)))


def test_model_that_starts_changing_its_weights_is_stopped():
    module = NetThatClampsWeights(from_start=False, through_data=False)
    program = compiled(trainable(module, evaluate=evaluate))
    by_block(program, batch())
    module.changes = True
    with pytest.raises(SamestepError, match="is changed by the model's own code"):
        by_block(program, batch())
    with pytest.raises(SamestepError, match="is changed by the model's own code"):
        program.evaluate(batch())
    program.close()


def test_gradients_are_sums_over_samples_not_means():
    torch.manual_seed(0)
    program = compiled(trainable(Net()))
    batch_gradients = by_block(program, batch())
    arrays = batch().arrays
    singles = [
        by_block(program, Batch({n: a[i : i + 1] for n, a in arrays.items()}, 1.0))
        for i in range(SAMPLES)
    ]
    program.close()
    for number, values in batch_gradients.items():
        total = sum(single[number] for single in singles)
        np.testing.assert_allclose(values, total, rtol=1e-4, atol=1e-5)


class _Gate(torch.autograd.Function):
    """Blocks backward until the receiver has the last block."""

    opened = threading.Event()
    waited_in_vain = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        _Gate.waited_in_vain = not _Gate.opened.wait(20)
        return gradient


@pytest.mark.parametrize("unused_at_the_end", [False, True])
def test_last_block_is_delivered_before_backward_reaches_the_first(unused_at_the_end):
    """Checked by the order of events: backward of the first layer waits for the receiver."""

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            if unused_at_the_end:
                self.pooler = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = _Gate.apply(torch.tanh(self.first(x)))
            y: torch.Tensor = self.last(torch.tanh(self.middle(x)))
            return y

    _Gate.opened.set()  # the model check of a real card runs backward as well
    program = compiled(trainable(Gated()))
    _Gate.opened.clear()
    order = []
    for item in program.gradients([(batch(), 0)]):
        order.append(item.block if isinstance(item, BlockGradient) else "loss")
        if isinstance(item, BlockGradient) and item.block == 1:
            _Gate.opened.set()
    program.close()
    assert order == [*range(4 if unused_at_the_end else 3, -1, -1), "loss"]
    assert not _Gate.waited_in_vain


def test_read_only_parameters_are_loaded_without_a_warning(recwarn):
    program = compiled(trainable(Net()))
    parameters = [np.zeros(size, np.float32) for size in (30, 30, 6, 30)]
    for values in parameters:
        values.flags.writeable = False
    torch.set_warn_always(True)
    try:
        program.load(parameters)
    finally:
        torch.set_warn_always(False)
        program.close()
    assert not recwarn.list


def test_load_takes_effect_and_copies():
    program = compiled(trainable(Net()))
    sizes = [30, 30, 6, 30]
    zeros = [np.zeros(size, np.float32) for size in sizes]
    program.load(zeros)
    for values in zeros:
        values.fill(9.0)
    loss = list(program.gradients([(batch(), 0)]))[-1]
    assert isinstance(loss, Loss)
    expected = float((torch.tensor(batch().arrays["y"]) ** 2).sum())
    assert loss.loss_sum == pytest.approx(expected, rel=1e-6)
    program.close()


def test_evaluation_has_no_dropout_and_training_keeps_it():
    program = compiled(trainable(Net(dropout=0.5), evaluate=evaluate))
    first = program.evaluate(batch())
    one, other = by_block(program, batch(), 1), by_block(program, batch(), 2)
    assert program.evaluate(batch()) == first
    assert any(one[number].tobytes() != other[number].tobytes() for number in one)
    program.close()


def test_a_microbatch_without_samples_counts_as_zeros():
    program = compiled(trainable(Net()))
    *gradients, loss = program.gradients([(batch(samples=0), 0)])
    program.close()
    assert all(not item.values.any() for item in gradients if isinstance(item, BlockGradient))
    assert loss == Loss(0.0, 0.0)


def test_a_loss_without_graph_counts_as_zeros():
    def nothing(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
        if arrays["x"].sum() == 0:
            return torch.zeros(())
        return loss_sum(module, arrays)

    program = compiled(trainable(Net(), loss=nothing))
    *gradients, loss = program.gradients([(Batch({"x": np.zeros((1, WIDTH), np.float32)}, 0.0), 0)])
    program.close()
    assert [item.block for item in gradients if isinstance(item, BlockGradient)] == [3, 2, 1, 0]
    assert loss == Loss(0.0, 0.0)


class Positions(nn.Module):
    """Autograd gives `first` and `added` one gradient buffer, because a view is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1, WIDTH))
        self.added = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first * x + self.added.unsqueeze(0)


@pytest.mark.parametrize("loss_scale", [1.0, 4.0])
def test_gradient_buffer_shared_in_the_graph_is_not_modified(loss_scale):
    module = Positions()
    leaves = [(batch(1, seed), seed) for seed in range(3)]
    expected = []
    for name in ("first", "added"):
        parts = [
            torch.autograd.grad(
                loss_sum(module, {n: torch.tensor(a) for n, a in each.arrays.items()}),
                getattr(module, name),
            )[0].ravel()
            for each, _ in leaves
        ]
        expected.append(parts[0] + parts[1] + parts[2])
    program = EagerBackend(BACKEND).compile(trainable(Positions()), batch(1))
    program.loss_scale = loss_scale
    gradients = {
        item.block: item.values
        for item in program.gradients(leaves)
        if isinstance(item, BlockGradient)
    }
    for number, values in enumerate(expected):
        assert gradients[number].tobytes() == values.numpy().tobytes()
    program.close()


class Checkpointed(nn.Module):
    """Its last layer is behind a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.last, self.first(x), use_reentrant=True)
        return y


@pytest.mark.skipif(BACKEND == "accelerator", reason="torch cannot move it to such a device")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_module_is_refused_in_one_line():
    job = trainable(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    scripted: Any = torch.jit.script(job.module)
    with pytest.raises(SamestepError, match=r"torch\.jit\.script; pass the nn"):
        compiled(replace(job, module=scripted))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_is_named_as_such():
    program = compiled(trainable(Checkpointed()))
    with pytest.raises(SamestepError, match=r"'last.*pass use_reentrant=False"):
        list(program.gradients([(batch(), 0)]))
    program.close()


def test_an_error_in_the_device_thread_reaches_the_receiver():
    program = compiled(trainable(Net()))
    before_error = by_block(program, batch())
    wrong_batch = Batch({"x": np.zeros((1, WIDTH + 1), np.float32), "y": batch().arrays["y"]}, 1.0)
    with pytest.raises(LossFailed, match="shapes cannot be multiplied"):
        list(program.gradients([(wrong_batch, 0)]))
    repeat = by_block(program, batch())
    program.close()
    assert all(np.array_equal(before_error[number], repeat[number]) for number in before_error)


def test_weight_addresses_do_not_change_bits():
    """Frozen weights too. Small shapes may hide a difference, so the test compares addresses."""
    torch.manual_seed(0)
    module, moved_module = Net(), Net()
    moved_module.load_state_dict(module.state_dict())
    for parameter in moved_module.parameters():
        room = torch.zeros(parameter.numel() + 1)
        room[1:] = parameter.detach().reshape(-1)
        parameter.data = room[1:].view(parameter.shape)
        assert parameter.data_ptr() % numerics.ALIGNMENT_BYTES
    results = []
    for each in (module, moved_module):
        each.last.bias.requires_grad_(False)
        program = compiled(trainable(each))
        assert all(p.data_ptr() % numerics.ALIGNMENT_BYTES == 0 for p in each.parameters())
        results.append(by_block(program, batch()))
        program.close()
    assert all(results[0][n].tobytes() == results[1][n].tobytes() for n in results[0])


def test_two_threads_are_used_on_request():
    thread_counts: list[int] = []

    def looking(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
        thread_counts.append(torch.get_num_threads())
        return loss_sum(module, arrays)

    before = torch.get_num_threads()
    program = compiled(trainable(Net(), loss=looking, threads=2))
    by_block(program, batch())
    program.close()
    torch.set_num_threads(before)
    assert set(thread_counts) == {2}


def test_bfloat16_computes_in_bfloat16_and_sums_in_float32():
    torch.manual_seed(0)
    module = Net()
    dtypes: list[torch.dtype] = []
    module.last.register_forward_hook(lambda _m, _i, output: dtypes.append(output.dtype))
    state = copy.deepcopy(module.state_dict())
    plain = by_block(program := compiled(trainable(module)), batch())
    program.close()
    assert set(dtypes) == {torch.float32}
    dtypes.clear()
    with torch.no_grad():
        for name, values in module.state_dict().items():
            values.copy_(state[name])
    program = compiled(trainable(module, precision="bfloat16", evaluate=evaluate))
    sums = by_block(program, batch())
    assert by_block(program, batch())[0].tobytes() == sums[0].tobytes()
    program.evaluate(batch())
    loss = list(program.gradients([(batch(), 0)]))[-1]
    program.close()
    assert set(dtypes) == {torch.bfloat16}
    assert isinstance(loss, Loss)
    assert loss.loss_sum != float(torch.tensor(loss.loss_sum).bfloat16())
    for number, values in plain.items():
        assert sums[number].dtype == np.float32
        np.testing.assert_allclose(sums[number], values, rtol=0.1, atol=0.1)
    assert any(sums[number].tobytes() != plain[number].tobytes() for number in plain)


def test_dropped_layers_are_absent_and_follow_the_seed():
    """Layer drop: the example passes all layers, but later microbatches skip some."""

    class Dropping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            if not self.training or torch.rand(()) < 0.5:
                x = torch.tanh(self.middle(x))
            y: torch.Tensor = self.last(x)
            return y

    torch.manual_seed(0)
    program = compiled(trainable(Dropping()))
    left_out = []
    for seed in range(12):
        first, repeat = (by_block(program, batch(), seed) for _ in range(2))
        assert all(first[n].tobytes() == repeat[n].tobytes() for n in first)
        assert first[0].any()
        left_out.append(is_absent(first[1]))
        assert left_out[-1] == (not first[1].any())
    seeds = range(12)
    subtree = list(program.gradients([(batch(), seed) for seed in seeds]))
    program.close()
    (joined_gradients,) = (
        item.values for item in subtree if isinstance(item, BlockGradient) and item.block == 1
    )
    assert not is_absent(joined_gradients), "one microbatch that reaches it is enough"
    assert {*left_out} == {False, True}


def test_device_sums_mark_reached_elements():
    block = trainable(Net()).blocks[0]
    (first, bias) = (part for _, part in block.slices())
    reach_marks = torch.zeros(block.tensors[0].elements)
    reach_marks[0] = -0.0
    values = join_parts(block, [reach_marks, None], torch.device("cpu")).numpy()
    assert [is_absent(values[part]) for part in (first, bias)] == [False, True]


NET_BLOCKS = trainable(Net()).blocks


class WithSharedMemory(Net):
    """torch would update the shared memory twice per step."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.data = self.first.weight.data


class WithBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class WithCountedRows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, WIDTH, scale_grad_by_freq=True)


class WithCounter(Net):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("make_trainable", "message"),
    [
        (lambda: trainable(WithBatchNorm()), "running statistics"),
        (lambda: trainable(WithCountedRows()), "divides gradients by how often"),
        (lambda: trainable(WithSharedMemory()), "got two that share memory"),
        (lambda: trainable(WithCounter()), "'calls' changes in forward"),
        (lambda: trainable(Net(), loss=lambda m, a: loss_sum(m, a) / len(a["x"])), "summed"),
        (lambda: trainable(Net().half()), "float32"),
        (lambda: trainable(Net().requires_grad_(False), blocks=NET_BLOCKS), "got it frozen"),
        (
            lambda: trainable(Net(), blocks=trainable(nn.Linear(2, 2)).blocks),
            "a parameter 'weight' of shape",
        ),
        (lambda: Trainable(trainable(Net()).blocks), "needs a torch module"),
    ],
)
def test_modules_that_cannot_be_exact_are_refused(make_trainable, message):
    with pytest.raises(SamestepError, match=message):
        compiled(make_trainable())


def test_loss_that_is_not_a_scalar_is_refused():
    program = compiled(trainable(Net()))
    program._loss = lambda m, a: m(a["x"])  # type: ignore[attr-defined]
    with pytest.raises(SamestepError, match="one sum"):
        list(program.gradients([(batch(), 0)]))
    program.close()


def test_evaluation_without_a_function_is_refused():
    program = compiled(trainable(Net()))
    with pytest.raises(SamestepError, match="no evaluation"):
        program.evaluate(batch())
    program.close()


@pytest.mark.skipif(BACKEND != "cpu", reason="a card's profile does not depend on its host")
def test_numerics_profile_differs_only_in_threads_and_names_torch_and_isa():
    backend = EagerBackend(BACKEND)
    one, two = backend.numerics_profile(1), backend.numerics_profile(2)
    assert {key for key in one if one[key] != two[key]} == {"threads"}
    assert one["torch"] == torch.__version__
    assert one["isa"] == torch.backends.cpu.get_cpu_capability()
    assert backend.info.usable
    assert backend.info.name == one["processor"]


def test_program_reports_a_thread_that_flushes_subnormals():
    class Flushing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_flush_denormal(True)
            return super().forward(x)

    plain = compiled(trainable(Net()))
    assert plain.keeps_subnormals()
    plain.close()
    program = compiled(trainable(Flushing()))
    assert not program.keeps_subnormals()
    program.close()
