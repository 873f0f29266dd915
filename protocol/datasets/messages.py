"""Read a message of a conversation, and the conversation's tools, in common export formats.

A message is OpenAI's (`role`, `content`, `tool_calls`, `tool_call_id`, `weight`; the older
`function_call`) or ShareGPT's (`from`, `value`). The arguments of a call are an object, or an
object as JSON text. A tool is OpenAI's (`type: function`) or its inner object alone. All formats
become `ChatMessage` and `Tool`.
https://platform.openai.com/docs/guides/fine-tuning, https://huggingface.co/docs/transformers/chat_extras
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from protocol.base.errors import DataError
from protocol.datasets.text_file import format_value

Tool = Mapping[str, Any]
"""A function that the assistant may call: `{"type": "function", "function": {...}}`."""

ROLES: Final = ("system", "user", "assistant", "tool")
_ROLE_OF: Final = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "function": "tool", "observation": "tool", "function_response": "tool",
    "tool_response": "tool",
}  # fmt: skip
_CALL_ROLES: Final = frozenset({"function_call", "tool_call"})
"""Roles of ShareGPT whose text is a call, as JSON."""
_REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking")
_MESSAGE_KEYS: Final = frozenset({
    "role", "content", "from", "value", "tool_calls", "function_call", "tool_call_id", "name",
    "weight", "train", *_REASONING_KEYS,
})  # fmt: skip
_MAX_LISTED_TOOLS: Final = 10
"""Maximum number of tools that an error names."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function.

    Attributes:
        name: Name of the function.
        arguments: Values by name.
        id: The id by which a tool's answer refers to this call; empty without one.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of the system, the user, the assistant or a tool.

    Attributes:
        role: One of `ROLES`.
        content: The text; empty only beside tool calls.
        reasoning: The assistant's thoughts before the text; the chat template may leave them out.
        tool_calls: The functions that the assistant calls.
        call_id: In a tool's answer: the id of the call, if the data has it.
        name: In a tool's answer: the name of the function, if the data has it.
        trained: Whether the assistant learns this message.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    trained: bool = True

    def record(self) -> list[Any]:
        """Return the message as a JSON list: role, content, and a mapping of the other fields that
        have a value."""
        optional_fields: dict[str, Any] = {
            "reasoning": self.reasoning,
            "tool_calls": [[call.name, call.arguments, call.id] for call in self.tool_calls],
            "call_id": self.call_id,
            "name": self.name,
        }
        optional_fields = {key: value for key, value in optional_fields.items() if value}
        if not self.trained:
            optional_fields["trained"] = False
        return (
            [self.role, self.content, optional_fields]
            if optional_fields
            else [self.role, self.content]
        )

    @staticmethod
    def of(record: list[Any]) -> ChatMessage:
        """Return the message from the result of `record`."""
        role, content, *rest = record
        optional_fields = dict(rest[0]) if rest else {}
        calls = tuple(ToolCall(*call) for call in optional_fields.pop("tool_calls", ()))
        return ChatMessage(role, content, tool_calls=calls, **optional_fields)

    def for_template(self, *, arguments_as_text: bool) -> dict[str, Any]:
        """Return the message in the format that chat templates expect.

        Args:
            arguments_as_text: Whether the template expects the arguments of calls as JSON text.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                _call_for_template(call, as_text=arguments_as_text) for call in self.tool_calls
            ]
        if self.call_id:
            message["tool_call_id"] = self.call_id
        if self.name:
            message["name"] = self.name
        return message


def _call_for_template(call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    arguments: Any = dict(call.arguments)
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def has_value(value: object) -> bool:
    """Return whether a value is neither null nor empty; zero and false are values."""
    return value is not None and value not in ("", [], {}, "[]", "{}", "null")


def read_message(location: str, document: object) -> ChatMessage:
    """Read one message.

    Args:
        location: File, row and number of the message.
        document: The message.

    Raises:
        DataError: The value is not a message, or has a key that training would ignore.
    """
    if not isinstance(document, dict):
        raise DataError(f"{location}: expected role and content, got {format_value(document)}")
    role_key = "from" if "from" in document and "role" not in document else "role"
    text_key = "value" if "value" in document and "content" not in document else "content"
    if role_key not in document:
        raise DataError(f"{location}: expected role and content, found no role")
    unknown_keys = [
        key for key, value in document.items() if has_value(value) and key not in _MESSAGE_KEYS
    ]
    if unknown_keys:
        raise DataError(
            f"{location}: expected role and content, got {unknown_keys[0]!r} too, which training "
            "would ignore; remove that key"
        )
    role_name = document[role_key]
    role = _ROLE_OF.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise DataError(
            f"{location}: expected one of the roles {', '.join(ROLES)}, got "
            f"{format_value(role_name)}"
        )
    if role == "assistant":
        is_call = role_name in _CALL_ROLES
        return _read_assistant(location, document, text_key, is_call=is_call)
    _refuse_assistant_keys(location, role, document)
    content = require_text(location, _join_parts(document.get(text_key)), "content")
    if role != "tool":
        return ChatMessage(role, content)
    call_id, name = (document.get(key) or "" for key in ("tool_call_id", "name"))
    return ChatMessage(role, content, call_id=str(call_id), name=str(name))


def _read_assistant(
    location: str, message: Mapping[str, Any], text_key: str, *, is_call: bool
) -> ChatMessage:
    content = _join_parts(message.get(text_key))
    calls: list[object] = []
    if is_call:
        calls, content = _read_list(location, content, "calls"), None
    if has_value(message.get("tool_calls")):
        calls += _read_list(location, message["tool_calls"], "tool_calls")
    if has_value(message.get("function_call")):
        calls.append(message["function_call"])
    tool_calls = tuple(_read_call(location, call) for call in calls)
    if tool_calls and (content is None or (isinstance(content, str) and not content.strip())):
        content = ""
    else:
        if text_key not in message:
            raise DataError(f"{location}: expected role and content, found no content")
        content = require_text(location, content, "content")
    reasoning = next((message[key] for key in _REASONING_KEYS if has_value(message.get(key))), "")
    if not isinstance(reasoning, str):
        raise DataError(f"{location}: expected text as reasoning, got {format_value(reasoning)}")
    return ChatMessage(
        "assistant",
        content,
        reasoning=reasoning,
        tool_calls=tool_calls,
        trained=_is_trained(location, message),
    )


def _is_trained(location: str, message: Mapping[str, Any]) -> bool:
    """Return whether neither `weight` (0 or 1) nor `train` (a boolean) excludes the message."""
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and weight not in (0, 1):
        raise DataError(
            f"{location}: expected weight 0 or 1, got {format_value(weight)}; a message is learned "
            "or not"
        )
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{location}: expected true or false as train, got {format_value(train)}")
    return weight != 0 and train is not False


def _refuse_assistant_keys(location: str, role: str, message: Mapping[str, Any]) -> None:
    for key in ("weight", "train"):
        if message.get(key):
            raise DataError(
                f"{location}: expected {key} only in messages of the assistant, the only ones that "
                f"are learned, got it in a message of the {role}; remove that key"
            )
    for key in ("tool_calls", "function_call", *_REASONING_KEYS):
        if has_value(message.get(key)):
            raise DataError(
                f"{location}: expected {key} only in messages of the assistant, got it in a "
                f"message of the {role}"
            )
    tool_keys = [key for key in ("tool_call_id", "name") if has_value(message.get(key))]
    if role != "tool" and tool_keys:
        raise DataError(
            f"{location}: expected role and content, got {tool_keys[0]!r} too, which training "
            "would ignore; remove that key"
        )


def _join_parts(content: object) -> object:
    """Join a content that is a list of text parts, as in OpenAI's format; return others
    unchanged."""
    if not isinstance(content, list) or not content:
        return content
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in content
    ]
    return content if None in texts else "".join(map(str, texts))


def _read_call(location: str, call: object) -> ToolCall:
    """Read a call: `{"name", "arguments"}`, alone or as `{"type": "function", "function": ...}`."""
    outer: Mapping[str, Any] = call if isinstance(call, dict) else {}
    inner = outer.get("function", outer)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(
            f"{location}: expected a call with the name of a function and its arguments, got "
            f"{format_value(call)}"
        )
    arguments = inner.get("arguments", inner.get("parameters"))
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise DataError(
            f"{location}: expected an object as arguments of {inner['name']!r}, or its JSON text, "
            f"got {format_value(inner.get('arguments'))}"
        )
    return ToolCall(inner["name"], arguments, str(outer.get("id") or ""))


def read_tools(location: str, document: object) -> tuple[Tool, ...]:
    """Read the tools of a conversation: a list, or its JSON text.

    Raises:
        DataError: The value is not a list of functions.
    """
    if not has_value(document) or (isinstance(document, str) and not document.strip()):
        return ()
    tools = _read_list(location, document, "tools")
    return tuple(
        _read_tool(f"{location} tool {number}", tool) for number, tool in enumerate(tools, 1)
    )


def _read_tool(location: str, tool: object) -> Tool:
    outer: Mapping[str, Any] = tool if isinstance(tool, dict) else {}
    inner = outer.get("function", outer)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(
            f"{location}: expected a function with its name, description and parameters, got "
            f"{format_value(tool)}"
        )
    return outer if "function" in outer else {"type": "function", "function": inner}


def _read_list(location: str, value: object, name: str) -> list[object]:
    """Return a list; the value may also be JSON text, or a single object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DataError(
                f"{location}: expected {name} as JSON, got {format_value(value)}"
            ) from None
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise DataError(f"{location}: expected {name} as a list, got {format_value(value)}")
    return value


