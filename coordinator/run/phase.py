"""Where a run is."""

from __future__ import annotations

from enum import Enum


class RunPhase(Enum):
    """Where a run is.

    WAITING for workers to be ready; TRAINING; EVALUATING held-out data; HALTED until an
    operator's word; OVER.
    """

    WAITING = "waiting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    HALTED = "halted"
    OVER = "over"
