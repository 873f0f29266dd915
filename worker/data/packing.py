"""Several pieces of text in a sample of fixed length, so that next to nothing is padding.

A piece is a conversation, or a document of running text, cut where it is longer than a sample.
None attends to another in its sample, and positions begin anew with each: see `check_packing`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backends.base.interface import Batch
from protocol.base.errors import DataError
from protocol.exact.samples import permutation
from worker.data.chat_template import Counted
from worker.models.tokens import NOTHING, Tokens

_PROBED: Final = 8
"""Tokens of each of two documents that show whether a model keeps them apart."""
_ALIKE_WITHIN: Final = 1e-4


class Pieces(Protocol):
    """What is packed."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many tokens of each are read, at most a sample's length."""

    def piece(self, number: int) -> tuple[Tokens, Tokens]:
        """What is read, and its labels, both (lengths[number],)."""

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """Its tokens, and which of them are predicted with loss."""


def packed(lengths: NDArray[np.int64], capacity: int, seed: int) -> list[list[int]]:
    """Which pieces go into which sample: each where the least room is left that it fits into.

    Longest first, those of one length in an order drawn by the seed (best fit decreasing): at
    most 11/9 of the fewest samples that there can be (Johnson 1974, doi:10.1137/0203025).

    Args:
        lengths: Of the pieces, each at most `capacity`.
        capacity: Tokens of a sample.
        seed: The run's.
    """
    drawn = permutation(seed, 0, len(lengths))
    ranked = drawn[np.argsort(-lengths[drawn], kind="stable")]
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms: list[int] = []  # rising; those that some pack has left
    for number in ranked.tolist():
        length = int(lengths[number])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room = rooms[at]
            pack = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        packs[pack].append(number)
        left = room - length
        if left:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(pack)
    return packs


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples of several pieces; what is left of one is padding.

    Attributes:
        pieces: All of them.
        packs: Which of them each sample has.
        length: `data.max_tokens`.
    """

    pieces: Pieces
    packs: Sequence[Sequence[int]]
    length: int

    @staticmethod
    def of(pieces: Pieces, length: int, seed: int) -> PackedSamples:
        """Pack all of them."""
        return PackedSamples(pieces, packed(pieces.lengths, length, seed), length)

    def __len__(self) -> int:
        return len(self.packs)

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """input_ids, labels and position_ids, (samples, tokens): see `Samples`."""
        chosen = np.arange(len(self))[rows].tolist()
        inputs = np.zeros((len(chosen), self.length), np.int64)
        labels = np.full((len(chosen), self.length), NOTHING, np.int64)
        positions = np.zeros((len(chosen), self.length), np.int64)
        for row, number in enumerate(chosen):
            at = 0
            for each in self.packs[number]:
                read, predicted = self.pieces.piece(each)
                here = slice(at, at + len(read))
                inputs[row, here], labels[row, here] = read, predicted
                positions[row, here] = np.arange(len(read))
                at += len(read)
        weight = float(np.count_nonzero(labels != NOTHING))
        arrays = {"input_ids": inputs, "labels": labels, "position_ids": positions}
        return Batch(arrays, weight)

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """See `Samples`: the pieces one after the other."""
        both = [self.pieces.sample(each) for each in self.packs[number]]
        return np.concatenate([a for a, _ in both]), np.concatenate([b for _, b in both])


def check_packing(module: nn.Module, vocabulary: int, options: Mapping[str, Any]) -> None:
    """See that a model computes documents in one sample as it does each alone.

    Raises:
        DataError: It has no positions that begin anew, or lets one document attend to another.
    """
    documents = torch.arange(2 * _PROBED).reshape(2, _PROBED) * 7919 % vocabulary
    positions = torch.arange(_PROBED).repeat(2)
    try:
        with torch.no_grad():
            module.eval()
            alone = module(input_ids=documents, **options).logits
            together = module(
                input_ids=documents.reshape(1, -1), position_ids=positions[None], **options
            ).logits
    except (TypeError, ValueError) as error:
        raise DataError(f"this model takes no positions, so {_REMEDY} ({error})") from None
    difference = float((alone.reshape(together.shape) - together).abs().max())
    if not difference <= _ALIKE_WITHIN * float(alone.abs().max()):
        raise DataError(f"this model lets documents of one sample see one another, so {_REMEDY}")


_REMEDY: Final = "they cannot be packed: --set data.packing=false"
