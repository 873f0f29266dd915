"""Tokens that a run adds to a model's vocabulary (`model.added_tokens`), and their rows.

A new row is the mean of the model's rows (Hewitt 2021, "Initializing new word embeddings for
pretrained language models"), which is what transformers' resize_token_embeddings draws from a
distribution about, so that it depends on nothing but the checkpoint.
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
    """Make each text a token, wherever it occurs; a mark that is there already stays as it is.

    Raises:
        DataError: A text is an ordinary token, which would then split other words.
    """
    known, marks = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    for text in texts:
        if text in known and text not in marks:
            raise DataError(
                f"model.added_tokens names {text!r}, which the tokenizer has as an ordinary token; "
                "leave it out"
            )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in texts if text not in marks]
    )


def with_rows(loaded: Pretrained, model: ModelSpec, tokenizer: Any, base: Any) -> Pretrained:
    """Return the model with a row for each token of the tokenizer.

    Args:
        loaded: The model; changed in place.
        model: The section `model` of the run spec.
        tokenizer: With the added tokens.
        base: The tokenizer without them; None for a model that was made for `tokenizer`.
    """
    ids = tuple(int(each) for each in tokenizer.convert_tokens_to_ids([*model.added_tokens]))
    if base is not None:
        known = base.get_vocab()
        names = zip(ids, model.added_tokens, strict=True)
        fill_rows(loaded.model, len(tokenizer), [n for n, text in names if text not in known])
    return replace(loaded, added_tokens=ids)


def fill_rows(model: Any, tokens: int, new: Sequence[int]) -> None:
    """Give a model at least so many rows, and set new ones to the mean of those it had.

    Args:
        model: Any of transformers'; changed in place.
        tokens: The size of the tokenizer's vocabulary.
        new: Further rows that no token has had.
    """
    count = int(model.get_input_embeddings().weight.shape[0])
    unused = {*new}
    means = [
        tensor.detach()[[n for n in range(count) if n not in unused]].double().mean(dim=0)
        for tensor in _tables(model)
    ]
    if tokens <= count and not new:
        return
    if tokens > count:
        model.resize_token_embeddings(tokens, mean_resizing=False)
    rows = sorted({*range(count, tokens), *new})
    with torch.no_grad():
        for tensor, mean in zip(_tables(model), means, strict=True):
            tensor[rows] = mean.to(tensor.dtype)


def _tables(model: Any) -> Iterator[torch.Tensor]:
    """Yield what has a row for each token: embeddings, the head and its bias."""
    table: nn.Module = model.get_input_embeddings()
    yield table.get_parameter("weight")
    head = output_table(model)
    if head is not None:
        yield head.get_parameter("weight")
    output: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if getattr(output, "bias", None) is not None:
        yield output.bias


def output_table(model: Any) -> nn.Module | None:
    """Return the head with a row for each token, unless it shares the embeddings."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    table = model.get_input_embeddings()
    return None if head is None or head.weight is table.weight else head


def table_names(model: Any) -> list[str]:
    """Return the names of the modules with a row for each token, a shared one once."""
    tables = [model.get_input_embeddings(), output_table(model)]
    return [name for name, child in model.named_modules() if any(child is each for each in tables)]
