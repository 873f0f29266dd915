"""Greedy decoding: generate a target for each source of a batch, always taking the likeliest token.

The targets are those of transformers' `generate(do_sample=False, num_beams=1)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

_WIDTH_MULTIPLE: Final = 16
"""Targets are padded to a multiple of this, since some devices compile a program per shape."""


@dataclass(frozen=True, slots=True)
class GreedyDecoding:
    """Greedy generation of targets with these tokens and this maximum length.

    Attributes:
        start: The token that the decoder begins with.
        padding: The padding token.
        ends: The tokens that end a target.
        max_tokens: Most tokens of a target.
    """

    start: int
    padding: int
    ends: frozenset[int]
    max_tokens: int

    def targets(self, module: nn.Module, arrays: Mapping[str, torch.Tensor]) -> list[list[int]]:
        """Return the tokens of each target, without start and end.

        Args:
            module: In evaluation mode.
            arrays: input_ids and attention_mask, (samples, tokens).
        """
        inputs = {name: arrays[name] for name in ("input_ids", "attention_mask")}
        decoder = self._decoder(module, inputs)
        samples, device = len(inputs["input_ids"]), inputs["input_ids"].device
        column = torch.full((samples, 1), self.start, device=device)
        targets: list[list[int]] = [[] for _ in range(samples)]
        unfinished = set(range(samples))
        for _ in range(self.max_tokens):
            tokens = decoder.next_logits(column).argmax(dim=-1)
            column = tokens[:, None].to(device)
            for row, token in enumerate(tokens.tolist()):
                if token in self.ends:
                    unfinished.discard(row)
                if row in unfinished:
                    targets[row].append(token)
            if not unfinished:
                break
        return targets

    def _decoder(
        self, module: nn.Module, inputs: Mapping[str, torch.Tensor]
    ) -> _CachedDecoder | _UncachedDecoder:
        # Only models of transformers, and peft's wrappers of them, cache attention. Other backends
        # replace the module by one without a cache.
        if hasattr(type(module), "generate"):
            return _CachedDecoder(module, inputs)
        width = -(-self.max_tokens // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        shape = (len(inputs["input_ids"]), width)
        return _UncachedDecoder(module, inputs, torch.full(shape, self.padding))


class _CachedDecoder:
    """Encodes the sources once, and computes each token from cached keys and values."""

    def __init__(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
        self._module = module
        self._inputs: dict[str, Any] = dict(inputs)

    def next_logits(self, column: torch.Tensor) -> torch.Tensor:
        """Append tokens, (samples, 1), and return the next logits, (samples, vocabulary)."""
        out: Any = self._module(**self._inputs, decoder_input_ids=column, use_cache=True)
        encoder_outputs = BaseModelOutput(last_hidden_state=out.encoder_last_hidden_state)
        self._inputs = {
            "attention_mask": self._inputs["attention_mask"],
            "encoder_outputs": encoder_outputs,
            "past_key_values": out.past_key_values,
        }
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits


class _UncachedDecoder:
    """Computes each token from the sources and all previous tokens, padded at the end."""

    def __init__(
        self, module: nn.Module, inputs: Mapping[str, torch.Tensor], text: torch.Tensor
    ) -> None:
        self._module, self._inputs, self._text, self._count = module, inputs, text, 0

    def next_logits(self, column: torch.Tensor) -> torch.Tensor:
        """See `_CachedDecoder.next_logits`."""
        self._text[:, self._count] = column[:, 0]
        out: Any = self._module(**self._inputs, decoder_input_ids=self._text, use_cache=False)
        self._count += 1
        logits: torch.Tensor = out.logits[:, self._count - 1].float()
        return logits
