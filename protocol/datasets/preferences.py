"""Pairs of answers, one preferred to the other, out of data files.

A row is as TRL has it: `prompt`, `chosen` and `rejected`, each a text or a list of messages; or,
without a prompt, two whole conversations that are the same up to their last answers.
https://huggingface.co/docs/trl/dataset_formats#preference
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from protocol.base.errors import DataError
from protocol.datasets.conversations import (
    Conversation,
    DistinctRows,
    conversation_of,
    is_message_list,
    read_documents,
    read_messages,
    with_system,
)
from protocol.datasets.messages import ChatMessage, check_calls, check_turns, read_tools, read_words
from protocol.datasets.rows import BadRows, Record
from protocol.datasets.text_file import shown
from protocol.spec.sections.data import PREFERENCE_COLUMNS, DataSpec

_OPTIONAL: Final = ("prompt", "system", "tools")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations that differ in their last messages alone, both the assistant's."""

    chosen: Conversation
    rejected: Conversation

    @property
    def document(self) -> str:
        """Return all of it as text: equal for equal pairs."""
        return json.dumps([self.chosen.document, self.rejected.document])


def read_preferences(spec: DataSpec) -> DistinctRows[Pair]:
    """Read what the run spec names.

    Raises:
        DataError: A file is missing, not UTF-8 or damaged, lacks a column, or rows are no pairs
            that a model can learn from.
    """
    bad_rows = BadRows(skip=spec.skip_bad_rows)
    rows = read_documents(spec, PREFERENCE_COLUMNS, _OPTIONAL, _pair, bad_rows)
    return DistinctRows(rows, _pair_of, f"pairs in {spec.train!r}", bad_rows)


def _pair_of(document: str, location: str) -> Pair:
    chosen, rejected = json.loads(document)
    return Pair(conversation_of(chosen, location), conversation_of(rejected, location))


def _pair(location: str, record: Record) -> str:
    prompt = _messages(f"{location} prompt", record["prompt"], "user")
    chosen, rejected = (
        _conversation(location, key, prompt, record) for key in ("chosen", "rejected")
    )
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise DataError(
            f"{location}: expected chosen and rejected to be the same up to their last answers, "
            "got conversations that differ before"
        )
    if chosen.messages == rejected.messages:
        raise DataError(
            f"{location}: expected chosen and rejected to differ, got the same twice; leave the "
            "row out"
        )
    return Pair(chosen, rejected).document


def _conversation(
    location: str, key: str, prompt: tuple[ChatMessage, ...], record: Record
) -> Conversation:
    at = f"{location} {key}"
    answer = _messages(at, record[key], "assistant")
    if not answer:
        raise DataError(f"{location}: expected {key}, got {shown(record[key])}")
    if prompt and answer[0].role != "assistant":
        # As some sets have it: the whole conversation once more.
        if answer[: len(prompt)] != prompt:
            raise DataError(
                f"{at}: expected an answer to the prompt, or the conversation that begins "
                "with it, got another one; leave the column prompt out, or rename it"
            )
        prompt = ()
    messages = (*prompt, *answer)
    if messages[0].role == "assistant":
        raise DataError(
            f"{at}: expected a prompt before the answer, found none; give the column "
            "prompt, or whole conversations"
        )
    messages = with_system(at, record["system"], messages)
    check_turns(at, messages)
    tools = check_calls(location, messages, read_tools(location, record["tools"]))
    return Conversation(messages, location, tools)


def _messages(location: str, value: object, role: str) -> tuple[ChatMessage, ...]:
    """Read messages; a text is what the role says, and nothing is no message."""
    if value is None:
        return ()
    if is_message_list(value):
        return read_messages(location, value)
    return (
        ChatMessage(role, read_words(location, value, "prompt" if role == "user" else "answer")),
    )
