"""Write Ollama's Modelfile for a GGUF file: context length, stop tokens and chat template.

Ollama uses Go templates, models use Jinja. The text that a model's template writes
around each message is found by rendering it, and checked on a longer conversation. A template that
writes other text is replaced by a comment; Ollama then uses the template in the GGUF file.
https://github.com/ollama/ollama/blob/main/docs/modelfile.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jinja2

from worker.models.tokens import answer_end_tokens

Message = Mapping[str, str]
NAME: Final = "Modelfile"
_ROLES: Final = ("system", "user", "assistant")
_SYSTEM, _QUESTION, _ANSWER = (
    {"role": role, "content": content}
    for role, content in zip(_ROLES, ("zqsx", "zqux", "zqax"), strict=True)
)
"""Messages of one unlikely word each, which is easy to locate in a rendered text."""


@dataclass(frozen=True, slots=True)
class MessageFraming:
    """The text that a chat template writes around the messages of each role.

    Attributes:
        before: Text before a message, by role.
        after: Text after a message, by role.
        prompt: Text before a generated answer.
        system: System message of a conversation that has none.
    """

    before: Mapping[str, str]
    after: Mapping[str, str]
    prompt: str
    system: str

    def render(self, messages: Sequence[Message]) -> str:
        """Render a conversation up to the beginning of the next answer."""
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        parts = [f"{self.before[m['role']]}{m['content']}{self.after[m['role']]}" for m in messages]
        return "".join(parts) + self.prompt


def modelfile(tokenizer: Any, file: str, context: int) -> str:
    """Return the text of a Modelfile.

    Args:
        tokenizer: The model's tokenizer.
        file: The name of the GGUF file beside it.
        context: The model's context length in tokens.
    """
    lines = [f"FROM ./{file}", f"PARAMETER num_ctx {context}"]
    ends = sorted(answer_end_tokens(tokenizer))
    lines += [f'PARAMETER stop "{tokenizer.decode([token])}"' for token in ends]
    if not tokenizer.chat_template:
        return "\n".join(lines) + "\n"
    framing = framing_of(tokenizer)
    if framing is None:
        lines.append(
            "# The chat template is more than text around each message: see the GGUF file."
        )
    else:
        if framing.system:
            lines.append(f'SYSTEM """{framing.system}"""')
        lines.append(f'TEMPLATE """{_go_template(framing)}"""')
    return "\n".join(lines) + "\n"


def _go_template(framing: MessageFraming) -> str:
    cases = "".join(
        f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}'
        f"{framing.before[role]}{{{{ .Content }}}}{framing.after[role]}"
        for number, role in enumerate(_ROLES)
    )
    return f"{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}{framing.prompt}"


def framing_of(tokenizer: Any) -> MessageFraming | None:
    """Return the text that a chat template writes around messages; None if it writes more."""
    try:
        framing = _find_framing(tokenizer)
        if framing is None or any("{{" in text or '"""' in text for text in _texts(framing)):
            return None
        turns = [_QUESTION, _ANSWER, _QUESTION, {"role": "assistant", "content": "1"}, _QUESTION]
        for messages in ([_SYSTEM, *turns], turns, [_SYSTEM, _QUESTION], [_QUESTION]):
            if framing.render(messages) != _render(tokenizer, messages, prompt=True):
                return None
    except (jinja2.TemplateError, TypeError, ValueError):
        return None
    return framing


def _texts(framing: MessageFraming) -> list[str]:
    return [*framing.before.values(), *framing.after.values(), framing.prompt, framing.system]


def _find_framing(tokenizer: Any) -> MessageFraming | None:
    def last_framing(messages: Sequence[Message]) -> tuple[str, str] | None:
        """Return the text before and after the last message's content."""
        earlier = _render(tokenizer, messages[:-1])
        text = _render(tokenizer, messages)
        prefix, content, suffix = text.removeprefix(earlier).partition(messages[-1]["content"])
        return (prefix, suffix) if content and text.startswith(earlier) else None

    prompt = [_SYSTEM, _QUESTION]
    answer = last_framing([*prompt, _ANSWER])
    question = last_framing([*prompt, _ANSWER, _QUESTION])
    if answer is None or question is None:
        return None
    prompt_text = _render(tokenizer, prompt)
    before_system, _, remainder = prompt_text.partition(_SYSTEM["content"])
    after_system, _, _ = remainder.partition(_QUESTION["content"])
    if not after_system.endswith(question[0]):
        return None
    after_system = after_system.removesuffix(question[0])
    # Without a system message, a template may write its own.
    opening = _render(tokenizer, [_QUESTION]).partition(_QUESTION["content"])[0]
    default_system = opening.removesuffix(question[0])
    default_system = default_system.removeprefix(before_system).removesuffix(after_system)
    return MessageFraming(
        {"system": before_system, "user": question[0], "assistant": answer[0]},
        {"system": after_system, "user": question[1], "assistant": answer[1]},
        prompt=_render(tokenizer, prompt, prompt=True).removeprefix(prompt_text),
        system=default_system,
    )


def _render(tokenizer: Any, messages: Sequence[Message], *, prompt: bool = False) -> str:
    """Render messages without the begin token, which Ollama adds."""
    text = str(
        tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=prompt)
    )
    return text.removeprefix(tokenizer.bos_token or "")
