"""The run-spec key `arithmetic`, and its effect on a worker's numerics profile."""

from __future__ import annotations

import pytest

from protocol.base.errors import RunSpecError
from protocol.spec.run_spec import parse_run_spec_text

RUN_SPEC = "task: regress\nsteps: 3\n"


def test_a_plain_string_sets_the_mode() -> None:
    spec = parse_run_spec_text(RUN_SPEC + "arithmetic: canonical")
    assert spec.arithmetic.is_canonical
    assert str(spec.arithmetic) == "canonical, fused, subnormals kept"
    same_spec = parse_run_spec_text(RUN_SPEC, ["arithmetic.mode=canonical"])
    assert same_spec.digest() == spec.digest()


def test_native_is_the_default() -> None:
    assert not parse_run_spec_text(RUN_SPEC).arithmetic.is_canonical


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(RunSpecError, match=r"arithmetic"):
        parse_run_spec_text(RUN_SPEC + "arithmetic: exact")
