"""The host releases a frozen base once the device has it, without an effect on results."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from backends.eager.eager import EagerBackend
from backends.wgpu.weights.host_copy import release
from protocol.base.errors import SamestepError
from tests.backends.wgpu.frozen_layers import (
    LARGE_LAYERS,
    LARGE_WIDTH,
    LAYERS,
    FrozenLayers,
    compile_program,
    measure_growth,
    random_batch,
    trainable,
)
from tests.backends.wgpu.small_models import gradients
from tests.cluster import ROOT
from tests.resident_memory import MIB

LARGE_BYTES = 4 * LARGE_WIDTH * LARGE_WIDTH * LARGE_LAYERS
OVERHEAD_BYTES = 112 * MIB
"""Limit on activations and staged uploads; less than `LARGE_BYTES` (160 MiB)."""


@pytest.mark.parametrize("base_dtype", ["float32", "int8", "int4"])
def test_released_host_weights_are_not_read(device, base_dtype):
    module = FrozenLayers()
    module_copy = copy.deepcopy(module)
    program = compile_program(device, module_copy, base_dtype, random_batch())
    actual, sums = gradients(program, random_batch()), program.evaluate(random_batch())
    frozen = [p for p in module_copy.parameters() if not p.requires_grad]
    assert len(frozen) == 2 * LAYERS
    assert all(parameter.isnan().all() for parameter in frozen)
    assert module_copy.scale.isfinite().all()

    reference = EagerBackend("cpu").compile(trainable(module, base_dtype), random_batch())
    expected = gradients(reference, random_batch())
    assert sums["loss"] == pytest.approx(reference.evaluate(random_batch())["loss"], rel=1e-5)
    reference.close()
    for block, values in expected.items():
        assert np.linalg.norm(actual[block] - values) <= 1e-5 * np.linalg.norm(values)
    repeat = gradients(program, random_batch())
    assert all(np.array_equal(repeat[block], actual[block]) for block in actual)
    program.close()

    with pytest.raises(SamestepError, match=r"'layers.0.weight' were released .* build the task"):
        compile_program(device, module_copy, base_dtype, random_batch())


def test_integer_parameters_are_not_released():
    parameter = nn.Parameter(torch.arange(3), requires_grad=False)
    release(parameter)
    assert parameter.tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base_dtype", "bits"),
    [("float32", 32), ("int8", 8.5)],  # int8 has a float32 scale per 64 weights
)
def test_host_memory_holds_only_the_stored_base(device, base_dtype, bits):
    if not device.adapter.software:
        pytest.skip("this process does not see the memory of a GPU")
    code = (
        f"from {measure_growth.__module__} import measure_growth\n"
        f"print(measure_growth({base_dtype!r}))"
    )
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    # A software device adds the stored base to host memory; the host releases its float32 base.
    stored_bytes = LARGE_BYTES * bits / 32
    assert int(completed.stdout.splitlines()[-1]) < stored_bytes - LARGE_BYTES + OVERHEAD_BYTES
