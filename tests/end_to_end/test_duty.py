"""A worker that evaluates while others train: nothing waits for it, and no bit is another."""

from __future__ import annotations

from tests.cluster import Cluster
from tests.commands import called
from tests.end_to_end.test_restart import ANYWHERE, LOCAL, one_line, result_of, run

SPEC = """
task: scripted
steps: 40
batch: {samples: 8, microbatch: 1}
evaluate_every: 10
"""


def test_an_evaluator_measures_beside_training_and_holds_up_nobody(tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text(SPEC)
    alone = tmp_path / "alone"
    ended = run(*ANYWHERE, *LOCAL, "--run", str(spec), "--out", str(alone))
    assert ended.returncode == 0, ended.stderr

    scripted = ("--backend", "scripted")
    with Cluster(tmp_path / "c", "--expect-workers", "1", "--run", str(spec)) as cluster:
        cluster.held_worker("eva", 25, *scripted, "--duty", "evaluate")
        cluster.wait_for("worker_connected", worker="eva")
        ann = cluster.held_worker("ann", 11, *scripted)
        ann.reached()
        early = cluster.wait_for("evaluated")
        assert early["step"] in (10, 11)
        eva, _ = sorted(cluster.ask("GET", "/status")["workers"], key=lambda w: w["name"] == "ann")
        assert (eva["name"], eva["duty"], eva["microbatches"]) == ("eva", "evaluate", 0)
        ann.release()  # she is to do all that is left, with Eva standing still after 25 steps
        result = cluster.result()
        assert cluster.every("evaluated")[-1]["step"] == 40
        assert all(each["worker"] != "eva" for each in cluster.every("straggler"))
    for key in ("weights_digest", "losses", "eval", "exact"):
        assert result[key] == result_of(alone)[key]
    assert result["workers"] == {"ann": 8 * 40, "eva": 0}
    audited = run("audit", str(tmp_path / "c" / "out"))
    assert audited.returncode == 0, audited.stdout


def test_another_duty_is_one_line():
    ended = called("worker", "--duty", "rest", "--coordinator", "127.0.0.1:1")
    assert ended.returncode == 2
    assert one_line(ended) == "worker: --duty: expected train or evaluate, got 'rest'"
