"""Workers on systems that lack features of Linux, simulated on Linux."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import reading_task
from tests.cluster import Cluster
from tests.processes import Process, start
from tests.restricted_worker import FEATURES

READ = f"task: {reading_task.NAME}\nsteps: 3\nbatch: {{samples: 18, microbatch: 1}}\n"
REGRESS = "task: regress\nsteps: 3\nbatch: {samples: 8, microbatch: 2}\n"


def worker_without(
    cluster: Cluster, home: Path, name: str, missing_feature: str, backend: str = "scripted"
) -> Process:
    """Start a worker that lacks a feature, with empty home and cache, in a fresh process."""
    home.mkdir()
    process = start(
        "tests.restricted_worker", missing_feature, "--coordinator", cluster.address["data"],
        "--name", name, "--backend", backend, cwd=home,
        environment={
            "HOME": str(home),
            "SAMESTEP_CACHE": str(home / "cache"),
            # No system tool is needed.
            "PATH": "",
            "SAMESTEP_HOME": os.environ.get("SAMESTEP_HOME", str(Path.home() / ".samestep")),
        },
    )  # fmt: skip
    cluster.workers[name] = process
    return process


ALL_FEATURES = ",".join(FEATURES)


@pytest.mark.parametrize(
    "systems", [[ALL_FEATURES], pytest.param(list(FEATURES), marks=pytest.mark.slow, id="each")]
)
def test_files_are_fetched_and_a_run_finishes_without_features(tmp_path, systems):
    (tmp_path / "data.txt").write_text("something good")
    (tmp_path / "run.yaml").write_text(READ + "data: {train: data.txt}\n")
    arguments = ("--expect-workers", str(len(systems)), "--run", "run.yaml")
    with Cluster(tmp_path / "run", *arguments, cwd=tmp_path) as cluster:
        for number, missing_feature in enumerate(systems):
            worker_without(cluster, tmp_path / f"w{number}", f"w{number}", missing_feature)
        cluster.result()
        for name, process in cluster.workers.items():
            assert cluster.wait_for_exit(process) == 0, name
    for name in cluster.workers:
        cached_files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert [path.read_text() for path in cached_files if "blobs" in path.parts] == [
            "something good"
        ]


def test_same_bits_without_any_of_the_features(tmp_path):
    (tmp_path / "run.yaml").write_text(REGRESS)
    arguments = ("--expect-workers", "1", "--run", str(tmp_path / "run.yaml"))
    with Cluster(tmp_path / "a", *arguments) as cluster:
        cluster.start_worker("here", "--backend", "cpu")
        expected = cluster.result()["weights_digest"]
    with Cluster(tmp_path / "b", *arguments) as cluster:
        worker_without(cluster, tmp_path / "home", "there", ALL_FEATURES, backend="cpu")
        assert cluster.result()["weights_digest"] == expected
