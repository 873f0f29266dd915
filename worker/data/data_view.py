"""Show a run's data: some samples as the model reads them, and statistics.

Tokens with loss are in brackets, and green on a terminal with colors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.base.fields import cut_text
from protocol.datasets.data_check import check_samples
from protocol.spec.run_spec import (
    ClassifyRun,
    DpoRun,
    EmbedRun,
    MaskedLmRun,
    ModelRun,
    Seq2SeqRun,
    TagRun,
)
from worker.data import holdout
from worker.data.chat_template import LossMask
from worker.data.embedding_data import read_embedding_data
from worker.data.labeled_data import LabeledTexts, Scale, read_labeled_texts
from worker.data.language_data import Samples, read_language_data
from worker.data.preference_data import read_preference_data
from worker.data.sequence_data import SequenceData, read_pair_data, read_tagged_data
from worker.models.tokens import IGNORED_LABEL, Tokens

OPEN, CLOSE = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    ("\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"),
)
_CLASSES_SHOWN: Final = 20
"""Number of classes shown at each end of the list: the most common and the rarest."""
_NAME_WIDTH: Final = 40
_LARGE_VALUE: Final = 10
_UNESCAPED_CHARACTERS: Final = {"\n", "\t"}

Sample = tuple[Tokens, LossMask]
"""Tokens, and which of them have loss."""


def data_lines(spec: ModelRun, samples: int) -> Iterator[str]:
    """Yield random samples of the training data, by the seed, then statistics of all samples.

    Raises:
        DataError: The data cannot be used.
    """
    match spec:
        case DpoRun():
            yield from _pair_lines(spec, samples)
        case EmbedRun():
            yield from _text_group_lines(spec, samples)
        case ClassifyRun():
            yield from _labeled_text_lines(spec, samples)
        case TagRun():
            yield from _sequence_lines(read_tagged_data(spec), spec, samples)
        case Seq2SeqRun():
            yield from _sequence_lines(read_pair_data(spec), spec, samples)
        case _:
            yield from _language_lines(spec, samples)


def _labeled_text_lines(spec: ClassifyRun, samples: int) -> Iterator[str]:
    data = read_labeled_texts(spec)
    check_samples(len(data.train), spec)
    labeled_samples = data.samples
    for number in _sample_indices(len(data.train), samples, spec.seed):
        row = int(data.train[number])
        tokens = labeled_samples.tokens[row]
        target = labeled_samples.targets[row]
        if not data.names:
            target = target * data.scale.deviation + data.scale.mean
        label = ", ".join(_labels_of(target, data.names)) or "none"
        yield f"sample {number}: {len(tokens)} tokens, label: {label}"
        yield from with_brackets(
            data.tokenizer, tokens, np.zeros(len(tokens), np.bool_)
        ).splitlines()
        yield ""
    for part, rows in (("training", data.train), ("held-out", data.held_out)):
        yield from _token_count_lines(f"{part} samples", labeled_samples.tokens.lengths[rows])
    if not data.names:
        values = labeled_samples.targets[data.train] * data.scale.deviation + data.scale.mean
        if data.scale == Scale() and max(abs(values.mean()), values.std()) > _LARGE_VALUE:
            yield (
                "the values are large, but a new model predicts values near 0: set "
                "data.standardize=true"
            )
        yield (
            f"training values: min {values.min():.6g}, mean {values.mean():.6g}, max "
            f"{values.max():.6g}"
        )
    yield from _class_table(labeled_samples.targets, data)
    yield from _note_lines(data.notes)


def _sequence_lines(data: SequenceData, spec: ModelRun, samples: int) -> Iterator[str]:
    check_samples(len(data.train), spec)
    for number in _sample_indices(len(data.train), samples, spec.seed):
        row = int(data.train[number])
        tokens, labels = data.inputs[row], data.labels[row]
        yield f"sample {number}: {_token_summary(tokens, labels != IGNORED_LABEL)}"
        if not data.names:
            for ids, has_loss in ((tokens, False), (labels, True)):
                loss_mask = np.full(len(ids), has_loss)
                yield from with_brackets(data.tokenizer, ids, loss_mask).splitlines()
        else:
            for token, label in zip(tokens.tolist(), labels.tolist(), strict=True):
                text = data.tokenizer.decode([token])
                name = "" if label == IGNORED_LABEL else data.names[label]
                yield f"  {text:{_NAME_WIDTH}}  {name}"
        yield ""
    if not data.names:
        yield from _legend_lines(samples)
    for part, rows in (("training", data.train), ("held-out", data.held_out)):
        yield from _token_count_lines(f"{part} samples", data.inputs.lengths[rows])
        if not data.names:
            yield from _token_count_lines(f"{part} targets", data.labels.lengths[rows])
    for number, name in enumerate(data.names):
        count = sum(int((data.labels[row] == number).sum()) for row in data.train.tolist())
        yield f"tag {name}: {count} training words"
    yield from _note_lines(data.notes)


def _labels_of(target: Any, names: Sequence[str]) -> list[str]:
    if not names:
        return [f"{float(target):.6g}"]
    if np.ndim(target):
        return [name for name, is_set in zip(names, target, strict=True) if is_set]
    return [names[int(target)]]


def _class_table(targets: NDArray[Any], data: LabeledTexts) -> Iterator[str]:
    """Yield samples per class, most common first; skip the middle of a long list."""
    if not data.names:
        return
    one_hot = targets if targets.ndim > 1 else np.eye(len(data.names))[targets]
    train, held_out = (one_hot[rows].sum(0).astype(int) for rows in (data.train, data.held_out))
    ranked = sorted(range(len(data.names)), key=lambda n: (-int(train[n]), n))
    width = max(len("class"), *(min(len(name), _NAME_WIDTH) for name in data.names))
    yield f"{'class':{width}}  {'training':>8}  {'held out':>8}"
    for rank, number in enumerate(ranked):
        if _CLASSES_SHOWN <= rank < len(ranked) - _CLASSES_SHOWN:
            if rank == _CLASSES_SHOWN:
                yield f"... {len(ranked) - 2 * _CLASSES_SHOWN} more classes ..."
            continue
        class_name = cut_text(data.names[number], _NAME_WIDTH)
        yield f"{class_name:{width}}  {train[number]:8}  {held_out[number]:8}"


def _language_lines(spec: ModelRun, samples: int) -> Iterator[str]:
    data = read_language_data(spec, 0.0 if spec.is_capture else spec.data.holdout)
    check_samples(len(data.train), spec)
    for number in _sample_indices(len(data.train), samples, spec.seed):
        tokens, loss_mask = data.train.sample(number)
        yield f"sample {number}: {_token_summary(tokens, loss_mask)}"
        yield from with_brackets(data.tokenizer, tokens, loss_mask).splitlines()
        yield ""
    if isinstance(spec, MaskedLmRun):
        yield f"of these a share of {spec.data.mask_share:g} is masked again in each step"
    yield from _legend_lines(samples)
    yield from _length_lines("training samples", _all_samples(data.train))
    yield from _length_lines("held-out samples", _all_samples(data.held_out))
    yield from _note_lines(data.notes)


def _pair_lines(spec: DpoRun, samples: int) -> Iterator[str]:
    data = read_preference_data(spec)
    check_samples(len(data.train), spec)
    for number in _sample_indices(len(data.train), samples, spec.seed):
        pair = data.pairs.pair(int(data.train[number]))
        for answer, sample in zip(("chosen", "rejected"), pair, strict=True):
            yield f"pair {number}, {answer}: {_token_summary(*sample)}"
            yield from with_brackets(data.tokenizer, *sample).splitlines()
            yield ""
    yield from _legend_lines(samples)
    for part, numbers in (("training", data.train), ("held-out", data.held_out)):
        for index, answer in enumerate(("chosen", "rejected")):
            answers = (data.pairs.pair(number)[index] for number in numbers.tolist())
            yield from _length_lines(f"{part} pairs, {answer}", answers)
    yield from _note_lines(data.notes)


def _text_group_lines(spec: EmbedRun, samples: int) -> Iterator[str]:
    data = read_embedding_data(spec)
    check_samples(len(data.train), spec)
    names = ["anchor", "positive", *["negative"] * (data.rows.shape[1] - 2)]
    for number in _sample_indices(len(data.train), samples, spec.seed):
        for name, text in zip(names, data.rows[data.train[number]].tolist(), strict=True):
            tokens = data.texts[text]
            yield f"sample {number}, {name}: {len(tokens)} tokens"
            yield from with_brackets(
                data.tokenizer, tokens, np.zeros(len(tokens), np.bool_)
            ).splitlines()
        yield ""
    for part, rows in (("training", data.train), ("held-out", data.held_out)):
        yield from _token_count_lines(f"{part} anchors", data.texts.lengths[data.rows[rows, 0]])
        yield from _token_count_lines(
            f"{part} passages", data.texts.lengths[data.rows[rows, 1:].reshape(-1)]
        )
    yield from _note_lines(data.notes)


def with_brackets(tokenizer: Any, tokens: Tokens, loss_mask: LossMask) -> str:
    """Return the text of a sample, tokens with loss in brackets, control characters escaped."""
    segments = []
    for has_loss, run in groupby(zip(tokens.tolist(), loss_mask.tolist(), strict=True), _has_loss):
        text = tokenizer.decode(
            [token for token, _ in run],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        printable = "".join(
            c if c.isprintable() or c in _UNESCAPED_CHARACTERS else repr(c)[1:-1] for c in text
        )
        segments.append(f"{OPEN}{printable}{CLOSE}" if has_loss else printable)
    return "".join(segments)


def _has_loss(token: tuple[int, bool]) -> bool:
    return token[1]


def _token_summary(tokens: Tokens, loss_mask: LossMask) -> str:
    return f"{len(tokens)} tokens, {int(loss_mask.sum())} of them with loss"


def _sample_indices(training_samples: int, samples: int, seed: int) -> list[int]:
    return holdout.evaluation_subset(training_samples, samples, seed).tolist() if samples else []


def _all_samples(samples: Samples) -> Iterator[Sample]:
    return (samples.sample(number) for number in range(len(samples)))


def _legend_lines(samples: int) -> Iterator[str]:
    if samples:
        yield f"{OPEN} {CLOSE}: tokens with loss"


def _length_lines(name: str, samples: Iterable[Sample]) -> Iterator[str]:
    counts = [(len(tokens), int(loss_mask.sum())) for tokens, loss_mask in samples]
    if not counts:
        return
    lengths = np.array([tokens for tokens, _ in counts])
    total, loss_total = int(lengths.sum()), sum(loss_tokens for _, loss_tokens in counts)
    yield from _token_count_lines(name, lengths)
    yield f"{name}: {total} tokens, {loss_total} with loss ({100 * loss_total / total:.1f} %)"


def _token_count_lines(name: str, lengths: NDArray[np.int64]) -> Iterator[str]:
    if not len(lengths):
        return
    ranked = np.sort(lengths)
    least, median, ninth_decile, most = (
        int(ranked[round(fraction * (len(ranked) - 1))]) for fraction in (0.0, 0.5, 0.9, 1.0)
    )
    yield (
        f"{name}: {len(ranked)}; tokens of each: min {least}, median {median}, 90% at most "
        f"{ninth_decile}, max {most}"
    )


def _note_lines(notes: Mapping[str, int]) -> Iterator[str]:
    for name, count in notes.items():
        yield f"{name.replace('_', ' ')}: {count}"
