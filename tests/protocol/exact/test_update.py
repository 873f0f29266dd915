"""The exact update: each operation correctly rounded, each rule as defined, and close to torch's.

The references round after every operation: in exact fractions, or in float64 and then float32. For
+ - * / sqrt of float32 values the second gives the first (Figueroa, "When is double rounding
innocuous?", 1995), since 53 >= 2 * 24 + 2; subnormal results included.
"""

import importlib
import math
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.exact import update
from protocol.exact.reduction.average import square_sum
from protocol.exact.schedule import learning_rate
from protocol.exact.update import (
    StepScalars,
    apply_update,
    average_weights,
    averaging_share,
    clip_factor,
    global_norm,
    moment_count,
    step_scalars,
)
from protocol.spec.sections.optimizer import (
    Adagrad,
    Adam,
    Adamw,
    Lion,
    Momentum,
    OptimizerSpec,
    Rmsprop,
    ScheduleFree,
    Sgd,
)

SMALLEST = 2.0**-149
BINARY = {
    "add": (np.add, lambda a, b: a + b),
    "subtract": (np.subtract, lambda a, b: a - b),
    "multiply": (np.multiply, lambda a, b: a * b),
    "divide": (np.divide, lambda a, b: a / b),
}
SPECS = {
    "sgd": Sgd(name="sgd", lr=0.1),
    "sgd-decay-clip": Sgd(name="sgd", lr=0.1, weight_decay=0.05, clip_norm=0.5),
    "momentum": Momentum(name="momentum", lr=0.05, momentum=0.9),
    "momentum-decay-clip": Momentum(
        name="momentum", lr=0.05, momentum=0.9, weight_decay=0.01, clip_norm=0.5
    ),
    "nesterov": Momentum(name="nesterov", lr=0.05, momentum=0.9),
    "nesterov-decay-clip": Momentum(
        name="nesterov", lr=0.05, momentum=0.9, weight_decay=0.01, clip_norm=0.5
    ),
    "adamw": Adamw(name="adamw", lr=1e-2),
    "adamw-decay-clip": Adamw(name="adamw", lr=1e-2, weight_decay=0.1, clip_norm=0.5),
    "lion": Lion(name="lion", lr=1e-3, betas=(0.9, 0.99)),
    "lion-decay-clip": Lion(
        name="lion", lr=1e-3, betas=(0.95, 0.98), weight_decay=0.1, clip_norm=0.5
    ),
    "schedule-free": ScheduleFree(name="schedule-free", lr=1e-2),
    "schedule-free-warmup-decay-clip": ScheduleFree(
        name="schedule-free", lr=1e-2, warmup_steps=7, weight_decay=0.1, clip_norm=0.5
    ),
    "adam": Adam(name="adam", lr=1e-2),
    "adam-decay-clip": Adam(name="adam", lr=1e-2, weight_decay=0.1, clip_norm=0.5),
    "adam-low-beta1": Adam(name="adam", lr=1e-2, betas=(0.3, 0.99), weight_decay=0.1),
    "rmsprop": Rmsprop(name="rmsprop", lr=1e-2),
    "rmsprop-decay-clip": Rmsprop(
        name="rmsprop", lr=1e-2, alpha=0.9, weight_decay=0.1, clip_norm=0.5
    ),
    "adam-amsgrad": Adam(name="adam", lr=1e-2, amsgrad=True, weight_decay=0.1, clip_norm=0.5),
    "adamw-amsgrad": Adamw(name="adamw", lr=1e-2, amsgrad=True, betas=(0.9, 0.9)),
    "rmsprop-momentum": Rmsprop(name="rmsprop", lr=1e-3, momentum=0.9, weight_decay=0.1),
    "rmsprop-centered": Rmsprop(name="rmsprop", lr=1e-3, centered=True),
    "rmsprop-centered-momentum": Rmsprop(
        name="rmsprop", lr=1e-3, centered=True, momentum=0.5, weight_decay=0.1, clip_norm=0.5
    ),
    "momentum-clip-value": Momentum(
        name="momentum", lr=0.05, momentum=0.9, weight_decay=0.01, clip_value=0.05
    ),
    "adamw-clip-value": Adamw(lr=1e-2, clip_value=0.05),
    "adagrad": Adagrad(name="adagrad", lr=1e-1),
    "adagrad-decay-clip": Adagrad(name="adagrad", lr=1e-1, weight_decay=0.1, clip_norm=0.5),
    "adamw-low-beta1": Adamw(name="adamw", lr=1e-2, betas=(0.3, 0.99), weight_decay=0.1),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)

