"""Renders conversations by a tokenizer's chat template, and finds the tokens that are learned.

transformers renders the template, in its sandbox. The assistant's answers are found in the
rendered text in one of three ways, each of which is checked against the whole text:

1. by the template's own marks, `{% generation %}`, where it has them;
2. by rendering the conversation up to each answer: each text is the beginning of the next;
3. where it is not, since the template drops the reasoning of earlier turns: by rendering the
   conversation with another answer in this one's stead. What differs is the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import jinja2
import numpy as np
from numpy.typing import NDArray

from protocol.base.errors import DataError, describe_error
from protocol.datasets.conversations import Conversation
from protocol.datasets.messages import ChatMessage
from worker.models.tokens import Tokens, where_said, without_spaces

_MARK: Final = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_BEGIN, _END = "\ue000\ue00a", "\ue000\ue00b"
"""Replace the marks: private characters, which no text should hold."""
_FIXED_DATE: Final = (
    "{%- macro strftime_now(format) -%}{{- format"
    " | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07')"
    " | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday')"
    " | replace('%a', 'Fri') | replace('%H', '12') | replace('%M', '00') | replace('%S', '00')"
    " -}}{%- endmacro %}{{- '' }}"
)
"""A template that asks for today would make other tokens tomorrow: it gets the date that those of
Llama 3 name without a clock."""
_ENCODED_AT_ONCE: Final = 256
_REASONING_BEGINS: Final = "<think>"
_REASONING_ENDS: Final = "</think>"
_UNLIKELY: Final = "zqxv0"

Counted = NDArray[np.bool_]
Loss = Literal["assistant", "last", "all"]
"""Which tokens are learned: see `data.loss`."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the spans of it that are learned, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A tokenizer with its template.

    Args:
        tokenizer: The given template is put into it, so that it is saved with the model.
        source: The given template; None for the tokenizer's own.
        loss: Which tokens are learned.
        else_all: Whether a run that asks for the assistant's tokens could ask for all.

    Raises:
        DataError: The tokenizer has no template.
    """

    def __init__(
        self, tokenizer: Any, source: str | None, *, loss: Loss, else_all: bool = True
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
        self._loss = loss
        self._checked: set[tuple[tuple[str, int], ...]] = set()
        self._or_all = ", or learn everything: --set data.loss=all" if else_all else ""
        fixed = _FIXED_DATE if "strftime_now" in text else ""
        self._plain = fixed + text
        self._template_with_marks = (
            fixed + _MARK.sub(_with_marks, text) if _MARK.search(text) else None
        )
        self._arguments_as_text = False

    def render(self, conversation: Conversation) -> Rendered:
        """Return a conversation as the model will read it.

        Raises:
            DataError: The template refuses it, drops a part of it, or does not say which words are
                the assistant's.
        """
        full = self._full_text(conversation)
        self._refuse_dropped_parts(conversation, full)
        answers = [n for n, each in enumerate(conversation.messages) if each.role == "assistant"]
        trained = [conversation.messages[number].trained for number in answers]
        if self._loss == "all":
            if not all(trained):
                raise DataError(
                    f"{conversation.location}: expected every message to be learned with "
                    "data.loss=all, got one with weight 0 or train false; leave out data.loss"
                )
            return Rendered(full, ((0, len(full)),))
        if self._template_with_marks is not None:
            spans = self._by_marks(conversation, full, len(answers))
        else:
            spans = [*self._by_beginnings(conversation, full, answers)]
        if self._loss == "last":
            trained = [False] * (len(trained) - 1) + trained[-1:]
        if all(trained):
            return Rendered(full, tuple(spans))
        if len(spans) != len(answers):
            if self._loss == "last":
                return Rendered(full, tuple(spans[-1:]))
            raise DataError(
                f"{conversation.location}: expected one pair of marks {{% generation %}} around "
                f"each answer where some are not learned, got {len(spans)} pairs for "
                f"{len(answers)} answers; correct them: --set data.chat_template=JINJA"
            )
        kept = zip(spans, trained, strict=True)
        return Rendered(full, tuple(span for span, is_trained in kept if is_trained))

    def _full_text(self, conversation: Conversation) -> str:
        """Render it; where the template wants the arguments of calls as text, give it that."""
        try:
            return self._text(conversation, conversation.messages)
        except DataError:
            if self._arguments_as_text or not any(m.tool_calls for m in conversation.messages):
                raise
        self._arguments_as_text = True
        try:
            return self._text(conversation, conversation.messages)
        except DataError:
            self._arguments_as_text = False
            return self._text(conversation, conversation.messages)  # for its own error

    def _refuse_dropped_parts(self, conversation: Conversation, full: str) -> None:
        """Check that tools and each message are in what the template makes of a conversation.

        Once for each order of roles unlikely words are looked for too: short ones are anywhere.

        Raises:
            DataError: Something is missing.
        """
        _refuse_absent(conversation, full)
        shape = tuple((each.role, len(each.tool_calls)) for each in conversation.messages)
        if shape not in self._checked:
            unlikely = tuple(
                replace(each, content=each.content and f"zq{number}xv", reasoning="")
                for number, each in enumerate(conversation.messages)
            )
            self._checked.add(shape)
            model = Conversation(unlikely, conversation.location, conversation.tools)
            try:
                text = self._text(model, unlikely)
            except DataError:
                return  # a template may ask for certain words
            _refuse_absent(model, text)

    def encode(self, rendered: Sequence[Rendered]) -> Iterator[tuple[Tokens, Counted]]:
        """Return the tokens of each, and which of them are learned.

        Each text is tokenized as a whole. A token that overlaps the beginning of a span is learned,
        since the assistant's first character is in it; one that overlaps the end is not.
        """
        for lo in range(0, len(rendered), _ENCODED_AT_ONCE):
            some = rendered[lo : lo + _ENCODED_AT_ONCE]
            parts = [
                [one.text[:cut] for cut in {at: None for span in one.spans for at in span}]
                for one in some
            ]
            ids = iter(self._ids([one.text for one in some]))
            prefixes = iter(self._ids([text for texts in parts for text in texts]))
            for one, texts in zip(some, parts, strict=True):
                tokens = next(ids)
                ends = {
                    len(text): self._tokens_before(one.text, len(text), tokens, next(prefixes))
                    for text in texts
                }
                loss_mask = np.zeros(len(tokens), np.bool_)
                for start, end in one.spans:
                    loss_mask[ends[start] : ends[end]] = True
                yield tokens, loss_mask

    def _tokens_before(self, text: str, cut: int, tokens: Tokens, beginning: Tokens) -> int:
        """Return how many tokens of a text end before or at a character.

        Mostly the text up to there has the same tokens by itself; where one overlaps, the tokenizer
        is asked for the offsets of all.

        Raises:
            DataError: It has no offsets.
        """
        if np.array_equal(tokens[: len(beginning)], beginning):
            return len(beginning)
        if not self._tokenizer.is_fast:
            raise DataError(
                f"the tokenizer cannot say which tokens are the assistant's in {text[:80]!r}; use "
                f"a model with a tokenizer.json{self._or_all}"
            )
        offsets = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        return next((n for n, (_, end) in enumerate(offsets) if end > cut), len(tokens))

    def _ids(self, texts: Sequence[str]) -> list[Tokens]:
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [np.array(ids, np.int64) for ids in encoded["input_ids"]]

    def _by_marks(
        self, conversation: Conversation, full: str, answers: int
    ) -> list[tuple[int, int]]:
        assert self._template_with_marks is not None
        marked = self._text(conversation, conversation.messages, template=self._template_with_marks)
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
        if marked.replace(_BEGIN, "").replace(_END, "") != full or len(spans) < answers:
            raise DataError(
                f"{conversation.location}: the template's marks {{% generation %}} do not enclose "
                "each answer of the assistant; correct them: --set data.chat_template=JINJA"
            )
        return spans

    def _by_beginnings(
        self, conversation: Conversation, full: str, answers: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        last, end = "", 0
        for number in answers:
            messages = conversation.messages
            prompt = self._text(conversation, messages[:number], prompt=True)
            answered = self._text(conversation, messages[: number + 1])
            if (
                prompt.startswith(last)
                and answered.startswith(prompt)
                and full.startswith(answered)
                and len(prompt) < len(answered)
            ):
                start, end = len(prompt), len(answered)
                last = answered
            else:
                span = self._by_replacement(conversation, full, number)
                if span is None or span[0] < end:
                    raise DataError(
                        f"{conversation.location} message {number + 1}: the template's text of the "
                        "conversation up to here is not a prefix of its text of the whole "
                        "conversation, so the assistant's tokens cannot be located; give a "
                        "template with {% generation %} around them "
                        "(data.chat_template)" + self._or_all
                    )
                start, end = span
            yield start, end

    def _by_replacement(
        self, conversation: Conversation, full: str, number: int
    ) -> tuple[int, int] | None:
        """Return the span of an answer: what changes where another answer stands in its stead.

        It begins behind the prompt that generation would begin with, and ends behind what the
        template writes after an answer. None if the text does not show that.
        """
        messages = conversation.messages
        other = ChatMessage("assistant", _UNLIKELY)
        try:
            history = self._text(conversation, messages[:number])
            prompt = self._text(conversation, messages[:number], prompt=True)
            rendered_alone = self._text(conversation, [*messages[:number], other])
            rendered_among = self._text(
                conversation, [*messages[:number], other, *messages[number + 1 :]]
            )
        except DataError:
            return None
        if rendered_among.count(_UNLIKELY) != 1 or rendered_alone.count(_UNLIKELY) != 1:
            return None
        before, after = rendered_among.split(_UNLIKELY)
        closing = rendered_alone.partition(_UNLIKELY)[2]
        opening = prompt.removeprefix(history) if prompt.startswith(history) else ""
        if opening not in before:  # some prompts open the reasoning that earlier turns have lost
            opening = opening.partition(_REASONING_BEGINS)[0]
        start = before.rfind(opening) + len(opening)
        fits = (
            opening
            and closing
            and opening in before
            and after.startswith(closing)
            and full.startswith(before[:start])
            and full.endswith(after)
        )
        end = len(full) - len(after) + len(closing)
        return (start, end) if fits and start < end else None

    def _text(
        self,
        conversation: Conversation,
        messages: Sequence[ChatMessage],
        *,
        prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Render these messages, with the beginning of an answer if that is asked for."""
        as_text = self._arguments_as_text
        try:
            rendered = self._tokenizer.apply_chat_template(
                [each.for_template(arguments_as_text=as_text) for each in messages],
                tools=[*conversation.tools] or None,
                chat_template=template or self._plain,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise DataError(
                f"{conversation.location}: the chat template fails: {describe_error(error)}"
            ) from None
        return str(rendered)


def _refuse_absent(conversation: Conversation, full: str) -> None:
    rendered = without_spaces(full)
    for tool in conversation.tools:
        if where_said(rendered, str(tool["function"]["name"])) < 0:
            raise DataError(
                f"{conversation.location}: the chat template leaves out the tools, so they would "
                "not be learned; take a model made for tool calls, or give a template that writes "
                "them (--set data.chat_template=JINJA)"
            )
    rest = rendered
    for number, message in enumerate(conversation.messages, start=1):
        # Some templates write the system's words with the last question, others no old reasoning.
        search_text = rendered if message.role == "system" else rest
        end = _end_of(message, search_text)
        if end < 0:
            raise DataError(
                f"{conversation.location} message {number}: the chat template leaves out what the "
                f"{message.role} says, so it would not be learned; give a template that writes "
                "every message (--set data.chat_template=JINJA), or leave the message out"
            )
        if message.role != "system":
            rest = rest[end:]


def _end_of(message: ChatMessage, rendered: str) -> int:
    """Return where a message ends in a rendered text without spaces; -1 if it is not there."""
    end = 0
    if message.content:
        content = message.content.rpartition(_REASONING_ENDS)[2] or message.content
        end = where_said(rendered, content)
    for call in message.tool_calls:
        for said in (call.name, *map(_value_text, call.arguments.values())):
            at = where_said(rendered, said)
            if at < 0:
                return -1
            end = max(end, at)
    return end


def _value_text(value: object) -> str:
    """Return a value as a call shows it: a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _with_marks(mark: re.Match[str]) -> str:
    """Return a block of its own, so that the template's rules for spaces around blocks hold."""
    left, end, right = mark.groups()
    return f"{{%{left} if true %}}{{{{ {(_END if end else _BEGIN)!r} }}}}{{% endif {right}%}}"
