"""`torchrun -m worker --shard` on the stand-in: a frozen base over two ranks, each with a card."""

import time
from pathlib import Path

import pytest

from tests import standin
from tests.cluster import Cluster, Hold
from tests.free_ports import free_ports
from tests.processes import Process, start
from tests.worker.torchrun.test_ranks import FROZEN, run_file
from worker.torchrun.group import LOSS_TIMEOUT_S

pytestmark = pytest.mark.slow
_ENGINE_S = 10
"""Time that an ending worker waits for its device."""


def start_ranks(
    cluster, folder: Path, environments: list[dict[str, str]], *, rank_0_hold: Hold | None = None
) -> list[Process]:
    """Start two ranks, each with a card; their standard error goes to files in the folder.

    Args:
        cluster: The cluster whose coordinator they join.
        folder: The folder for the files `rank-0` and `rank-1`.
        environments: The environment of each rank.
        rank_0_hold: If set, rank 0 pauses within a step until the hold is released.
    """
    port = str(free_ports(1)[0])

    def module_of(rank: int) -> list[str]:
        if rank == 0 and rank_0_hold is not None:
            return ["tests.busy_rank", str(rank_0_hold.port)]
        return ["tests.one_rank"]

    ranks = [
        start(
            *module_of(rank), str(rank), "2", port, "--coordinator", cluster.address["data"],
            "--name", "cards", "--backend", "accelerator", "--shard", "--retry-for", "5",
            environment=environment,
            stderr=folder / f"rank-{rank}",
        )
        for rank, environment in enumerate(environments)
    ]  # fmt: skip
    cluster.workers |= {str(rank): process for rank, process in enumerate(ranks)}
    return ranks


def test_ranks_use_only_their_cards_and_have_the_digest_of_a_cpu(tmp_path, environment):
    run = run_file(tmp_path, FROZEN)
    with Cluster(tmp_path / "cpu", "--expect-workers", "1", "--run", run) as cluster:
        cluster.start_worker("cpu", "--backend", "cpu")
        expected = cluster.result()["weights_digest"]
    folder = tmp_path / "touched"
    folder.mkdir()
    environment = {**environment, standin.TOUCHED: str(folder)}
    with Cluster(tmp_path / "cards", "--expect-workers", "1", "--run", run) as cluster:
        ranks = start_ranks(cluster, tmp_path, [environment] * 2)
        assert cluster.result()["weights_digest"] == expected
        device = cluster.wait_for("worker_ready", worker="cards")["device"]
        assert [cluster.wait_for_exit(rank) for rank in ranks] == [0, 0]
    assert device == "2 ranks sharded: 2 x Stand-in Accelerator"
    for rank in range(2):
        (file,) = folder.glob(f"rank-{rank}-*")
        lines = file.read_text().splitlines()
        assert {line.partition(" ")[0] for line in lines} == {f"{standin.NAME}:{rank}"}, lines
        assert len(lines) > 1, "the threads of the engine, the device and autograd"


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_broken_card_ends_both_ranks_and_the_cause_is_reported(tmp_path, environment, broken_rank):
    """The other rank waits in a collective, which the broken rank does not enter."""
    run = run_file(tmp_path, FROZEN.replace("steps: 4", "steps: 400"))
    breaking_environment = {**environment, standin.KERNELS_TO_FAULT: "1500"}  # within a step
    with Cluster(tmp_path / "cards", "--expect-workers", "1", "--run", run) as cluster:
        ranks = start_ranks(
            cluster,
            tmp_path,
            [breaking_environment if rank == broken_rank else environment for rank in range(2)],
        )
        disconnection = cluster.wait_for("worker_disconnected", worker="cards")
        codes = [cluster.wait_for_exit(rank) for rank in ranks]
    error_texts = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert codes == [1, 1], error_texts
    cause = "an illegal memory access was encountered"
    assert cause in disconnection["reason"]
    assert cause in error_texts[broken_rank]


def test_lost_coordinator_ends_both_ranks_during_a_computation(tmp_path, environment):
    """Both ranks report the reason of rank 0, although no message is sent in a computation."""
    run = run_file(tmp_path, FROZEN.replace("steps: 4", "steps: 400"))
    hold = Hold()
    with Cluster(tmp_path / "cards", "--expect-workers", "1", "--run", run) as cluster:
        ranks = start_ranks(cluster, tmp_path, [environment] * 2, rank_0_hold=hold)
        hold.wait_until_paused()
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        killed_s = time.monotonic()
        codes = [rank.wait(60) for rank in ranks]
        elapsed_s = time.monotonic() - killed_s
    hold.close()
    rank_0_errors, rank_1_errors = ((tmp_path / f"rank-{rank}").read_text() for rank in range(2))
    assert all(codes), codes
    assert elapsed_s < 5 + _ENGINE_S + LOSS_TIMEOUT_S + 15, "with room for a slow machine"
    cause = "no coordinator"
    assert cause in rank_0_errors
    assert rank_1_errors.count("\n") == 1
    assert f"the group of ranks' failed: rank 0: {cause}" in rank_1_errors
