"""Absent gradients: added by the tree, preserved by codecs, skipped by the update as in torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.exact.reduction.absent import (
    absent_gradient,
    is_absent,
    keep_absent,
    mark_absent,
    mark_present,
)
from protocol.exact.reduction.average import average
from protocol.exact.reduction.bfloat16 import pack, round_to_bfloat16, unpack
from protocol.exact.reduction.tree import Subtree
from protocol.exact.reduction.tree_sum import ADDITIONS, TreeSum
from protocol.exact.replica import MISSED_UPDATES, Replica, are_counts, part_slices
from protocol.exact.update import adapt_scalars, average_weights, counts_updates, step_scalars
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.optimizer import Adamw
from tests.protocol.exact.test_update import SPECS, ReferenceScheduleFree
from tests.torch_optimizers import torch_optimizer

SIZES = {"often": 7, "seldom": 4, "never": 3, "alone.bias": 1}
BLOCK = Block(
    name="all",
    kind="block",
    tensors=tuple(TensorSpec(name=name, shape=(size,)) for name, size in SIZES.items()),
)
CHANCE = {"often": 0.9, "seldom": 0.15, "never": 0.0, "alone.bias": 0.4}
numbers = st.one_of(st.just(-0.0), st.integers(-9, 9).map(lambda n: n / 8))


@given(st.data(), st.integers(1, 9), st.sampled_from(["float32", "bfloat16"]))
def test_a_sum_is_absent_exactly_if_all_its_terms_are(data, count, precision):
    """In any order of arrival; cancelled sums and negative zeros still count as present."""
    gradients = [
        data.draw(st.lists(numbers, min_size=2, max_size=2)) if data.draw(st.booleans()) else None
        for _ in range(count)
    ]
    sums = TreeSum(count, ADDITIONS[precision])
    for leaf in data.draw(st.permutations(range(count))):
        values = gradients[leaf]
        term = (
            absent_gradient(2)
            if values is None
            else mark_present(round_to_bfloat16(np.array(values, np.float32)))
        )
        sums.put(Subtree(leaf, leaf + 1), term.copy())
    out = np.empty(2, np.float32)
    assert sums.total is not None
    average(sums.total, 3.0, out)
    present_values = [values for values in gradients if values is not None]
    assert is_absent(out) == (not present_values)
    decoded = unpack(pack(round_to_bfloat16(out), "bfloat16").view(np.uint8), "bfloat16")
    assert is_absent(decoded) == (not present_values)


def test_an_absent_term_changes_no_bit_of_a_sum():
    values = np.array([1.5, -0.0, 0.0, -1e-45, 3e38, np.inf], np.float32)
    for left, right in ((values.copy(), absent_gradient(6)), (absent_gradient(6), values.copy())):
        assert ADDITIONS["float32"](left, right).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], False), ([-0.0], True), ([-0.0, -0.0], True), ([0.0], False), ([-0.0, 0.0], False),
        ([0.0, -0.0], False), ([-0.0, 1.0], False), ([np.nan], False), ([-0.0, np.nan], False),
    ],
)  # fmt: skip
def test_only_negative_zeros_are_absent_and_present_unmarks_them(values, expected):
    gradient = np.array(values, np.float32)
    before = gradient.tobytes()
    assert is_absent(gradient) is expected
    marked_gradient = mark_present(gradient)
    assert gradient.tobytes() == before
    assert not is_absent(marked_gradient)
    np.testing.assert_array_equal(marked_gradient, gradient)
    assert not values or math.copysign(1, marked_gradient[0]) == 1 or marked_gradient[0] != 0


def test_a_block_is_marked_tensor_by_tensor():
    gradient = np.full(BLOCK.elements, -0.0, np.float32)
    mark_absent(BLOCK, gradient, {"seldom", "alone.bias"})
    marks = [is_absent(gradient[part]) for _, part in BLOCK.slices()]
    assert marks == [False, True, False, True]
    assert not gradient.any()


def test_step_without_weight_keeps_absent_gradients():
    gradient = np.array([-0.0, 2.0, np.nan, 0.0], np.float32)
    out = np.empty_like(gradient)
    average(gradient, 0.0, out)
    assert out.tobytes() == np.array([-0.0, 0, 0, 0], np.float32).tobytes()
    keep_absent(gradient, gradient)
    assert gradient.tobytes() == out.tobytes()


def train_with_torch(spec, start, steps):
    """Return the result of torch's optimizer; an absent gradient is None."""
    parameters = {name: torch.nn.Parameter(torch.from_numpy(v.copy())) for name, v in start.items()}
    decays = {name: 0.0 if "bias" in name else spec.weight_decay for name in SIZES}
    if spec.name == "schedule-free":
        optimizers = {
            name: ReferenceScheduleFree(p, spec.model_copy(update={"weight_decay": decays[name]}))
            for name, p in parameters.items()
        }
    else:
        groups = [{"params": [p], "weight_decay": decays[n]} for n, p in parameters.items()]
        optimizer = torch_optimizer(spec, groups)
    for gradients in steps:
        for name, parameter in parameters.items():
            gradient = gradients[name]
            parameter.grad = None if gradient is None else torch.from_numpy(gradient.copy())
        if spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), spec.clip_norm)
        if spec.clip_value is not None and any(g is not None for g in gradients.values()):
            torch.nn.utils.clip_grad_value_(list(parameters.values()), spec.clip_value)
        if spec.name != "schedule-free":
            optimizer.step()
            continue
        for name, tensor_optimizer in optimizers.items():
            tensor_optimizer.param_groups[0]["lr"] = spec.lr
            if gradients[name] is not None:
                tensor_optimizer.step()
            elif spec.name == "schedule-free":
                skip_step(tensor_optimizer)
    if spec.name == "schedule-free":
        return {
            name: tensor_optimizer.average().numpy()
            for name, tensor_optimizer in optimizers.items()
        }
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def skip_step(torch_optimizer):
    """Count a step without an update: schedulefree shares its counters among all parameters."""
    spec = torch_optimizer.spec
    rate = spec.lr * min(
        1.0, (torch_optimizer.k + 1) / spec.warmup_steps if spec.warmup_steps else 1.0
    )
    torch_optimizer.lr_max = max(rate, torch_optimizer.lr_max)
    torch_optimizer.weight_sum += torch_optimizer.lr_max**2
    torch_optimizer.k += 1


