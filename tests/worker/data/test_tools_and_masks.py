"""Tool calls, reasoning and weights: the tokens and the mask of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.base.errors import DataError
from protocol.datasets.conversations import Conversation, read_conversations
from protocol.spec.sections.data import DataSpec
from tests.small_chat import CHATML, CHATML_WITH_GENERATION, save_chat_tokenizer, write_jsonl
from tests.tool_chat import MARKED_TOOL_TEMPLATE, TOOL_TEMPLATE, WEATHER_TOOL, tool_chat
from worker.data.chat_template import ChatTemplate


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    return save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def read(directory: Any, row: dict[str, Any], **spec: Any) -> Conversation:
    data = DataSpec(
        train=str(write_jsonl(directory / "a.jsonl", [row])), **{"format": "messages", **spec}
    )
    [one] = read_conversations(data)
    return one


def learned_tokens(
    tokenizer: Any, conversation: Conversation, template: str, loss: Any = "assistant"
):
    chat_template = ChatTemplate(tokenizer, template, loss=loss)
    rendered = chat_template.render(conversation)
    [(tokens, count_mask)] = chat_template.encode([rendered])
    return tokens.tolist(), count_mask.tolist(), [rendered.text[a:b] for a, b in rendered.spans]


def transformers_mask(tokenizer: Any, messages: Any, tools: Any) -> tuple[list[int], list[bool]]:
    encoding = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=MARKED_TOOL_TEMPLATE, tokenize=True,
        return_dict=True, return_assistant_tokens_mask=True,
    )  # fmt: skip
    return encoding["input_ids"], [bool(has_loss) for has_loss in encoding["assistant_masks"]]


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, MARKED_TOOL_TEMPLATE])
def test_tool_calls_have_the_tokens_and_mask_of_transformers(tokenizer, tmp_path, template):
    chat = tool_chat()
    one = read(tmp_path, {"messages": chat, "tools": [WEATHER_TOOL]})
    for message in chat:  # transformers requires this form of the arguments
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        message["content"] = message["content"] or ""
    expected = transformers_mask(tokenizer, chat, [WEATHER_TOOL])
    tokens, count_mask, spans = learned_tokens(tokenizer, one, template)
    assert (tokens, count_mask) == expected
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    assert spans == [
        "Hello!<|im_end|>\n",
        f"<think>\nI need a forecast.\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>\n",
        "<think>\n\n</think>\n\nNo rain.<|im_end|>\n",
    ]


FUNCTION = WEATHER_TOOL["function"]
QUESTION = {"role": "user", "content": "Rain?"}
TOOL_ANSWER = {"role": "tool", "content": "no"}
ANSWER = {"role": "assistant", "content": "No rain."}
CALLS: dict[str, dict[str, Any]] = {
    "arguments as an object": {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
    "arguments as text": {
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        ]
    },
    "calls as text": {"tool_calls": '[{"name": "weather", "arguments": {"city": "Oslo"}}]'},
    "one call": {"function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("tools", [[WEATHER_TOOL], [FUNCTION], json.dumps([FUNCTION])])
def test_each_form_of_a_call_has_the_same_tokens(tokenizer, tmp_path, call, tools):
    row = {
        "messages": [QUESTION, {"role": "assistant", "content": "", **call}, TOOL_ANSWER, ANSWER]
    }
    one = read(tmp_path, {**row, "tools": tools})
    assert one.messages[1].tool_calls[0].arguments == {"city": "Oslo"}
    assert one.tools == (WEATHER_TOOL,)
    assert '"arguments": {"city": "Oslo"}' in learned_tokens(tokenizer, one, TOOL_TEMPLATE)[2][0]


def test_sharegpt_tools_equal_those_of_messages(tmp_path):
    rows = {
        "conversations": [
            {"from": "human", "value": "Rain?"},
            {
                "from": "function_call",
                "value": '{"name": "weather", "arguments": {"city": "Oslo"}}',
            },
            {"from": "observation", "value": "no"},
            {"from": "gpt", "value": "No rain."},
        ],
        "system": "Be brief.",
        "tools": json.dumps([FUNCTION]),
    }
    one = read(tmp_path, rows, format="sharegpt")
    assert [message.role for message in one.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert one.messages[2].tool_calls[0].name == "weather"
    assert one.tools == (WEATHER_TOOL,)


def test_a_template_that_wants_arguments_as_text_gets_them(tokenizer, tmp_path):
    as_text = TOOL_TEMPLATE.replace(
        "(call.function.arguments | tojson) + '}", "call.function.arguments + '}"
    )
    one = read(tmp_path, {"messages": tool_chat(), "tools": [WEATHER_TOOL]})
    assert '{"city": "Oslo"}' in learned_tokens(tokenizer, one, as_text)[2][1]


def test_a_template_without_tools_is_refused(tokenizer, tmp_path):
    row = {"messages": [QUESTION, ANSWER], "tools": [WEATHER_TOOL]}
    with pytest.raises(DataError, match="line 1: expected the tools in the chat template"):
        learned_tokens(tokenizer, read(tmp_path, row), CHATML)
    call = {"role": "assistant", "content": "Let me look.", **CALLS["one call"]}
    row = {"messages": [QUESTION, call, TOOL_ANSWER, ANSWER]}
    with pytest.raises(
        DataError, match=r"message 2: expected the assistant.s message in the chat template"
    ):
        learned_tokens(tokenizer, read(tmp_path, row), CHATML)


def test_learned_answers_follow_loss_and_weight(tokenizer, tmp_path):
    def spans(loss: str = "assistant", **first: Any) -> list[str]:
        chat = [QUESTION, {**ANSWER, "content": "One.", **first}, QUESTION, ANSWER]
        return learned_tokens(tokenizer, read(tmp_path, {"messages": chat}), CHATML, loss)[2]

    both_answers, last = ["One.<|im_end|>\n", "No rain.<|im_end|>\n"], ["No rain.<|im_end|>\n"]
    assert spans() == spans(weight=1) == spans(train=True) == both_answers
    assert spans(loss="last") == spans(weight=0) == spans(train=False) == last
    with pytest.raises(DataError, match=r"every message to have loss with data\.loss=all"):
        spans(loss="all", weight=0)


TWO_MARKS_PER_ANSWER = CHATML_WITH_GENERATION.replace(
    "{{ message['content'] + '<|im_end|>' }}",
    "{{ message['content'] }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}",
)


@pytest.mark.parametrize(("weight", "learned"), [(1, ["<|im_end|>"]), (0, [])])
def test_last_answer_without_weight_is_not_learned(tokenizer, tmp_path, weight, learned):
    chat = [QUESTION, ANSWER, QUESTION, {**ANSWER, "weight": weight}]
    conversation = read(tmp_path, {"messages": chat})
    assert learned_tokens(tokenizer, conversation, TWO_MARKS_PER_ANSWER, "last")[2] == learned


def test_a_prompt_of_messages_is_not_learned(tokenizer, tmp_path):
    row = {"prompt": [QUESTION, {**ANSWER, "content": "One."}, QUESTION], "completion": [ANSWER]}
    one = read(tmp_path, row, format="prompt-completion")
    assert learned_tokens(tokenizer, one, CHATML)[2] == ["No rain.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [QUESTION, TOOL_ANSWER, ANSWER],
            "message 2: expected a tool to answer a call, got no call before it",
        ),
        (
            [QUESTION, {**ANSWER, **CALLS["one call"]}, QUESTION, ANSWER],
            "message 3: expected a tool's answer",
        ),
        (
            [QUESTION, {**ANSWER, "tool_calls": [{"arguments": {}}]}],
            "expected a call with the name",
        ),
        (
            [QUESTION, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "[1]"}]}],
            "expected an object as arguments of 'f'",
        ),
        ([{**QUESTION, "weight": 1}, ANSWER], "expected weight only in messages of the assistant"),
        (
            [{**QUESTION, "tool_calls": [1]}, ANSWER],
            "expected tool_calls only in messages of the assistant",
        ),
        ([QUESTION, {**ANSWER, "reasoning_content": 3}], "expected text as reasoning, got 3"),
        ([QUESTION, {**ANSWER, "train": "no"}], "expected true or false as train"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, messages, message):
    with pytest.raises(DataError, match=message) as error:
        read(tmp_path, {"messages": messages})
    assert "line 1" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_call_of_a_function_that_is_not_listed_is_refused(tmp_path):
    call = {"function": {"name": "wether", "arguments": {"city": "Oslo"}}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(
        DataError, match=r"message 2.*a function in tools \(weather\), got 'wether'"
    ):
        read(tmp_path, {"messages": messages, "tools": [WEATHER_TOOL]})
    assert read(tmp_path, {"messages": messages}).messages[1].tool_calls[0].name == "wether"


def test_columns_of_another_format_are_named(tmp_path):
    row = {"id": 1, "conversations": [{"from": "human", "value": "a"}]}
    with pytest.raises(DataError, match=r"another format: --set data\.format=sharegpt"):
        read(tmp_path, row)
    row = {"instruction": "a", "output": "b"}
    with pytest.raises(DataError, match=r"--set data\.format=alpaca"):
        read(tmp_path, row, format="prompt-completion")
