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

    def difference(self, other: CrossCheck | None, origin: str) -> str:
        """Describe the first difference; empty if there is none.

        Args:
            other: The values of another worker, or of the same script at a later start.
            origin: The origin of this object's values, such as "on the run's first worker".
        """
        if other is None:
            return ""
        for name, expected in sorted(self.constants.items()):
            value = other.constants.get(name, expected)
            if value != expected:
                return (
                    f"expected {name} = {expected} as {origin}, got {value}: the script reads it "
                    "from this machine (environment, file or argument); set it to the same value, "
                    "or pass it in fit(options=...)"
                )
        expected_loss, loss = self.first_loss, other.first_loss
        if expected_loss is None or loss is None:
            return ""
        tolerance = _ABSOLUTE_TOLERANCE + _RELATIVE_TOLERANCE * max(abs(expected_loss), abs(loss))
        if abs(expected_loss - loss) <= tolerance:
            return ""
        return (
            f"expected a loss of {expected_loss:.6g} for the first samples as {origin}, got "
            f"{loss:.6g}, more than rounding: compare the environment variables, files and "
            "arguments that the script reads and its packages, or use another device"
        )
