"""Adafactor: equal to torch's and transformers' within 1e-5, with sums in a documented order."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.optimization import Adafactor as AdafactorOfTransformers

from protocol.exact import adafactor
from protocol.exact.adafactor import factor_elements
from protocol.exact.kernels.library import library_for, using
from protocol.exact.reduction.absent import absent_gradient
from protocol.exact.replica import Replica, part_slices
from protocol.exact.update import average_keep, step_scalars
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.optimizer import Adafactor, EmaSpec, ParameterGroup

SHAPES = {
    "a": (7, 5), "bias": (5,), "c": (3, 4, 2, 3), "d": (1, 9), "e": (9, 1), "scalar": (),
}  # fmt: skip
BLOCK = Block(
    name="b",
    kind="block",
    tensors=tuple(TensorSpec(name=name, shape=shape) for name, shape in SHAPES.items()),
)
STEPS = 50
FIXED_RATE = {"scale_parameter": False, "relative_step": False}
"""Options of transformers' optimizer, which scales and limits the rate by default."""


def values(step):
    noise = np.random.default_rng(step).standard_normal(BLOCK.elements) * 0.1 + 0.05
    return noise.astype(np.float32)


def replica_of(spec):
    replica = Replica((BLOCK,), spec)
    replica.load_parameters([values(99) * 10])
    return replica


