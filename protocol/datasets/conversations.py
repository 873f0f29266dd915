"""Conversations out of data files: read, checked, duplicates removed.

A row is a list of messages (`messages`, or ShareGPT's `conversations`), a prompt with its
completion, or Alpaca's instruction, input and output. All become the same: perhaps a system
message, then user and assistant in turn, with the answers of tools behind the calls, the assistant
last.
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
    read_words,
)
from protocol.datasets.rows import BadRows, Location, Locations, Record, read_rows
from protocol.datasets.text_file import shown
from protocol.spec.files import sources
from protocol.spec.sections.data import COLUMNS_OF_FORMAT, OPTIONAL_COLUMNS, DataSpec

_TURN: Final = ("user", "assistant")
_STEERING: Final = frozenset({
    "system", "system_prompt", "history", "tools", "functions", "tool_calls", "documents", "image",
    "images", "video", "videos", "audio", "audios", "weight", "label", "chat_template_kwargs",
})  # fmt: skip
"""Columns that change a conversation or its learned part, in the formats that others read."""
_MATCH: Final = frozenset({"label", "score"})
"""Columns of pairs of texts that say whether, or how well, the two belong together."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order.

    Attributes:
        messages: The assistant's last.
        location: File and row, in words.
        tools: What the assistant may call.
    """

    messages: tuple[ChatMessage, ...]
    location: str
    tools: tuple[Tool, ...] = ()

    @property
    def document(self) -> str:
        """Return all of it as text: equal for equal conversations."""
        record_messages: Any = [message.record() for message in self.messages]
        if self.tools:
            record_messages = {"messages": record_messages, "tools": self.tools}
        return json.dumps(record_messages, ensure_ascii=False)


Row = TypeVar("Row")


class DistinctRows(Generic[Row]):
    """Distinct rows in the order of the files, kept on disk: they may be larger than memory.

    Attributes:
        documents: The content of each row as text: equal for equal rows.
        duplicates: Number of repeated rows.
        bad_rows: How many rows were skipped.
    """

    def __init__(
        self,
        rows: Iterable[tuple[Location, str]],
        row_of: Callable[[str, str], Row],
        expected: str,
        bad_rows: BadRows,
    ) -> None:
        """Keep each row once.

        Args:
            rows: The location and the document of each row.
            row_of: Makes a row of its document and its location.
            expected: What the rows are and where, for the error if there are none.
            bad_rows: Where the reader reports rows that cannot be used.

        Raises:
            DataError: There are no rows.
        """
        distinct, self._locations, self._row_of = DistinctTexts(), Locations(), row_of
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
        return self._row_of(self.documents[number], self._locations[number])


def conversation_of(document: str, location: str) -> Conversation:
    """Return the conversation with this `document`."""
    record_messages = json.loads(document)
    tools: Sequence[Tool] = ()
    if isinstance(record_messages, dict):
        record_messages, tools = record_messages["messages"], record_messages["tools"]
    return Conversation(tuple(map(ChatMessage.of, record_messages)), location, tuple(tools))


def read_conversations(spec: DataSpec) -> DistinctRows[Conversation]:
    """Read what the run spec names.

    Raises:
        DataError: A file is missing, not UTF-8 or damaged, lacks a column, or rows are no
            conversations that a model can learn from.
    """
    parse = partial(_conversation, _MESSAGES_OF[spec.format])
    bad_rows = BadRows(skip=spec.skip_bad_rows)
    rows = read_documents(spec, COLUMNS_OF_FORMAT[spec.format], OPTIONAL_COLUMNS, parse, bad_rows)
    return DistinctRows(rows, conversation_of, f"conversations in {spec.train!r}", bad_rows)


def _conversation(
    messages_of: Callable[[str, Record], tuple[ChatMessage, ...]], location: str, record: Record
) -> str:
    messages = messages_of(location, record)
    check_turns(location, messages)
    tools = check_calls(location, messages, read_tools(location, record["tools"]))
    return Conversation(messages, location, tools).document


def read_documents(
    spec: DataSpec,
    columns: Sequence[str],
    optional: Collection[str],
    parse: Callable[[str, Record], str],
    bad_rows: BadRows,
) -> Iterator[tuple[Location, str]]:
    """Read every row, with its columns by the keys of `data.columns`.

    Args:
        spec: Names files and columns.
        columns: Keys of `data.columns`.
        optional: Those that a row need not have.
        parse: Makes the document of a row.
        bad_rows: Where rows that cannot be used are reported.
    """
    column_names: Mapping[str, str] = dict(spec.columns.items())
    names = {key: column_names.get(key, key) for key in columns}
    required_columns = {
        f"columns.{key}": name for key, name in names.items() if key not in optional
    }
    unread_columns = (_STEERING | _MATCH if "anchor" in names else _STEERING) - {*names.values()}
    files = sources.row_files(spec.train)
    rows = read_rows(files, required_columns, [*names.values(), *sorted(unread_columns)], bad_rows)

    def parse_row(location: Location, record: Record) -> str:
        for key in sorted(unread_columns & record.keys() & _MATCH) if "anchor" in names else ():
            if str(record[key]) in ("0", "0.0"):
                raise DataError(
                    f"{location}: expected texts that belong together, got {key} {record[key]}: "
                    "a text that does not answer its anchor is no positive; leave the row out"
                )
        for key in sorted(unread_columns & record.keys() - {"score"}):
            if has_value(record[key]) and (key != "label" or isinstance(record[key], bool)):
                raise DataError(
                    f"{location}: expected {' and '.join(names)} alone to say what is learned, got "
                    f"{key!r} too, which training would ignore; leave it out"
                )
        return parse(str(location), {key: record.get(name) for key, name in names.items()})

    return bad_rows.parse(rows, parse_row)


def _of_messages(location: str, record: Record) -> tuple[ChatMessage, ...]:
    return with_system(location, record["system"], read_messages(location, record["messages"]))


def _of_sharegpt(location: str, record: Record) -> tuple[ChatMessage, ...]:
    return with_system(location, record["system"], read_messages(location, record["conversations"]))


def read_messages(location: str, cell: object) -> tuple[ChatMessage, ...]:
    """Read a list of messages, or its JSON text; their order is not checked.

    Raises:
        DataError: The value is not a list of messages.
    """
    if isinstance(cell, str):  # a cell of a table
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            raise DataError(f"{location}: expected messages as JSON, got {shown(cell)}") from None
    if not isinstance(cell, list) or not cell:
        raise DataError(f"{location}: expected a list of messages, got {shown(cell)}")
    return tuple(
        read_message(f"{location} message {n}", message) for n, message in enumerate(cell, start=1)
    )


def is_message_list(cell: object) -> bool:
    """Return whether a cell holds messages rather than a text."""
    return isinstance(cell, list) or (isinstance(cell, str) and cell.lstrip().startswith("[{"))


def _of_prompt(location: str, record: Record) -> tuple[ChatMessage, ...]:
    """Read a prompt and its completion; only the completion is learned."""
    prompt, completion = (
        read_messages(f"{location} {key}", record[key])
        if is_message_list(record[key])
        else (ChatMessage(role, read_words(location, record[key], key)),)
        for key, role in zip(("prompt", "completion"), _TURN, strict=True)
    )
    prompt = tuple(replace(message, trained=message.role != "assistant") for message in prompt)
    return with_system(location, record["system"], (*prompt, *completion))


def _of_alpaca(location: str, record: Record) -> tuple[ChatMessage, ...]:
    question = read_words(location, record["instruction"], "instruction")
    if record["input"] is not None and record["input"] != "":
        question = f"{question}\n\n{read_words(location, record['input'], 'input')}"
    answer = ChatMessage("assistant", read_words(location, record["output"], "output"))
    earlier_turns = _history(location, record["history"])
    return with_system(
        location, record["system"], (*earlier_turns, ChatMessage("user", question), answer)
    )


def _history(location: str, turns: object) -> Iterator[ChatMessage]:
    """Read earlier turns: a list of pairs, instruction and answer, or its JSON text."""
    if not has_value(turns):
        return
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError):
            turns = None
    pairs = turns if isinstance(turns, list) else [None]
    for number, pair in enumerate(pairs, start=1):
        at = f"{location} history {number}"
        if not isinstance(pair, list) or len(pair) != len(_TURN):
            raise DataError(f"{at}: expected an instruction and its answer, got {shown(pair)}")
        for role, content in zip(_TURN, pair, strict=True):
            yield ChatMessage(role, read_words(at, content, f"the {role}'s turn"))


def with_system(
    location: str, cell: object, messages: tuple[ChatMessage, ...]
) -> tuple[ChatMessage, ...]:
    """Put the row's column `system` before the messages, if it says something.

    Raises:
        DataError: The column is not text, or the messages begin with another system message.
    """
    if not has_value(cell) or (isinstance(cell, str) and not cell.strip()):
        return messages
    system = ChatMessage("system", read_words(location, cell, "system"))
    if messages[0].role != "system":
        return (system, *messages)
    if messages[0] != system:
        raise DataError(
            f"{location}: expected one system message, got one in the column system and another in "
            "the messages; leave one out"
        )
    return messages


_MESSAGES_OF: Final = {
    "messages": _of_messages, "sharegpt": _of_sharegpt, "prompt-completion": _of_prompt,
    "alpaca": _of_alpaca,
}  # fmt: skip
