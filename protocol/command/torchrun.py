"""Whether torchrun has started this process, as one of several ranks."""

from __future__ import annotations

import os


def started_by_torchrun() -> bool:
    """Its own variables say so; MASTER_ADDR and WORLD_SIZE alone may be set by hand."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