finite_bits = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_to_float32(values):
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float64).astype(np.float32)


def nearest_float32(value: Fraction) -> float:
    """Round to nearest, ties to even, by the definition of IEEE 754 binary32."""
    if value == 0:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    result = round(value / unit) * unit
    return math.copysign(math.inf, result) if abs(result) >= 2**128 else float(result)


def bit_patterns(random, count):
    """Draw float32 values of any bits, a fifth of them subnormal, without NaNs, whose payload
    depends on the hardware."""
    bits = random.integers(0, 2**32, count, np.uint64).astype(np.uint32)
    subnormal = random.random(count) < 0.2
    bits[subnormal] &= np.uint32(0x807FFFFF)
    values = bits.view(np.float32)
    values[np.isnan(values)] = np.float32(1.5)
    return values


def same_bits(a, b):
    nan = np.isnan(a) & np.isnan(b)
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | nan).all())


@pytest.mark.parametrize("name", BINARY)
def test_operations_on_random_bit_patterns_are_correctly_rounded(name):
    random = np.random.default_rng(11)
    operation, _ = BINARY[name]
    a, b = bit_patterns(random, 400_000), bit_patterns(random, 400_000)
    # Half of the pairs are close to each other, where sums cancel and quotients are near one.
    b[::2] = (a[::2].view(np.uint32) ^ random.integers(0, 2**20, 200_000, np.uint32)).view(
        np.float32
    )
    b[np.isnan(b)] = np.float32(1.5)
    with np.errstate(all="ignore"):
        expected = round_to_float32(operation(a.astype(np.float64), b.astype(np.float64)))
        out = np.empty_like(a)
        operation(a, b, out=out)
        assert same_bits(out, expected)
        for scalar in b[:32]:
            operation(a[:5000], scalar, out=out[:5000])
            float64_result = round_to_float32(
                operation(a[:5000].astype(np.float64), np.float64(scalar))
            )
            assert same_bits(out[:5000], float64_result)


@pytest.mark.parametrize("name", BINARY)
@given(a=finite_bits, b=finite_bits)
def test_operations_agree_with_exact_fractions(name, a, b):
    operation, exact = BINARY[name]
    if name == "divide" and b == 0:
        return
    with np.errstate(all="ignore"):
        result = operation(np.array([a], np.float32), np.array([b], np.float32))[0]
    assert float(result) == nearest_float32(exact(Fraction(a), Fraction(b)))


def test_products_and_quotients_are_not_flushed_to_zero():
    tiny = np.full(64, 2.0**-100, np.float32)
    assert (np.multiply(tiny, np.float32(2.0**-49)) == np.float32(SMALLEST)).all()
    assert (np.divide(tiny, np.full(64, 2.0**49, np.float32)) == np.float32(SMALLEST)).all()
    smallest = np.full(64, SMALLEST, np.float32)
    assert (np.add(smallest, smallest) == np.float32(2 * SMALLEST)).all()


def test_sqrt_is_correctly_rounded_for_every_mantissa():
    # All of [1, 4): every mantissa with an even and with an odd exponent.
    lo, hi = np.array([1.0, 4.0], np.float32).view(np.uint32)
    for start in range(lo, hi, 1 << 20):
        values = np.arange(start, start + (1 << 20), dtype=np.uint32).view(np.float32)
        assert same_bits(np.sqrt(values), round_to_float32(np.sqrt(values.astype(np.float64))))


def test_sqrt_of_random_bit_patterns_is_correctly_rounded():
    values = np.abs(bit_patterns(np.random.default_rng(5), 1_000_000))
    assert same_bits(np.sqrt(values), round_to_float32(np.sqrt(values.astype(np.float64))))


@given(st.floats(SMALLEST, width=32, allow_infinity=False))
def test_sqrt_lies_within_half_a_unit_of_the_exact_root(value):
    root = np.sqrt(np.array([value], np.float32))[0]
    below, above = (Fraction(float(np.nextafter(root, np.float32(to)))) for to in (0, np.inf))
    exact = Fraction(float(root))
    assert ((below + exact) / 2) ** 2 < Fraction(value) < ((above + exact) / 2) ** 2