@pytest.mark.parametrize("name", SPECS)
def test_every_rule_skips_absent_gradients_like_torch(name):
    spec = SPECS[name].model_copy(update={"schedule": "constant"})
    random = np.random.default_rng(8)
    draw = {
        name: (lambda n=size: random.standard_normal(n).astype("f4"))
        for name, size in SIZES.items()
    }
    start = {name: draw[name]() for name in SIZES}
    steps = [
        {name: draw[name]() if random.random() < CHANCE[name] else None for name in SIZES}
        for _ in range(60)
    ]
    replica = Replica((BLOCK,), spec)
    replica.load_parameters([np.concatenate(list(start.values()))])
    for number, gradients in enumerate(steps):
        flat = np.concatenate(
            [
                absent_gradient(size) if gradients[name] is None else gradients[name]
                for name, size in SIZES.items()
            ]
        )
        norm = float(np.sqrt((flat.astype(np.float64) ** 2).sum()))
        replica.apply([flat], step_scalars(spec, number + 1, number, 60, norm))
    expected = train_with_torch(spec, start, steps)
    for tensor, values in replica.trained_tensors().items():
        np.testing.assert_allclose(values, expected[tensor], rtol=2e-6, atol=2e-7, err_msg=tensor)
    np.testing.assert_array_equal(replica.trained_tensors()["never"], start["never"])
    assert replica.has_missed_updates == (counts_updates(spec))


ADAMW = Adamw(name="adamw", lr=0.01)


def train_with(reachable_tensors, steps=4):
    """Return a replica trained with gradients of only the tensors that each step reaches."""
    replica = Replica((BLOCK,), ADAMW)
    for number in range(steps):
        flat = np.full(BLOCK.elements, 0.5, np.float32)
        mark_absent(BLOCK, flat, SIZES.keys() - reachable_tensors(number))
        replica.apply([flat], step_scalars(ADAMW, number + 1, number, 9, 1.0))
    return replica


def test_missed_updates_are_part_of_the_state_if_any_exist():
    full_replica, partial_replica = (
        train_with(lambda _: set(SIZES)),
        train_with(lambda n: {"often"} if n else set(SIZES)),
    )
    assert {part.kind for part in full_replica.parts()} == {
        "parameters",
        "first_moment",
        "second_moment",
    }
    assert partial_replica.parts()[-1].kind == MISSED_UPDATES
    assert partial_replica.parts()[-1].values.tolist() == [0, 3, 3, 3]
    replica_copy = partial_replica.copy()
    assert replica_copy.state_digest() == partial_replica.state_digest()
    replica_copy.clear_missed()
    assert replica_copy.state_digest() != partial_replica.state_digest()
    assert replica_copy.weights_digest() == partial_replica.weights_digest()


def test_state_loaded_by_pieces_replaces_any_content():
    full_replica, partial_replica = (
        train_with(lambda _: set(SIZES)),
        train_with(lambda n: {"often"} if n else set(SIZES)),
    )
    for source, target in (
        (full_replica, partial_replica.copy()),
        (partial_replica, full_replica.copy()),
        (partial_replica, Replica((BLOCK,), ADAMW)),
    ):
        for part in source.parts():
            for number, part_range in enumerate(part_slices(part.kind, BLOCK)):
                target.load_piece(part.kind, part.block, number, part.values[part_range])
        target.set_counters(source.step, source.optimizer_step)
        assert target.state_digest() == source.state_digest()
    partial_replica.clear_moments()
    assert not partial_replica.has_missed_updates


@pytest.mark.parametrize("bad_count", [-1.0, 5.0, 0.5, np.nan, np.inf])
def test_invalid_counts_are_recognized(bad_count):
    assert are_counts(np.array([0, 4], np.float32), 4)
    assert not are_counts(np.array([0, bad_count], np.float32), 4)


@given(st.integers(1, 100_000))
def test_scalars_after_all_updates_are_those_of_the_step(updates):
    spec = SPECS["adamw-decay-clip"]
    scalars = step_scalars(spec, updates, updates, 10**6, 0.25)
    expected_scalars = adapt_scalars(spec, scalars, updates)
    for name, value in expected_scalars.model_dump().items():
        assert value == pytest.approx(scalars.model_dump()[name], rel=3e-7)
        assert float(np.float32(value)) == value


def test_absent_gradient_keeps_the_schedule_free_average():
    spec = SPECS["schedule-free"]
    replica = Replica((BLOCK,), spec)
    replica.load_parameters([np.arange(BLOCK.elements, dtype=np.float32)])
    replica.apply([np.ones(BLOCK.elements, np.float32)], step_scalars(spec, 1, 0, 9, 1.0))
    before = average_weights(spec, replica.parameters[0], (replica.parts()[1].values,)).tobytes()
    replica.apply([absent_gradient(BLOCK.elements)], step_scalars(spec, 2, 1, 9, 0.0))
    assert replica.trained_weights()[0].tobytes() == before
