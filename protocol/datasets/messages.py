"""One message of a conversation, and the tools it may call, read in the dialects people export.

A message is OpenAI's (`role`, `content`, `tool_calls`, `tool_call_id`, `weight`; the older
`function_call`) or ShareGPT's (`from`, `value`). The arguments of a call are an object, or an
object as JSON text. A tool is OpenAI's (`type: function`) or its inner object alone. All become
the same `ChatMessage` and `Tool`.
https://platform.openai.com/docs/guides/fine-tuning, https://huggingface.co/docs/transformers/chat_extras
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from protocol.base.errors import DataError
from protocol.datasets.text_file import shown

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
_CALLING: Final = frozenset({"function_call", "tool_call"})
"""ShareGPT's roles whose text is a call, as JSON."""
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_READ: Final = frozenset({
    "role", "content", "from", "value", "tool_calls", "function_call", "tool_call_id", "name",
    "weight", "train", *_REASONING,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function.

    Attributes:
        name: Name of the function.
        arguments: By name.
        id: What the answer refers to; empty where nothing does.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What one of system, user, assistant and tool says.

    Attributes:
        role: Who.
        content: The text; empty only beside tool calls.
        reasoning: What the assistant thought before; the chat template decides whether to show it.
        tool_calls: What the assistant calls.
        call_id: Of a tool's answer: the call it answers, if the data says.
        name: Name of a tool's answer: the function, if the data says.
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
        """Return it as JSON: role, content, and a third element only if there is more to say."""
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
        """Return the message of a `record`."""
        role, content, *rest = record
        optional_fields = dict(rest[0]) if rest else {}
        calls = tuple(ToolCall(*call) for call in optional_fields.pop("tool_calls", ()))
        return ChatMessage(role, content, tool_calls=calls, **optional_fields)

    def for_template(self, *, arguments_as_text: bool) -> dict[str, Any]:
        """Return it as chat templates expect it.

        Args:
            arguments_as_text: Whether the template wants the arguments of calls as JSON text.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                _call(call, as_text=arguments_as_text) for call in self.tool_calls
            ]
        if self.call_id:
            message["tool_call_id"] = self.call_id
        if self.name:
            message["name"] = self.name
        return message


def _call(call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    arguments: Any = dict(call.arguments)
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def has_value(value: object) -> bool:
    """Return whether a key says something: zero and false do, null and empty values do not."""
    return value is not None and value not in ("", [], {}, "[]", "{}", "null")


def read_message(location: str, document: object) -> ChatMessage:
    """Read one message.

    Args:
        location: File, row and number of the message.
        document: The message.

    Raises:
        DataError: The value is not a message, or says something that training would ignore.
    """
    if not isinstance(document, dict):
        raise DataError(f"{location}: expected role and content, got {shown(document)}")
    role_key = "from" if "from" in document and "role" not in document else "role"
    text_key = "value" if "value" in document and "content" not in document else "content"
    if role_key not in document:
        raise DataError(f"{location}: expected role and content, found no role")
    unknown_keys = [key for key, value in document.items() if has_value(value) and key not in _READ]
    if unknown_keys:
        raise DataError(
            f"{location}: expected role and content, got {unknown_keys[0]!r} too, which training "
            "would ignore; leave it out"
        )
    role_name = document[role_key]
    role = _ROLE_OF.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise DataError(
            f"{location}: expected one of the roles {', '.join(ROLES)}, got {shown(role_name)}"
        )
    if role == "assistant":
        return _assistant(location, document, text_key, calling=role_name in _CALLING)
    _refuse_assistants_keys(location, role, document)
    content = read_words(location, _joined_parts(document.get(text_key)), "content")
    if role != "tool":
        return ChatMessage(role, content)
    call_id, name = (document.get(key) or "" for key in ("tool_call_id", "name"))
    return ChatMessage(role, content, call_id=str(call_id), name=str(name))


def _assistant(
    location: str, message: Mapping[str, Any], text_key: str, *, calling: bool
) -> ChatMessage:
    content = _joined_parts(message.get(text_key))
    calls: list[object] = []
    if calling:
        calls, content = _list_of(location, content, "calls"), None
    if has_value(message.get("tool_calls")):
        calls += _list_of(location, message["tool_calls"], "tool_calls")
    if has_value(message.get("function_call")):
        calls.append(message["function_call"])
    tool_calls = tuple(_tool_call(location, call) for call in calls)
    if tool_calls and (content is None or (isinstance(content, str) and not content.strip())):
        content = ""
    else:
        if text_key not in message:
            raise DataError(f"{location}: expected role and content, found no content")
        content = read_words(location, content, "content")
    reasoning = next((message[key] for key in _REASONING if has_value(message.get(key))), "")
    if not isinstance(reasoning, str):
        raise DataError(f"{location}: expected text as reasoning, got {shown(reasoning)}")
    return ChatMessage(
        "assistant",
        content,
        reasoning=reasoning,
        tool_calls=tool_calls,
        trained=_is_trained(location, message),
    )


def _is_trained(location: str, message: Mapping[str, Any]) -> bool:
    """Return what `weight` (0 or 1) and `train` (true or false) say; true without them."""
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and weight not in (0, 1):
        raise DataError(
            f"{location}: expected weight 0 or 1, got {shown(weight)}; a message is learned or not"
        )
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{location}: expected true or false as train, got {shown(train)}")
    return weight != 0 and train is not False


def _refuse_assistants_keys(location: str, role: str, message: Mapping[str, Any]) -> None:
    for key in ("weight", "train"):
        if message.get(key):
            raise DataError(
                f"{location}: expected {key} on the assistant's messages alone, which are what is "
                f"learned, got it on the {role}'s; leave it out"
            )
    for key in ("tool_calls", "function_call", *_REASONING):
        if has_value(message.get(key)):
            raise DataError(f"{location}: expected {key} from the assistant alone, got the {role}")
    unread_keys = [key for key in ("tool_call_id", "name") if has_value(message.get(key))]
    if role != "tool" and unread_keys:
        raise DataError(
            f"{location}: expected role and content, got {unread_keys[0]!r} too, which training "
            "would ignore; leave it out"
        )


def _joined_parts(content: object) -> object:
    """Join a content that is a list of text parts, as OpenAI's may be."""
    if not isinstance(content, list) or not content:
        return content
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in content
    ]
    return content if None in texts else "".join(map(str, texts))


def _tool_call(location: str, call: object) -> ToolCall:
    """Read a call: `{"name", "arguments"}`, alone or as `{"type": "function", "function": ...}`."""
    outer: Mapping[str, Any] = call if isinstance(call, dict) else {}
    inner = outer.get("function", outer)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(
            f"{location}: expected a call with the name of a function and its arguments, got "
            f"{shown(call)}"
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
            f"got {shown(inner.get('arguments'))}"
        )
    return ToolCall(inner["name"], arguments, str(outer.get("id") or ""))


def read_tools(location: str, document: object) -> tuple[Tool, ...]:
    """Read the tools of a conversation: a list, or its JSON text.

    Raises:
        DataError: They are no list of functions.
    """
    if not has_value(document) or (isinstance(document, str) and not document.strip()):
        return ()
    tools = _list_of(location, document, "tools")
    return tuple(_tool(f"{location} tool {number}", tool) for number, tool in enumerate(tools, 1))


def _tool(location: str, tool: object) -> Tool:
    outer: Mapping[str, Any] = tool if isinstance(tool, dict) else {}
    inner = outer.get("function", outer)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(
            f"{location}: expected a function with its name, description and parameters, got "
            f"{shown(tool)}"
        )
    return outer if "function" in outer else {"type": "function", "function": inner}


def _list_of(location: str, value: object, what: str) -> list[object]:
    """Return a list; of its JSON text, and of a lone object, too."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DataError(f"{location}: expected {what} as JSON, got {shown(value)}") from None
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise DataError(f"{location}: expected {what} as a list, got {shown(value)}")
    return value


def read_words(location: str, value: object, key: str) -> str:
    """Return a text with its spaces.

    Raises:
        DataError: The value is not text, or is blank.
    """
    if value is None:
        raise DataError(f"{location}: expected text as {key}, found no {key}")
    if not isinstance(value, str):
        raise DataError(f"{location}: expected text as {key}, got {shown(value)}")
    if not value.strip():
        raise DataError(f"{location}: expected text as {key}, found none; leave the row out")
    return value


def check_calls(
    location: str, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...]
) -> tuple[Tool, ...]:
    """Check that calls name tools, where there is a list of them.

    Returns:
        The tools.

    Raises:
        DataError: A call names another function.
    """
    names = [tool["function"]["name"] for tool in tools]
    for number, message in enumerate(messages, start=1):
        for call in message.tool_calls:
            if names and call.name not in names:
                raise DataError(
                    f"{location} message {number}: expected a call of a function in tools "
                    f"({', '.join(names[:_SHOWN_TOOLS])}), got {call.name!r}"
                )
    return tools


_SHOWN_TOOLS: Final = 10


def check_turns(location: str, messages: tuple[ChatMessage, ...]) -> None:
    """Check the order: perhaps system, then user and assistant in turn; tools answer calls.

    Raises:
        DataError: A message is out of turn, or the assistant does not speak last.
    """
    open_calls = 0
    last = ""
    for number, message in enumerate(messages, start=1):
        at = f"{location} message {number}"
        if message.role == "system":
            if number > 1:
                raise DataError(f"{at}: expected the system to speak first or never, got it here")
            continue
        if message.role == "tool":
            if not open_calls:
                raise DataError(f"{at}: expected a tool to answer a call, got no call before it")
            open_calls -= 1
            last = "tool"
            continue
        expected = "user" if last in ("", "assistant") and not open_calls else "assistant"
        if open_calls and last == "assistant":
            raise DataError(
                f"{at}: expected the answer of a tool to the call before, got {message.role}"
            )
        if message.role != expected:
            raise DataError(f"{at}: expected it to be the {expected}'s turn, got {message.role}")
        open_calls = len(message.tool_calls)
        last = message.role
    if messages[-1].role != "assistant":
        raise DataError(
            f"{location}: expected the assistant to speak last, got {messages[-1].role}; leave out "
            "what is not answered"
        )