class RoundedFloat:
    """Arrays whose every operation is computed in float64 and rounded to float32."""

    def __init__(self, values):
        self.values = round_to_float32(values)

    def _apply(self, operation, other):
        operand = other.values if isinstance(other, RoundedFloat) else round_to_float32(other)
        with np.errstate(all="ignore"):
            float64_result = operation(self.values.astype(np.float64), operand.astype(np.float64))
        return RoundedFloat(float64_result)

    def __add__(self, other):
        return self._apply(np.add, other)

    def __sub__(self, other):
        return self._apply(np.subtract, other)

    def __mul__(self, other):
        return self._apply(np.multiply, other)

    def __truediv__(self, other):
        return self._apply(np.divide, other)

    def sqrt(self):
        return RoundedFloat(np.sqrt(self.values.astype(np.float64)))


def naive_update(spec, scalars, p, gradient, moments, *, decay):
    """Apply the rules of the `update` module's docstring, without in-place operations."""
    c = scalars
    g = gradient * c.clip
    if c.clip_value is not None:
        g = RoundedFloat(np.clip(g.values, -np.float32(c.clip_value), np.float32(c.clip_value)))
    if decay and c.weight_decay and spec.name in {"adam", "rmsprop", "adagrad"}:
        g = g + p * c.weight_decay
    if spec.name == "adagrad":
        v = moments[0] + g * g
        return p - g / (v.sqrt() + c.epsilon) * c.learning_rate, (v,)
    if spec.name == "rmsprop":
        return naive_rmsprop(spec, c, p, g, moments)
    if spec.name in {"adam", "adamw"}:
        m, v, *largest = moments
        if spec.name == "adamw":
            p = p * (c.decay_factor if decay else 1.0)
        near_m, near_g = m + (g - m) * c.one_minus_beta1, g - (g - m) * c.beta1
        m = near_m if c.one_minus_beta1 < 0.5 else near_g
        v = v * c.beta2 + g * c.one_minus_beta2 * g
        w = v
        if largest:
            w = RoundedFloat(np.where(v.values > largest[0].values, v.values, largest[0].values))
            largest = [w]
        root = w.sqrt() * c.root_correction + c.epsilon
        return p - m / root * c.step_size, (m, v, *largest)
    if spec.name == "lion":
        (m,) = moments
        p = p * (c.decay_factor if decay else 1.0)
        blend = g * c.one_minus_beta1 + m * c.beta1
        p = p - RoundedFloat(np.sign(blend.values)) * c.learning_rate
        return p, (m * c.beta2 + g * c.one_minus_beta2,)
    if spec.name == "schedule-free":
        m, v = moments
        v = v * c.beta2 + g * c.one_minus_beta2 * g
        u = g / (v.sqrt() * c.root_correction + c.epsilon)
        u = u + p * c.weight_decay if decay and c.weight_decay else u
        p = p + m * c.averaging - u * c.step_size
        return p, ((m - u * c.drift) * c.one_minus_averaging, v)
    if decay and c.weight_decay:
        g = g + p * c.weight_decay
    if spec.name == "sgd":
        return p - g * c.learning_rate, ()
    velocity = moments[0] * c.momentum + g
    if spec.name == "nesterov":
        return p - (g + velocity * c.momentum) * c.learning_rate, (velocity,)
    return p - velocity * c.learning_rate, (velocity,)


def naive_rmsprop(spec, c, p, g, moments):
    v, *other_moments = moments
    v = v * c.beta2 + g * c.one_minus_beta2 * g
    variance, new_moments = v, [v]
    if spec.centered:
        a = other_moments.pop()
        near_a, near_g = a + (g - a) * c.one_minus_beta2, g - (g - a) * c.beta2
        a = near_a if c.one_minus_beta2 < 0.5 else near_g
        variance = v - a * a
        variance = RoundedFloat(np.where(variance.values < 0, np.float32(0), variance.values))
    step = g / (variance.sqrt() + c.epsilon)
    if spec.momentum:
        step = other_moments[0] * c.momentum + step
        new_moments.append(step)
    if spec.centered:
        new_moments.append(a)
    return p - step * c.learning_rate, tuple(new_moments)


