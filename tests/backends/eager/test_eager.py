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
    InPlaceProgram,
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


def make_trainable(module: nn.Module, **changes: Any) -> Trainable:
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


def compile_program(trainable: Trainable, example: Batch | None = None) -> Program:
    return EagerBackend(BACKEND).compile(trainable, example or batch())


def block_gradients(program: Program, microbatch: Batch, seed: int = 0) -> dict[int, Array]:
    items = program.gradients([(microbatch, seed)])
    return {item.block: item.values for item in items if isinstance(item, BlockGradient)}


def torch_gradients(module: nn.Module, trainable: Trainable, microbatch: Batch) -> dict[int, Array]:
    module.zero_grad()
    loss_sum(module, {name: torch.tensor(a) for name, a in microbatch.arrays.items()}).backward()
    parameters = dict(module.named_parameters())
    gradients = {}
    for number, block in enumerate(trainable.blocks):
        parts = []
        for spec in block.tensors:
            gradient = parameters[spec.name].grad
            zeros = torch.zeros(spec.shape)
            parts.append((zeros if gradient is None else gradient).reshape(-1).numpy())
        gradients[number] = np.concatenate(parts).copy()
    module.zero_grad()
    return gradients


@pytest.mark.parametrize("net", [Net, NetWithTiedWeights])
def test_gradients_equal_those_of_plain_torch(net):
    torch.manual_seed(0)
    module = net()
    trainable = make_trainable(module)
    expected = torch_gradients(module, trainable, batch())
    program = compile_program(trainable)
    actual = block_gradients(program, batch())
    program.close()
    assert actual.keys() == expected.keys()
    for number, values in expected.items():
        np.testing.assert_allclose(actual[number], values, rtol=1e-5, atol=1e-6)
    assert is_absent(actual[2]), "backward does not reach the unused layer"


@pytest.mark.skipif(BACKEND != "cpu", reason="a card has its own copy of the weights")
@pytest.mark.parametrize("net", [Net, NetWithTiedWeights])
def test_module_computes_with_shared_arrays_and_unchanged_bits(net):
    torch.manual_seed(0)
    module = net()
    trainable = make_trainable(module)
    parameters = [aligned_zeros(block.elements) for block in trainable.blocks]
    names = dict(module.named_parameters())
    for block, values in zip(trainable.blocks, parameters, strict=True):
        for tensor, elements in block.slices():
            values[elements] = names[tensor.name].detach().numpy().reshape(-1)
    program = compile_program(trainable)
    assert isinstance(program, InPlaceProgram)
    before = block_gradients(program, batch())
    program.share(parameters)
    after = block_gradients(program, batch())
    assert {n: x.tobytes() for n, x in after.items()} == {n: x.tobytes() for n, x in before.items()}
    shared = [
        names[tensor.name].data_ptr() == values[elements].ctypes.data
        for block, values in zip(trainable.blocks, parameters, strict=True)
        for tensor, elements in block.slices()
    ]
    assert shared[0], "the first tensor of a block is aligned"
    assert not all(shared), "the bias after a weight of 25 elements is not aligned, so it is copied"
    for values in parameters:
        np.multiply(values, np.float32(0.5), out=values)
    program.load(parameters)
    halves = {n: x.detach().numpy().copy() for n, x in names.items()}
    for block, values in zip(trainable.blocks, parameters, strict=True):
        for tensor, elements in block.slices():
            assert halves[tensor.name].reshape(-1).tobytes() == values[elements].tobytes()
    program.close()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_next_microbatch_uses_changed_shared_arrays(precision):
    """Also in low precision, for which torch converts the weights."""
    torch.manual_seed(0)
    first, second = Net(), Net()
    trainable, other_trainable = (
        make_trainable(module, precision=precision, evaluate=evaluate) for module in (first, second)
    )
    shared = [aligned_zeros(block.elements) for block in trainable.blocks]
    sharing, copying = compile_program(trainable), compile_program(other_trainable)
    assert isinstance(sharing, InPlaceProgram)
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
        actual, expected = block_gradients(sharing, batch()), block_gradients(copying, batch())
        assert [actual[n].tobytes() for n in actual] == [expected[n].tobytes() for n in actual]
        assert sharing.evaluate(batch()) == copying.evaluate(batch())
    sharing.close()
    copying.close()


class NetThatClampsWeights(Net):
    """A model whose forward clamps a weight, if `is_clamping`."""

    def __init__(self, *, from_start: bool, through_data: bool) -> None:
        super().__init__()
        self.is_clamping, self._through_data = from_start, through_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_clamping:
            weight = self.middle.weight
            with torch.no_grad():
                (weight.data if self._through_data else weight).clamp_(-0.01, 0.01)
        return super().forward(x)


