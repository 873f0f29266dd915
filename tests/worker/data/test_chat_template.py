"""Which tokens of a conversation count, against a computation by hand and transformers."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.base.errors import DataError
from protocol.datasets.conversations import Conversation
from protocol.datasets.messages import ChatMessage
from tests.small_chat import CHATML, CHATML_WITH_GENERATION, conversation, save_chat_tokenizer
from worker.data.chat_template import ChatTemplate

WEATHER = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Rain?"),
    ChatMessage("assistant", "No."),
    ChatMessage("user", "Snow, ice → wind?"),
    ChatMessage("assistant", " Yes:\n\nall é of them "),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    return save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def conversation_of(messages: Any) -> Conversation:
    return Conversation(tuple(messages), "'chat.jsonl' line 3")


def dialogue(number: int) -> Conversation:
    return conversation_of(
        ChatMessage(turn["role"], turn["content"]) for turn in conversation(number)
    )


def read(
    tokenizer: Any, messages: Any, template: str, **options: Any
) -> tuple[list[int], list[bool]]:
    chat_template = ChatTemplate(tokenizer, template, loss=options.get("loss", "assistant"))
    [(tokens, count_mask)] = chat_template.encode([chat_template.render(conversation_of(messages))])
    return tokens.tolist(), count_mask.tolist()


def expected_tokens_and_mask(tokenizer: Any, *, end_of_line: bool) -> tuple[list[int], list[bool]]:
    """Encode ChatML's pieces one by one; its marks are separate tokens, so no pieces merge."""
    ids: list[int] = []
    count_mask: list[bool] = []

    def add(text: str, *, counts: bool) -> None:
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(new)
        count_mask.extend([counts] * len(new))

    for message in WEATHER:
        is_answer = message.role == "assistant"
        add("<|im_start|>", counts=False)
        add(message.role + "\n", counts=False)
        add(message.content, counts=is_answer)
        add("<|im_end|>", counts=is_answer)
        add("\n", counts=is_answer and end_of_line)
    return ids, count_mask


def test_mask_equals_that_of_separate_pieces(tokenizer):
    text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in WEATHER)
    assert (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        == read(tokenizer, WEATHER, CHATML)[0]
    )
    for template, end_of_line in ((CHATML, True), (CHATML_WITH_GENERATION, False)):
        assert read(tokenizer, WEATHER, template) == expected_tokens_and_mask(
            tokenizer, end_of_line=end_of_line
        )


@pytest.mark.parametrize("number", range(6))
def test_generation_marks_equal_transformers(tokenizer, number):
    messages = conversation(number)
    expected = tokenizer.apply_chat_template(
        messages, chat_template=CHATML_WITH_GENERATION, tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    chat_template = ChatTemplate(tokenizer, CHATML_WITH_GENERATION, loss="assistant")
    [(tokens, count_mask)] = chat_template.encode([chat_template.render(dialogue(number))])
    assert tokens.tolist() == expected["input_ids"]
    assert count_mask.astype(int).tolist() == expected["assistant_masks"]


def test_batch_equals_separate_conversations(tokenizer):
    chat_template = ChatTemplate(tokenizer, CHATML, loss="assistant")
    rendered = [chat_template.render(dialogue(number % 9)) for number in range(300)]
    for one, (tokens, count_mask) in zip(rendered, chat_template.encode(rendered), strict=True):
        [(tokens_alone, marks)] = chat_template.encode([one])
        assert tokens_alone.tolist() == tokens.tolist()
        assert marks.tolist() == count_mask.tolist()


def test_all_tokens_count_on_request(tokenizer):
    ids, count_mask = read(tokenizer, WEATHER, CHATML, loss="all")
    assert all(count_mask)
    assert len(ids) == len(count_mask)


def test_token_across_the_start_of_an_answer_counts(tokenizer):
    """`:` and a space end the prompt; with the answer, the space is part of its first token."""
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    question = (ChatMessage("user", "Eh?"), ChatMessage("assistant", "is"))
    ids, count_mask = read(tokenizer, question, template)
    assert [tokenizer.decode([i]) for i, c in zip(ids, count_mask, strict=True) if c] == [" is"]


def test_context_dependent_tokenizer_counts_by_characters():
    """Alone, "ab" is a token; before "c" it is "a" and the beginning of "bc"."""
    import tokenizers
    import transformers

    vocabulary = [
        ("<unk>", -9.0),
        ("ab", -2.0),
        ("a", -1.0),
        ("bc", -1.0),
        ("c", -3.0),
        ("b", -3.0),
    ]
    plain_tokenizer = tokenizers.Tokenizer(
        tokenizers.models.Unigram(vocabulary, 0, byte_fallback=False)
    )
    unigram = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain_tokenizer, unk_token="<unk>"
    )
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ids, count_mask = read(
        unigram, (ChatMessage("user", "ab"), ChatMessage("assistant", "ca")), template
    )
    assert unigram.convert_ids_to_tokens(ids) == ["a", "bc", "a"]
    assert count_mask == [False, True, True]


