"""Rows of tags and of text pairs, and a small T5 and BART, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAMES = ["Ada", "Bo", "Cy"]
TAGGED_ROWS = [
    {
        "tokens": ["yesterday", name, "Lovelace", "went", "to", city, "unbelievably", "fast"],
        "tags": ["O", "B-PER", "I-PER", "O", "O", "B-LOC", "O", "O"],
    }
    for name in NAMES
    for city in ("Oslo", "Rome", "Bonn", "Kyiv")
]
PAIRS = [
    {"source": f"add {a} and {b}", "target": f"{a + b} it is"} for a in range(4) for b in range(3)
]


def save_encoder_decoders(directory: Path) -> dict[str, Path]:
    """Save a T5 and a BART of two layers each, with a tokenizer trained on the rows."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import models, pre_tokenizers, processors, trainers

    bpe = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    bpe.train_from_iterator([text for row in PAIRS for text in row.values()], trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    directories: dict[str, Path] = {}
    torch.manual_seed(0)
    special_tokens: dict[str, Any] = {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    t5: Any = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        **special_tokens,
    )
    bart: Any = transformers.BartConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_position_embeddings=64, bos_token_id=0, forced_eos_token_id=None,
        **special_tokens,
    )  # fmt: skip
    for name, model_class, config in (
        ("t5", transformers.T5ForConditionalGeneration, t5),
        ("bart", transformers.BartForConditionalGeneration, bart),
    ):
        directories[name] = directory / name
        model_class(config).save_pretrained(directories[name])
        tokenizer.save_pretrained(directories[name])
    return directories
