"""Accuracy of the functions of canonical arithmetic against float64, fused and separate; the
documentation states it."""

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

_DRAW = np.random.default_rng(0)
_RANGES = ((-151, 129), (-104, 90), (-20, 20), (-9, 9), (-2, 2), (-1, 1), (0, 3), (0.9, 1.1))
_EACH = 4096
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
    """Random bits of all exponents, and the ranges where a function changes most."""
    bits = _DRAW.integers(0, 2**32, 4 * _EACH, np.uint32).view(np.float32)
    ranges = [_DRAW.uniform(low, high, _EACH).astype(np.float32) for low, high in _RANGES]
    x = np.concatenate([bits, *ranges])
    wide_range = _DRAW.uniform(-30, 30, len(x) - len(bits)).astype(np.float32)
    return x, np.concatenate([np.roll(bits, 7), wide_range])


@cache
def computed(convention: Convention) -> dict[str, Floats]:
    """Compute every function of the same inputs in one kernel."""
    x, y = function_inputs()
    texts = [text for text, _ in FUNCTIONS.values()]
    lines = [f"out[i + {n * len(x)}u] = {text};" for n, text in enumerate(texts)]
    source = "\n".join([
        "@group(0) @binding(0) var<storage, read> a: array<f32>;",
        "@group(0) @binding(1) var<storage, read> b: array<f32>;",
        "@group(0) @binding(2) var<storage, read_write> out: array<f32>;",
        *called_functions(" ".join(texts)),
        "@compute @workgroup_size(64)",
        "fn main(@builtin(global_invocation_id) id: vec3u) {",
        f"let i = id.x; if (i >= {len(x)}u) {{ return; }} let x = a[i]; let y = b[i];",
        *lines,
        "}",
    ])  # fmt: skip
    host = CpuTarget(convention)
    buffers = [host.buffer(x.nbytes), host.buffer(x.nbytes), host.buffer(x.nbytes * len(texts))]
    host.upload(buffers[0], x)
    host.upload(buffers[1], y)
    dispatch = Dispatch(Shader(source, 3), (0, 1, 2), (len(x) // 64, 1, 1), "functions")
    commands = host.prepare([dispatch], buffers)
    (content,) = host.run(commands, [Copy(buffers[2], x.nbytes * len(texts))]).result()
    host.close()
    return dict(zip(FUNCTIONS, np.split(content, len(texts)), strict=True))


@cache
def documented_ulps() -> dict[str, float]:
    """Read the documented error of each function, in ulps."""
    text = (Path(__file__).parents[4] / "docs" / "canonical.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE)
    return {name: float(ulp) for name, ulp in rows}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_accurate_as_documented(name: str, fused: bool) -> None:  # noqa: FBT001
    x, y = function_inputs()
    actual = computed(Convention(fused=fused))[name]
    with np.errstate(all="ignore"):
        expected = FUNCTIONS[name][1](x.astype(np.float64), y.astype(np.float64))
        rounded = expected.astype(np.float32)
        error = np.abs(actual - expected) / np.spacing(np.abs(rounded)).astype(np.float64)
    finite = np.isfinite(rounded)
    is_exact = (actual == rounded) | (np.isnan(actual) & np.isnan(rounded))
    assert is_exact[~finite].all(), x[~finite & ~is_exact][:3]
    worst = float(error[finite].max())
    assert worst <= documented_ulps()[name] <= 2, (worst, x[finite][error[finite].argmax()])
