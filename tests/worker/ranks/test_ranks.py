"""Groups of processes as members of a run: the digest of a run without groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster
from tests.free_ports import free_ports
from tests.processes import Process, start

DIGITS = """
task: digits
seed: 3
steps: 4
batch: {samples: 24, microbatch: 2}
digits: {hidden: [8, 8], dropout: 0.1}
optimizer: {name: adamw, lr: 1.0e-2}
checkpoint: {every: 0}
"""
FROZEN = """
task: "tests.frozen_base_task:FrozenBase"
steps: 4
batch: {samples: 14, microbatch: 2}
checkpoint: {every: 0}
"""


def run_file(directory: Path, text: str) -> str:
    path = directory / "run.yaml"
    path.write_text(text)
    return str(path)


def group(cluster: Cluster, name: str, *options: str) -> list[Process]:
    """Two ranks, each as torchrun starts it."""
    port = str(free_ports(1)[0])
    ranks = [
        start(
            "tests.one_rank", str(rank), "2", port, "--coordinator", cluster.address["data"],
            "--name", name, "--backend", "cpu", *options,
        )
        for rank in range(2)
    ]  # fmt: skip
    cluster.workers |= {f"{name}-{rank}": process for rank, process in enumerate(ranks)}
    return ranks


def digest_of(directory: Path, text: str, members: int, *options: str, plain: int = 0) -> str:
    """Of a run of so many groups and plain workers."""
    expected = str(members + plain)
    with Cluster(
        directory, "--expect-workers", expected, "--run", run_file(directory, text)
    ) as cluster:
        for number in range(plain):
            cluster.worker(f"plain-{number}", "--backend", "cpu")
        for number in range(members):
            group(cluster, f"group-{number}", *options)
        result = cluster.result()
        codes = [process.wait(60) for process in cluster.workers.values()]
    assert result["outcome"] == "finished"
    assert codes == [0] * len(codes)
    assert result["exact"]
    return str(result["weights_digest"])


@pytest.fixture(scope="module")
def plain_digest(tmp_path_factory):
    return digest_of(tmp_path_factory.mktemp("plain"), DIGITS, 0, plain=1)


def test_two_groups_of_two_ranks_give_the_digest_of_a_plain_run(tmp_path, plain_digest):
    assert digest_of(tmp_path, DIGITS, 2) == plain_digest


def test_a_rank_that_is_lost_is_a_member_that_is_lost(tmp_path, plain_digest):
    run = run_file(tmp_path, DIGITS)
    with Cluster(tmp_path, "--expect-workers", "2", "--run", run) as cluster:
        hold = cluster.held_worker("plain", 1, "--backend", "cpu")
        ranks = group(cluster, "pair")
        device = cluster.wait_for("worker_ready", worker="pair")["device"]
        assert device.startswith("2 ranks in parallel: 2 x ")
        hold.reached()
        ranks[1].send_signal(signal.SIGKILL)
        cluster.wait_for("worker_disconnected", worker="pair")
        hold.release()
        assert cluster.result()["weights_digest"] == plain_digest
        assert ranks[0].wait(60) == 1


def test_a_frozen_base_lies_across_the_ranks_and_all_members_agree(tmp_path):
    digest_of(tmp_path, FROZEN, 2, "--shard")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--shard",)])
def test_two_members_that_torchrun_starts(tmp_path, plain_digest, options):
    run = run_file(tmp_path, FROZEN if options else DIGITS)
    with Cluster(tmp_path, "--expect-workers", "2", "--run", run) as cluster:
        members = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node", "2", "-m", "worker", "--backend", "cpu",
                    "--name", f"group-{number}", "--coordinator", cluster.address["data"],
                    *options,
                ],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for number in range(2)
        ]  # fmt: skip
        said = [member.communicate(timeout=300)[0] for member in members]
        assert [member.returncode for member in members] == [0, 0], said
        result = cluster.result()
    assert result["outcome"] == "finished"  # digests are compared after every step
    assert options or result["weights_digest"] == plain_digest
