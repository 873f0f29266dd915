"""A run's data as lines for a person: some samples as the model reads them, and statistics."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final

import numpy as np

from protocol.data.data_check import check_samples
from protocol.spec.run_spec import RunSpec
from worker.data import holdout
from worker.data.chat_template import Counted
from worker.data.language_data import Samples, read_language_data
from worker.models.tokens import Tokens

_OPEN, _CLOSE = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    ("\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"),
)
_KEPT: Final = {"\n", "\t"}


def data_lines(spec: RunSpec, samples: int) -> Iterator[str]:
    """Samples drawn by the seed from what is trained on, then figures of all.

    Raises:
        DataError: The data cannot be used.
    """
    assert spec.data is not None
    data = read_language_data(spec, 0.0 if spec.captures else spec.data.holdout)
    check_samples(len(data.train), spec)
    for number in holdout.measured(len(data.train), samples, spec.seed).tolist() if samples else ():
        tokens, counted = data.train.sample(number)
        yield f"sample {number}: {len(tokens)} tokens, {int(counted.sum())} of them with loss"
        yield from marked(data.tokenizer, tokens, counted).splitlines()
        yield ""
    if samples:
        yield f"{_OPEN} {_CLOSE}: tokens with loss"
    yield from _lengths("training samples", data.train)
    if len(data.held_out):
        yield from _lengths("held-out samples", data.held_out)
    for name, count in data.notes.items():
        yield f"{name.replace('_', ' ')}: {count}"


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


def _lengths(what: str, samples: Samples) -> Iterator[str]:
    both = [samples.sample(number) for number in range(len(samples))]
    lengths = np.sort([len(tokens) for tokens, _ in both])
    total, counted = int(lengths.sum()), sum(int(marks.sum()) for _, marks in both)
    points = [int(lengths[round(share * (len(lengths) - 1))]) for share in (0.0, 0.5, 0.9, 1.0)]
    yield (
        f"{what}: {len(both)}; tokens of each: least {points[0]}, half {points[1]}, nine tenths "
        f"{points[2]}, most {points[3]}"
    )
    yield f"{what}: {total} tokens, {counted} with loss ({100 * counted / total:.1f} %)"