@pytest.mark.parametrize("through_data", [False, True])
def test_model_that_changes_its_weights_is_refused(through_data):
    with pytest.raises(SamestepError, match=r"'middle\.weight'.* is changed by the model's own"):
        compile_program(
            make_trainable(NetThatClampsWeights(from_start=True, through_data=through_data))
        )


def test_model_that_changes_its_weights_only_later_is_refused_then():
    module = NetThatClampsWeights(from_start=False, through_data=False)
    program = compile_program(make_trainable(module, evaluate=evaluate))
    block_gradients(program, batch())
    module.is_clamping = True
    with pytest.raises(SamestepError, match="is changed by the model's own code"):
        block_gradients(program, batch())
    with pytest.raises(SamestepError, match="is changed by the model's own code"):
        program.evaluate(batch())
    program.close()


def test_gradients_are_sums_over_samples_not_means():
    torch.manual_seed(0)
    program = compile_program(make_trainable(Net()))
    batch_gradients = block_gradients(program, batch())
    arrays = batch().arrays
    singles = [
        block_gradients(program, Batch({n: a[i : i + 1] for n, a in arrays.items()}, 1.0))
        for i in range(SAMPLES)
    ]
    program.close()
    for number, values in batch_gradients.items():
        total = sum(single[number] for single in singles)
        np.testing.assert_allclose(values, total, rtol=1e-4, atol=1e-5)


class _Gate(torch.autograd.Function):
    """Suspends backward before the first layer, until the receiver has all other blocks."""

    opened = threading.Event()
    has_timed_out = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        _Gate.has_timed_out = not _Gate.opened.wait(20)
        return gradient


@pytest.mark.parametrize("has_unused_pooler", [False, True])
def test_later_blocks_are_delivered_before_backward_reaches_the_first(has_unused_pooler):
    """Backward of the first layer waits until the receiver has block 1."""

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            if has_unused_pooler:
                self.pooler = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = _Gate.apply(torch.tanh(self.first(x)))
            y: torch.Tensor = self.last(torch.tanh(self.middle(x)))
            return y

    _Gate.opened.set()  # on a card, compile also runs backward
    program = compile_program(make_trainable(Gated()))
    _Gate.opened.clear()
    order = []
    for item in program.gradients([(batch(), 0)]):
        order.append(item.block if isinstance(item, BlockGradient) else "loss")
        if isinstance(item, BlockGradient) and item.block == 1:
            _Gate.opened.set()
    program.close()
    assert order == [*range(4 if has_unused_pooler else 3, -1, -1), "loss"]
    assert not _Gate.has_timed_out


def test_read_only_parameters_are_loaded_without_a_warning(recwarn):
    program = compile_program(make_trainable(Net()))
    parameters = [np.zeros(block.elements, np.float32) for block in NET_BLOCKS]
    for values in parameters:
        values.flags.writeable = False
    torch.set_warn_always(True)
    try:
        program.load(parameters)
    finally:
        torch.set_warn_always(False)
        program.close()
    assert not recwarn.list


def test_load_copies_the_parameters():
    program = compile_program(make_trainable(Net()))
    zeros = [np.zeros(block.elements, np.float32) for block in NET_BLOCKS]
    program.load(zeros)
    for values in zeros:
        values.fill(9.0)
    loss = list(program.gradients([(batch(), 0)]))[-1]
    assert isinstance(loss, Loss)
    expected = float((torch.tensor(batch().arrays["y"]) ** 2).sum())
    assert loss.loss_sum == pytest.approx(expected, rel=1e-6)
    program.close()


def test_dropout_is_used_in_training_but_not_in_evaluation():
    program = compile_program(make_trainable(Net(dropout=0.5), evaluate=evaluate))
    first = program.evaluate(batch())
    gradients, other_gradients = (block_gradients(program, batch(), seed) for seed in (1, 2))
    assert program.evaluate(batch()) == first
    assert any(gradients[n].tobytes() != other_gradients[n].tobytes() for n in gradients)
    program.close()


def test_microbatch_without_samples_has_zero_gradients_and_loss():
    program = compile_program(make_trainable(Net()))
    *gradients, loss = program.gradients([(batch(samples=0), 0)])
    program.close()
    assert all(not item.values.any() for item in gradients if isinstance(item, BlockGradient))
    assert loss == Loss(0.0, 0.0)


