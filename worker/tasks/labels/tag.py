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
from worker.models.tokens import IGNORED_LABEL, add_tokens_to_model, check_tokens, tokenizer_files
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
ENTITY_TYPES_IN_FULL: Final = 20
"""Most entity types with F1 by type: three counts of each and two more fit in a message."""


class Tag(TransformerTask):
    """Batches are those of `SequenceData`: input_ids, attention_mask and labels, one width."""

    def __init__(self, spec: TagRun) -> None:
        data = read_tagged_data(spec)
        loaded = pretrained.load_tagger(spec.model, data.names, spec.seed)
        loaded = add_tokens_to_model(loaded, spec.model, data.tokenizer)
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
    """Yield the entities of a sentence: type, first word, end.

    B-x begins an entity, and so does I-x or E-x that does not follow x. E-x (or L-x) is its last
    word, S-x (or U-x) an entity of one word. These are the rules of conlleval and seqeval.
    """
    entity_type, start = "", 0
    for index, tag in enumerate([*tags, "O"]):
        mark, name = _mark_and_type(tag)
        continues = mark in _INSIDE_MARKS and name == entity_type
        if entity_type and not continues:
            yield entity_type, start, index
            entity_type = ""
        if mark and not continues:
            entity_type, start = name, index
        if entity_type and mark in _LAST_MARKS:
            yield entity_type, start, index + 1
            entity_type = ""


_FIRST_MARKS, _INSIDE_MARKS, _LAST_MARKS = frozenset("BSU"), frozenset("IEL"), frozenset("ELSU")


def _mark_and_type(tag: str) -> tuple[str, str]:
    """Split a tag such as B-PER; both parts are empty if the tag marks no entity."""
    mark, _, entity_type = tag.partition("-")
    return (mark, entity_type) if mark in _FIRST_MARKS | _INSIDE_MARKS and entity_type else ("", "")


def _entity_types(names: Sequence[str]) -> list[str]:
    """Return the types of entities; an empty list if the tags do not mark entities."""
    return sorted({entity_type for _, entity_type in map(_mark_and_type, names) if entity_type})


def span_sums(pairs: Sequence[tuple[Sequence[str], Sequence[str]]], names: Sequence[str]) -> Sums:
    """Return counts over sentences.

    Args:
        pairs: True tags and the model's tags of each sentence.
        names: Names of all tags.
    """
    entity_types = _entity_types(names)
    number = {
        entity_type: str(n) if len(entity_types) <= ENTITY_TYPES_IN_FULL else ""
        for n, entity_type in enumerate(entity_types)
    }
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
            for entity_type, _, _ in matches:
                key = f"{count}{number[entity_type]}"
                sums[key] = sums.get(key, 0) + 1
    return sums


def span_metrics(names: Sequence[str]) -> tuple[Metric, ...]:
    """Return the F1 of entities, word accuracy, and F1 by type of entity.

    Without entities there is only accuracy; above `ENTITY_TYPES_IN_FULL` types, no F1 by type.
    """
    accuracy = Metric(name="accuracy", numerator={"correct": 1}, denominator={"words": 1})
    entity_types = _entity_types(names)
    if not entity_types:
        return (accuracy,)
    if len(entity_types) > ENTITY_TYPES_IN_FULL:
        return (Metric(name="f1", **_f1([""])), accuracy)
    overall_f1 = Metric(name="f1", **_f1([str(n) for n in range(len(entity_types))]))
    by_type = [
        Metric(name=f"f1[{entity_type}]", **_f1([str(n)]))
        for n, entity_type in enumerate(entity_types)
    ]
    return (overall_f1, accuracy, *by_type)


def _f1(numbers: Sequence[str]) -> dict[str, Any]:
    hits = {f"hit{number}": 2.0 for number in numbers}
    errors = {f"{outcome}{number}": 1.0 for outcome in ("missed", "false") for number in numbers}
    return Ratio(numerator=hits, denominator=hits | errors).model_dump()
