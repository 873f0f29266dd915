"""The metrics that workers receive at the end of a run."""

from __future__ import annotations

from coordinator.service.result import metrics_to_send


def test_metrics_that_fit_a_message_are_sent_all_or_none():
    metrics = {f"figure {number} é": 0.1 if number else None for number in range(12)}
    assert metrics_to_send({"eval": metrics}) == metrics
    assert metrics_to_send({"eval": {"n" * 65: 1.0}}) == {}
    assert metrics_to_send({"eval": {f"{number} {'n' * 60}": 1.0 for number in range(6)}}) == {}
    assert metrics_to_send({}) == {}
