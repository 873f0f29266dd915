"""Pack several pieces of text into each sample of fixed length, with little padding.

A piece is a conversation, or a document of running text, which is cut if it is longer than a
sample. The pieces of a sample do not attend to each other, and the positions of each start at zero:
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
from worker.data.chat_template import LossMask
from worker.models.tokens import IGNORED_LABEL, Tokens

_PROBE_TOKENS: Final = 8
"""Tokens of each of two documents that are used to test a model's isolation of documents."""
_TOLERANCE: Final = 1e-4
"""Allowed difference of logits, relative to the largest one."""


class Pieces(Protocol):
    """The pieces to pack."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of input tokens of each piece, at most a sample's length."""

    def piece(self, number: int) -> tuple[Tokens, Tokens]:
        """Return input tokens and labels of a piece, both (lengths[number],)."""

    def sample(self, number: int) -> tuple[Tokens, LossMask]:
        """Return the tokens of a piece, and which of them have loss."""


def pack_pieces(lengths: NDArray[np.int64], capacity: int, seed: int) -> list[list[int]]:
    """Assign each piece to the sample with the least remaining room into which it fits.

    This is best-fit decreasing; pieces of equal length are in a random order, by the seed. The
    number of samples is at most about 11/9 of the minimum (Johnson 1974, doi:10.1137/0203025).

    Args:
        lengths: Lengths of the pieces, each at most `capacity`.
        capacity: Number of tokens of a sample.
        seed: The run's seed.
    """
    order = permutation(seed, 0, len(lengths))
    ranked = order[np.argsort(-lengths[order], kind="stable")]
    packs: list[list[int]] = []
    packs_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms: list[int] = []  # remaining rooms of all packs, distinct and ascending
    for number in ranked.tolist():
        length = int(lengths[number])
        index = bisect_left(rooms, length)
        if index == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room = rooms[index]
            pack = packs_by_room[room].pop()
            if not packs_by_room[room]:
                del rooms[index]
        packs[pack].append(number)
        room_left = room - length
        if room_left:
            if not packs_by_room[room_left]:
                insort(rooms, room_left)
            packs_by_room[room_left].append(pack)
    return packs


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples of several pieces, padded at the end.

    Attributes:
        pieces: All pieces.
        packs: Indices of the pieces of each sample.
        length: `data.max_tokens`.
    """

    pieces: Pieces
    packs: Sequence[Sequence[int]]
    length: int

    @staticmethod
    def of(pieces: Pieces, length: int, seed: int) -> PackedSamples:
        """Pack all pieces."""
        return PackedSamples(pieces, pack_pieces(pieces.lengths, length, seed), length)

    def __len__(self) -> int:
        return len(self.packs)

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """Build a batch of input_ids, labels and position_ids, (samples, tokens); see `Samples`."""
        numbers = np.arange(len(self))[rows].tolist()
        inputs = np.zeros((len(numbers), self.length), np.int64)
        labels = np.full((len(numbers), self.length), IGNORED_LABEL, np.int64)
        positions = np.zeros((len(numbers), self.length), np.int64)
        for row, number in enumerate(numbers):
            offset = 0
            for piece in self.packs[number]:
                piece_inputs, piece_labels = self.pieces.piece(piece)
                span = slice(offset, offset + len(piece_inputs))
                inputs[row, span], labels[row, span] = piece_inputs, piece_labels
                positions[row, span] = np.arange(len(piece_inputs))
                offset += len(piece_inputs)
        weight = float(np.count_nonzero(labels != IGNORED_LABEL))
        arrays = {"input_ids": inputs, "labels": labels, "position_ids": positions}
        return Batch(arrays, weight)

    def sample(self, number: int) -> tuple[Tokens, LossMask]:
        """Return the concatenated pieces of a sample; see `Samples`."""
        parts = [self.pieces.sample(piece) for piece in self.packs[number]]
        return np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts])


def check_packing(module: nn.Module, vocabulary: int, options: Mapping[str, Any]) -> None:
    """Check that a model gives packed documents the same logits as separate ones.

    Raises:
        DataError: The model takes no position_ids, or lets documents attend to each other.
    """
    # Multiples of a prime: different tokens, spread over the vocabulary.
    documents = torch.arange(2 * _PROBE_TOKENS).reshape(2, _PROBE_TOKENS) * 7919 % vocabulary
    positions = torch.arange(_PROBE_TOKENS).repeat(2)
    try:
        with torch.no_grad():
            module.eval()
            separate_logits = module(input_ids=documents, **options).logits
            packed_logits = module(
                input_ids=documents.reshape(1, -1), position_ids=positions[None], **options
            ).logits
    except (TypeError, ValueError) as error:
        raise DataError(
            f"expected a model that takes position_ids for packing, got one that does not: "
            f"{_REMEDY} ({error})"
        ) from None
    difference = float((separate_logits.reshape(packed_logits.shape) - packed_logits).abs().max())
    if not difference <= _TOLERANCE * float(separate_logits.abs().max()):
        raise DataError(
            "expected a model that keeps the documents of a sample apart for packing, got one that "
            f"lets them attend to each other: {_REMEDY}"
        )


_REMEDY: Final = "--set data.packing=false"
