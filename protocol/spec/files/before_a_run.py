"""What may be in a run's directory before the run begins."""

from __future__ import annotations

from typing import Final

SCRIPT_DIRECTORY: Final = "script"
"""Directory for a copy of the script whose `samestep.fit` begins the run."""
BEFORE_A_RUN: Final = frozenset({"lock", "term.json", "epoch.json", "lost+found", SCRIPT_DIRECTORY})
"""The copy of the script, files of a run that was not accepted, and `lost+found`."""
