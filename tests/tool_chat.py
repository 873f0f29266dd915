"""Chats with tools and reasoning, and a template like Qwen3's, for tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.small_chat import save_chat_model, write_chat_run

_CITIES = [a + b for a in ("Os", "Bon", "Ber", "Ro") for b in ("lo", "n", "me")]

TOOL_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A template like Qwen3's: tools as JSON, calls in tags; earlier turns lose their reasoning."""

MARKED_TOOL_TEMPLATE = TOOL_TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' }}\n{%- if loop",
    "{{- '<|im_start|>assistant\\n' }}{%- generation %}\n{%- if loop",
).replace(
    "{{- '<|im_end|>\\n' }}\n{%- elif m.role == 'tool' %}",
    "{{- '<|im_end|>\\n' }}{%- endgeneration %}\n{%- elif m.role == 'tool' %}",
)
"""`TOOL_TEMPLATE` with generation markers, from which transformers computes the assistant mask."""

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def write_tool_run(directory: Path) -> Path:
    """Write the spec of a LoRA run on chats with tools, in a folder of compressed files."""
    run = write_chat_run(directory)
    rows = [{"messages": tool_chat(city)[2:], "tools": [{"name": "weather"}]} for city in _CITIES]
    (directory / "chats").mkdir()
    for part in range(2):
        lines = "".join(json.dumps(row) + "\n" for row in rows[part::2])
        (directory / "chats" / f"{part}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    save_chat_model(directory / "model", positions=512)
    document = json.loads(run.read_text())
    document["data"] |= {"train": str(directory / "chats"), "chat_template": TOOL_TEMPLATE}
    document["data"]["max_tokens"] = 512
    run.write_text(json.dumps(document))
    return run


def tool_chat(city: str = "Oslo") -> list[dict[str, Any]]:
    """Return a chat in OpenAI's format: two questions, a tool call with its answer, and reasoning
    in both turns."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
    }
    return [
        {"role": "user", "content": f"Hello from {city}!"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "They greet me."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I need a forecast.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": false}'},
        {"role": "assistant", "content": "No rain."},
    ]
