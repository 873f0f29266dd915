"""Fields that documents and messages share: their bounds are checked where something comes in."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from protocol.base import limits


def _counted(count: int) -> int:
    if count > limits.COUNTED_SAMPLES:
        raise ValueError(f"expected a number of at most {limits.COUNTED_SAMPLES:g}")
    return count


# Texts are shown at consoles, and in lists of a line each.
PRINTABLE = r"^[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}]*$"
Small = Annotated[str, Field(max_length=64, pattern=PRINTABLE)]
Text = Annotated[str, Field(max_length=400, pattern=PRINTABLE)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=0, lt=2**63)]
Bytes32 = Annotated[bytes, Field(min_length=32, max_length=32)]
Bounded = Annotated[int, AfterValidator(_counted)]


def finite_or_none(value: Any) -> Any:
    """JSON has no NaN: what is not finite is null, as the loss of a skipped step."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_text(text: str, limit_bytes: int = 400) -> str:
    """A text as a message may carry it: its printable characters, cut to so many bytes of UTF-8."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown.encode(errors="replace")[:limit_bytes].decode(errors="ignore")