# torch's rate is always min(lr, 1 / sqrt(t)), which is a relative step here.
REFERENCES: dict[str, tuple[dict[str, Any], Any]] = {
    "torch": (
        {"relative_step": True, "weight_decay": 0.1, "no_decay": ()},
        lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    ),
    "transformers": (
        {"scale_parameter": False, "weight_decay": 0.1, "no_decay": ()},
        lambda p: AdafactorOfTransformers(p, lr=1e-2, weight_decay=0.1, **FIXED_RATE),
    ),
    "transformers-threshold": (
        {"scale_parameter": False, "clip_threshold": 0.5, "beta2_decay": -0.6},
        lambda p: AdafactorOfTransformers(
            p, lr=1e-2, clip_threshold=0.5, decay_rate=-0.6, **FIXED_RATE
        ),
    ),
    "transformers-relative": ({"relative_step": True}, AdafactorOfTransformers),
    "transformers-warmup": (
        {"relative_step": True, "warmup_steps": 10_000},  # 1e-2 / 10_000: 1e-6 per step
        lambda p: AdafactorOfTransformers(p, warmup_init=True),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_weights_stay_within_a_hundred_thousandth_of_the_reference(name):
    keys, make_optimizer = REFERENCES[name]
    spec = Adafactor(name="adafactor", lr=1e-2, **keys)
    replica = replica_of(spec)
    parameters = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in replica.tensors().items()}
    optimizer = make_optimizer(list(parameters.values()))
    for step in range(STEPS):
        for tensor, part in BLOCK.slices():
            gradient = torch.tensor(values(step)[part].reshape(tensor.shape))
            parameters[tensor.name].grad = gradient
        optimizer.step()
        replica.apply([values(step)], step_scalars(spec, step + 1, step, STEPS, 1.0))
    for tensor, weights in replica.tensors().items():
        expected = parameters[tensor].detach().numpy()
        assert np.abs(weights - expected).max() <= 1e-5 * np.abs(expected).max(), tensor


def sum_in_lanes(numbers):
    """Add in the order that `protocol.exact.adafactor` documents, one number at a time."""
    total = 0.0
    for lo in range(0, len(numbers), 1024):
        lanes = [0.0] * 16
        for column, number in enumerate(numbers[lo : lo + 1024]):
            lanes[column % 16] += number
        for half in (8, 4, 2, 1):
            for i in range(half):
                lanes[i] += lanes[i + half]
        total += lanes[0]
    return total


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("shape", [(1, 13, 5), (3, 2, 16), (2, 3, 2070), (1, 70, 1024), (4, 1, 1)])
def test_sums_have_the_documented_order(shape, native):
    spec = Adafactor(name="adafactor", eps=1e-3)
    scalars = step_scalars(spec, 1, 0, 10, 1.0)
    stack = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    squares = stack.astype(np.float64) ** 2 + scalars.epsilon
    with using(library_for(stack) if native else None):
        row_sums, column_sums = adafactor._square_sums(scalars, stack)
    for matrix in range(shape[0]):
        rows = squares[matrix].tolist()
        assert row_sums[matrix].tolist() == [sum_in_lanes(row) for row in rows]
        expected = [0.0] * shape[2]
        for row in rows:
            expected = [total + number for total, number in zip(expected, row, strict=True)]
        assert column_sums[matrix].tolist() == expected


def test_a_stack_has_the_bits_of_its_matrices_alone():
    # With these options no root mean square of a whole tensor has an effect.
    spec = Adafactor(name="adafactor", scale_parameter=False, clip_threshold=1e3)
    scalars = step_scalars(spec, 1, 0, 10, 1.0)
    stack = np.random.default_rng(4).standard_normal((6, 3, 4)).astype(np.float32)
    stack_result, factors = np.ones_like(stack), np.zeros(factor_elements(stack.shape), np.float32)
    adafactor.apply_adafactor(spec, scalars, stack_result, stack, factors, decay=False)
    for matrix, expected in zip(stack, stack_result, strict=True):
        matrix_result = np.ones_like(matrix)
        matrix_factors = np.zeros(factor_elements(matrix.shape), np.float32)
        adafactor.apply_adafactor(spec, scalars, matrix_result, matrix, matrix_factors, decay=False)
        assert matrix_result.tobytes() == expected.tobytes()


def test_groups_averages_and_absent_gradients_work_together():
    groups = (ParameterGroup(match=("a",), lr_scale=0.5, weight_decay=0.1),)
    spec = Adafactor(name="adafactor", lr=1e-2, groups=groups, ema=EmaSpec(decay=0.5))
    replica = replica_of(spec)
    average = {name: weights.copy() for name, weights in replica.tensors().items()}
    for step in range(4):
        gradient = values(step)
        if step == 3:
            gradient[:35] = absent_gradient(35)  # of tensor a, 7 x 5
        before = replica.tensors()["a"].copy()
        replica.apply([gradient], step_scalars(spec, step + 1, step, 4, 1.0))
        assert (replica.tensors()["a"] != before).any() == (step < 3)
        average_share = average_keep(EmaSpec(decay=0.5), step + 1)
        for name, weights in replica.tensors().items():
            average[name] = weights + average_share * (average[name] - weights)
    for name, weights in replica.trained_tensors().items():
        np.testing.assert_allclose(weights, average[name], rtol=2e-6, atol=1e-6)
    assert not replica.non_finite_location()
    replica.arrays("factors")[0][13] = np.nan  # the 12 factors of a precede those of bias
    assert replica.non_finite_location() == "block 'b', tensor 'bias' (factors)"


def test_adafactor_state_is_sent_in_chunk_sized_pieces():
    large_block = Block(name="b", kind="block", tensors=(
        TensorSpec(name="w", shape=(400_000, 3)), TensorSpec(name="v", shape=(300_000,))
    ))  # fmt: skip
    pieces = part_slices("factors", large_block)
    assert [part_range.start for part_range in pieces[1:]] == [
        part_range.stop for part_range in pieces[:-1]
    ]
    assert pieces[-1].stop == 400_000 + 3 + 300_000  # rows and columns of w, elements of v
    assert (
        max(part_range.stop - part_range.start for part_range in pieces)
        <= large_block.chunk_elements
    )
    assert math.ceil(pieces[-1].stop / large_block.chunk_elements) == len(pieces)
    replica = replica_of(Adafactor(name="adafactor"))
    replica.apply([values(1)], step_scalars(Adafactor(name="adafactor"), 1, 0, 4, 1.0))
    restored_replica = Replica((BLOCK,), Adafactor(name="adafactor"))
    for part in replica.parts():
        for number, part_range in enumerate(part_slices(part.kind, BLOCK)):
            restored_replica.load_piece(part.kind, 0, number, part.values[part_range])
    restored_replica.set_counters(1, 1)
    assert restored_replica.state_digest() == replica.state_digest()
