"""A frozen base leaves main memory when the device has it, and no bit of a result changes."""

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
    DEEP,
    LARGE,
    LAYERS,
    Model,
    batch,
    job,
    measure,
    program_of,
)
from tests.backends.wgpu.small_models import gradients
from tests.cluster import ROOT
from tests.resident_memory import MIB

LARGE_BYTES = 4 * LARGE * LARGE * DEEP
ROOM_BYTES = 112 * MIB
"""For activations and staged uploads; less than the 160 MiB of the large model's float32 base."""


@pytest.mark.parametrize("base_dtype", ["float32", "int8", "int4"])
def test_nothing_reads_what_the_host_has_let_go_of(device, base_dtype):
    module = Model()
    copied = copy.deepcopy(module)
    program = program_of(device, copied, base_dtype, batch())
    values_by_block, sums = gradients(program, batch()), program.evaluate(batch())
    frozen = [p for p in copied.parameters() if not p.requires_grad]
    assert len(frozen) == 2 * LAYERS
    assert all(parameter.isnan().all() for parameter in frozen)
    assert copied.scale.isfinite().all()

    reference = EagerBackend("cpu").compile(job(module, base_dtype), batch())
    expected = gradients(reference, batch())
    assert sums["loss"] == pytest.approx(reference.evaluate(batch())["loss"], rel=1e-5)
    reference.close()
    for block, values in expected.items():
        assert np.linalg.norm(values_by_block[block] - values) <= 1e-5 * np.linalg.norm(values)
    again = gradients(program, batch())
    assert all(np.array_equal(again[block], values_by_block[block]) for block in values_by_block)
    program.close()

    with pytest.raises(SamestepError, match=r"'layers.0.weight' were let go of .* build the task"):
        program_of(device, copied, base_dtype, batch())


def test_whole_numbers_stay():
    numbers = nn.Parameter(torch.arange(3), requires_grad=False)
    release(numbers)
    assert numbers.tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base_dtype", "bits"),
    [("float32", 32), ("int8", 8.5)],
)
def test_main_memory_holds_the_base_once_as_it_is_stored(device, base_dtype, bits):
    if not device.adapter.software:
        pytest.skip("what a card holds is not seen here")
    code = f"from {measure.__module__} import measure\nprint(measure({base_dtype!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    # On a software device the stored base is in main memory too, and comes on top of what was.
    stored = LARGE_BYTES * bits / 32
    assert int(done.stdout.splitlines()[-1]) < stored - LARGE_BYTES + ROOM_BYTES
