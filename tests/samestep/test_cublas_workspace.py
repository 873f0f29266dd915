"""The variable that fixes cuBLAS's bits is set before CUDA can read it, or a warning is given."""

import os
import warnings
from types import SimpleNamespace

import pytest

import samestep
from samestep.cublas_workspace import reserve_workspace

NAME = "CUBLAS_WORKSPACE_CONFIG"
USED, UNUSED = (
    SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda is_used=is_used: is_used))
    for is_used in (True, False)
)


def test_import_sets_the_variable():
    assert samestep.__version__
    assert os.environ[NAME]


@pytest.mark.parametrize(
    ("modules", "before"), [({}, {}), ({"torch": UNUSED}, {}), ({"torch": USED}, {NAME: ":16:8"})]
)
def test_variable_is_set_silently(modules, before):
    environment = dict(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reserve_workspace(modules, environment)
    assert environment == {NAME: ":4096:8"} | before


def test_warning_if_a_card_was_used_before():
    environment: dict[str, str] = {}
    with pytest.warns(UserWarning, match=f"import samestep first, or set {NAME}=:4096:8"):
        reserve_workspace({"torch": USED}, environment)
    assert environment == {NAME: ":4096:8"}
