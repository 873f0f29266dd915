"""Ollama's Modelfile: the chat template's texts around messages, or none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.small_chat import CHATML, save_chat_tokenizer
from tests.tool_chat import TOOL_TEMPLATE
from worker.results.modelfile import framing_of, modelfile


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    return save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


DEFAULT_SYSTEM_MESSAGE = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
INSERTED_TEXT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last %}{{ 'Think. ' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_of_text_around_messages_is_written(tokenizer):
    tokenizer.chat_template = CHATML
    text = modelfile(tokenizer, "m-q8_0.gguf", 128)
    assert text.startswith(
        'FROM ./m-q8_0.gguf\nPARAMETER num_ctx 128\nPARAMETER stop "<|im_end|>"\nTEMPLATE """'
    )
    for role in ("system", "user", "assistant"):
        assert (
            f'if eq .Role "{role}" }}}}<|im_start|>{role}\n{{{{ .Content }}}}<|im_end|>\n' in text
        )
    assert text.endswith('{{ end }}{{ end }}<|im_start|>assistant\n"""\n')
    assert "SYSTEM" not in text


def test_default_system_message_is_written(tokenizer):
    tokenizer.chat_template = DEFAULT_SYSTEM_MESSAGE
    assert 'SYSTEM """Be kind."""' in modelfile(tokenizer, "m.gguf", 128)
    framing = framing_of(tokenizer)
    assert framing is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert framing.render(messages) == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("template", [INSERTED_TEXT, "{{ raise_exception('no') }}", TOOL_TEMPLATE])
def test_complex_template_is_omitted(tokenizer, template):
    tokenizer.chat_template = template
    text = modelfile(tokenizer, "m.gguf", 128)
    assert "TEMPLATE" not in text
    assert "# The chat template is more than text around each message" in text


def test_modelfile_without_a_template_has_none(tokenizer):
    tokenizer.chat_template = None
    assert modelfile(tokenizer, "m.gguf", 128).count("\n") == 3
