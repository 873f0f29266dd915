"""A worker that evaluates while others train: nothing waits for it, and no bit changes."""

from __future__ import annotations

from tests.cluster import Cluster
from tests.commands import run_command
from tests.end_to_end.test_restart import ANY_PORT, LOCAL, one_line, result_of, run

SPEC = """
task: scripted
steps: 40
batch: {samples: 8, microbatch: 1}
evaluate_every: 10
"""


def test_evaluator_runs_beside_training_without_delay(tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text(SPEC)
    reference_out = tmp_path / "alone"
    completed = run(*ANY_PORT, *LOCAL, "--run", str(spec), "--out", str(reference_out))
    assert completed.returncode == 0, completed.stderr

    scripted = ("--backend", "scripted")
    with Cluster(tmp_path / "c", "--expect-workers", "1", "--run", str(spec)) as cluster:
        cluster.start_paused_worker("eva", 25, *scripted, "--duty", "evaluate")
        cluster.wait_for("worker_connected", worker="eva")
        ann = cluster.start_paused_worker("ann", 11, *scripted)
        ann.wait_until_paused()
        evaluation = cluster.wait_for("evaluated")
        assert evaluation["step"] in (10, 11)
        eva, _ = sorted(cluster.ask("GET", "/status")["workers"], key=lambda w: w["name"] == "ann")
        assert (eva["name"], eva["duty"], eva["microbatches"]) == ("eva", "evaluate", 0)
        ann.release()  # it must do all remaining work, with eva stopped after 25 steps
        result = cluster.result()
        assert cluster.events_named("evaluated")[-1]["step"] == 40
        assert all(each["worker"] != "eva" for each in cluster.events_named("straggler"))
    for key in ("weights_digest", "losses", "eval", "exact"):
        assert result[key] == result_of(reference_out)[key]
    assert result["workers"] == {"ann": 8 * 40, "eva": 0}
    audit = run("audit", str(tmp_path / "c" / "out"))
    assert audit.returncode == 0, audit.stdout


def test_unknown_duty_gives_a_one_line_error():
    completed = run_command("worker", "--duty", "rest", "--coordinator", "127.0.0.1:1")
    assert completed.returncode == 2
    assert one_line(completed) == "worker: --duty: expected train or evaluate, got 'rest'"
