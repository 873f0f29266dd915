"""Evaluation metrics of a classifier, and the sums from which they are computed.

An evaluation part sends the nonzero cells of its confusion matrix: at most `PART_SAMPLES` of them,
which fit in one message. With more than `CLASSES_IN_FULL` classes it sends only the numbers of
samples and of correct ones. For multi-label data it sends hits, misses and false alarms, by class
with at most `LABELS_IN_FULL` labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Sums
from protocol.base.fields import cut_text
from protocol.spec.manifest import Metric, Ratio

PART_SAMPLES: Final = 24
"""Samples in an evaluation part: `EvalResult` has space for two sums per sample and a few more."""
CLASSES_IN_FULL: Final = 32
"""With more classes there are no metrics by class, since each needs two cells per class."""
LABELS_IN_FULL: Final = 20
"""Most labels with F1 by class: three counts of each and two more fit in a message."""
_SHOWN_BYTES: Final = 80
"""Limit on a class name within the name of a metric."""
CONFUSION_CLASSES: Final = 8
"""Most classes whose confusion counts are metrics too."""


def confusion_sums(true: Sequence[int], predicted: Sequence[int], classes: int) -> Sums:
    """Return the counts of one part.

    Args:
        true: True labels by number, at most `PART_SAMPLES`.
        predicted: The model's labels, by number.
        classes: Number of classes.

    Returns:
        The counts of cells "true,predicted"; above `CLASSES_IN_FULL` only "samples" and "correct".
    """
    if classes > CLASSES_IN_FULL:
        correct = sum(1 for a, b in zip(true, predicted, strict=True) if a == b)
        return {"samples": len(true), "correct": correct}
    counts = Counter(zip(true, predicted, strict=True))
    return {_cell(*pair): count for pair, count in counts.items()}


def label_sums(true: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> Sums:
    """Return the counts of one part of multi-label data.

    Args:
        true: True labels, (samples, classes).
        predicted: The model's labels, (samples, classes).
    """
    exact = int((true == predicted).all(axis=1).sum())
    sums: dict[str, float] = {"samples": len(true), "exact": exact}
    counts = {"hit": true & predicted, "missed": true & ~predicted, "false": ~true & predicted}
    for outcome, cells in counts.items():
        if true.shape[1] > LABELS_IN_FULL:
            sums[outcome] = int(cells.sum())
        else:
            by_class = enumerate(cells.sum(axis=0))
            sums |= {f"{outcome}{number}": int(count) for number, count in by_class if count}
    return sums


def label_metrics(names: Sequence[str]) -> tuple[Metric, ...]:
    """Return micro F1, the fraction of texts whose labels are all correct, macro F1, F1 by class.

    Args:
        names: Names of the classes; above `LABELS_IN_FULL` there are no F1 by class and macro F1.
    """
    exact = Metric(name="exact_match", numerator={"exact": 1}, denominator={"samples": 1})
    if len(names) > LABELS_IN_FULL:
        return (_f1_of("micro_f1", [""]), exact)
    scores = [
        _f1_of(f"f1[{name}]", [str(number)]) for number, name in enumerate(_printable_names(names))
    ]
    macro = tuple(
        Ratio(numerator=score.numerator, denominator=score.denominator) for score in scores
    )
    micro = _f1_of("micro_f1", [str(number) for number in range(len(names))])
    return (micro, Metric(name="macro_f1", mean_of=macro), exact, *scores)


def _f1_of(name: str, classes: Sequence[str]) -> Metric:
    """Return 2 hits / (2 hits + misses + false alarms), each summed over these classes."""
    hits = {f"hit{number}": 2.0 for number in classes}
    errors = {f"{outcome}{number}": 1.0 for outcome in ("missed", "false") for number in classes}
    return Metric(name=name, numerator=hits, denominator=hits | errors)


def class_metrics(names: Sequence[str], majority: int) -> tuple[Metric, ...]:
    """Return accuracy, the accuracy of the majority class as a baseline, F1, and confusion counts.

    Args:
        names: Names of the classes, by number; above `CLASSES_IN_FULL` there is only accuracy,
            above `CONFUSION_CLASSES` there are no confusion counts.
        majority: The class with the most training samples.
    """
    if len(names) > CLASSES_IN_FULL:
        return (Metric(name="accuracy", numerator={"correct": 1}, denominator={"samples": 1}),)
    names = _printable_names(names)
    classes = range(len(names))
    cells = {_cell(a, b): 1.0 for a in classes for b in classes}
    scores = [_f1(number, len(names)) for number in classes]
    return (
        Metric(name="accuracy", numerator={_cell(c, c): 1 for c in classes}, denominator=cells),
        Metric(
            name="majority_class",
            numerator={_cell(majority, c): 1 for c in classes},
            denominator=cells,
        ),
        Metric(name="macro_f1", mean_of=tuple(scores)),
        *(
            Metric(name=f"f1[{name}]", numerator=f1.numerator, denominator=f1.denominator)
            for name, f1 in zip(names, scores, strict=True)
        ),
        *_confusion(names),
    )


def _printable_names(names: Sequence[str]) -> list[str]:
    """Return printable names for metrics, with numbers if two would be equal."""
    short_names = [cut_text(name, _SHOWN_BYTES) for name in names]
    if len(set(short_names)) == len(short_names) and not any("][" in name for name in short_names):
        return short_names
    numbered = (f"{number}:{name}" for number, name in enumerate(short_names))
    return [cut_text(name, _SHOWN_BYTES) for name in numbered]


def _f1(number: int, classes: int) -> Ratio:
    """Return the F1 of a class, 2 tp / (2 tp + fp + fn), as a ratio of cells."""
    hits_by_cell = _cell(number, number)
    missed_by_cell = {_cell(number, label): 1.0 for label in range(classes) if label != number}
    false_by_cell = {_cell(label, number): 1.0 for label in range(classes) if label != number}
    return Ratio(
        numerator={hits_by_cell: 2},
        denominator={hits_by_cell: 2, **missed_by_cell, **false_by_cell},
    )


def _confusion(names: Sequence[str]) -> Iterator[Metric]:
    """Yield the counts confusion[true][predicted]."""
    if len(names) > CONFUSION_CLASSES:
        return
    for a, true in enumerate(names):
        for b, predicted in enumerate(names):
            name = f"confusion[{true}][{predicted}]"
            yield Metric(name=name, numerator={_cell(a, b): 1}, detail=True)


def _cell(true: int, predicted: int) -> str:
    return f"{true},{predicted}"
