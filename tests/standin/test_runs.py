"""Runs on the stand-in accelerator have the CPU's digest, also if a card fails."""

import re

import pytest

from tests import standin
from tests.cluster import RUNS, Cluster

pytestmark = pytest.mark.slow

DIGITS = (
    "--run", str(RUNS / "digits.yaml"), "--set", "steps=16", "--set", "evaluate_every=8",
    "--set", "batch.samples=48",
)  # fmt: skip
FEW_KERNELS, MANY_KERNELS = 20, 3000
"""Numbers of kernels after which a card fails: before it is ready, and within a step."""


@pytest.fixture(scope="module")
def cpu_result(tmp_path_factory):
    """Return the result of a run on one CPU worker."""
    with Cluster(tmp_path_factory.mktemp("cpu"), "--expect-workers", "1", *DIGITS) as cluster:
        cluster.start_worker("cpu", "--backend", "cpu")
        return cluster.result()


def assert_equals_cpu(cluster, cpu_result):
    document = cluster.result()
    assert document["weights_digest"] == cpu_result["weights_digest"]
    assert document["losses"] == cpu_result["losses"]
    assert document["eval"] == cpu_result["eval"]
    return document


@pytest.mark.parametrize(
    "devices", [("accelerator1",), ("accelerator0-1",), ("accelerator0", "cpu")]
)
def test_result_equals_that_of_a_cpu(tmp_path, environment, cpu_result, devices):
    with Cluster(tmp_path, "--expect-workers", str(len(devices)), *DIGITS) as cluster:
        for device in devices:
            cluster.start_worker(device, "--backend", device, environment=environment)
        assert_equals_cpu(cluster, cpu_result)


@pytest.mark.parametrize("kernels", [FEW_KERNELS, MANY_KERNELS])
def test_broken_card_leaves_and_the_run_continues_with_the_same_bits(
    tmp_path, environment, cpu_result, kernels
):
    failing = {**environment, standin.KERNELS_TO_FAULT: str(kernels)}
    with Cluster(tmp_path, "--expect-workers", "2", *DIGITS) as cluster:
        card = cluster.start_worker("card", "--backend", "accelerator0", environment=failing)
        if kernels == FEW_KERNELS:
            assert cluster.wait_for_exit(card) == 1
            cluster.start_worker("other", "--backend", "cpu")
            cluster.start_worker("cpu", "--backend", "cpu")
        else:  # the CPU pauses, or else the run may end before the card has run its kernels
            hold = cluster.start_paused_worker("cpu", 1, "--backend", "cpu")
            hold.wait_until_paused()
            assert cluster.wait_for_exit(card) == 1
            hold.release()
        assert_equals_cpu(cluster, cpu_result)
        assert card.stderr is not None
        (last_line,) = [line for line in card.stderr.read().splitlines() if "illegal" in line]
    assert last_line.startswith(
        "worker: device 'accelerator 0' failed: CUDA error: an illegal memory"
    )


def test_two_card_worker_restarts_the_process_of_a_broken_card(tmp_path, environment, cpu_result):
    failing = {**environment, standin.KERNELS_TO_FAULT: str(MANY_KERNELS)}
    with Cluster(tmp_path, "--expect-workers", "2", *DIGITS) as cluster:
        cards = cluster.start_worker("cards", "--backend", "accelerator", "--gpus", "0,1",
                               environment=failing)  # fmt: skip
        assert_equals_cpu(cluster, cpu_result)
        cluster.wait_for_exit(cards)
        assert cards.stdout is not None
        assert cards.stderr is not None
        output = cards.stdout.read() + cards.stderr.read()
    assert "CUDA error: an illegal memory access" in output
    assert "restarted, 1 of at most 3 times" in output


def test_hanging_card_ends_its_worker_and_the_run_continues(tmp_path, environment, cpu_result):
    hanging = {**environment, standin.KERNELS_TO_HANG: str(MANY_KERNELS)}
    with Cluster(tmp_path, "--expect-workers", "2", *DIGITS) as cluster:
        card = cluster.start_worker("card", "--backend", "accelerator0", environment=hanging)
        # The CPU pauses, or else the run may end before the card hangs and its worker ends.
        hold = cluster.start_paused_worker("cpu", 1, "--backend", "cpu")
        hold.wait_until_paused()
        assert cluster.wait_for_exit(card) == 1
        hold.release()
        assert_equals_cpu(cluster, cpu_result)
        assert card.stderr is not None
        error_text = card.stderr.read()
    # The limit depends on the slowest answer so far.
    assert re.search(r"device 'accelerator 0' failed: expected an answer within \d+ s", error_text)
    assert "it hangs" in error_text


def test_card_that_hangs_before_the_first_step_ends_its_worker(tmp_path, environment, cpu_result):
    hanging = {**environment, standin.KERNELS_TO_HANG: str(FEW_KERNELS)}
    with Cluster(tmp_path, "--expect-workers", "1", *DIGITS) as cluster:
        card = cluster.start_worker("card", "--backend", "accelerator0", environment=hanging)
        assert cluster.wait_for_exit(card) == 1
        cluster.start_worker("cpu", "--backend", "cpu")
        assert_equals_cpu(cluster, cpu_result)
        assert card.stderr is not None
        error_text = card.stderr.read()
    assert "device 'accelerator 0' failed: expected an answer within 45 s" in error_text
    assert "while it compiles the task" in error_text


def test_hanging_card_of_two_is_restarted(tmp_path, environment, cpu_result):
    hanging = {**environment, standin.KERNELS_TO_HANG: str(MANY_KERNELS)}
    with Cluster(tmp_path, "--expect-workers", "2", *DIGITS) as cluster:
        cards = cluster.start_worker("cards", "--backend", "accelerator", "--gpus", "0,1",
                               environment=hanging)  # fmt: skip
        assert_equals_cpu(cluster, cpu_result)
        cluster.wait_for_exit(cards)
        assert cards.stdout is not None
        assert cards.stderr is not None
        output = cards.stdout.read() + cards.stderr.read()
    assert "was ended: device 'accelerator" in output
    assert "it hangs" in output
    assert "restarted, 1 of at most 3 times" in output


def test_error_of_a_card_that_is_too_small_names_the_remedy(tmp_path, environment, cpu_result):
    limited = {**environment, standin.MEMORY_LIMIT: "8192"}
    with Cluster(tmp_path, "--expect-workers", "1", *DIGITS) as cluster:
        card = cluster.start_worker("card", "--backend", "accelerator0", environment=limited)
        assert cluster.wait_for_exit(card) == 1
        cluster.start_worker("cpu", "--backend", "cpu")
        assert_equals_cpu(cluster, cpu_result)
        assert card.stderr is not None
        error_text = card.stderr.read()
    assert "out of memory" in error_text
    assert "batch.microbatch" in error_text