def require_text(location: str, value: object, key: str) -> str:
    """Return the value unchanged if it is a text that is not blank.

    Raises:
        DataError: The value is not text, or is blank.
    """
    if value is None:
        raise DataError(f"{location}: expected text as {key}, found no {key}")
    if not isinstance(value, str):
        raise DataError(f"{location}: expected text as {key}, got {format_value(value)}")
    if not value.strip():
        raise DataError(f"{location}: expected text as {key}, found none; leave the row out")
    return value


def check_calls(
    location: str, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...]
) -> tuple[Tool, ...]:
    """Check that every call names one of the tools, if the conversation lists tools.

    Returns:
        The tools.

    Raises:
        DataError: A call names a function that is not in the list.
    """
    names = [tool["function"]["name"] for tool in tools]
    for number, message in enumerate(messages, start=1):
        for call in message.tool_calls:
            if names and call.name not in names:
                raise DataError(
                    f"{location} message {number}: expected a call of a function in tools "
                    f"({', '.join(names[:_MAX_LISTED_TOOLS])}), got {call.name!r}"
                )
    return tools


def check_turns(location: str, messages: tuple[ChatMessage, ...]) -> None:
    """Check the order: optionally system, then user and assistant in turn; tools answer calls.

    Raises:
        DataError: A message is out of turn, or the assistant does not speak last.
    """
    open_calls = 0
    last_role = ""
    for number, message in enumerate(messages, start=1):
        message_location = f"{location} message {number}"
        if message.role == "system":
            if number > 1:
                raise DataError(
                    f"{message_location}: expected a system message only at the start, got one here"
                )
            continue
        if message.role == "tool":
            if not open_calls:
                raise DataError(
                    f"{message_location}: expected a tool to answer a call, got no call before it"
                )
            open_calls -= 1
            last_role = "tool"
            continue
        expected = "user" if last_role in ("", "assistant") and not open_calls else "assistant"
        if open_calls and last_role == "assistant":
            raise DataError(
                f"{message_location}: expected a tool's answer to the preceding call, got "
                f"{message.role}"
            )
        if message.role != expected:
            raise DataError(
                f"{message_location}: expected a message of the {expected}, got {message.role}"
            )
        open_calls = len(message.tool_calls)
        last_role = message.role
    if messages[-1].role != "assistant":
        raise DataError(
            f"{location}: expected the last message to be the assistant's, got "
            f"{messages[-1].role}; remove the messages after the last answer"
        )
