"""Groups of processes that shard a frozen base, as workers of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster
from tests.end_to_end.test_embeddings import embed_run
from tests.free_ports import free_ports
from tests.processes import Process, start
from tests.small_decoder import write_decoder_run

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


def start_ranks(cluster: Cluster, name: str) -> list[Process]:
    """Start two ranks as torchrun does."""
    port = str(free_ports(1)[0])
    ranks = [
        start(
            "tests.one_rank", str(rank), "2", port, "--coordinator", cluster.address["data"],
            "--name", name, "--backend", "cpu", "--shard",
        )
        for rank in range(2)
    ]  # fmt: skip
    cluster.workers |= {f"{name}-{rank}": process for rank, process in enumerate(ranks)}
    return ranks


def test_groups_with_a_sharded_base_agree(tmp_path):
    run = run_file(tmp_path, FROZEN)
    with Cluster(tmp_path, "--expect-workers", "2", "--run", run) as cluster:
        for number in range(2):
            start_ranks(cluster, f"group-{number}")
        result = cluster.result()
        device = cluster.wait_for("worker_ready", worker="group-0")["device"]
        exit_codes = [process.wait(60) for process in cluster.workers.values()]
    assert device.startswith("2 ranks sharded: 2 x ")
    assert result["outcome"] == "finished"
    assert exit_codes == [0] * 4
    assert result["exact"]


@pytest.mark.slow
def test_all_ranks_use_the_unit_of_the_run_spec(tmp_path):
    """The mean of a microbatch counts by its weight on every rank: the digest equals one
    worker's."""
    run = run_file(tmp_path, FROZEN.replace("microbatch: 2}", "microbatch: 2, unit: microbatch}"))
    digests = []
    for kind in ("alone", "ranks"):
        with Cluster(tmp_path / kind, "--expect-workers", "1", "--run", run) as cluster:
            if kind == "ranks":
                start_ranks(cluster, "group")
            else:
                cluster.start_worker("alone", "--backend", "cpu")
            digests.append(cluster.result()["weights_digest"])
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_lora_with_a_bfloat16_base_has_the_digest_of_one_device(tmp_path):
    """The run has dropout, gradient checkpointing and an evaluation at the end."""
    source = {"source": str(tmp_path / "model"), "base_dtype": "bfloat16", "precision": "bfloat16"}
    run = str(
        write_decoder_run("causal-lm", tmp_path, model={**source, "gradient_checkpointing": True})
    )
    results = []
    for kind in ("alone", "ranks"):
        with Cluster(tmp_path / kind, "--expect-workers", "1", "--run", run) as cluster:
            if kind == "ranks":
                start_ranks(cluster, "group")
            else:
                cluster.start_worker("alone", "--backend", "cpu")
            results.append(cluster.result())
    alone, ranks = results
    assert ranks["outcome"] == "finished"
    assert ranks["weights_digest"] == alone["weights_digest"]
    assert ranks["losses"] == alone["losses"]


@pytest.mark.slow
def test_ranks_learn_embeddings_with_negatives_from_the_whole_step(tmp_path):
    """The run has LoRA, dropout, a learned temperature and a last step of two microbatches."""
    run = str(embed_run(tmp_path, lora={"r": 2}, batch={"samples": 20, "microbatch": 4}))
    losses = []
    for kind in ("alone", "ranks"):
        with Cluster(tmp_path / kind, "--expect-workers", "1", "--run", run) as cluster:
            if kind == "ranks":
                start_ranks(cluster, "group")
            else:
                cluster.start_worker("alone", "--backend", "cpu")
            losses.append(cluster.result()["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_lost_rank_disconnects_its_worker_and_the_run_finishes(tmp_path):
    run = run_file(tmp_path, FROZEN)
    with Cluster(tmp_path, "--expect-workers", "2", "--run", run) as cluster:
        hold = cluster.start_paused_worker("plain", 1, "--backend", "cpu")
        ranks = start_ranks(cluster, "pair")
        hold.wait_until_paused()
        ranks[1].send_signal(signal.SIGKILL)
        cluster.wait_for("worker_disconnected", worker="pair")
        hold.release()
        assert cluster.result()["outcome"] == "finished"
        assert ranks[0].wait(60) == 1


@pytest.mark.slow
def test_two_groups_started_by_torchrun_finish_a_run(tmp_path):
    run = run_file(tmp_path, FROZEN)
    with Cluster(tmp_path, "--expect-workers", "2", "--run", run) as cluster:
        groups = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node", "2", "-m", "worker", "--backend", "cpu",
                    "--name", f"group-{number}", "--coordinator", cluster.address["data"],
                    "--shard",
                ],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for number in range(2)
        ]  # fmt: skip
        outputs = [group.communicate(timeout=300)[0] for group in groups]
        assert [group.returncode for group in groups] == [0, 0], outputs
        result = cluster.result()
    assert result["outcome"] == "finished"  # digests are compared after every step
