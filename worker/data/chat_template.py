"""Render conversations with a tokenizer's chat template, and find the tokens that have loss.

transformers renders the template, in its sandbox. The assistant's answers are located in the
rendered text in one of three ways, each of which is checked against the whole text:

1. by the marks `{% generation %}` of a template that has them;
2. by rendering the conversation up to each answer, if each text is a prefix of the next;
3. otherwise, for templates that drop the reasoning of earlier turns, by rendering the conversation
   with a placeholder instead of the answer: the difference is the answer.
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
from worker.models.tokens import Tokens, find_message_end, remove_whitespace

_MARK: Final = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_BEGIN, _END = "\ue000\ue00a", "\ue000\ue00b"
"""Replacements of the marks: private-use characters, which text should not contain."""
_FIXED_DATE_MACRO: Final = (
    "{%- macro strftime_now(format) -%}{{- format"
    " | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07')"
    " | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday')"
    " | replace('%a', 'Fri') | replace('%H', '12') | replace('%M', '00') | replace('%S', '00')"
    " -}}{%- endmacro %}{{- '' }}"
)
"""Templates that ask for today's date get this one, so that tokens do not depend on the day; it is
the default of Llama 3's template. The empty output at the end keeps jinja from removing a newline
at the beginning of the template."""
_ENCODING_BATCH: Final = 256
_REASONING_BEGINS: Final = "<think>"
_REASONING_ENDS: Final = "</think>"
_PLACEHOLDER: Final = "zqxv0"

LossMask = NDArray[np.bool_]
LossScope = Literal["assistant", "last", "all"]
"""Which tokens have loss: see `data.loss`."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation as text, and its spans that have loss, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A tokenizer with its template.

    Args:
        tokenizer: The tokenizer; it receives `source`, so that the template is saved with it.
        source: The template of the run spec; None to use the tokenizer's template.
        loss: Which tokens have loss.
        suggest_all: Whether errors suggest data.loss=all.

    Raises:
        DataError: The tokenizer has no template.
    """

    def __init__(
        self, tokenizer: Any, source: str | None, *, loss: LossScope, suggest_all: bool = True
    ) -> None:
        if source is not None:
            tokenizer.chat_template = source
        try:
            text = str(tokenizer.get_chat_template())
        except ValueError:
            raise DataError(
                "expected a tokenizer with a chat template, found none: use a model made for "
                "conversations, or set a template: --set data.chat_template=JINJA"
            ) from None
        self._tokenizer = tokenizer
        self._loss = loss
        self._checked_shapes: set[tuple[tuple[str, int], ...]] = set()
        self._all_hint = ", or train on all tokens: --set data.loss=all" if suggest_all else ""
        date_macro = _FIXED_DATE_MACRO if "strftime_now" in text else ""
        self._template = date_macro + text
        self._template_with_marks = (
            date_macro + _MARK.sub(_mark_block, text) if _MARK.search(text) else None
        )
        self._arguments_as_text = False

    def render(self, conversation: Conversation) -> RenderedConversation:
        """Render a conversation as the model reads it.

        Raises:
            DataError: The template refuses the conversation or drops a part of it, or the
                assistant's answers cannot be located.
        """
        full_text = self._render_conversation(conversation)
        self._check_completeness(conversation, full_text)
        answers = [n for n, m in enumerate(conversation.messages) if m.role == "assistant"]
        has_loss = [conversation.messages[number].trained for number in answers]
        if self._loss == "all":
            if not all(has_loss):
                raise DataError(
                    f"{conversation.location}: expected every message to have loss with "
                    "data.loss=all, got one with weight 0 or train false; leave out data.loss"
                )
            return RenderedConversation(full_text, ((0, len(full_text)),))
        if self._template_with_marks is not None:
            spans = self._spans_by_marks(conversation, full_text, len(answers))
        else:
            spans = [*self._spans_by_prefixes(conversation, full_text, answers)]
        if self._loss == "last":
            has_loss = [False] * (len(has_loss) - 1) + has_loss[-1:]
        if all(has_loss):
            return RenderedConversation(full_text, tuple(spans))
        if len(spans) != len(answers):
            if self._loss == "last":
                return RenderedConversation(full_text, tuple(spans[-1:] if has_loss[-1] else ()))
            raise DataError(
                f"{conversation.location}: expected one pair of marks {{% generation %}} around "
                f"each answer, as some answers have no loss, got {len(spans)} pairs for "
                f"{len(answers)} answers; correct them: --set data.chat_template=JINJA"
            )
        pairs = zip(spans, has_loss, strict=True)
        return RenderedConversation(
            full_text, tuple(span for span, is_trained in pairs if is_trained)
        )

    def _render_conversation(self, conversation: Conversation) -> str:
        """Render a conversation; if that fails, pass the arguments of tool calls as text.

        If that succeeds, they are passed as text from then on.
        """
        try:
            return self._render_messages(conversation, conversation.messages)
        except DataError:
            if self._arguments_as_text or not any(m.tool_calls for m in conversation.messages):
                raise
        self._arguments_as_text = True
        try:
            return self._render_messages(conversation, conversation.messages)
        except DataError:
            self._arguments_as_text = False
            return self._render_messages(
                conversation, conversation.messages
            )  # raises the first error

    def _check_completeness(self, conversation: Conversation, full_text: str) -> None:
        """Check that the rendered conversation contains the tools and each message.

        Once for each sequence of roles and numbers of tool calls, this is also checked with
        unlikely words as messages, because a short message may occur by chance.

        Raises:
            DataError: A tool or message is missing.
        """
        _check_messages_present(conversation, full_text)
        shape = tuple((m.role, len(m.tool_calls)) for m in conversation.messages)
        if shape not in self._checked_shapes:
            placeholders = tuple(
                replace(message, content=message.content and f"zq{number}xv", reasoning="")
                for number, message in enumerate(conversation.messages)
            )
            self._checked_shapes.add(shape)
            placeholder_conversation = Conversation(
                placeholders, conversation.location, conversation.tools
            )
            try:
                text = self._render_messages(placeholder_conversation, placeholders)
            except DataError:
                return  # a template may require certain words
            _check_messages_present(placeholder_conversation, text)

    def encode(self, rendered: Sequence[RenderedConversation]) -> Iterator[tuple[Tokens, LossMask]]:
        """Yield the tokens of each conversation, and which of them have loss.

        Each text is tokenized as a whole. A token that overlaps the beginning of a span has loss,
        since it contains the assistant's first character; one that overlaps the end has none.
        """
        for lo in range(0, len(rendered), _ENCODING_BATCH):
            batch = rendered[lo : lo + _ENCODING_BATCH]
            prefix_texts = [
                [
                    entry.text[:position]
                    for position in dict.fromkeys(edge for span in entry.spans for edge in span)
                ]
                for entry in batch
            ]
            ids = iter(self._encode_texts([entry.text for entry in batch]))
            prefixes = iter(self._encode_texts([text for texts in prefix_texts for text in texts]))
            for entry, texts in zip(batch, prefix_texts, strict=True):
                tokens = next(ids)
                tokens_before = {
                    len(text): self._count_tokens_before(
                        entry.text, len(text), tokens, next(prefixes)
                    )
                    for text in texts
                }
                loss_mask = np.zeros(len(tokens), np.bool_)
                for start, end in entry.spans:
                    loss_mask[tokens_before[start] : tokens_before[end]] = True
                yield tokens, loss_mask

    def _count_tokens_before(self, text: str, position: int, tokens: Tokens, prefix: Tokens) -> int:
        """Return how many tokens of a text end at or before a character position.

        Usually `prefix`, the tokens of the text up to the position, is a prefix of all tokens. If a
        token overlaps the position, the tokenizer's offsets are used.

        Raises:
            DataError: The tokenizer has no offsets.
        """
        if np.array_equal(tokens[: len(prefix)], prefix):
            return len(prefix)
        if not self._tokenizer.is_fast:
            raise DataError(
                "expected a tokenizer that reports offsets, to locate the assistant's tokens in "
                f"{text[:80]!r}, got one without; use a model with a tokenizer.json"
                f"{self._all_hint}"
            )
        offsets = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        return next((n for n, (_, end) in enumerate(offsets) if end > position), len(tokens))

    def _encode_texts(self, texts: Sequence[str]) -> list[Tokens]:
        if not texts:
            return []
        encodings = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [np.array(ids, np.int64) for ids in encodings["input_ids"]]

    def _spans_by_marks(
        self, conversation: Conversation, full_text: str, answers: int
    ) -> list[tuple[int, int]]:
        assert self._template_with_marks is not None
        marked_text = self._render_messages(
            conversation, conversation.messages, template=self._template_with_marks
        )
        spans = []
        head, *segments = marked_text.split(_BEGIN)
        offset = len(head)
        for segment in segments:
            answer, end_mark, tail = segment.partition(_END)
            spans.append((offset, offset + len(answer)))
            offset += len(answer) + len(tail)
            if not end_mark or not answer or _END in tail:
                spans.clear()
                break
        if marked_text.replace(_BEGIN, "").replace(_END, "") != full_text or len(spans) < answers:
            raise DataError(
                f"{conversation.location}: expected marks {{% generation %}} around each answer of "
                "the assistant, got other marks; correct them: --set data.chat_template=JINJA"
            )
        return spans

    def _spans_by_prefixes(
        self, conversation: Conversation, full_text: str, answers: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the span of each answer; one whose prefixes do not match is located by replacement.

        Raises:
            DataError: An answer is located in neither way.
        """
        previous_text, end = "", 0
        for number in answers:
            messages = conversation.messages
            prompt = self._render_messages(conversation, messages[:number], prompt=True)
            text_with_answer = self._render_messages(conversation, messages[: number + 1])
            if (
                prompt.startswith(previous_text)
                and text_with_answer.startswith(prompt)
                and full_text.startswith(text_with_answer)
                and len(prompt) < len(text_with_answer)
            ):
                start, end = len(prompt), len(text_with_answer)
                previous_text = text_with_answer
            else:
                span = self._span_by_replacement(conversation, full_text, number)
                if span is None or span[0] < end:
                    raise DataError(
                        f"{conversation.location} message {number + 1}: expected the text of the "
                        "conversation up to here to be a prefix of the whole text, got another "
                        "text, so the assistant's tokens cannot be located; set a template with "
                        "{% generation %} around them (data.chat_template)" + self._all_hint
                    )
                start, end = span
            yield start, end

    def _span_by_replacement(
        self, conversation: Conversation, full_text: str, number: int
    ) -> tuple[int, int] | None:
        """Locate an answer by rendering the conversation with a placeholder in its place.

        The span begins after the generation prompt, and ends after the text that the template
        writes after an answer. Returns None if the span cannot be located.
        """
        messages = conversation.messages
        placeholder = ChatMessage("assistant", _PLACEHOLDER)
        try:
            history = self._render_messages(conversation, messages[:number])
            prompt = self._render_messages(conversation, messages[:number], prompt=True)
            text_until_answer = self._render_messages(
                conversation, [*messages[:number], placeholder]
            )
            whole_text = self._render_messages(
                conversation, [*messages[:number], placeholder, *messages[number + 1 :]]
            )
        except DataError:
            return None
        if whole_text.count(_PLACEHOLDER) != 1 or text_until_answer.count(_PLACEHOLDER) != 1:
            return None
        head, tail = whole_text.split(_PLACEHOLDER)
        closing = text_until_answer.partition(_PLACEHOLDER)[2]
        opening = prompt.removeprefix(history) if prompt.startswith(history) else ""
        if opening not in head:  # a prompt may open reasoning, which earlier turns lack
            opening = opening.partition(_REASONING_BEGINS)[0]
        start = head.rfind(opening) + len(opening)
        is_located = (
            opening
            and closing
            and opening in head
            and tail.startswith(closing)
            and full_text.startswith(head[:start])
            and full_text.endswith(tail)
        )
        end = len(full_text) - len(tail) + len(closing)
        return (start, end) if is_located and start < end else None

    def _render_messages(
        self,
        conversation: Conversation,
        messages: Sequence[ChatMessage],
        *,
        prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Render messages; `prompt`: also render the beginning of the next answer."""
        as_text = self._arguments_as_text
        try:
            rendered = self._tokenizer.apply_chat_template(
                [message.for_template(arguments_as_text=as_text) for message in messages],
                tools=[*conversation.tools] or None,
                chat_template=template or self._template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise DataError(
                f"{conversation.location}: the chat template fails: {describe_error(error)}"
            ) from None
        return str(rendered)


def _check_messages_present(conversation: Conversation, text: str) -> None:
    rendered_text = remove_whitespace(text)
    for tool in conversation.tools:
        if find_message_end(rendered_text, str(tool["function"]["name"])) < 0:
            raise DataError(
                f"{conversation.location}: expected the tools in the chat template's text, got a "
                "text without them; use a model made for tool calls, or set a template that "
                "writes them (--set data.chat_template=JINJA)"
            )
    remainder = rendered_text
    for number, message in enumerate(conversation.messages, start=1):
        # Some templates write the system message with the last question.
        search_text = rendered_text if message.role == "system" else remainder
        end = _end_of(message, search_text)
        if end < 0:
            raise DataError(
                f"{conversation.location} message {number}: expected the {message.role}'s message "
                "in the chat template's text, got a text without it; set a template that writes "
                "every message (--set data.chat_template=JINJA), or leave the message out"
            )
        if message.role != "system":
            remainder = remainder[end:]


def _end_of(message: ChatMessage, rendered: str) -> int:
    """Return where a message ends in a rendered text without spaces; -1 if it is missing."""
    end = 0
    if message.content:
        content = message.content.rpartition(_REASONING_ENDS)[2] or message.content
        end = find_message_end(rendered, content)
    for call in message.tool_calls:
        for text in (call.name, *map(_value_text, call.arguments.values())):
            position = find_message_end(rendered, text)
            if position < 0:
                return -1
            end = max(end, position)
    return end


def _value_text(value: object) -> str:
    """Return a value as text in a tool call: a string unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _mark_block(mark: re.Match[str]) -> str:
    """Return a replacement of a `{% generation %}` tag that writes a mark.

    It begins and ends with tags of a block too, so whitespace is removed around it as before.
    """
    left_dash, end, right_dash = mark.groups()
    output = repr(_END if end else _BEGIN)
    return f"{{%{left_dash} if true %}}{{{{ {output} }}}}{{% endif {right_dash}%}}"
