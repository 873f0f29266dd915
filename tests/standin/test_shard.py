"""A frozen base across two ranks with a card each: `torchrun -m worker --shard` on the stand-in."""

import pytest

from tests import standin
from tests.cluster import Cluster
from tests.free_ports import free_ports
from tests.processes import start
from tests.worker.torchrun.test_ranks import FROZEN, run_file

pytestmark = pytest.mark.slow


def test_each_rank_touches_its_own_card_alone_and_the_digest_is_that_of_a_cpu(
    tmp_path, environment
):
    run = run_file(tmp_path, FROZEN)
    with Cluster(tmp_path / "cpu", "--expect-workers", "1", "--run", run) as cluster:
        cluster.worker("cpu", "--backend", "cpu")
        expected = cluster.result()["weights_digest"]
    touched = tmp_path / "touched"
    touched.mkdir()
    environment = {**environment, standin.TOUCHED: str(touched)}
    with Cluster(tmp_path / "cards", "--expect-workers", "1", "--run", run) as cluster:
        port = str(free_ports(1)[0])
        ranks = [
            start(
                "tests.one_rank", str(rank), "2", port, "--coordinator", cluster.address["data"],
                "--name", "cards", "--backend", "accelerator", "--shard", environment=environment,
            )
            for rank in range(2)
        ]  # fmt: skip
        cluster.workers |= {str(rank): process for rank, process in enumerate(ranks)}
        assert cluster.result()["weights_digest"] == expected
        device = cluster.wait_for("worker_ready", worker="cards")["device"]
        assert [cluster.wait_for_exit(rank) for rank in ranks] == [0, 0]
    assert device == "2 ranks sharded: 2 x Stand-in Accelerator"
    for rank in range(2):
        (file,) = touched.glob(f"rank-{rank}-*")
        lines = file.read_text().splitlines()
        assert {line.partition(" ")[0] for line in lines} == {f"{standin.NAME}:{rank}"}, lines
        assert len(lines) > 1, "the engine's thread, the device's, autograd's"
