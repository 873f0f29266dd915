"""Read conversations from data files, check them and remove duplicates.

A row is a list of messages (`messages`, or ShareGPT's `conversations`), a prompt with its
completion, or Alpaca's instruction, input and output. Each row becomes a `Conversation`: optionally
a system message, then messages of user and assistant in turn, the assistant's last. The answers of
tools follow the messages that call them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from protocol.base.errors import DataError
from protocol.datasets.disk_texts import DistinctTexts
from protocol.datasets.messages import (
    ChatMessage,
    Tool,
    check_calls,
    check_turns,
    has_value,
    read_message,
    read_tools,
    require_text,
)
from protocol.datasets.rows import BadRows, Location, Locations, Record, read_rows
from protocol.datasets.text_file import format_value
from protocol.spec.files import sources
from protocol.spec.sections.data import COLUMNS_OF_FORMAT, OPTIONAL_COLUMNS, DataSpec

_TURN_ROLES: Final = ("user", "assistant")
_STEERING_COLUMNS: Final = frozenset({
    "system", "system_prompt", "history", "tools", "functions", "tool_calls", "documents", "image",
    "images", "video", "videos", "audio", "audios", "weight", "label", "chat_template_kwargs",
})  # fmt: skip
"""Columns that, in other libraries, change a conversation or the part of it that is learned."""
_SIMILARITY_COLUMNS: Final = frozenset({"label", "score"})
"""Columns of pairs of texts that state whether, or how well, the two texts belong together."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order.

    Attributes:
        messages: The messages; the last is the assistant's.
        location: File and row, for errors.
        tools: Functions that the assistant may call.
    """

    messages: tuple[ChatMessage, ...]
    location: str
    tools: tuple[Tool, ...] = ()

    @property
    def document(self) -> str:
        """Return the conversation as JSON text; equal conversations have equal texts."""
        document: Any = [message.record() for message in self.messages]
        if self.tools:
            document = {"messages": document, "tools": self.tools}
        return json.dumps(document, ensure_ascii=False)


Row = TypeVar("Row")


class DistinctRows(Generic[Row]):
    """Distinct rows in the order of the files, stored on disk: they may be larger than memory.

    Attributes:
        documents: The content of each row as text; equal rows have equal texts.
        duplicates: Number of repeated rows.
        bad_rows: Number of skipped rows.
    """

    def __init__(
        self,
        rows: Iterable[tuple[Location, str]],
        parse_document: Callable[[str, str], Row],
        expected: str,
        bad_rows: BadRows,
    ) -> None:
        """Store each row once.

        Args:
            rows: The location and the document of each row.
            parse_document: Returns the row of a document and its location.
            expected: A description of the rows and their source, for the error if there are none.
            bad_rows: Receives the rows that cannot be used.

        Raises:
            DataError: There are no rows.
        """
        distinct, self._locations, self._parse_document = (
            DistinctTexts(),
            Locations(),
            parse_document,
        )
        for location, document in rows:
            if distinct.add(document):
                self._locations.append(location)
        if not distinct.texts:
            raise DataError(f"expected {expected}, found none")
        self.documents, self.duplicates = distinct.texts, distinct.duplicates
        self.bad_rows = bad_rows.count

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Row:
        return self._parse_document(self.documents[number], self._locations[number])


def conversation_of(document: str, location: str) -> Conversation:
    """Return the conversation with this `document`."""
    content = json.loads(document)
    messages, tools = (
        (content["messages"], content["tools"]) if isinstance(content, dict) else (content, ())
    )
    return Conversation(tuple(map(ChatMessage.of, messages)), location, tuple(tools))


def read_conversations(spec: DataSpec) -> DistinctRows[Conversation]:
    """Read the conversations of the files that the run spec names.

    Raises:
        DataError: A file is missing, not UTF-8 or damaged, lacks a column, or contains rows that a
            model cannot learn from.
    """
    to_document = partial(_to_document, _MESSAGE_READERS[spec.format])
    columns, bad_rows = COLUMNS_OF_FORMAT[spec.format], BadRows(skip=spec.skip_bad_rows)
    rows = read_documents(spec, columns, OPTIONAL_COLUMNS, to_document, bad_rows)
    return DistinctRows(rows, conversation_of, f"conversations in {spec.train!r}", bad_rows)


def _to_document(
    read: Callable[[str, Record], tuple[ChatMessage, ...]], location: str, record: Record
) -> str:
    messages = read(location, record)
    check_turns(location, messages)
    tools = check_calls(location, messages, read_tools(location, record["tools"]))
    return Conversation(messages, location, tools).document


def read_documents(
    spec: DataSpec,
    columns: Sequence[str],
    optional: Collection[str],
    to_document: Callable[[str, Record], str],
    bad_rows: BadRows,
) -> Iterator[tuple[Location, str]]:
    """Yield the location and the document of every row.

    Args:
        spec: Names files and columns.
        columns: Keys of `data.columns`.
        optional: Keys of columns that a row may lack.
        to_document: Returns the document of a row, a mapping from key to value.
        bad_rows: Receives the rows that cannot be used.
    """
    column_names: Mapping[str, str] = dict(spec.columns.items())
    names = {key: column_names.get(key, key) for key in columns}
    required_columns = {
        f"columns.{key}": name for key, name in names.items() if key not in optional
    }
    similarity_columns = _SIMILARITY_COLUMNS if "anchor" in names else frozenset()
    ignored_columns = (_STEERING_COLUMNS | similarity_columns) - {*names.values()}
    files = sources.row_files(spec.train)
    rows = read_rows(files, required_columns, [*names.values(), *sorted(ignored_columns)], bad_rows)

    def parse_row(location: Location, record: Record) -> str:
        for key in sorted(ignored_columns & record.keys() & similarity_columns):
            if str(record[key]) in ("0", "0.0"):
                raise DataError(
                    f"{location}: expected texts that belong together, got {key} {record[key]}: "
                    "a text that does not answer its anchor is no positive; leave the row out"
                )
        for key in sorted(ignored_columns & record.keys() - {"score"}):
            if has_value(record[key]) and (key != "label" or isinstance(record[key], bool)):
                raise DataError(
                    f"{location}: expected only {' and '.join(names)}, got {key!r} too, which "
                    "training would ignore; remove that column"
                )
        return to_document(str(location), {key: record.get(name) for key, name in names.items()})

    return bad_rows.parse(rows, parse_row)


def _read_openai(location: str, record: Record) -> tuple[ChatMessage, ...]:
    return with_system(location, record["system"], read_messages(location, record["messages"]))


def _read_sharegpt(location: str, record: Record) -> tuple[ChatMessage, ...]:
    return with_system(location, record["system"], read_messages(location, record["conversations"]))


def read_messages(location: str, cell: object) -> tuple[ChatMessage, ...]:
    """Read a list of messages, or its JSON text; the order of messages is not checked.

    Raises:
        DataError: The value is not a list of messages.
    """
    if isinstance(cell, str):  # a cell of a table
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            raise DataError(
                f"{location}: expected messages as JSON, got {format_value(cell)}"
            ) from None
    if not isinstance(cell, list) or not cell:
        raise DataError(f"{location}: expected a list of messages, got {format_value(cell)}")
    return tuple(
        read_message(f"{location} message {n}", message) for n, message in enumerate(cell, start=1)
    )


def is_message_list(cell: object) -> bool:
    """Return whether a cell contains messages rather than a text."""
    return isinstance(cell, list) or (isinstance(cell, str) and cell.lstrip().startswith("[{"))


def _read_prompt(location: str, record: Record) -> tuple[ChatMessage, ...]:
    """Read a prompt and its completion; only the completion is learned."""
    prompt, completion = (
        read_messages(f"{location} {key}", record[key])
        if is_message_list(record[key])
        else (ChatMessage(role, require_text(location, record[key], key)),)
        for key, role in zip(("prompt", "completion"), _TURN_ROLES, strict=True)
    )
    prompt = tuple(replace(message, trained=message.role != "assistant") for message in prompt)
    return with_system(location, record["system"], (*prompt, *completion))


def _read_alpaca(location: str, record: Record) -> tuple[ChatMessage, ...]:
    question = require_text(location, record["instruction"], "instruction")
    if record["input"] is not None and record["input"] != "":
        question = f"{question}\n\n{require_text(location, record['input'], 'input')}"
    answer = ChatMessage("assistant", require_text(location, record["output"], "output"))
    earlier_turns = _read_history(location, record["history"])
    return with_system(
        location, record["system"], (*earlier_turns, ChatMessage("user", question), answer)
    )


def _read_history(location: str, turns: object) -> Iterator[ChatMessage]:
    """Read earlier turns: a list of pairs (instruction, answer), or its JSON text."""
    if not has_value(turns):
        return
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError):
            turns = None
    pairs = turns if isinstance(turns, list) else [None]
    for number, pair in enumerate(pairs, start=1):
        turn_location = f"{location} history {number}"
        if not isinstance(pair, list) or len(pair) != len(_TURN_ROLES):
            raise DataError(
                f"{turn_location}: expected an instruction and its answer, got {format_value(pair)}"
            )
        for role, content in zip(_TURN_ROLES, pair, strict=True):
            yield ChatMessage(role, require_text(turn_location, content, f"the {role}'s turn"))


def with_system(
    location: str, cell: object, messages: tuple[ChatMessage, ...]
) -> tuple[ChatMessage, ...]:
    """Put the row's column `system` before the messages, unless the column is empty.

    Raises:
        DataError: The column is not text, or the messages begin with another system message.
    """
    if not has_value(cell) or (isinstance(cell, str) and not cell.strip()):
        return messages
    system = ChatMessage("system", require_text(location, cell, "system"))
    if messages[0].role != "system":
        return (system, *messages)
    if messages[0] != system:
        raise DataError(
            f"{location}: expected one system message, got one in the column system and another in "
            "the messages; leave one out"
        )
    return messages


_MESSAGE_READERS: Final = {
    "messages": _read_openai, "sharegpt": _read_sharegpt, "prompt-completion": _read_prompt,
    "alpaca": _read_alpaca,
}  # fmt: skip
