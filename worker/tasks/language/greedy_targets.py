"""Targets that an encoder-decoder writes for a batch of sources, each token the likeliest one.

What transformers' `generate(do_sample=False, num_beams=1)` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

_WIDTH_MULTIPLE: Final = 16
"""A device that compiles whole calls gets targets padded to this: few shapes."""


@dataclass(frozen=True, slots=True)
class GreedyDecoding:
    """How targets begin and end.

    Attributes:
        start: The token that the decoder begins with.
        padding: The padding token.
        ends: The tokens that end a target.
        max_tokens: The most tokens of a target.
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
        written: list[list[int]] = [[] for _ in range(samples)]
        unfinished = set(range(samples))
        for _ in range(self.max_tokens):
            tokens = decoder.next_logits(column).argmax(dim=-1)
            column = tokens[:, None].to(device)
            for row, token in enumerate(tokens.tolist()):
                if token in self.ends:
                    unfinished.discard(row)
                if row in unfinished:
                    written[row].append(token)
            if not unfinished:
                break
        return written

    def _decoder(
        self, module: nn.Module, inputs: Mapping[str, torch.Tensor]
    ) -> _CachedDecoder | _WholeCalls:
        # Models of transformers, and peft's around them, keep the state of attention; a device's
        # stand-in for one computes whole calls.
        if hasattr(type(module), "generate"):
            return _CachedDecoder(module, inputs)
        width = -(-self.max_tokens // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        shape = (len(inputs["input_ids"]), width)
        return _WholeCalls(module, inputs, torch.full(shape, self.padding))


class _CachedDecoder:
    """Encodes the sources once, and computes each token from the state that the last one left."""

    def __init__(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
        self._module = module
        self._known: dict[str, Any] = dict(inputs)

    def next_logits(self, column: torch.Tensor) -> torch.Tensor:
        """Return the next token's logits, (samples, vocabulary), behind these, (samples, 1)."""
        out: Any = self._module(**self._known, decoder_input_ids=column, use_cache=True)
        encoded = BaseModelOutput(last_hidden_state=out.encoder_last_hidden_state)
        self._known = {
            "attention_mask": self._known["attention_mask"],
            "encoder_outputs": encoded,
            "past_key_values": out.past_key_values,
        }
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits


class _WholeCalls:
    """Computes each token from the sources and all tokens before, padded behind."""

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
