"""A small Llama with a chat tokenizer, data for it, and run specs that train it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The ChatML template, with which many models are trained; without generation markers."""

CHATML_WITH_GENERATION = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{- message['content'] + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
)


def save_chat_tokenizer(directory: Path, template: str | None = CHATML) -> Any:
    """Save a byte-level BPE tokenizer with ChatML's special tokens, and a `config.json`, which
    `tokenizer.source` requires.

    Returns:
        The tokenizer.
    """
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    texts = [message["content"] for number in range(9) for message in conversation(number)]
    bpe.train_from_iterator([*texts, "user\n assistant\n system\n\n"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return tokenizer


def save_chat_model(directory: Path, positions: int = 128) -> None:
    """Save a Llama of two layers with random weights, and its chat tokenizer."""
    import torch
    import transformers

    tokenizer = save_chat_tokenizer(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions,
        pad_token_id=0, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def conversation(number: int) -> list[dict[str, str]]:
    """Return one to three questions with answers; every third conversation begins with a system
    message."""
    messages = [{"role": "system", "content": f"Add to {number}."}] if number % 3 == 0 else []
    for turn in range(number % 3 + 1):
        messages.append({"role": "user", "content": f"What is {number} plus {turn}?"})
        messages.append({"role": "assistant", "content": f"It is {number + turn}."})
    return messages


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    """Write one row per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_chat_run(directory: Path, **changes: Any) -> Path:
    """Write the spec of a LoRA run on the small chat model and 40 conversations."""
    save_chat_model(directory / "model")
    rows = [{"messages": conversation(number)} for number in range(40)]
    data = write_jsonl(directory / "chat.jsonl", rows)
    spec = {
        "name": "chat",
        "task": "causal-lm",
        "seed": 7,
        "model": {"source": str(directory / "model")},
        "lora": {"r": 4, "dropout": 0.1},
        "data": {"train": str(data), "format": "messages", "holdout": 0.2, "max_tokens": 96},
        "batch": {"samples": 7, "microbatch": 2},
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "steps": 4,
        **changes,
    }
    path = directory / "run.yaml"
    path.write_text(json.dumps(spec))
    return path


def preference_pair(number: int) -> dict[str, object]:
    """Return a preference pair: the right sum is chosen, a wrong one rejected."""
    messages = conversation(number)
    wrong_answer = {"role": "assistant", "content": f"It may be {number * 7 + 3}, I do not know."}
    return {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": [wrong_answer]}


def write_dpo_run(directory: Path, **changes: Any) -> Path:
    """Write the spec of a DPO run with LoRA on 40 preference pairs."""
    save_chat_model(directory / "model")
    data = write_jsonl(directory / "pairs.jsonl", [preference_pair(number) for number in range(40)])
    spec = {
        "name": "dpo",
        "task": "dpo",
        "seed": 7,
        "model": {"source": str(directory / "model")},
        "lora": {"r": 4, "dropout": 0.1},
        "data": {"train": str(data), "holdout": 0.2, "max_tokens": 96},
        "batch": {"samples": 7, "microbatch": 2},
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "steps": 4,
        **changes,
    }
    path = directory / "run.yaml"
    path.write_text(json.dumps(spec))
    return path


def write_packed_run(directory: Path) -> Path:
    """Write the spec of a run that trains a small Llama from scratch on packed documents."""
    lines = [f"{n} and {m} is {n + m}." * (1 + n % 3) for n in range(40) for m in range(3)]
    data = {"train": str(write_jsonl(directory / "sums.jsonl", [{"text": line} for line in lines]))}
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    spec = {
        "name": "packed", "task": "causal-lm", "seed": 7, "steps": 4,
        "model": {"config": config}, "tokenizer": {"vocab_size": 300},
        "data": {**data, "holdout": 0.2, "packing": True, "max_tokens": 64},
        "batch": {"samples": 7, "microbatch": 2}, "optimizer": {"name": "adamw", "lr": 5e-3},
    }  # fmt: skip
    path = directory / "run.yaml"
    path.write_text(json.dumps(spec))
    return path
