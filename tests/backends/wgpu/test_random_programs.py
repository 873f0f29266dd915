"""Random modules agree with torch or are refused in one line: no wrong number, no driver message.

`SAMESTEP_PROGRAMS` sets their number (10 by default, always the same), and `SAMESTEP_FIRST` the
part that comes first. Parts let several processes share the work; every second part uses the
kernels of a card:

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
from tests.backends.wgpu.random_programs import Text, programs, shrunk

PROGRAMS: Final = int(os.environ.get("SAMESTEP_PROGRAMS", "10"))
FIRST: Final = int(os.environ.get("SAMESTEP_FIRST", "0"))
PER_PART: Final = 10
LEAST_AGREEING: Final = 0.25
"""Required share of accepted programs, because a backend that refuses everything is never wrong."""


def complaint_of(device, text: Text, *, as_on_a_card: bool) -> str:
    """Return what is wrong with the program; empty if nothing is."""
    try:
        compare(device, text, as_on_a_card=as_on_a_card)
    except Mismatch as error:
        return str(error)
    except Unsupported:
        return ""
    return ""


def complaint(device, text: Text, **kernels: bool) -> str:
    """Add the shortest program that shows the fault."""
    least = shrunk(text, lambda shorter: bool(complaint_of(device, shorter, **kernels)))
    return f"{complaint_of(device, least, **kernels)}; as a program that repeats it:\n\n{least}"


@pytest.mark.parametrize("part", range(FIRST, FIRST + -(-PROGRAMS // PER_PART)))
def test_a_random_module_agrees_with_torch_or_is_refused(device, part, monkeypatch):
    as_on_a_card = part % 2 == 1
    if as_on_a_card:
        monkeypatch.setattr(kernels, "_COOPERATIVE_TERMS", 2)  # no row here is as long as a card's
    outcomes: Counter[bool] = Counter()
    refusals: set[str] = set()

    @seed(part)
    @settings(
        max_examples=2 * PER_PART, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def run_program(text: Text) -> None:
        if len(refusals) == PER_PART or str(text) in refusals:
            return
        refusals.add(str(text))
        try:
            outcomes[compare(device, text, as_on_a_card=as_on_a_card) == "agreed"] += 1
        except Mismatch:
            pytest.fail(complaint(device, text, as_on_a_card=as_on_a_card), pytrace=False)
        except Unsupported:
            pass

    run_program()
    assert outcomes[True] >= LEAST_AGREEING * sum(outcomes.values()), outcomes
