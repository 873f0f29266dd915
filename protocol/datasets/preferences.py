"""Read preference pairs from data files: two answers, of which one is preferred.

A row has TRL's format: `prompt`, `chosen` and `rejected`, each a text or a list of messages.
Without `prompt`, the others are whole conversations that differ only in their last answers.
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
from protocol.datasets.messages import (
    ChatMessage,
    check_calls,
    check_turns,
    read_tools,
    require_text,
)
from protocol.datasets.rows import BadRows, Record
from protocol.datasets.text_file import format_value
from protocol.spec.sections.data import PREFERENCE_COLUMNS, DataSpec

_OPTIONAL_COLUMNS: Final = ("prompt", "system", "tools")


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two conversations that differ only in their last message, the assistant's answer."""

    chosen: Conversation
    rejected: Conversation

    @property
    def document(self) -> str:
        """Return the pair as JSON text; equal pairs have equal texts."""
        return json.dumps([self.chosen.document, self.rejected.document])


def read_preferences(spec: DataSpec) -> DistinctRows[PreferencePair]:
    """Read the preference pairs of the files that the run spec names.

    Raises:
        DataError: A file is missing, not UTF-8 or damaged, lacks a column, or contains rows that a
            model cannot learn from.
    """
    bad_rows = BadRows(skip=spec.skip_bad_rows)
    rows = read_documents(spec, PREFERENCE_COLUMNS, _OPTIONAL_COLUMNS, _read_document, bad_rows)
    return DistinctRows(rows, _parse_document, f"pairs in {spec.train!r}", bad_rows)


def _parse_document(document: str, location: str) -> PreferencePair:
    chosen, rejected = json.loads(document)
    return PreferencePair(conversation_of(chosen, location), conversation_of(rejected, location))


def _read_document(location: str, record: Record) -> str:
    prompt = _read_messages(f"{location} prompt", record["prompt"], "user")
    chosen, rejected = (
        _make_conversation(location, key, prompt, record) for key in ("chosen", "rejected")
    )
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise DataError(
            f"{location}: expected chosen and rejected to be the same up to their last answers, "
            "got conversations that differ earlier"
        )
    if chosen.messages == rejected.messages:
        raise DataError(
            f"{location}: expected chosen and rejected to differ, got the same twice; leave the "
            "row out"
        )
    return PreferencePair(chosen, rejected).document


def _make_conversation(
    location: str, key: str, prompt: tuple[ChatMessage, ...], record: Record
) -> Conversation:
    column_location = f"{location} {key}"
    answer = _read_messages(column_location, record[key], "assistant")
    if not answer:
        raise DataError(f"{location}: expected {key}, got {format_value(record[key])}")
    if prompt and answer[0].role != "assistant":
        # Some data sets repeat the prompt in both answers.
        if answer[: len(prompt)] != prompt:
            raise DataError(
                f"{column_location}: expected an answer to the prompt, or a conversation that "
                "begins with the prompt, got a conversation that begins differently; remove the "
                "column prompt, or rename it"
            )
        prompt = ()
    messages = (*prompt, *answer)
    if messages[0].role == "assistant":
        raise DataError(
            f"{column_location}: expected a prompt before the answer, got none; add a column "
            "'prompt', or use whole conversations"
        )
    messages = with_system(column_location, record["system"], messages)
    check_turns(column_location, messages)
    tools = check_calls(location, messages, read_tools(location, record["tools"]))
    return Conversation(messages, location, tools)


def _read_messages(location: str, value: object, role: str) -> tuple[ChatMessage, ...]:
    """Read messages. Plain text becomes one message of this role; None becomes no message."""
    if value is None:
        return ()
    if is_message_list(value):
        return read_messages(location, value)
    return (
        ChatMessage(role, require_text(location, value, "prompt" if role == "user" else "answer")),
    )
