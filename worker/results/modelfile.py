"""Ollama's Modelfile beside a GGUF file: the context, the ends of answers, and the chat template.

Ollama's templates are Go's, a model's are Jinja. What a model's template writes around each message
is found by rendering it, and checked on a longer conversation; a template that writes anything
else is left out, with a comment, and Ollama uses what it knows by itself.
https://github.com/ollama/ollama/blob/main/docs/modelfile.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jinja2

from worker.models.tokens import answer_ends

Message = Mapping[str, str]
NAME: Final = "Modelfile"
_ROLES: Final = ("system", "user", "assistant")
_SYSTEM, _QUESTION, _ANSWER = (
    {"role": role, "content": content}
    for role, content in zip(_ROLES, ("zqsx", "zqux", "zqax"), strict=True)
)
"""Unlikely words: where they stand in a rendered text is known."""


@dataclass(frozen=True, slots=True)
class Around:
    """What a chat template writes around the messages of each role.

    Attributes:
        before: By role.
        behind: By role.
        prompt: What an answer begins with.
        system: What the system says where a conversation has no system message.
    """

    before: Mapping[str, str]
    behind: Mapping[str, str]
    prompt: str
    system: str

    def render(self, messages: Sequence[Message]) -> str:
        """Return a conversation up to the beginning of an answer."""
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        parts = [
            f"{self.before[m['role']]}{m['content']}{self.behind[m['role']]}" for m in messages
        ]
        return "".join(parts) + self.prompt


def modelfile(tokenizer: Any, file: str, context: int) -> str:
    """Return the text of a Modelfile.

    Args:
        tokenizer: The model's.
        file: The name of the GGUF file beside it.
        context: The longest text that the model takes.
    """
    lines = [f"FROM ./{file}", f"PARAMETER num_ctx {context}"]
    ends = sorted(answer_ends(tokenizer))
    lines += [f'PARAMETER stop "{tokenizer.decode([token])}"' for token in ends]
    if not tokenizer.chat_template:
        return "\n".join(lines) + "\n"
    around = around_messages(tokenizer)
    if around is None:
        lines.append(
            "# The chat template is more than text around each message: see the GGUF file."
        )
    else:
        if around.system:
            lines.append(f'SYSTEM """{around.system}"""')
        lines.append(f'TEMPLATE """{_go_template(around)}"""')
    return "\n".join(lines) + "\n"


def _go_template(around: Around) -> str:
    cases = "".join(
        f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}'
        f"{around.before[role]}{{{{ .Content }}}}{around.behind[role]}"
        for number, role in enumerate(_ROLES)
    )
    return f"{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}{around.prompt}"


def around_messages(tokenizer: Any) -> Around | None:
    """Return what a chat template writes around messages; None if it writes anything else."""
    try:
        around = _around(tokenizer)
        if around is None or any("{{" in text or '"""' in text for text in _texts(around)):
            return None
        turns = [_QUESTION, _ANSWER, _QUESTION, {"role": "assistant", "content": "1"}, _QUESTION]
        for messages in ([_SYSTEM, *turns], turns, [_SYSTEM, _QUESTION], [_QUESTION]):
            if around.render(messages) != _rendered(tokenizer, messages, prompt=True):
                return None
    except (jinja2.TemplateError, TypeError, ValueError):
        return None
    return around


def _texts(around: Around) -> list[str]:
    return [*around.before.values(), *around.behind.values(), around.prompt, around.system]


def _around(tokenizer: Any) -> Around | None:
    def added(messages: Sequence[Message]) -> tuple[str, str] | None:
        """What the last message adds to those before it: before and behind its words."""
        earlier = _rendered(tokenizer, messages[:-1])
        whole = _rendered(tokenizer, messages)
        prefix, matched, suffix = whole.removeprefix(earlier).partition(messages[-1]["content"])
        return (prefix, suffix) if matched and whole.startswith(earlier) else None

    asked = [_SYSTEM, _QUESTION]
    answer, question = added([*asked, _ANSWER]), added([*asked, _ANSWER, _QUESTION])
    if answer is None or question is None:
        return None
    text = _rendered(tokenizer, asked)
    system, _, rest = text.partition(_SYSTEM["content"])
    behind, _, _ = rest.partition(_QUESTION["content"])
    if not behind.endswith(question[0]):
        return None
    behind = behind.removesuffix(question[0])
    alone = _rendered(tokenizer, [_QUESTION]).partition(_QUESTION["content"])[0]
    said = alone.removesuffix(question[0]).removeprefix(system).removesuffix(behind)
    return Around(
        {"system": system, "user": question[0], "assistant": answer[0]},
        {"system": behind, "user": question[1], "assistant": answer[1]},
        prompt=_rendered(tokenizer, asked, prompt=True).removeprefix(text),
        system=said,
    )


def _rendered(tokenizer: Any, messages: Sequence[Message], *, prompt: bool = False) -> str:
    """Render messages, without the begin token, which Ollama writes by itself."""
    text = str(
        tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=prompt)
    )
    return text.removeprefix(tokenizer.bos_token or "")
