"""What a tokenizer's chat template makes of conversations, and which of its tokens are learned.

The template is rendered by transformers, in its sandbox. What the assistant says is found in the
rendered text: by the template's own marks, `{% generation %}`, where it has them, else by
rendering the conversation up to each of its turns, of which each has to be how the next begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jinja2
import numpy as np
from numpy.typing import NDArray

from protocol.base.errors import DataError, in_words
from protocol.data.conversations import ChatMessage, Conversation
from worker.models.tokens import Tokens, where_said, without_spaces

_MARK: Final = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_BEGIN, _END = "\ue000\ue00a", "\ue000\ue00b"
"""Stand where the marks were: private characters, which no text should hold."""
_FIXED_DATE: Final = (
    "{%- macro strftime_now(format) -%}{{- format"
    " | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07')"
    " | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday')"
    " | replace('%a', 'Fri') | replace('%H', '12') | replace('%M', '00') | replace('%S', '00')"
    " -}}{%- endmacro %}{{- '' }}"
)
"""A template that asks for today would make other tokens tomorrow: it is told the day that those
of Llama 3 name without a clock."""
_ENCODED_AT_ONCE: Final = 256
_THOUGHTS_END: Final = "</think>"

Counted = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and where in it the assistant's words lie, rising."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A tokenizer with its template.

    Args:
        tokenizer: The given template is put into it, so that it is saved with the model.
        source: The given template; None for the tokenizer's own.
        everything: Count all tokens rather than the assistant's.
        else_all: Whether a run that asks for the assistant's could ask for all.

    Raises:
        DataError: The tokenizer has no template.
    """

    def __init__(
        self, tokenizer: Any, source: str | None, *, everything: bool, else_all: bool = True
    ) -> None:
        if source is not None:
            tokenizer.chat_template = source
        try:
            text = str(tokenizer.get_chat_template())
        except ValueError:
            raise DataError(
                "expected a tokenizer with a chat template, found none: take a model made for "
                "conversations, or give a template: --set data.chat_template=JINJA"
            ) from None
        self._tokenizer = tokenizer
        self._everything = everything
        self._known_roles: set[tuple[str, ...]] = set()
        self._or_all = ", or learn everything: --set data.loss=all" if else_all else ""
        fixed = _FIXED_DATE if "strftime_now" in text else ""
        self._plain = fixed + text
        self._marked = fixed + _MARK.sub(_stand_in, text) if _MARK.search(text) else None

    def render(self, conversation: Conversation) -> Rendered:
        """A conversation as the model will read it.

        Raises:
            DataError: The template refuses it, or does not say what the assistant's words are.
        """
        full = self._text(conversation, len(conversation.messages))
        self._refuse_what_is_left_out(conversation, full)
        if self._everything:
            return Rendered(full, ((0, len(full)),))
        if self._marked is not None:
            return self._by_marks(conversation, full)
        return Rendered(full, tuple(self._by_beginnings(conversation, full)))

    def _refuse_what_is_left_out(self, conversation: Conversation, full: str) -> None:
        """See that each message is in what the template makes of a conversation.

        Once for each order of roles unlikely words are looked for too: short ones are anywhere.

        Raises:
            DataError: One is not.
        """
        _refuse_absent(conversation, full)
        roles = tuple(message.role for message in conversation.messages)
        if roles not in self._known_roles:
            unlikely = tuple(ChatMessage(role, f"zq{n}xv") for n, role in enumerate(roles))
            model = Conversation(unlikely, conversation.place)
            self._known_roles.add(roles)
            try:
                text = self._text(model, len(unlikely))
            except DataError:
                return  # a template may ask for certain words
            _refuse_absent(model, text)

    def encode(self, rendered: Sequence[Rendered]) -> Iterator[tuple[Tokens, Counted]]:
        """Tokens of each, and which of them count.

        The text is made into tokens as a whole. One that reaches over the beginning of a span
        counts, for the assistant's first character is in it; one that reaches over the end does
        not.
        """
        for lo in range(0, len(rendered), _ENCODED_AT_ONCE):
            some = rendered[lo : lo + _ENCODED_AT_ONCE]
            parts = [
                [one.text[:cut] for cut in {at: None for span in one.spans for at in span}]
                for one in some
            ]
            ids = iter(self._ids([one.text for one in some]))
            beginnings = iter(self._ids([text for texts in parts for text in texts]))
            for one, texts in zip(some, parts, strict=True):
                tokens = next(ids)
                ends = {
                    len(text): self._tokens_before(one.text, len(text), tokens, next(beginnings))
                    for text in texts
                }
                counted = np.zeros(len(tokens), np.bool_)
                for start, end in one.spans:
                    counted[ends[start] : ends[end]] = True
                yield tokens, counted

    def _tokens_before(self, text: str, cut: int, tokens: Tokens, beginning: Tokens) -> int:
        """How many tokens of a text end before or at a character.

        Mostly the text up to there has the same tokens by itself; where one reaches over, the
        tokenizer is asked what each stands for.

        Raises:
            DataError: It is one of those that cannot say.
        """
        if np.array_equal(tokens[: len(beginning)], beginning):
            return len(beginning)
        if not self._tokenizer.is_fast:
            raise DataError(
                f"the tokenizer cannot say which tokens are the assistant's in {text[:80]!r}; use "
                f"a model with a tokenizer.json{self._or_all}"
            )
        places = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        return next((n for n, (_, end) in enumerate(places) if end > cut), len(tokens))

    def _ids(self, texts: Sequence[str]) -> list[Tokens]:
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [np.array(ids, np.int64) for ids in encoded["input_ids"]]

    def _by_marks(self, conversation: Conversation, full: str) -> Rendered:
        assert self._marked is not None
        marked = self._text(conversation, len(conversation.messages), template=self._marked)
        spans, at = [], 0
        before, *pieces = marked.split(_BEGIN)
        at = len(before)
        for piece in pieces:
            said, end, after = piece.partition(_END)
            spans.append((at, at + len(said)))
            at += len(said) + len(after)
            if not end or not said or _END in after:
                spans.clear()
                break
        answers = sum(each.role == "assistant" for each in conversation.messages)
        if marked.replace(_BEGIN, "").replace(_END, "") != full or len(spans) < answers:
            raise DataError(
                f"{conversation.place}: the template's marks {{% generation %}} do not enclose "
                "each answer of the assistant; mend them: --set data.chat_template=JINJA"
            )
        return Rendered(full, tuple(spans))

    def _by_beginnings(self, conversation: Conversation, full: str) -> Iterator[tuple[int, int]]:
        last = ""
        for number, message in enumerate(conversation.messages):
            if message.role != "assistant":
                continue
            asked = self._text(conversation, number, prompt=True)
            told = self._text(conversation, number + 1)
            if not (
                asked.startswith(last)
                and told.startswith(asked)
                and full.startswith(told)
                and len(asked) < len(told)
            ):
                raise DataError(
                    f"{conversation.place} message {number + 1}: what the tokenizer's template "
                    "makes of a conversation up to here is not how the whole one begins, so the "
                    "assistant's words cannot be told; give a template with {% generation %} "
                    f"around them (data.chat_template){self._or_all}"
                )
            yield len(asked), len(told)
            last = told

    def _text(
        self,
        conversation: Conversation,
        count: int,
        *,
        prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """The first so many messages, with the beginning of an answer if that is asked for."""
        messages = [_document(message) for message in conversation.messages[:count]]
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                chat_template=template or self._plain,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise DataError(
                f"{conversation.place}: the tokenizer's chat template refuses it: {in_words(error)}"
            ) from None
        return str(rendered)


def _refuse_absent(conversation: Conversation, full: str) -> None:
    rendered = without_spaces(full)
    rest = rendered
    for number, message in enumerate(conversation.messages, start=1):
        # Some templates write the system's words with the last question, others no old thoughts.
        within = rendered if message.role == "system" else rest
        content = message.content.rpartition(_THOUGHTS_END)[2] or message.content
        end = where_said(within, content)
        if end < 0:
            raise DataError(
                f"{conversation.place} message {number}: the chat template leaves out what the "
                f"{message.role} says, so it would not be heeded; give a template that writes "
                "every message (--set data.chat_template=JINJA), or leave the message out"
            )
        if message.role != "system":
            rest = rest[end:]


def _stand_in(mark: re.Match[str]) -> str:
    """A block of its own, so that the template's rules for spaces around blocks still hold."""
    left, end, right = mark.groups()
    return f"{{%{left} if true %}}{{{{ {(_END if end else _BEGIN)!r} }}}}{{% endif {right}%}}"


def _document(message: ChatMessage) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