def run(spec, start, gradients, *, decay=True, chunk_elements=update.UPDATE_CHUNK_ELEMENTS):
    """Return parameters and moments after one step for each gradient."""
    parameters = start.copy()
    moments = tuple(np.zeros_like(start) for _ in range(moment_count(spec)))
    for step, gradient in enumerate(gradients):
        norm = global_norm([square_sum(gradient)])
        scalars = step_scalars(spec, step + 1, step, len(gradients), norm)
        apply_update(
            spec,
            scalars,
            parameters,
            gradient,
            moments,
            decay=decay,
            chunk_elements=chunk_elements,
        )
    return parameters, moments


def problem(elements=1000, steps=10, seed=0):
    random = np.random.default_rng(seed)
    start = random.standard_normal(elements).astype(np.float32)
    scale = np.exp(random.uniform(-8, 1, elements)) / 10
    gradients = (random.standard_normal((steps, elements)) * scale).astype(np.float32)
    return start, gradients


@each_spec
@pytest.mark.parametrize("decay", [True, False])
def test_each_rule_equals_the_naive_rule_bit_for_bit(spec, decay):
    start, gradients = problem()
    weights, actual_moments = run(spec, start, gradients, decay=decay)
    p = RoundedFloat(start)
    moments = tuple(RoundedFloat(np.zeros_like(start)) for _ in range(moment_count(spec)))
    for step, gradient in enumerate(gradients):
        norm = global_norm([square_sum(gradient)])
        scalars = step_scalars(spec, step + 1, step, len(gradients), norm)
        p, moments = naive_update(spec, scalars, p, RoundedFloat(gradient), moments, decay=decay)
    assert same_bits(weights, p.values)
    assert all(same_bits(a, b.values) for a, b in zip(actual_moments, moments, strict=True))


@each_spec
def test_step_on_any_bit_patterns_equals_the_naive_step(spec):
    random = np.random.default_rng(8)
    p, gradient = bit_patterns(random, 20_000), bit_patterns(random, 20_000)
    moments = tuple(np.abs(bit_patterns(random, 20_000)) for _ in range(moment_count(spec)))
    scalars = step_scalars(spec, 3, 2, 10, 7.0)
    expected, expected_moments = naive_update(
        spec,
        scalars,
        RoundedFloat(p),
        RoundedFloat(gradient),
        tuple(RoundedFloat(m) for m in moments),
        decay=True,
    )
    apply_update(spec, scalars, p, gradient, moments, decay=True)
    assert same_bits(p, expected.values)
    assert all(same_bits(a, b.values) for a, b in zip(moments, expected_moments, strict=True))


@each_spec
def test_chunk_size_does_not_change_a_bit(spec):
    start, gradients = problem(elements=1003, steps=3)
    unchunked_weights, moments = run(spec, start, gradients)
    for size in (1, 7, 64, 1002, 1003):
        weights, actual_moments = run(spec, start, gradients, chunk_elements=size)
        assert same_bits(weights, unchunked_weights)
        assert all(same_bits(a, b) for a, b in zip(actual_moments, moments, strict=True))


@each_spec
def test_array_address_does_not_change_a_bit(spec):
    start, gradients = problem(elements=333, steps=1)
    expected, _ = run(spec, start, gradients)
    for shift in range(5):
        shifted_array = np.empty(333 + shift, np.float32)[shift:]
        shifted_array[:] = start
        moments = tuple(
            np.zeros(333 + shift, np.float32)[shift:] for _ in range(moment_count(spec))
        )
        scalars = step_scalars(spec, 1, 0, 1, global_norm([square_sum(gradients[0])]))
        apply_update(spec, scalars, shifted_array, gradients[0], moments, decay=True)
        assert same_bits(shifted_array, expected)


@each_spec
def test_gradient_is_unchanged(spec):
    start, gradients = problem(elements=50, steps=1)
    before = gradients.copy()
    run(spec, start, gradients)
    assert same_bits(gradients, before)


def test_update_of_an_empty_array_changes_nothing():
    empty = np.empty(0, np.float32)
    spec = Sgd(name="sgd")
    apply_update(spec, step_scalars(spec, 1, 0, 1, 0.0), empty, empty, (), decay=True)


def test_overflow_raises_no_warning():
    spec = Sgd(name="sgd", lr=1e3)
    parameters = np.full(4, 1e38, np.float32)
    scalars = step_scalars(spec, 1, 0, 1, 0.0)
    apply_update(spec, scalars, parameters, parameters.copy(), (), decay=False)
    assert np.isneginf(parameters).all()


