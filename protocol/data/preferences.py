"""Pairs of answers, one preferred to the other, out of a JSONL, CSV, TSV or Parquet file.

A row is as TRL has it: `prompt`, `chosen` and `rejected`, each a text or a list of messages; or,
without a prompt, two whole conversations that are the same up to their last answers.
https://huggingface.co/docs/trl/dataset_formats#preference
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from protocol.base.errors import DataError
from protocol.data.conversations import (
    ChatMessage,
    Conversation,
    DistinctRows,
    check_turns,
    conversation_of,
    read_messages,
    read_words,
    records,
    with_system,
)
from protocol.data.rows import Record
from protocol.data.text_file import shown
from protocol.spec import sources
from protocol.spec.run_spec import PREFERENCE_COLUMNS, DataSpec

_OPTIONAL: Final = ("prompt", "system")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations that differ in their last messages alone, both the assistant's."""

    chosen: Conversation
    rejected: Conversation

    @property
    def document(self) -> str:
        """All that is said, as text: equal for equal pairs."""
        return json.dumps([self.chosen.document, self.rejected.document])


def read_preferences(spec: DataSpec) -> DistinctRows[Pair]:
    """Read what the run spec names.

    Raises:
        DataError: The file is not there, not UTF-8 or damaged, lacks a column, or a row is no pair
            that a model can learn from.
    """
    path = sources.text_source(spec.train)
    given = (
        (place, _pair(place, record).document)
        for place, record in records(path, spec, PREFERENCE_COLUMNS, _OPTIONAL)
    )
    return DistinctRows(given, _pair_of, f"pairs in {str(path)!r}")


def _pair_of(document: str, place: str) -> Pair:
    chosen, rejected = json.loads(document)
    return Pair(conversation_of(chosen, place), conversation_of(rejected, place))


def _pair(place: str, record: Record) -> Pair:
    prompt = _messages(f"{place} prompt", record["prompt"], "user")
    chosen, rejected = (
        _conversation(place, key, prompt, record[key], record["system"])
        for key in ("chosen", "rejected")
    )
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise DataError(
            f"{place}: expected chosen and rejected to be the same up to their last answers, "
            "got conversations that differ before"
        )
    if chosen.messages == rejected.messages:
        raise DataError(
            f"{place}: expected chosen and rejected to differ, got the same twice; leave the "
            "row out"
        )
    return Pair(chosen, rejected)


def _conversation(
    place: str, key: str, prompt: tuple[ChatMessage, ...], told: object, system: object
) -> Conversation:
    answer = _messages(f"{place} {key}", told, "assistant")
    if not answer:
        raise DataError(f"{place}: expected {key}, got {shown(told)}")
    if prompt and answer[0].role != "assistant":
        # As some sets have it: the whole conversation once more.
        if answer[: len(prompt)] != prompt:
            raise DataError(
                f"{place} {key}: expected an answer to the prompt, or the conversation that begins "
                "with it, got another one; leave the column prompt out, or rename it"
            )
        prompt = ()
    messages = (*prompt, *answer)
    if messages[0].role == "assistant":
        raise DataError(
            f"{place} {key}: expected a prompt before the answer, found none; give the column "
            "prompt, or whole conversations"
        )
    messages = with_system(f"{place} {key}", system, messages)
    check_turns(f"{place} {key}", messages)
    return Conversation(messages, place)


def _messages(place: str, told: object, role: str) -> tuple[ChatMessage, ...]:
    """A text is what the role says; nothing of nothing."""
    if told is None:
        return ()
    if isinstance(told, list) or (isinstance(told, str) and told.lstrip().startswith("[{")):
        return read_messages(place, told)
    return (ChatMessage(role, read_words(place, told, "prompt" if role == "user" else "answer")),)