def test_loss_without_graph_still_yields_every_block():
    def loss_or_constant(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
        if arrays["x"].sum() == 0:
            return torch.zeros(())
        return loss_sum(module, arrays)

    program = compile_program(make_trainable(Net(), loss=loss_or_constant))
    *gradients, loss = program.gradients([(Batch({"x": np.zeros((1, WIDTH), np.float32)}, 0.0), 0)])
    program.close()
    assert [item.block for item in gradients if isinstance(item, BlockGradient)] == [3, 2, 1, 0]
    assert loss == Loss(0.0, 0.0)


class Positions(nn.Module):
    """A model in which the gradient of `added` is a view of a buffer that is also needed for the
    gradient of `first`."""

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
                loss_sum(module, {n: torch.tensor(a) for n, a in microbatch.arrays.items()}),
                getattr(module, name),
            )[0].ravel()
            for microbatch, _ in leaves
        ]
        expected.append(parts[0] + parts[1] + parts[2])
    program = EagerBackend(BACKEND).compile(make_trainable(Positions()), batch(1))
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
    """A model whose last layer is inside a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.last, self.first(x), use_reentrant=True)
        return y


@pytest.mark.skipif(
    BACKEND == "accelerator", reason="torch cannot move a scripted module to the stand-in device"
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_module_is_refused_in_one_line():
    trainable = make_trainable(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    scripted: Any = torch.jit.script(trainable.module)
    with pytest.raises(SamestepError, match=r"torch\.jit\.script; pass the nn"):
        compile_program(replace(trainable, module=scripted))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_error_for_a_reentrant_checkpoint_names_the_layer_and_the_option():
    program = compile_program(make_trainable(Checkpointed()))
    with pytest.raises(SamestepError, match=r"'last.*pass use_reentrant=False"):
        list(program.gradients([(batch(), 0)]))
    program.close()


def test_an_error_in_the_device_thread_reaches_the_receiver():
    program = compile_program(make_trainable(Net()))
    before_error = block_gradients(program, batch())
    wrong_batch = Batch({"x": np.zeros((1, WIDTH + 1), np.float32), "y": batch().arrays["y"]}, 1.0)
    with pytest.raises(LossFailed, match="shapes cannot be multiplied"):
        list(program.gradients([(wrong_batch, 0)]))
    after_error = block_gradients(program, batch())
    program.close()
    assert all(np.array_equal(before_error[n], after_error[n]) for n in before_error)


def test_compile_aligns_all_weights_so_that_their_addresses_do_not_change_bits():
    """With small shapes the bits may agree by chance, so the test checks addresses as well."""
    torch.manual_seed(0)
    module, unaligned_module = Net(), Net()
    unaligned_module.load_state_dict(module.state_dict())
    for parameter in unaligned_module.parameters():
        memory = torch.zeros(parameter.numel() + 1)
        memory[1:] = parameter.detach().reshape(-1)
        parameter.data = memory[1:].view(parameter.shape)
        assert parameter.data_ptr() % numerics.ALIGNMENT_BYTES
    results = []
    for net in (module, unaligned_module):
        net.last.bias.requires_grad_(False)  # frozen weights are aligned as well
        program = compile_program(make_trainable(net))
        assert all(p.data_ptr() % numerics.ALIGNMENT_BYTES == 0 for p in net.parameters())
        results.append(block_gradients(program, batch()))
        program.close()
    assert all(results[0][n].tobytes() == results[1][n].tobytes() for n in results[0])


def test_two_threads_are_used_on_request():
    thread_counts: list[int] = []

    def record_threads(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
        thread_counts.append(torch.get_num_threads())
        return loss_sum(module, arrays)

    before = torch.get_num_threads()
    program = compile_program(make_trainable(Net(), loss=record_threads, threads=2))
    block_gradients(program, batch())
    program.close()
    torch.set_num_threads(before)
    assert set(thread_counts) == {2}


def test_bfloat16_computes_in_bfloat16_and_sums_in_float32():
    torch.manual_seed(0)
    module = Net()
    dtypes: list[torch.dtype] = []
    module.last.register_forward_hook(lambda _m, _i, output: dtypes.append(output.dtype))
    state = copy.deepcopy(module.state_dict())
    float32_gradients = block_gradients(program := compile_program(make_trainable(module)), batch())
    program.close()
    assert set(dtypes) == {torch.float32}
    dtypes.clear()
    with torch.no_grad():
        for name, values in module.state_dict().items():
            values.copy_(state[name])
    program = compile_program(make_trainable(module, precision="bfloat16", evaluate=evaluate))
    gradients = block_gradients(program, batch())
    assert block_gradients(program, batch())[0].tobytes() == gradients[0].tobytes()
    program.evaluate(batch())
    loss = list(program.gradients([(batch(), 0)]))[-1]
    program.close()
    assert set(dtypes) == {torch.bfloat16}
    assert isinstance(loss, Loss)
    assert loss.loss_sum != float(torch.tensor(loss.loss_sum).bfloat16()), "float32, not rounded"
    for number, values in float32_gradients.items():
        assert gradients[number].dtype == np.float32
        np.testing.assert_allclose(gradients[number], values, rtol=0.1, atol=0.1)
    assert any(gradients[n].tobytes() != float32_gradients[n].tobytes() for n in gradients)


def test_gradients_of_dropped_layers_are_absent_and_follow_the_seed():
    """The check in compile passes the middle layer (its seed is 0); some microbatches skip it."""

    class Dropping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            if not self.training or torch.rand(()) < 0.5:
                x = torch.tanh(self.middle(x))
            y: torch.Tensor = self.last(x)
            return y

    torch.manual_seed(0)
    program = compile_program(make_trainable(Dropping()))
    is_dropped = []
    for seed in range(12):
        first, repeat = (block_gradients(program, batch(), seed) for _ in range(2))
        assert all(first[n].tobytes() == repeat[n].tobytes() for n in first)
        assert first[0].any()
        is_dropped.append(is_absent(first[1]))
        assert is_dropped[-1] == (not first[1].any())
    items = list(program.gradients([(batch(), seed) for seed in range(12)]))
    program.close()
    (gradient_sum,) = (
        item.values for item in items if isinstance(item, BlockGradient) and item.block == 1
    )
    assert {*is_dropped} == {False, True}
    assert not is_absent(gradient_sum), "some microbatch of the subtree reaches the layer"


def test_joined_gradient_marks_only_unreached_tensors_as_absent():
    block = make_trainable(Net()).blocks[0]
    weight, bias = (part for _, part in block.slices())
    weight_gradient = torch.full((block.tensors[0].elements,), -0.0)
    values = join_parts(block, [weight_gradient, None], torch.device("cpu")).numpy()
    assert [is_absent(values[part]) for part in (weight, bias)] == [False, True]


NET_BLOCKS = make_trainable(Net()).blocks


class NetWithSharedMemory(Net):
    """A model with two parameters in one memory, which torch updates twice per step."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.data = self.first.weight.data


class NetWithBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class NetWithScaledEmbedding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, WIDTH, scale_grad_by_freq=True)


class NetWithCounter(Net):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("make_unsupported", "message"),
    [
        (lambda: make_trainable(NetWithBatchNorm()), "running statistics"),
        (lambda: make_trainable(NetWithScaledEmbedding()), "divides gradients by how often"),
        (lambda: make_trainable(NetWithSharedMemory()), "got two that share memory"),
        (lambda: make_trainable(NetWithCounter()), "'calls' changes in forward"),
        (lambda: make_trainable(Net(), loss=lambda m, a: loss_sum(m, a) / len(a["x"])), "summed"),
        (lambda: make_trainable(Net().half()), "float32"),
        (lambda: make_trainable(Net().requires_grad_(False), blocks=NET_BLOCKS), "got it frozen"),
        (
            lambda: make_trainable(Net(), blocks=make_trainable(nn.Linear(2, 2)).blocks),
            "a parameter 'weight' of shape",
        ),
        (lambda: Trainable(make_trainable(Net()).blocks), "needs a torch module"),
    ],
)
def test_modules_and_losses_without_exact_gradients_are_refused(make_unsupported, message):
    with pytest.raises(SamestepError, match=message):
        compile_program(make_unsupported())


def test_loss_that_is_not_a_scalar_is_refused():
    program = compile_program(make_trainable(Net()))
    program._loss = lambda m, a: m(a["x"])  # type: ignore[attr-defined]
    with pytest.raises(SamestepError, match="one sum"):
        list(program.gradients([(batch(), 0)]))
    program.close()


def test_evaluation_is_refused_if_the_task_has_no_evaluation_function():
    program = compile_program(make_trainable(Net()))
    with pytest.raises(SamestepError, match="no evaluation"):
        program.evaluate(batch())
    program.close()


@pytest.mark.skipif(BACKEND != "cpu", reason="a card's profile does not depend on its host")
def test_numerics_profile_contains_threads_torch_version_and_instruction_set():
    backend = EagerBackend(BACKEND)
    profile, with_two_threads = backend.numerics_profile(1), backend.numerics_profile(2)
    assert {key for key in profile if profile[key] != with_two_threads[key]} == {"threads"}
    assert profile["torch"] == torch.__version__
    assert profile["isa"] == torch.backends.cpu.get_cpu_capability()
    assert backend.info.usable
    assert backend.info.name == profile["processor"]


def test_program_reports_that_its_thread_flushes_subnormals():
    class Flushing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_flush_denormal(True)
            return super().forward(x)

    plain = compile_program(make_trainable(Net()))
    assert plain.keeps_subnormals()
    plain.close()
    program = compile_program(make_trainable(Flushing()))
    assert not program.keeps_subnormals()
    program.close()
