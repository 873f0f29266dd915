"""Metrics by class have distinct names for any class names."""

import pytest

from worker.tasks.labels.class_counts import class_metrics


@pytest.mark.parametrize(
    "names",
    [
        ("ham", "spam"),
        ("\u044f" * 42 + "a", "\u044f" * 42 + "b"),
        ("a\nb", "a b"),
        ("x", "x][x"),
        ("1:x", "x"),
    ],
)
def test_no_two_metrics_share_a_name(names):
    metrics = class_metrics(names, majority=0)
    expected_count = 3 + 2 + 4  # of all classes, F1 of each, cells of the confusion matrix
    assert len({metric.name for metric in metrics}) == len(metrics) == expected_count


def test_different_names_are_shown_unchanged():
    metric_names = [metric.name for metric in class_metrics(("ham", "spam"), majority=0)]
    assert {"f1[ham]", "f1[spam]", "confusion[ham][spam]"} <= set(metric_names)
