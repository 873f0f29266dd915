"""Real processes are killed and stopped; the run ends with the bits of an undisturbed run.

The release size: `python -m tests.chaos --minutes 30 --coordinator-kills 100 --worker-kills 400
--stalls 50`, with another `--seed` each time, and with `--sharded`.
"""

from __future__ import annotations

import pytest

from protocol.base import limits
from tests.chaos.campaign import run_campaign
from tests.chaos.plan import FaultType, Size, count_faults, draw_faults

SIZE = Size(steps=130, coordinator_kills=6, worker_kills=4, stalls=5, drains=1)
"""The smallest size that contains every type of fault."""
LARGER_SIZE = Size(steps=400, coordinator_kills=12, worker_kills=24, stalls=10, drains=4)


def test_a_plan_follows_from_its_seed_and_has_every_type_of_fault():
    faults = draw_faults(7, SIZE)
    assert faults == draw_faults(7, SIZE)
    assert faults != draw_faults(8, SIZE)
    assert count_faults(faults) == SIZE.fault_counts
    assert set(SIZE.fault_counts) == set(FaultType)
    assert all(0 < fault.after_step < SIZE.steps for fault in faults)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("size", "sharded"),
    [(SIZE, False), (LARGER_SIZE, False), (SIZE, True)],
    ids=["smallest", "larger", "sharded"],
)
def test_faults_of_every_type_do_not_change_the_result(tmp_path, request, size, sharded):
    seed = int(request.config.getoption("randomly_seed", default=1)) % 2**32
    outcome = run_campaign(tmp_path, seed, size, keep_log=True, fresh=False, sharded=sharded)
    assert outcome.starts == 1 + size.coordinator_kills
    assert {fault_type: len(times) for fault_type, times in outcome.seconds.items()} == dict(
        size.fault_counts
    )
    assert "sound" in outcome.audit
    assert (outcome.owner_assignments > size.worker_kills) == sharded
    assert outcome.loop_held_ms < 5 * limits.LOOP_HOLD_MS  # a busy machine slows everything down
