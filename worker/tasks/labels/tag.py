"""Task tag: an encoder learns a tag for each word, such as named entities or parts of speech.

The label of a word is that of its first token, as in transformers' token classification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch import nn

from backends.base.interface import Sums
from protocol.spec.earlier_run import RESULT_INFO_FILE
from protocol.spec.manifest import Metric, Ratio
from protocol.spec.run_spec import TagRun
from worker.data import holdout
from worker.data.sequence_data import read_tagged_data
from worker.models import pretrained
from worker.models.tokens import IGNORED_LABEL, check_tokens, tokenizer_files, with_added_tokens
from worker.models.trainable_model import TrainableModel
from worker.tasks.base.transformer import (
    Objective,
    Split,
    TransformerTask,
    labeled_loss,
    logits_of,
    split_into_parts,
)
from worker.tasks.labels.result_info import result_info

_PART_SAMPLES: Final = 16
KINDS_IN_FULL: Final = 20
"""Largest number of entity kinds for which F1 is also reported by kind: three counts of each kind,
and two more, fit in a message."""


class Tag(TransformerTask):
    """Batches are those of `SequenceData`: input_ids, attention_mask and labels, one width."""

    def __init__(self, spec: TagRun) -> None:
        data = read_tagged_data(spec)
        loaded = pretrained.load_tagger(spec.model, data.names, spec.seed)
        loaded = with_added_tokens(loaded, spec.model, data.tokenizer)
        model = TrainableModel.of(loaded, spec.model, spec.lora, "TOKEN_CLS", spec.seed)
        pretrained.check_length(loaded.model, spec.data.max_tokens)
        check_tokens(data.max_token, loaded.vocabulary)
        subset = holdout.evaluation_subset(len(data.held_out), spec.data.holdout_samples, spec.seed)
        parts = split_into_parts(data.held_out[subset], _PART_SAMPLES)
        options = loaded.forward_options
        info = result_info(spec, data.names, loaded.weights_digest)
        super().__init__(
            spec,
            model,
            Split(len(data.train), lambda n: data.batch(data.train[n]), parts, data.batch),
            Objective(
                partial(labeled_loss, options=options),
                partial(_evaluate, options=options, names=data.names),
                span_metrics(data.names),
            ),
            digests=data.digests,
            notes=data.notes,
            files={RESULT_INFO_FILE: info.document(), **tokenizer_files(data.tokenizer)},
        )


def _evaluate(
    module: nn.Module,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    names: Sequence[str],
) -> Sums:
    predicted = logits_of(module, arrays, options).argmax(dim=-1).cpu()
    labels = arrays["labels"].cpu()
    rows = [
        (a[a != IGNORED_LABEL].tolist(), b[a != IGNORED_LABEL].tolist())
        for a, b in zip(labels, predicted, strict=True)
    ]
    return span_sums([([names[n] for n in a], [names[n] for n in b]) for a, b in rows], names)


def spans(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the entities of a sentence: kind, first word, end.

    B-x begins an entity, and so does I-x or E-x that does not follow x. E-x (or L-x) is its last
    word, S-x (or U-x) an entity of one word. These are the rules of conlleval and seqeval.
    """
    kind, start = "", 0
    for index, tag in enumerate([*tags, "O"]):
        mark, name = _mark_and_kind(tag)
        continues = mark in _INSIDE_MARKS and name == kind
        if kind and not continues:
            yield kind, start, index
            kind = ""
        if mark and not continues:
            kind, start = name, index
        if kind and mark in _LAST_MARKS:
            yield kind, start, index + 1
            kind = ""


_FIRST_MARKS, _INSIDE_MARKS, _LAST_MARKS = frozenset("BSU"), frozenset("IEL"), frozenset("ELSU")


def _mark_and_kind(tag: str) -> tuple[str, str]:
    """Split a tag such as B-PER; both parts are empty if the tag marks no entity."""
    mark, _, kind = tag.partition("-")
    return (mark, kind) if mark in _FIRST_MARKS | _INSIDE_MARKS and kind else ("", "")


def _kinds(names: Sequence[str]) -> list[str]:
    """Return the kinds of entities; none if the tags do not mark entities."""
    return sorted({kind for _, kind in map(_mark_and_kind, names) if kind})


def span_sums(pairs: Sequence[tuple[Sequence[str], Sequence[str]]], names: Sequence[str]) -> Sums:
    """Return counts over sentences.

    Args:
        pairs: True tags and the model's tags of each sentence.
        names: Names of all tags.
    """
    kinds = _kinds(names)
    number = {kind: str(n) if len(kinds) <= KINDS_IN_FULL else "" for n, kind in enumerate(kinds)}
    sums: dict[str, float] = {"words": 0, "correct": 0}
    for true, predicted in pairs:
        sums["words"] += len(true)
        sums["correct"] += sum(a == b for a, b in zip(true, predicted, strict=True))
        true_spans, predicted_spans = {*spans(true)}, {*spans(predicted)}
        for count, matches in (
            ("hit", true_spans & predicted_spans),
            ("missed", true_spans - predicted_spans),
            ("false", predicted_spans - true_spans),
        ):
            for kind, _, _ in matches:
                key = f"{count}{number[kind]}"
                sums[key] = sums.get(key, 0) + 1
    return sums


def span_metrics(names: Sequence[str]) -> tuple[Metric, ...]:
    """Return word accuracy and the F1 of entities, also by kind if there are at most
    `KINDS_IN_FULL`."""
    accuracy = Metric(name="accuracy", numerator={"correct": 1}, denominator={"words": 1})
    kinds = _kinds(names)
    if not kinds:
        return (accuracy,)
    if len(kinds) > KINDS_IN_FULL:
        return (Metric(name="f1", **_f1([""])), accuracy)
    overall_f1 = Metric(name="f1", **_f1([str(n) for n in range(len(kinds))]))
    by_kind = [Metric(name=f"f1[{kind}]", **_f1([str(n)])) for n, kind in enumerate(kinds)]
    return (overall_f1, accuracy, *by_kind)


def _f1(numbers: Sequence[str]) -> dict[str, Any]:
    hits = {f"hit{number}": 2.0 for number in numbers}
    errors = {f"{kind}{number}": 1.0 for kind in ("missed", "false") for number in numbers}
    return Ratio(numerator=hits, denominator=hits | errors).model_dump()
