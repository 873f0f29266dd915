"""float16 with forced overflows: one model for any set of workers, and no batch lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.wgpu.device.adapters import adapters
from tests.cluster import Cluster
from tests.commands import run_command
from tests.end_to_end.test_conversations import float16_run


def train(
    run: Path, out: Path, workers: int, backend: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with Cluster(out, "--expect-workers", str(workers), "--run", str(run)) as cluster:
        for number in range(workers):
            cluster.start_worker(f"w{number}", "--backend", backend)
        result = cluster.result()
        return result, cluster.events_named("loss_scale_halved")


@pytest.mark.parametrize("backend", ["cpu", pytest.param("vulkan", marks=pytest.mark.slow)])
def test_one_and_two_workers_halve_the_scale_equally_and_lose_no_batch(tmp_path, backend):
    if backend == "vulkan" and isinstance(reason := adapters(), str):
        pytest.skip(reason)
    run = float16_run(tmp_path)
    single_worker, halvings = train(run, tmp_path / "1", 1, backend)
    two_workers, halvings_of_two = train(run, tmp_path / "2", 2, backend)
    assert single_worker["outcome"] == "finished"
    assert two_workers["weights_digest"] == single_worker["weights_digest"]
    assert two_workers["losses"] == single_worker["losses"]
    scales = [(each["step"], each["loss_scale"]) for each in halvings]
    assert scales == [(each["step"], each["loss_scale"]) for each in halvings_of_two]
    assert len([step for step, _ in scales if step == 0]) > 1
    assert {step for step, _ in scales} == {0, 1, 2, 3}  # the scale grows after each
    audit = run_command("coordinator", "audit", str(tmp_path / "2" / "out"))
    assert audit.returncode == 0, audit.stdout
    assert "4 of 4 steps replayed" in audit.stdout
