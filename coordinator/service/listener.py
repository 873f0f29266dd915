"""Who hears what happens: the console, the event stream, the service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Listener(Protocol):
    """Hears reports."""

    def reported(self, event: str, fields: Mapping[str, object]) -> None:
        """Something worth telling: a stable event name and its fields."""
