"""A small Llama with a tokenizer and texts, and run specs that train it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 300
LORA = {"r": 4, "dropout": 0.1}
MODEL_OPTIONS = {"base_dtype": "int8", "gradient_checkpointing": True}


def save_small_decoder(directory: Path) -> Path:
    """Save a Llama of two layers with random weights, for `from_pretrained`."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator([document(number) for number in range(9)], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>", bos_token="<end>"
    )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attention_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def document(number: int) -> str:
    """Return a repetitive text of 1 to 9 functions."""
    lines = [f"def f{number % 3}(x):\n    return x + {n % 10}\n" for n in range(number % 9 + 1)]
    return f"# {number}\n" + "".join(lines)


def write_decoder_run(task: str, directory: Path, **changes: Any) -> Path:
    """Write the spec of a LoRA run on the small Llama, with int8 base weights and an odd batch
    size.

    The run uses dropout and gradient checkpointing.

    Args:
        task: classify, with batches of texts of several lengths, or causal-lm.
        directory: Directory for all files.
        changes: Keys of the run spec to change.
    """
    source = save_small_decoder(directory / "model")
    if task == "classify":
        rows = [{"text": document(n)[: 9 * (n % 9 + 1)], "label": "ab"[n % 2]} for n in range(40)]
        texts = directory / "texts.jsonl"
        texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        texts = directory / "texts"
        texts.mkdir()
        for number in range(40):
            (texts / f"{number:02}.txt").write_text(document(number))
    spec = {
        "name": task,
        "task": task,
        "seed": 7,
        "model": {"source": str(source), **MODEL_OPTIONS},
        "lora": LORA,
        "data": {"train": str(texts), "holdout": 0.2, "max_tokens": 48},
        "batch": {"samples": 7, "microbatch": 2},
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "steps": 3,
        **changes,
    }
    path = directory / "run.yaml"
    path.write_text(json.dumps(spec))
    return path
