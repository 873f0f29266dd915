"""What a worker is there for."""

from __future__ import annotations

from typing import Literal

from protocol.base.errors import UsageError

Duty = Literal["train", "evaluate"]
"""To compute nodes, or to evaluate while others do."""


def parse_duty(text: str) -> Duty:
    """Of the command line.

    Raises:
        UsageError: There is no such duty.
    """
    match text:
        case "train" | "evaluate":
            return text
        case _:
            raise UsageError(f"--duty: expected train or evaluate, got {text!r}")
