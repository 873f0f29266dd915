"""Conversations out of a JSONL, CSV, TSV or Parquet file: read, checked, duplicates removed.

A row is a conversation in the form of OpenAI (`messages`), a prompt with its completion, or
Alpaca's instruction, input and output. All become the same: at most one system message, then user
and assistant in turn, the assistant last.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from protocol.base.errors import DataError
from protocol.data.disk_texts import DistinctTexts
from protocol.data.rows import Record, place_of, read_rows
from protocol.data.text_file import shown
from protocol.spec import sources
from protocol.spec.run_spec import COLUMNS_OF_FORMAT, OPTIONAL_COLUMNS, DataSpec

_ROLES: Final = ("system", "user", "assistant")
_TURN: Final = ("user", "assistant")
_STEERING: Final = frozenset({
    "system", "system_prompt", "history", "tools", "functions", "tool_calls", "documents", "image",
    "images", "video", "videos", "audio", "audios", "weight", "label", "chat_template_kwargs",
})  # fmt: skip
"""Columns that steer a conversation or what is learned of it, in the formats that others read."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What one of system, user and assistant says; never of spaces alone."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and where they stand in words: file and line."""

    messages: tuple[ChatMessage, ...]
    place: str

    @property
    def document(self) -> str:
        """All that is said, as text: equal for equal conversations."""
        return json.dumps([[each.role, each.content] for each in self.messages], ensure_ascii=False)


Row = TypeVar("Row")


class DistinctRows(Generic[Row]):
    """All different, in the order of the file, and on disk: they may be larger than memory.

    Attributes:
        documents: What each says, as text: equal for equal rows.
        duplicates: How many came again.
    """

    def __init__(
        self, given: Iterable[tuple[str, str]], row_of: Callable[[str, str], Row], expected: str
    ) -> None:
        """Keep each of these once.

        Args:
            given: Of each row its place in words, which ends with its number, and its document.
            row_of: The row that a document says, by that and its place.
            expected: What the rows are and in which file, should there be none.

        Raises:
            DataError: There are none.
        """
        found, self._numbers, self._where, self._row_of = DistinctTexts(), array("q"), "", row_of
        for place, document in given:
            self._where, _, number = place.rpartition(" ")
            if found.add(document):
                self._numbers.append(int(number))
        if not found.texts:
            raise DataError(f"expected {expected}, found none")
        self.documents, self.duplicates = found.texts, found.duplicates

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Row:
        return self._row_of(self.documents[number], f"{self._where} {self._numbers[number]}")


def conversation_of(document: str, place: str) -> Conversation:
    """The one whose `document` this is."""
    said = json.loads(document)
    return Conversation(tuple(ChatMessage(role, content) for role, content in said), place)


def read_conversations(spec: DataSpec) -> DistinctRows[Conversation]:
    """Read what the run spec names.

    Raises:
        DataError: The file is not there, not UTF-8 or damaged, lacks a column, or a row is no
            conversation that a model can learn from.
    """
    path = sources.text_source(spec.train)
    messages_of = _MESSAGES_OF[spec.format]
    given = (
        (place, Conversation(messages_of(place, record), place).document)
        for place, record in records(path, spec, COLUMNS_OF_FORMAT[spec.format], OPTIONAL_COLUMNS)
    )
    return DistinctRows(given, conversation_of, f"conversations in {str(path)!r}")


def records(
    path: Path, spec: DataSpec, columns: Sequence[str], need_not_be: Collection[str]
) -> Iterator[tuple[str, Record]]:
    """Every row with its place; the columns by the keys of `data.columns`."""
    asked: Mapping[str, str] = dict(spec.columns.items())
    names = {key: asked.get(key, key) for key in columns}
    wanted = {f"columns.{key}": name for key, name in names.items() if key not in need_not_be}
    unread = _STEERING - {*names.values()}
    for number, record in read_rows(path, wanted, [*names.values(), *sorted(unread)]):
        place = place_of(path, number)
        for key in sorted(unread & record.keys()):
            if _is_said(record[key]) and (key != "label" or isinstance(record[key], bool)):
                raise DataError(
                    f"{place}: expected {' and '.join(names)} alone to say what is learned, got "
                    f"{key!r} too, which would not be heeded; leave it out"
                )
        yield place, {key: record.get(name) for key, name in names.items()}


def _is_said(value: object) -> bool:
    """Whether a key says something: zero and false do, since they mean to leave something out."""
    return value is not None and value not in ("", [], {}, "[]", "{}", "null")


def _of_messages(place: str, record: Record) -> tuple[ChatMessage, ...]:
    messages = with_system(place, record["system"], read_messages(place, record["messages"]))
    check_turns(place, messages)
    return messages


def read_messages(place: str, told: object) -> tuple[ChatMessage, ...]:
    """A list of messages, or one as JSON in a cell of a table; whose turn it is is not looked at.

    Raises:
        DataError: It is no such list.
    """
    if isinstance(told, str):  # a cell of a table
        try:
            told = json.loads(told)
        except (ValueError, RecursionError):
            raise DataError(f"{place}: expected messages as JSON, got {shown(told)}") from None
    if not isinstance(told, list) or not told:
        raise DataError(f"{place}: expected a list of messages, got {shown(told)}")
    return tuple(_message(f"{place} message {n}", one) for n, one in enumerate(told, start=1))


def _message(place: str, told: object) -> ChatMessage:
    if not isinstance(told, dict):
        raise DataError(f"{place}: expected role and content, got {shown(told)}")
    if "from" in told and "value" in told:
        raise DataError(
            f"{place}: expected role and content, got ShareGPT's from and value; rename"
        )
    for key in ("role", "content"):
        if key not in told:
            raise DataError(f"{place}: expected role and content, found no {key}")
    others = [k for k, value in told.items() if _is_said(value) and k not in {"role", "content"}]
    if others:
        raise DataError(
            f"{place}: expected role and content alone, got {others[0]!r} too, which would not be "
            "heeded; leave it out"
        )
    if told["role"] not in _ROLES:
        raise DataError(
            f"{place}: expected one of the roles {', '.join(_ROLES)}, got {shown(told['role'])}"
        )
    return ChatMessage(told["role"], read_words(place, told["content"], "content"))


def check_turns(place: str, messages: tuple[ChatMessage, ...]) -> None:
    """See that the assistant answers each user.

    Raises:
        DataError: Who speaks when it is another's turn.
    """
    system = messages[0].role == "system"
    for number, message in enumerate(messages, start=1):
        at = f"{place} message {number}"
        if message.role == "system" and number > 1:
            raise DataError(f"{at}: expected the system to speak first or never, got it here")
        expected = ("assistant", "user")[(number - system) % 2]
        if message.role not in ("system", expected):
            raise DataError(f"{at}: expected it to be the {expected}'s turn, got {message.role}")
    if messages[-1].role != "assistant":
        raise DataError(
            f"{place}: expected the assistant to speak last, got {messages[-1].role}; leave out "
            "what is not answered"
        )


def _of_prompt(place: str, record: Record) -> tuple[ChatMessage, ...]:
    for key in ("prompt", "completion"):
        if isinstance(record[key], list):
            raise DataError(
                f"{place}: expected text as {key}, got a list; whole conversations are given as "
                "messages: --set data.format=messages"
            )
    prompt, completion = (read_words(place, record[key], key) for key in ("prompt", "completion"))
    said = ChatMessage("user", prompt), ChatMessage("assistant", completion)
    return with_system(place, record["system"], said)


def _of_alpaca(place: str, record: Record) -> tuple[ChatMessage, ...]:
    asked = read_words(place, record["instruction"], "instruction")
    if record["input"] is not None and record["input"] != "":
        asked = f"{asked}\n\n{read_words(place, record['input'], 'input')}"
    answer = ChatMessage("assistant", read_words(place, record["output"], "output"))
    before = _history(place, record["history"])
    return with_system(place, record["system"], (*before, ChatMessage("user", asked), answer))


def _history(place: str, told: object) -> Iterator[ChatMessage]:
    """Turns before a row's own: a list of pairs, instruction and answer; JSON in a table's cell."""
    if not _is_said(told):
        return
    if isinstance(told, str):
        try:
            told = json.loads(told)
        except (ValueError, RecursionError):
            told = None
    pairs = told if isinstance(told, list) else [None]
    for number, pair in enumerate(pairs, start=1):
        at = f"{place} history {number}"
        if not isinstance(pair, list) or len(pair) != len(_TURN):
            raise DataError(f"{at}: expected an instruction and its answer, got {shown(pair)}")
        for role, content in zip(_TURN, pair, strict=True):
            yield ChatMessage(role, read_words(at, content, f"the {role}'s turn"))


def with_system(
    place: str, told: object, messages: tuple[ChatMessage, ...]
) -> tuple[ChatMessage, ...]:
    """Messages with what the row's column `system` says before them, if it says something.

    Raises:
        DataError: It is no text, or the messages begin with another system message.
    """
    if not _is_said(told) or (isinstance(told, str) and not told.strip()):
        return messages
    system = ChatMessage("system", read_words(place, told, "system"))
    if messages[0].role != "system":
        return (system, *messages)
    if messages[0] != system:
        raise DataError(
            f"{place}: expected one system message, got one in the column system and another in "
            "the messages; leave one out"
        )
    return messages


_MESSAGES_OF: Final = {
    "messages": _of_messages, "prompt-completion": _of_prompt, "alpaca": _of_alpaca,
}  # fmt: skip


def read_words(place: str, value: object, key: str) -> str:
    """It, with its spaces.

    Raises:
        DataError: It is no text, or says nothing.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: expected text as {key}, got {shown(value)}")
    if not value.strip():
        raise DataError(f"{place}: expected text as {key}, found none; leave the row out")
    return value
