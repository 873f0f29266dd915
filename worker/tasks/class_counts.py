"""Held-out figures of a classifier: sums that are sent, and the metrics made of them.

A held-out part sends only the cells of its confusion matrix that are not zero. A part has at most
`PART_SAMPLES` of them, which is what one message holds, whatever the number of classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from backends.base.interface import Sums
from protocol.base.fields import cut_text
from protocol.spec.manifest import Metric, Ratio

PART_SAMPLES: Final = 24
"""Held-out samples in a part; `EvalResult` holds so many sums."""
CLASSES_IN_FULL: Final = 32
"""With more classes there are no figures by class: each would name two cells for every class."""
_SHOWN_BYTES: Final = 80
"""Of a class's name."""
CONFUSION_CLASSES: Final = 8
"""Up to so many classes the confusion counts are metrics too."""


def confusion_sums(true: Sequence[int], chosen: Sequence[int], classes: int) -> Sums:
    """Counts over one part.

    Args:
        true: Labels by number, at most `PART_SAMPLES`.
        chosen: What the model said.
        classes: How many there are.

    Returns:
        Cells "true,chosen"; with too many classes "samples" and "correct" alone.
    """
    if classes > CLASSES_IN_FULL:
        correct = sum(1 for a, b in zip(true, chosen, strict=True) if a == b)
        return {"samples": len(true), "correct": correct}
    counts = Counter(zip(true, chosen, strict=True))
    return {_cell(*pair): count for pair, count in counts.items()}


def class_metrics(names: Sequence[str], majority: int) -> tuple[Metric, ...]:
    """Accuracy, that of always saying the commonest class, F1 (macro and by class), and counts.

    Args:
        names: Of the classes, in the order of their numbers; shown as far as they are printable.
        majority: The class with the most training samples.
    """
    if len(names) > CLASSES_IN_FULL:
        return (Metric(name="accuracy", numerator={"correct": 1}, denominator={"samples": 1}),)
    names = _shown(names)
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


def _shown(names: Sequence[str]) -> list[str]:
    """Names as metrics carry them; with their numbers where two would look alike."""
    shown = [cut_text(name, _SHOWN_BYTES) for name in names]
    if len(set(shown)) == len(shown) and not any("][" in name for name in shown):
        return shown
    numbered = (f"{number}:{name}" for number, name in enumerate(shown))
    return [cut_text(name, _SHOWN_BYTES) for name in numbered]


def _f1(number: int, classes: int) -> Ratio:
    """2 tp / (2 tp + fp + fn), of cells."""
    hit = _cell(number, number)
    missed = {_cell(number, other): 1.0 for other in range(classes) if other != number}
    false = {_cell(other, number): 1.0 for other in range(classes) if other != number}
    return Ratio(numerator={hit: 2}, denominator={hit: 2, **missed, **false})


def _confusion(names: Sequence[str]) -> Iterator[Metric]:
    """confusion[true][said]: how many."""
    if len(names) > CONFUSION_CLASSES:
        return
    for a, true in enumerate(names):
        for b, said in enumerate(names):
            name = f"confusion[{true}][{said}]"
            yield Metric(name=name, numerator={_cell(a, b): 1}, detail=True)


def _cell(true: int, chosen: int) -> str:
    return f"{true},{chosen}"
