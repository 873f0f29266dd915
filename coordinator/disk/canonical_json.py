r"""One encoding for each JSON value, so that values can be hashed.

Keys sorted by code point, no space between tokens, ASCII only (other characters as \u escapes, in
lower case), numbers as Python writes them (the shortest text that reads back the same), no NaN and
no infinity.
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """Encode a value of dicts, lists, strings, numbers, booleans and None.

    Raises:
        ValueError: A number is not finite.
    """
    return _ENCODER.encode(value).encode()


def json_digest(value: Any) -> str:
    """Return the BLAKE3 of the canonical encoding, 64 hex digits."""
    return blake3(canonical_json(value)).hexdigest()
