"""Tokens that a run adds to a model's vocabulary (`model.added_tokens`), and their rows.

A new row is the mean of the model's rows (Hewitt 2021, "Initializing new word embeddings for
pretrained language models"), which depends only on the checkpoint: by default, transformers'
resize_token_embeddings samples around that mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from tokenizers import AddedToken
from torch import nn

from protocol.base.errors import DataError
from protocol.spec.sections.model import ModelSpec
from worker.models.pretrained import Pretrained


def add_to_tokenizer(tokenizer: Any, texts: Sequence[str]) -> None:
    """Add each text to the tokenizer as a token; existing added tokens are unchanged.

    Raises:
        DataError: A text is an ordinary token; added tokens also match inside other words.
    """
    vocabulary, added_vocabulary = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    for text in texts:
        if text in vocabulary and text not in added_vocabulary:
            raise DataError(
                f"model.added_tokens names {text!r}, which the tokenizer has as an ordinary token; "
                "leave it out"
            )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in texts if text not in added_vocabulary]
    )


def add_token_rows(
    loaded: Pretrained, model: ModelSpec, tokenizer: Any, original_tokenizer: Any
) -> Pretrained:
    """Return the model with embedding and head rows for each token of the tokenizer.

    Args:
        loaded: The model; changed in place.
        model: The section `model` of the run spec.
        tokenizer: The tokenizer with the added tokens.
        original_tokenizer: The tokenizer without them; None for a model that was made for
            `tokenizer`.
    """
    ids = tuple(
        int(token_id) for token_id in tokenizer.convert_tokens_to_ids([*model.added_tokens])
    )
    if original_tokenizer is not None:
        original_vocabulary = original_tokenizer.get_vocab()
        token_texts = zip(ids, model.added_tokens, strict=True)
        fill_rows(
            loaded.model,
            len(tokenizer),
            [new_id for new_id, text in token_texts if text not in original_vocabulary],
        )
    return replace(loaded, added_tokens=ids)


def fill_rows(model: Any, tokens: int, new_ids: Sequence[int]) -> None:
    """Resize a model to at least `tokens` rows, and set new rows to the mean of the old ones.

    Args:
        model: A model of transformers; changed in place.
        tokens: The size of the tokenizer's vocabulary.
        new_ids: Existing rows that had no token before.
    """
    count = int(model.get_input_embeddings().weight.shape[0])
    unused_rows = {*new_ids}
    means = [
        tensor.detach()[[row for row in range(count) if row not in unused_rows]]
        .double()
        .mean(dim=0)
        for tensor in _token_tables(model)
    ]
    if tokens <= count and not new_ids:
        return
    if tokens > count:
        model.resize_token_embeddings(tokens, mean_resizing=False)
    rows = sorted({*range(count, tokens), *new_ids})
    with torch.no_grad():
        for tensor, mean in zip(_token_tables(model), means, strict=True):
            tensor[rows] = mean.to(tensor.dtype)


def _token_tables(model: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with a row for each token: embeddings, the head's weight and its bias."""
    table: nn.Module = model.get_input_embeddings()
    yield table.get_parameter("weight")
    head = output_table(model)
    if head is not None:
        yield head.get_parameter("weight")
    output_layer: Any = (
        model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    )
    if getattr(output_layer, "bias", None) is not None:
        yield output_layer.bias


def output_table(model: Any) -> nn.Module | None:
    """Return the head with a row for each token; None if there is none or it shares embeddings."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    table = model.get_input_embeddings()
    return None if head is None or head.weight is table.weight else head


def table_names(model: Any) -> list[str]:
    """Return the names of the modules with a row for each token.

    If embeddings and head share a table, only the embeddings are named.
    """
    tables = [model.get_input_embeddings(), output_table(model)]
    return [
        name for name, child in model.named_modules() if any(child is table for table in tables)
    ]