DIGEST_PROGRAM = """
import hashlib
import numpy as np
from protocol.spec.sections.optimizer import Adamw
from protocol.exact.reduction.average import square_sum
from protocol.exact.update import apply_update, step_scalars, global_norm

spec = Adamw(name="adamw", lr=1e-2, weight_decay=0.1, clip_norm=0.5)
words = np.arange(1, 20_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
start = ((words >> np.uint64(40)).astype(np.float32) - np.float32(2**23)) * np.float32(2**-23)
p, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
for step in range(5):
    gradient = np.roll(start, step + 1) * np.float32(0.01)
    norm = global_norm([square_sum(gradient)])
    scalars = step_scalars(spec, step + 1, step, 5, norm)
    apply_update(spec, scalars, p, gradient, (m, v), decay=True)
print(hashlib.sha256(p.tobytes() + m.tobytes() + v.tobytes()).hexdigest())
"""


def dispatched_features():
    """Return the instruction sets that numpy would use here beyond its baseline."""
    core = importlib.import_module("numpy._core._multiarray_umath")
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]


def digest_in_process(**variables):
    completed = subprocess.run(
        [sys.executable, "-c", DIGEST_PROGRAM],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return completed.stdout.strip()


def test_bits_are_frozen_and_do_not_depend_on_the_instruction_set():
    features = dispatched_features()
    baseline_digest = digest_in_process()
    reduced_digest = digest_in_process(NPY_DISABLE_CPU_FEATURES=" ".join(features))
    assert baseline_digest == reduced_digest
    assert baseline_digest == "6acfd2823fea963474716736be91fbfcf9a1c92bb12e75b025c166af512498f3"


class ReferenceScheduleFree:
    """The loop of schedulefree 1.4's AdamWScheduleFree, for one tensor."""

    def __init__(self, parameter, spec):
        self.parameter, self.spec = parameter, spec
        self.param_groups = [{"lr": 0.0}]
        self.z, self.v = parameter.detach().clone(), parameter.detach() * 0
        self.k, self.lr_max, self.weight_sum = 0, -1.0, 0.0

    def step(self):
        spec, y, grad = self.spec, self.parameter.data, self.parameter.grad
        beta1, beta2 = spec.betas
        warmup = spec.warmup_steps
        rate = spec.lr * ((self.k + 1) / warmup if self.k < warmup else 1.0)
        self.lr_max = max(rate, self.lr_max)
        weight = self.lr_max**2
        self.weight_sum += weight
        ckp1 = weight / self.weight_sum
        self.v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denom = self.v.div(1 - beta2 ** (self.k + 1)).sqrt_().add_(spec.eps)
        normalized = grad.div(denom).add_(y, alpha=spec.weight_decay)
        y.lerp_(end=self.z, weight=ckp1)
        y.add_(normalized, alpha=rate * (beta1 * (1 - ckp1) - 1))
        self.z.sub_(normalized, alpha=rate)
        self.k += 1

    def average(self):
        return self.parameter.detach().lerp(end=self.z, weight=1 - 1 / self.spec.betas[0])


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@each_spec
def test_weights_stay_within_a_millionth_of_the_reference_over_100_steps(spec, schedule):
    torch = pytest.importorskip("torch")
    from tests.torch_optimizers import torch_optimizer

    is_schedule_free = spec.name == "schedule-free"
    spec = spec.model_copy(update={"schedule": "constant" if is_schedule_free else schedule})
    start, gradients = problem(elements=2000, steps=100, seed=4)
    weights, moments = run(spec, start, gradients)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    if is_schedule_free:
        optimizer: Any = ReferenceScheduleFree(parameter, spec)
    else:
        groups = [{"params": [parameter], "weight_decay": spec.weight_decay}]
        optimizer = torch_optimizer(spec, groups)
    for step, gradient in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = learning_rate(spec, step, 100)
        parameter.grad = torch.from_numpy(gradient.copy())
        if spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([parameter], spec.clip_norm)
        if spec.clip_value is not None:
            torch.nn.utils.clip_grad_value_([parameter], spec.clip_value)
        optimizer.step()
    weights = average_weights(spec, weights, moments)
    expected = (
        (optimizer.average() if is_schedule_free else parameter.detach()).numpy().astype(np.float64)
    )
    error = np.sqrt(((weights - expected) ** 2).sum() / (expected**2).sum())
    start_error = np.sqrt(((start - expected) ** 2).sum() / (expected**2).sum())
    assert error <= 1e-6
    assert start_error > 1e-3


@given(st.sampled_from(list(SPECS.values())), st.integers(1, 10**7), st.floats(0, 1e30))
def test_scalars_are_float32_values_and_survive_the_wire(spec, optimizer_step, norm):
    scalars = step_scalars(spec, optimizer_step, optimizer_step, 10**7, norm)
    for value in scalars.model_dump().values():
        assert float(np.float32(value)) == value
    assert StepScalars.model_validate_json(scalars.model_dump_json()) == scalars


@given(st.integers(0, 40), st.integers(1, 100))
def test_the_newest_steps_share_of_the_average_is_the_sum_of_squared_rates(warmup, step):
    rates = [Fraction(min(k, warmup), warmup) if warmup else 1 for k in range(1, step + 1)]
    expected = Fraction(rates[-1]) ** 2 / sum(Fraction(rate) ** 2 for rate in rates)
    assert averaging_share(step, warmup) == float(expected)


def test_average_after_the_first_step_is_its_weights():
    spec = SPECS["schedule-free"]
    start, gradients = problem(elements=20, steps=1)
    weights, moments = run(spec, start, gradients)
    assert not moments[0].any()
    assert same_bits(average_weights(spec, weights, moments), weights)


def test_commit_without_average_is_unchanged():
    assert "averaging" not in step_scalars(SPECS["adamw"], 3, 2, 10, 1.0).model_dump_json()
    assert "averaging" in step_scalars(SPECS["schedule-free"], 3, 2, 10, 1.0).model_dump_json()


def test_scalars_are_rounded_once_from_exact_values():
    spec = Adamw(lr=3e-3, weight_decay=0.1, betas=(0.9, 0.999), clip_norm=2.0)
    scalars = step_scalars(spec, 2, 1, 10, 8.0)
    exact = {
        "learning_rate": 3e-3,
        "clip": 2.0 / (8.0 + 1e-6),
        "decay_factor": 1 - 3e-4,
        "one_minus_beta2": 0.001,
        "step_size": 3e-3 / (1 - 0.81),
        "root_correction": 1 / math.sqrt(1 - 0.999**2),
        "epsilon": 1e-8,
    }
    for name, value in exact.items():
        assert getattr(scalars, name) == np.float32(value), name


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.1, 1e-60])
def test_scalars_beyond_float32_are_refused(value):
    document = step_scalars(Adamw(), 1, 0, 1, 0.0).model_dump()
    with pytest.raises(ValidationError):
        StepScalars(**document | {"learning_rate": value})


