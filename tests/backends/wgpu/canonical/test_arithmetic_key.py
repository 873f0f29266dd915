"""The run-spec key `arithmetic`, and its effect on a worker's numerics profile."""

from __future__ import annotations

import pytest

from protocol.base.errors import RunSpecError
from protocol.spec.run_spec import parse_run_spec_text

RUN = "task: regress\nsteps: 3\n"


def test_one_word_sets_the_mode() -> None:
    spec = parse_run_spec_text(RUN + "arithmetic: canonical")
    assert spec.arithmetic.is_canonical
    assert str(spec.arithmetic) == "canonical, fused, subnormals kept"
    repeat = parse_run_spec_text(RUN, ["arithmetic.mode=canonical"])
    assert repeat.digest() == spec.digest()


def test_native_is_the_default() -> None:
    assert not parse_run_spec_text(RUN).arithmetic.is_canonical


def test_unknown_word_is_named() -> None:
    with pytest.raises(RunSpecError, match=r"arithmetic"):
        parse_run_spec_text(RUN + "arithmetic: exact")
