"""A thread that flushes subnormals is detected, even if it began before the check was imported."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from protocol.base.errors import SubnormalsFlushed
from protocol.exact import subnormals


def test_thread_that_keeps_subnormals_passes():
    assert subnormals.subnormals_are_kept()
    subnormals.check_subnormals("this test")


@pytest.mark.parametrize("is_imported_first", [True, False])
def test_thread_that_flushes_subnormals_is_refused_with_one_line(is_imported_first):
    def error_of_flushing_thread() -> str:
        assert torch.set_flush_denormal(True)
        module = {} if is_imported_first else runpy.run_path(subnormals.__file__)
        are_kept = module.get("subnormals_are_kept", subnormals.subnormals_are_kept)
        assert not are_kept()
        check = module.get("check_subnormals", subnormals.check_subnormals)
        with pytest.raises(SubnormalsFlushed) as error_info:
            check("this test")
        return str(error_info.value)

    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(error_of_flushing_thread).result()
    assert error.startswith("this test flushes subnormal numbers to zero")
    assert "\n" not in error
