"""Field types that documents and messages share, with bounds that pydantic checks."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from protocol.base import limits


def _check_count(count: int) -> int:
    if count > limits.LARGEST_COUNT:
        raise ValueError(f"expected a number of at most {limits.LARGEST_COUNT:g}")
    return count


# Texts are printed on consoles and in lists with one line each.
PRINTABLE = r"^[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}]*$"
ShortText = Annotated[str, Field(max_length=64, pattern=PRINTABLE)]
Text = Annotated[str, Field(max_length=400, pattern=PRINTABLE)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=0, lt=2**63)]
Duty = Literal["train", "evaluate"]
"""Whether a worker trains, or evaluates while others train."""
Bytes32 = Annotated[bytes, Field(min_length=32, max_length=32)]
BoundedInt = Annotated[int, AfterValidator(_check_count)]
Count = Annotated[BoundedInt, Field(ge=1)]
CountOrZero = Annotated[BoundedInt, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


def sort_keys(value: Any) -> Any:
    """Sort a free-form document by key, so that the order of keys does not change its digest.

    Raises:
        ValueError: A number is not finite. JSON cannot represent it: workers would receive null.
    """
    if isinstance(value, dict):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected finite numbers")
    return [sort_keys(inner) for inner in value] if isinstance(value, list) else value


Document = Annotated[dict[str, Any], AfterValidator(sort_keys)]


def finite_or_none(value: Any) -> Any:
    """Replace a non-finite number by None, since JSON cannot represent it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_text(text: str, limit_bytes: int = 400) -> str:
    """Replace unprintable characters and cut the text to a number of UTF-8 bytes."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return printable.encode(errors="replace")[:limit_bytes].decode(errors="ignore")
