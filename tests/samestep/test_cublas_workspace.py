"""The variable for deterministic cuBLAS is set before CUDA reads it, or a warning follows."""

import os
import warnings
from types import SimpleNamespace

import pytest

import samestep
from samestep.cublas_workspace import reserve_workspace

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
INITIALIZED_TORCH = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
FRESH_TORCH = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))


def test_import_sets_the_variable():
    assert samestep.__version__
    assert os.environ[VARIABLE]


@pytest.mark.parametrize(
    ("modules", "initial"),
    [
        ({}, {}),
        ({"torch": FRESH_TORCH}, {}),
        ({"torch": INITIALIZED_TORCH}, {VARIABLE: ":16:8"}),
    ],
)
def test_variable_is_set_or_left_without_a_warning(modules, initial):
    environment = dict(initial)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reserve_workspace(modules, environment)
    assert environment == {VARIABLE: ":4096:8"} | initial


def test_warning_if_cuda_was_initialized_before():
    environment: dict[str, str] = {}
    with pytest.warns(UserWarning, match=f"import samestep first, or set {VARIABLE}=:4096:8"):
        reserve_workspace({"torch": INITIALIZED_TORCH}, environment)
    assert environment == {VARIABLE: ":4096:8"}
