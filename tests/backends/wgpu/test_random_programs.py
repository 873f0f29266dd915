"""Random modules agree with torch or are refused in one line: no wrong number, no driver's words.

`SAMESTEP_PROGRAMS` says how many (10 in a plain run, always the same ones), `SAMESTEP_FIRST` which
part of them comes first. In parts, so that several processes share them; every second part has the
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
from tests.backends.wgpu.differential import Untakable, Wrong, compare
from tests.backends.wgpu.random_programs import Text, programs, shrunk

PROGRAMS: Final = int(os.environ.get("SAMESTEP_PROGRAMS", "10"))
FIRST: Final = int(os.environ.get("SAMESTEP_FIRST", "0"))
PER_PART: Final = 10
LEAST_AGREEING: Final = 0.25
"""Of all: what refuses everything is never wrong."""


def wrong(device, text: Text, *, as_on_a_card: bool) -> str:
    """What is wrong with it; empty if nothing is."""
    try:
        compare(device, text, as_on_a_card=as_on_a_card)
    except Wrong as error:
        return str(error)
    except Untakable:
        return ""
    return ""


def complaint(device, text: Text, **kernels: bool) -> str:
    """With the shortest program that shows it."""
    least = shrunk(text, lambda shorter: bool(wrong(device, shorter, **kernels)))
    return f"{wrong(device, least, **kernels)}; as a program that repeats it:\n\n{least}"


@pytest.mark.parametrize("part", range(FIRST, FIRST + -(-PROGRAMS // PER_PART)))
def test_a_random_module_agrees_with_torch_or_is_refused(device, part, monkeypatch):
    as_on_a_card = part % 2 == 1
    if as_on_a_card:
        monkeypatch.setattr(kernels, "_COOPERATIVE_TERMS", 2)  # no row here has as many as a card's
    outcomes: Counter[bool] = Counter()
    seen: set[str] = set()

    @seed(part)
    @settings(
        max_examples=2 * PER_PART, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def tried(text: Text) -> None:
        if len(seen) == PER_PART or str(text) in seen:
            return
        seen.add(str(text))
        try:
            outcomes[compare(device, text, as_on_a_card=as_on_a_card) == "agreed"] += 1
        except Wrong:
            pytest.fail(complaint(device, text, as_on_a_card=as_on_a_card), pytrace=False)
        except Untakable:
            pass

    tried()
    assert outcomes[True] >= LEAST_AGREEING * sum(outcomes.values()), outcomes
