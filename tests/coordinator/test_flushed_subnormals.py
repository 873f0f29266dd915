"""A coordinator whose arithmetic would give different bits from its workers' does not start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from coordinator.main import main
from protocol.base.errors import SubnormalsFlushed


def test_a_coordinator_whose_threads_flush_subnormals_does_not_start():
    def start_coordinator() -> None:
        assert torch.set_flush_denormal(True)
        with pytest.raises(SubnormalsFlushed, match=r"^the coordinator flushes subnormal numbers"):
            main(None)  # type: ignore[arg-type]

    with ThreadPoolExecutor(1) as thread:
        thread.submit(start_coordinator).result()
