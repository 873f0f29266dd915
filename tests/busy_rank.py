"""A rank whose device never finishes a microbatch.

Run it as `python -m tests.busy_rank PAUSE_PORT RANK SIZE PORT`. After ten microbatches, the rank
connects to PAUSE_PORT on loopback and waits, in the middle of a step that the other ranks compute
too. The other arguments are those of `tests.one_rank`.
"""

from __future__ import annotations

import itertools
import runpy
import sys
from collections.abc import Iterator

from backends.base.interface import GradientItem
from tests.paused_worker import wait_for_release
from worker.torchrun.leader import GroupGradients, RankShare

_FINISHED_MICROBATCHES = 10
"""Microbatches that the rank computes before it waits."""


def wait_in_a_microbatch(port: int) -> None:
    compute, numbers = GroupGradients._compute_own_share, itertools.count()

    def compute_or_wait(self: GroupGradients, share: RankShare) -> Iterator[GradientItem]:
        number = next(numbers)
        if number >= _FINISHED_MICROBATCHES:
            wait_for_release(number, port)
        yield from compute(self, share)

    GroupGradients._compute_own_share = compute_or_wait  # type: ignore[method-assign]


if __name__ == "__main__":
    wait_in_a_microbatch(int(sys.argv.pop(1)))
    runpy.run_module("tests.one_rank", run_name="__main__")
