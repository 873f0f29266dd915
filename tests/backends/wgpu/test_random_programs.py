"""Random modules agree with torch, or are refused in one line without a driver's message.

`SAMESTEP_PROGRAMS` sets the number of modules (by default 10, always the same ones), and
`SAMESTEP_FIRST` the number of the first part. A part is a test with 10 modules, so that several
processes can run them. Every second part uses the kernels of a GPU:

    SAMESTEP_PROGRAMS=50000 python -m pytest -n auto tests/backends/wgpu/test_random_programs.py
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from backends.wgpu.lowering import kernels
from tests.backends.wgpu.differential import Mismatch, Unsupported, compare
from tests.backends.wgpu.random_programs import ProgramText, programs, shrink

PROGRAM_COUNT: Final = int(os.environ.get("SAMESTEP_PROGRAMS", "10"))
FIRST_PART: Final = int(os.environ.get("SAMESTEP_FIRST", "0"))
PROGRAMS_PER_PART: Final = 10
MIN_AGREEMENT: Final = 0.25
"""Required fraction of programs that are not refused: a backend that refuses all makes no error."""


def find_mismatch(device, program: ProgramText, *, use_gpu_kernels: bool) -> str:
    """Compare a program with torch; return the message of a mismatch, or an empty string."""
    try:
        compare(device, program, use_gpu_kernels=use_gpu_kernels)
    except Mismatch as error:
        return str(error)
    except Unsupported:
        return ""
    return ""


def describe_mismatch(device, program: ProgramText, *, use_gpu_kernels: bool) -> str:
    """Return the message of a mismatch, with the shortest program that reproduces one."""

    def mismatch_of(candidate: ProgramText) -> str:
        return find_mismatch(device, candidate, use_gpu_kernels=use_gpu_kernels)

    shortest = shrink(program, lambda candidate: bool(mismatch_of(candidate)))
    return f"{mismatch_of(shortest)}; to reproduce it, run:\n\n{shortest}"


@pytest.mark.parametrize(
    "part", range(FIRST_PART, FIRST_PART + -(-PROGRAM_COUNT // PROGRAMS_PER_PART))
)
def test_a_random_module_agrees_with_torch_or_is_refused(device, part, monkeypatch):
    use_gpu_kernels = part % 2 == 1
    if use_gpu_kernels:  # rows here are too short for cooperative sums without this change
        monkeypatch.setattr(kernels, "_COOPERATIVE_TERMS", 2)
    outcomes: Counter[bool] = Counter()  # whether a program agreed or was refused
    seen: set[str] = set()

    @seed(part)
    @settings(
        max_examples=2 * PROGRAMS_PER_PART, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def compare_new_program(program: ProgramText) -> None:
        if len(seen) == PROGRAMS_PER_PART or str(program) in seen:
            return
        seen.add(str(program))
        try:
            outcome = compare(device, program, use_gpu_kernels=use_gpu_kernels)
            outcomes[outcome == "agreed"] += 1
        except Mismatch:
            message = describe_mismatch(device, program, use_gpu_kernels=use_gpu_kernels)
            pytest.fail(message, pytrace=False)
        except Unsupported:
            pass

    compare_new_program()
    assert outcomes[True] >= MIN_AGREEMENT * sum(outcomes.values()), outcomes
