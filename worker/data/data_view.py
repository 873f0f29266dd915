"""A run's data as lines for a person: some samples as the model reads them, and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final

import numpy as np

from protocol.data.data_check import check_samples
from protocol.spec.run_spec import RunSpec
from worker.data import holdout
from worker.data.chat_template import Counted
from worker.data.language_data import Samples, read_language_data
from worker.data.preference_data import read_preference_data
from worker.models.tokens import Tokens

_OPEN, _CLOSE = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    ("\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"),
)
_KEPT: Final = {"\n", "\t"}

Sample = tuple[Tokens, Counted]
"""Tokens, and which of them are predicted with loss."""


def data_lines(spec: RunSpec, samples: int) -> Iterator[str]:
    """Samples drawn by the seed from what is trained on, then figures of all.

    Raises:
        DataError: The data cannot be used.
    """
    yield from (_pairs if spec.task == "dpo" else _language)(spec, samples)


def _language(spec: RunSpec, samples: int) -> Iterator[str]:
    assert spec.data is not None
    data = read_language_data(spec, 0.0 if spec.captures else spec.data.holdout)
    check_samples(len(data.train), spec)
    for number in _drawn(len(data.train), samples, spec.seed):
        tokens, counted = data.train.sample(number)
        yield f"sample {number}: {_counts_of(tokens, counted)}"
        yield from marked(data.tokenizer, tokens, counted).splitlines()
        yield ""
    yield from _legend(samples)
    yield from _lengths("training samples", _all(data.train))
    yield from _lengths("held-out samples", _all(data.held_out))
    yield from _told(data.notes)


def _pairs(spec: RunSpec, samples: int) -> Iterator[str]:
    data = read_preference_data(spec)
    check_samples(len(data.train), spec)
    for number in _drawn(len(data.train), samples, spec.seed):
        pair = data.pairs.pair(int(data.train[number]))
        for answer, sample in zip(("chosen", "rejected"), pair, strict=True):
            yield f"pair {number}, {answer}: {_counts_of(*sample)}"
            yield from marked(data.tokenizer, *sample).splitlines()
            yield ""
    yield from _legend(samples)
    for part, numbers in (("training", data.train), ("held-out", data.held_out)):
        for side, answer in enumerate(("chosen", "rejected")):
            those = (data.pairs.pair(number)[side] for number in numbers.tolist())
            yield from _lengths(f"{part} pairs, {answer}", those)
    yield from _told(data.notes)


def marked(tokenizer: Any, tokens: Tokens, counted: Counted) -> str:
    """The text of a sample, what counts in brackets; what would steer a terminal is escaped."""
    pieces = []
    for counts, run in groupby(zip(tokens.tolist(), counted.tolist(), strict=True), _counts):
        text = tokenizer.decode(
            [token for token, _ in run],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        shown = "".join(c if c.isprintable() or c in _KEPT else repr(c)[1:-1] for c in text)
        pieces.append(f"{_OPEN}{shown}{_CLOSE}" if counts else shown)
    return "".join(pieces)


def _counts(one: tuple[int, bool]) -> bool:
    return one[1]


def _counts_of(tokens: Tokens, counted: Counted) -> str:
    return f"{len(tokens)} tokens, {int(counted.sum())} of them with loss"


def _drawn(training_samples: int, samples: int, seed: int) -> list[int]:
    return holdout.measured(training_samples, samples, seed).tolist() if samples else []


def _all(samples: Samples) -> Iterator[Sample]:
    return (samples.sample(number) for number in range(len(samples)))


def _legend(samples: int) -> Iterator[str]:
    if samples:
        yield f"{_OPEN} {_CLOSE}: tokens with loss"


def _lengths(what: str, samples: Iterable[Sample]) -> Iterator[str]:
    counts = [(len(tokens), int(marks.sum())) for tokens, marks in samples]
    if not counts:
        return
    lengths = np.sort([tokens for tokens, _ in counts])
    total, counted = int(lengths.sum()), sum(with_loss for _, with_loss in counts)
    points = [int(lengths[round(share * (len(lengths) - 1))]) for share in (0.0, 0.5, 0.9, 1.0)]
    yield (
        f"{what}: {len(counts)}; tokens of each: least {points[0]}, half {points[1]}, nine tenths "
        f"{points[2]}, most {points[3]}"
    )
    yield f"{what}: {total} tokens, {counted} with loss ({100 * counted / total:.1f} %)"


def _told(notes: Mapping[str, int]) -> Iterator[str]:
    for name, count in notes.items():
        yield f"{name.replace('_', ' ')}: {count}"
