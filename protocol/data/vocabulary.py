"""Which number stands for which piece of text: what a teacher and its student must agree on.

Read from a tokenizer's `tokenizer.json` alone, so a coordinator can compare two without the
libraries that tokenise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from protocol.base.regular_file import read_json

TOKENIZER: str = "tokenizer.json"


def vocabulary_digest(tokens: Mapping[str, int]) -> str:
    """BLAKE3 over all pieces in the order of their numbers, each with its number."""
    ordered = sorted((number, piece) for piece, number in tokens.items())
    return blake3(json.dumps(ordered).encode()).hexdigest()


def digest_of_file(path: Path) -> str | None:
    """The digest of a `tokenizer.json`; None where there is none that is known here."""
    tokens = tokens_of_file(path)
    return None if tokens is None else vocabulary_digest(tokens)


def tokens_of_file(path: Path) -> dict[str, int] | None:
    """The pieces of a `tokenizer.json` with their numbers; None as above."""
    try:
        document = read_json(path)
        vocabulary = document["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pieces with their scores
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        tokens = {str(piece): int(number) for piece, number in vocabulary.items()}
        for added in document.get("added_tokens") or ():
            tokens[str(added["content"])] = int(added["id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return tokens