def test_scalars_refuse_unknown_fields():
    document = step_scalars(Adamw(), 1, 0, 1, 0.0).model_dump()
    with pytest.raises(ValidationError):
        StepScalars(**document | {"surprise": 1.0})


@given(
    name=st.sampled_from(["sgd", "momentum", "nesterov", "adamw", "lion"]),
    lr=st.floats(1e-30, 1e3),
    betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    eps=st.floats(1e-30, 1e3),
    weight_decay=st.floats(0, 1e3),
    clip_norm=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    optimizer_step=st.integers(1, 10**9),
    norm=st.floats(0, 1e45),
)
def test_every_valid_optimizer_has_scalars_within_float32(optimizer_step, norm, **fields):
    scalars = step_scalars(OptimizerSpec(**fields), optimizer_step, 0, 1, norm)
    assert scalars.learning_rate > 0


def test_moment_count_of_each_rule():
    counts = [moment_count(OptimizerSpec(name=n)) for n in ("sgd", "momentum", "nesterov", "adamw")]
    assert counts == [0, 1, 1, 2]


def test_global_norm_adds_in_block_order():
    assert global_norm([9.0, 16.0]) == 5.0
    assert global_norm([1e16, 1.0, 1.0]) == math.sqrt(1e16)
    assert global_norm([1.0, 1.0, 1e16]) == math.sqrt(1e16 + 2)


def test_clip_factor_scales_norms_above_the_limit():
    assert clip_factor(None, 1e9) == 1.0
    assert clip_factor(1.0, 0.5) == 1.0
    assert clip_factor(1.0, 0.0) == 1.0
    assert clip_factor(1.0, 4.0) == pytest.approx(0.25, rel=1e-6)
