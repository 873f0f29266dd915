"""A fault halts the run within its step: nothing is applied, and the faulty worker is named."""

from __future__ import annotations

from tests.cluster import RUNS, Cluster
from tests.processes import start


def test_flipped_bit_names_its_worker_and_continue_repairs_it(tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text("task: scripted\nsteps: 20\nbatch: {samples: 12, microbatch: 1}\n")
    run_options = ("--run", str(spec))
    with Cluster(tmp_path, "--expect-workers", "3", *run_options) as cluster:
        arguments = ("--coordinator", cluster.address["data"], "--backend", "scripted", "--name")
        cluster.workers["odd"] = start("tests.corrupted_worker", "10", *arguments, "odd")
        # The others wait for the deviating worker, however late it answers.
        holds = [
            cluster.start_paused_worker(name, 10, "--backend", "scripted") for name in ("w0", "w1")
        ]
        halt = cluster.wait_for("halted")
        assert "'odd'" in halt["reason"]
        assert "'w0'" not in halt["reason"]
        assert "after 10 steps" in halt["reason"]
        status = cluster.ask("GET", "/status")
        assert status["phase"] == "halted"
        assert status["step"] == 10
        for hold in holds:
            hold.wait_until_paused()
            hold.release()
        cluster.ask("POST", "/continue", {})
        result = cluster.result()
    with Cluster(tmp_path / "alone", "--expect-workers", "1", *run_options) as cluster:
        cluster.start_worker("w0", "--backend", "scripted")
        reference = cluster.result()
    assert result["weights_digest"] == reference["weights_digest"]


def test_divergence_halts_and_the_step_can_be_skipped(tmp_path):
    """A learning rate far too high: the values overflow, as in a real diverging run."""
    diverging_options = ("--set", "optimizer.lr=1000", "--set", "steps=30")
    with Cluster(
        tmp_path, "--expect-workers", "2", "--run", str(RUNS / "regress.yaml"), *diverging_options
    ) as cluster:
        cluster.start_worker("w0", "--backend", "cpu")
        cluster.start_worker("w1", "--backend", "cpu")
        halt = cluster.wait_for("halted")
        assert "non-finite" in halt["reason"]
        assert "worker 'w" in halt["reason"]
        assert "block 'head'" in halt["reason"] or "loss" in halt["reason"]
        assert f"step {halt['step']}" in halt["reason"]
        status_before = cluster.ask("GET", "/status")
        assert status_before["step"] == halt["step"]
        # The retry computes the same bits, so a real divergence repeats.
        cluster.ask("POST", "/continue", {})
        cluster.wait_for("halted", attempt=1)
        assert cluster.ask("GET", "/status")["weights_digest"] == status_before["weights_digest"]
        cluster.ask("POST", "/continue", {"skip_step": True})
        skip_event = cluster.wait_for("committed", step=halt["step"], skipped=True)
        assert skip_event["step"] == halt["step"]
        cluster.coordinator.terminate()
        cluster.wait_for_exit(cluster.coordinator)


def test_drained_halted_run_exits_with_1(tmp_path):
    with Cluster(
        tmp_path, "--expect-workers", "1", "--run", str(RUNS / "regress.yaml"),
        "--set", "optimizer.lr=1000",
    ) as cluster:  # fmt: skip
        cluster.start_worker("w0", "--backend", "cpu")
        cluster.wait_for("halted")
        cluster.coordinator.terminate()
        assert cluster.wait_for_exit(cluster.coordinator) == 1
        assert not (tmp_path / "out/result.json").exists()
