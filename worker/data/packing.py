"""Pack several pieces of text into samples of fixed length, so that almost nothing is padding.

A piece is a conversation, or a document of running text, which is cut if it is longer than a
sample. Pieces of one sample do not attend to each other, and the positions of each start at zero:
see `check_packing`.
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
    """The pieces to pack."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of input tokens of each piece, at most a sample's length."""

    def piece(self, number: int) -> tuple[Tokens, Tokens]:
        """Return input tokens and labels of a piece, both (lengths[number],)."""

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """Return the tokens of a piece, and which of them have loss."""


def packed(lengths: NDArray[np.int64], capacity: int, seed: int) -> list[list[int]]:
    """Assign pieces to samples: each to the sample with the least room that still holds it.

    Best-fit decreasing, pieces of one length in an order drawn by the seed: at most 11/9 of the
    smallest possible number of samples (Johnson 1974, doi:10.1137/0203025).

    Args:
        lengths: Of the pieces, each at most `capacity`.
        capacity: Tokens of a sample.
        seed: The run's.
    """
    order = permutation(seed, 0, len(lengths))
    ranked = order[np.argsort(-lengths[order], kind="stable")]
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
        free = room - length
        if free:
            if not with_room[free]:
                insort(rooms, free)
            with_room[free].append(pack)
    return packs


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples of several pieces, padded at the end.

    Attributes:
        pieces: All of them.
        packs: The pieces of each sample.
        length: `data.max_tokens`.
    """

    pieces: Pieces
    packs: Sequence[Sequence[int]]
    length: int

    @staticmethod
    def of(pieces: Pieces, length: int, seed: int) -> PackedSamples:
        """Pack all pieces."""
        return PackedSamples(pieces, packed(pieces.lengths, length, seed), length)

    def __len__(self) -> int:
        return len(self.packs)

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """Make a batch of input_ids, labels and position_ids, (samples, tokens): see `Samples`."""
        numbers = np.arange(len(self))[rows].tolist()
        inputs = np.zeros((len(numbers), self.length), np.int64)
        labels = np.full((len(numbers), self.length), NOTHING, np.int64)
        positions = np.zeros((len(numbers), self.length), np.int64)
        for row, number in enumerate(numbers):
            at = 0
            for each in self.packs[number]:
                read, predicted = self.pieces.piece(each)
                span = slice(at, at + len(read))
                inputs[row, span], labels[row, span] = read, predicted
                positions[row, span] = np.arange(len(read))
                at += len(read)
        weight = float(np.count_nonzero(labels != NOTHING))
        arrays = {"input_ids": inputs, "labels": labels, "position_ids": positions}
        return Batch(arrays, weight)

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """See `Samples`: the pieces are concatenated."""
        parts = [self.pieces.sample(each) for each in self.packs[number]]
        return np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts])


def check_packing(module: nn.Module, vocabulary: int, options: Mapping[str, Any]) -> None:
    """Check that a model computes packed documents as it computes each alone.

    Raises:
        DataError: It takes no position_ids, or lets documents attend to each other.
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
