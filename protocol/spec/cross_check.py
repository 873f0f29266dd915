"""Values of a script that workers compare besides its source: constants, and the first loss.

Environment variables, files and arguments can make the same script train something else on another
machine. The numerics profile cannot distinguish this from rounding.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from protocol.base import limits
from protocol.base.fields import PRINTABLE, ShortText

_RELATIVE_TOLERANCE: Final = 0.05
_ABSOLUTE_TOLERANCE: Final = 1e-3
"""Differences of the first loss that rounding explains. In bfloat16 a deep model's loss differs by
a percent or two between devices, and a loss near zero is a difference of larger numbers."""

_FIRST_LOSS: Final = "the loss of the first samples"
_Name = Annotated[str, Field(min_length=1, max_length=100, pattern=PRINTABLE)]


class CrossCheck(BaseModel):
    """Values that differ if the same script trains something else on another machine.

    Two workers compare only the values that both have, because the layers of another package
    version may have other attributes.

    Attributes:
        constants: Constants that the user's functions and layers read, as text, by name.
        first_loss: Loss per sample of the first samples in evaluation mode; None if it draws random
            numbers, which differ between devices, or is not finite.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    constants: dict[_Name, ShortText] = Field({}, max_length=limits.SCRIPT_CONSTANTS)
    first_loss: float | None = None

    def find_difference(self, other: CrossCheck | None) -> tuple[str, str, str] | None:
        """Return the first value that differs: its name, its text here and its text in `other`."""
        if other is None:
            return None
        for name, expected in sorted(self.constants.items()):
            value = other.constants.get(name, expected)
            if value != expected:
                return name, expected, value
        expected_loss, loss = self.first_loss, other.first_loss
        if expected_loss is None or loss is None:
            return None
        tolerance = _ABSOLUTE_TOLERANCE + _RELATIVE_TOLERANCE * max(abs(expected_loss), abs(loss))
        if abs(expected_loss - loss) <= tolerance:
            return None
        return _FIRST_LOSS, f"{expected_loss:.6g}", f"{loss:.6g}"

    def describe_difference(self, other: CrossCheck | None, origin: str) -> str:
        """Describe the first difference and its remedy; empty if there is none.

        Args:
            other: The values of another worker or of today.
            origin: Where this object's values are from, such as "on the run's first worker".
        """
        if (difference := self.find_difference(other)) is None:
            return ""
        name, expected, value = difference
        if name == _FIRST_LOSS:
            return (
                f"expected a loss of {expected} for the first samples as {origin}, got {value}, "
                "more than rounding: compare the environment variables, files and arguments that "
                "the script reads and its packages, or use another device"
            )
        return (
            f"expected {name} = {expected} as {origin}, got {value}: the script reads it from this "
            "machine (environment, file or argument); set it to the same value, or pass it in "
            "fit(options=...)"
        )
