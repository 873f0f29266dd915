"""The page's history of a run, read from a growing journal in bounded memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.operator import run_history
from coordinator.operator.run_history import Curve, RunHistory

TIME = "2026-01-01T00:00:{:06.3f}+00:00"


def commit(step: int, loss: float | None = 1.0, **overrides: Any) -> dict[str, Any]:
    return {
        "kind": "commit",
        "step": step,
        "loss": loss,
        "norm": None,
        "skipped": False,
        **overrides,
    }


def view(step: int, change: str, *names: str, worker: str = "", reason: str = "") -> dict[str, Any]:
    members = [{"name": n, "device": "d", "backend": "cpu", "signature": "5" * 64} for n in names]
    return {
        "kind": "view", "step": step, "change": change, "worker": worker, "reason": reason,
        "members": members,
    }  # fmt: skip


class Journal:
    def __init__(self, path):
        self.path = path
        self.lines = 0

    def write(self, *records: dict[str, Any], end: str = "\n") -> None:
        with self.path.open("a") as file:
            for record in records:
                entry = {"number": self.lines, "time": TIME.format(self.lines % 60)}
                file.write(json.dumps({**entry, "record": record}) + end)
                self.lines += 1


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal.jsonl")


def test_new_lines_extend_the_history(journal):
    history = RunHistory(journal.path)
    history.read()
    assert history.document()["loss"]["step"] == []
    journal.write(commit(0, 3.0), commit(1, 2.0))
    history.read()
    journal.write(commit(2, 1.5))
    history.read()
    loss = history.document()["loss"]
    assert loss["step"] == [1, 2, 3]
    assert loss["mean"] == [3.0, 2.0, 1.5]
    assert history.document(after=2)["loss"]["step"] == [3]
    assert history.document()["step_s"]["step"] == [2, 3]


def test_last_error_of_each_worker_is_reported(journal):
    fault = {"kind": "fault", "step": 3, "what": "straggler", "reason": "late", "response": ""}
    journal.write({**fault, "worker": "mars"}, {**fault, "worker": None})
    journal.write({"kind": "halt", "step": 5, "reason": "NaN", "worker": "mars"})
    history = RunHistory(journal.path)
    history.read()
    errors = history.document()["errors"]
    assert [*errors] == ["mars"]
    assert (errors["mars"]["what"], errors["mars"]["text"]) == ("halted", "NaN")


def test_norm_and_rate_are_optional(journal):
    older_commit = commit(0)
    del older_commit["norm"]
    journal.write(older_commit, commit(1, norm=2.0, rate=1e-3), commit(2, None, rate=None))
    history = RunHistory(journal.path)
    history.read()
    document = history.document()
    assert (document["norm"]["step"], document["norm"]["mean"]) == ([2], [2.0])
    assert (document["rate"]["step"], document["rate"]["mean"]) == ([2], [1e-3])


def test_incomplete_line_is_read_later(journal):
    history = RunHistory(journal.path)
    journal.write(commit(0), end="")
    history.read()
    assert history.document()["loss"]["step"] == []
    journal.path.write_text(journal.path.read_text() + "\n")
    history.read()
    assert history.document()["loss"]["step"] == [1]


def test_restart_removes_repeated_steps(journal):
    journal.write(*(commit(step, float(step)) for step in range(5)))
    journal.write(
        {"kind": "evaluation", "step": 2, "metrics": {"mse": 0.2}}, view(1, "started", "mars")
    )
    journal.write({"kind": "evaluation", "step": 5, "metrics": {"mse": 0.5}}, view(4, "lost"))
    journal.write({"kind": "resumed", "step": 3, "notes": ["power"]}, commit(3, 33.0))
    history = RunHistory(journal.path)
    history.read()
    assert history.document()["loss"]["mean"] == [0.0, 1.0, 2.0, 33.0]
    assert history.document()["events"][-1]["what"] == "resumed"
    assert [evaluation["step"] for evaluation in history.document()["evaluations"]] == [2]
    assert history.document()["workers_at"] == [(1, 1)]


def test_a_step_without_a_loss_leaves_a_gap_not_a_zero(journal):
    journal.write(commit(0), commit(1, None, skipped=True), commit(2))
    history = RunHistory(journal.path)
    history.read()
    assert history.document()["loss"]["step"] == [1, 3]
    assert [event["what"] for event in history.document()["events"]] == ["skipped"]


def test_departed_worker_is_listed_with_its_reason(journal):
    journal.write(view(0, "started", "mars", "venus"))
    journal.write(view(4, "lost", "mars", worker="venus", reason="connection reset"))
    history = RunHistory(journal.path)
    history.read()
    document = history.document()
    assert {worker["name"]: (worker["here"], worker["why"]) for worker in document["workers"]} == {
        "mars": (True, ""),
        "venus": (False, "connection reset"),
    }
    assert document["workers_at"] == [(0, 2), (4, 1)]


def test_invalid_line_is_skipped(journal):
    journal.write(commit(0))
    with journal.path.open("a") as file:
        file.write('{"number": 1}\nnot json\n{"time": "x", "record": {"kind": "commit"}}\n')
    journal.write(commit(1))
    history = RunHistory(journal.path)
    history.read()
    assert history.document()["loss"]["step"] == [1, 2]


def test_truncated_journal_is_reread(journal):
    journal.write(*(commit(step) for step in range(9)))
    history = RunHistory(journal.path)
    history.read()
    journal.path.unlink()
    journal.write(commit(0, 7.0))
    history.read()
    assert history.document()["loss"]["mean"] == [7.0]


def test_a_long_curve_is_thinned_and_keeps_its_extremes():
    curve = Curve()
    steps = 100_000
    for step in range(1, steps + 1):
        curve.add(step, 50.0 if step == 777 else 1.0)
    document = curve.document(0)
    assert len(document["step"]) <= run_history._POINTS
    assert document["step"][-1] == steps
    assert max(document["high"]) == 50.0
    assert min(document["low"]) == 1.0
    full = [mean for step, mean in zip(document["step"], document["mean"], strict=True)
            if step <= document["full"]]  # fmt: skip
    assert document["full"] == len(full) * document["stride"]
    assert sum(full) * document["stride"] == pytest.approx(document["full"] + 49, rel=1e-6)


def test_complete_points_are_final_until_the_stride_changes():
    curve, full_curve = Curve(), Curve()
    for step in range(1, 5_001):
        curve.add(step, float(step % 97))
        full_curve.add(step, float(step % 97))
    before = curve.document(0)
    for step in range(5_001, 5_051):
        curve.add(step, float(step % 97))
        full_curve.add(step, float(step % 97))
    update = curve.document(before["full"])
    assert update["stride"] == before["stride"]
    final_steps = [step for step in before["step"] if step <= before["full"]]
    assert [*final_steps, *update["step"]] == full_curve.document(0)["step"]


def test_step_count_follows_from_the_epochs_and_samples(journal):
    history = RunHistory(journal.path)
    spec = {"steps": 10**12, "epochs": 3, "batch": {"samples": 16}}
    journal.write({"kind": "run", "run_id": "r", "spec": spec})
    history.read()
    assert (history.document()["steps"], history.document()["epochs"]) == (None, 3)
    journal.write({"kind": "manifest", "train_samples": 50})
    history.read()
    assert history.document()["steps"] == 12
