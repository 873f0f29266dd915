"""Workers that the coordinator starts itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from coordinator.local_workers import RESTARTS
from tests.cluster import Cluster

RUN = """
task: scripted
steps: 1000000
batch: {samples: 4, microbatch: 1}
scripted: {blocks: 2, block_bytes: 64, samples: 4}
"""


def test_one_that_is_killed_is_started_again_a_few_times(tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text(RUN)
    job = ("--run", str(spec), "--local-workers", "1", "--backend", "scripted")
    with Cluster(tmp_path, *job) as cluster:
        for time in range(1, RESTARTS + 2):
            cluster.wait_for("worker_ready", nth=time, worker="local-0")
            os.kill(only_child(cluster.coordinator.pid), signal.SIGKILL)
        assert cluster.wait_for_exit(cluster.coordinator) == 1
        assert cluster.coordinator.stderr is not None
        *told, last = cluster.coordinator.stderr.read().splitlines()
    line = (
        "coordinator: local worker 'local-0' was ended by SIGKILL; started again, {} of at most 3"
    )
    assert [each.removesuffix(" times") for each in told] == [line.format(n) for n in (1, 2, 3)]
    assert last.startswith("coordinator: all local workers have ended")


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