def test_templates_have_no_clock(tokenizer):
    template = "{{ strftime_now('%d %b %Y, %Y-%m-%d') }}\n" + CHATML
    chat_template = ChatTemplate(tokenizer, template, loss="assistant")
    assert chat_template.render(conversation_of(WEATHER)).text.startswith(
        "26 Jul 2024, 2024-07-26\n<|im_start|>"
    )


INVALID_TEMPLATES = {
    "another role for the prompt": (
        (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
        ),
        "line 3 message 3: expected the text of the conversation up to here",
    ),
    "an error raised by the template": (
        "{{ raise_exception('no system here') }}",
        "template fails: TemplateError: no system here",
    ),
    "no Jinja": ("{% for m in messages %}", "template fails: "),
    "a sandbox escape": ("{{ ''.__class__.__mro__ }}", "template fails: "),
    "marks around an empty text": (
        "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}",
        "around each answer of the assistant, got other marks",
    ),
    "marks around one of two answers": (
        (
            "{% for m in messages %}{% if loop.last %}{% generation %}{{ m['content'] }}"
            "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
        ),
        "around each answer of the assistant, got other marks",
    ),
}


@pytest.mark.parametrize(
    ("template", "message"), INVALID_TEMPLATES.values(), ids=list(INVALID_TEMPLATES)
)
def test_mask_is_not_guessed_without_evidence(tokenizer, template, message):
    with pytest.raises(DataError) as error:
        read(tokenizer, WEATHER, template)
    assert message in str(error.value)
    assert "line 3" in str(error.value)
    assert "\n" not in str(error.value)


BODY = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
DROPPING_TEMPLATES = {
    "the system": (
        "{% for m in messages if m['role'] != 'system' %}" + BODY, "message 1: .*system",
    ),
    "the user's messages": (
        "{% for m in messages %}" + BODY.replace("m['content']", "(m['content'] if m['role'] != "
        "'user' else '?')"), "message 2: .*user",
    ),
    "all but the last": (
        "{% for m in messages %}{% if loop.last %}" + BODY
        + "{% endif %}", "message 1: .*system",
    ),
    "the end of a long message": (
        "{% for m in messages %}" + BODY.replace("m['content']", "m['content'][:12]"),
        "message 4: .*user",
    ),
}  # fmt: skip


@pytest.mark.parametrize("loss", ["assistant", "all"])
@pytest.mark.parametrize(
    ("template", "message"), DROPPING_TEMPLATES.values(), ids=list(DROPPING_TEMPLATES)
)
def test_template_that_drops_words_is_refused(tokenizer, template, message, loss):
    template += (
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(
        DataError,
        match=f"line 3 {message}'s message in the chat template's text, got a text without it",
    ):
        read(tokenizer, WEATHER, template, loss=loss)


def test_dropped_short_words_are_refused_despite_other_occurrences(tokenizer):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] != 'user' %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(DataError, match=r"message 1: .*user's message in the chat template's text"):
        read(tokenizer, (ChatMessage("user", "s"), ChatMessage("assistant", "ok")), template)


def test_words_may_be_stripped_moved_or_encoded_as_json(tokenizer):
    last = "{% if loop.index == messages | length - 1 %}{{ messages[0]['content'] }}{% endif %}"
    moving_template = (
        "{% for m in messages if m['role'] != 'system' %}" + last + BODY + "{% endfor %}"
    )
    as_json = "{% for m in messages %}" + BODY.replace("m['content']", "(m['content'] | tojson)")
    stripped = "{% for m in messages %}" + BODY.replace("m['content']", "m['content'].strip()")
    for template in (moving_template, as_json + "{% endfor %}", stripped + "{% endfor %}"):
        read(tokenizer, WEATHER, template, loss="all")
