"""Accuracy of canonical functions against float64, in both conventions, as docs/canonical.md states
it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.wgpu.canonical.convention import Convention
from backends.wgpu.canonical.host import CpuTarget
from backends.wgpu.device.target import Copy
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.functions import called_functions

pytest.importorskip("ziglang")

Floats = NDArray[np.float32]
Exact = NDArray[np.float64]

_RNG = np.random.default_rng(0)
_RANGES = ((-151, 129), (-104, 90), (-20, 20), (-9, 9), (-2, 2), (-1, 1), (0, 3), (0.9, 1.1))
_INPUTS_PER_RANGE = 4096
_ERF = np.vectorize(math.erf)

FUNCTIONS: dict[str, tuple[str, Callable[[Exact, Exact], Exact]]] = {
    "exp": ("exp(x)", lambda x, _: np.exp(x)),
    "exp2": ("exp2(x)", lambda x, _: np.exp2(x)),
    "expm1": ("exp_minus_1(x)", lambda x, _: np.expm1(x)),
    "log": ("log(x)", lambda x, _: np.log(x)),
    "log2": ("log2(x)", lambda x, _: np.log2(x)),
    "log1p": ("log_1_plus(x)", lambda x, _: np.log1p(x)),
    "tanh": ("hyperbolic_tangent(x)", lambda x, _: np.tanh(x)),
    "erf": ("erf(x)", lambda x, _: _ERF(x)),
    "sin": ("sin(x)", lambda x, _: np.sin(x)),
    "cos": ("cos(x)", lambda x, _: np.cos(x)),
    "sqrt": ("sqrt(x)", lambda x, _: np.sqrt(x)),
    "rsqrt": ("(1.0 / sqrt(x))", lambda x, _: 1 / np.sqrt(x)),
    "division": ("(x / y)", lambda x, y: x / y),
    "pow": ("power(x, y)", np.power),
}


@cache
def function_inputs() -> tuple[Floats, Floats]:
    """Return x and y: random bits of all exponents, and ranges where functions change most."""
    bits = _RNG.integers(0, 2**32, 4 * _INPUTS_PER_RANGE, np.uint32).view(np.float32)
    ranges = [
        _RNG.uniform(low, high, _INPUTS_PER_RANGE).astype(np.float32) for low, high in _RANGES
    ]
    x = np.concatenate([bits, *ranges])
    wide_range = _RNG.uniform(-30, 30, len(x) - len(bits)).astype(np.float32)
    return x, np.concatenate([np.roll(bits, 7), wide_range])


@cache
def compute_functions(convention: Convention) -> dict[str, Floats]:
    """Compute all functions of the same inputs in one kernel on the CPU."""
    x, y = function_inputs()
    expressions = [expression for expression, _ in FUNCTIONS.values()]
    stores = [
        f"out[i + {number * len(x)}u] = {expression};"
        for number, expression in enumerate(expressions)
    ]
    source = "\n".join([
        "@group(0) @binding(0) var<storage, read> a: array<f32>;",
        "@group(0) @binding(1) var<storage, read> b: array<f32>;",
        "@group(0) @binding(2) var<storage, read_write> out: array<f32>;",
        *called_functions(" ".join(expressions)),
        "@compute @workgroup_size(64)",
        "fn main(@builtin(global_invocation_id) id: vec3u) {",
        f"let i = id.x; if (i >= {len(x)}u) {{ return; }} let x = a[i]; let y = b[i];",
        *stores,
        "}",
    ])  # fmt: skip
    cpu = CpuTarget(convention)
    output_bytes = x.nbytes * len(expressions)
    buffers = [cpu.buffer(nbytes) for nbytes in (x.nbytes, y.nbytes, output_bytes)]
    cpu.upload(buffers[0], x)
    cpu.upload(buffers[1], y)
    dispatch = Dispatch(Shader(source, 3), (0, 1, 2), (len(x) // 64, 1, 1), "functions")
    commands = cpu.prepare([dispatch], buffers)
    (results,) = cpu.run(commands, [Copy(buffers[2], output_bytes)]).result()
    cpu.close()
    return dict(zip(FUNCTIONS, np.split(results, len(expressions)), strict=True))


@cache
def documented_ulps() -> dict[str, float]:
    """Read the error of each function from docs/canonical.md, in ulps."""
    text = (Path(__file__).parents[4] / "docs" / "canonical.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE)
    return {name: float(ulp) for name, ulp in rows}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_accurate_as_documented(name: str, fused: bool) -> None:  # noqa: FBT001
    x, y = function_inputs()
    actual = compute_functions(Convention(fused=fused))[name]
    with np.errstate(all="ignore"):
        expected = FUNCTIONS[name][1](x.astype(np.float64), y.astype(np.float64))
        rounded = expected.astype(np.float32)
        error = np.abs(actual - expected) / np.spacing(np.abs(rounded)).astype(np.float64)
    is_finite = np.isfinite(rounded)
    is_exact = (actual == rounded) | (np.isnan(actual) & np.isnan(rounded))
    assert is_exact[~is_finite].all(), x[~is_finite & ~is_exact][:3]
    largest_error = float(error[is_finite].max())
    worst_input = x[is_finite][error[is_finite].argmax()]
    assert largest_error <= documented_ulps()[name] <= 2, (largest_error, worst_input)
