"""The faults of a chaos run and their times, drawn from one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from protocol.spec.run_spec import LogMode

_FIRST_STEP: Final = 3
_FINAL_STEPS: Final = 30
"""Steps without faults at the end, so that the last victims return before the run ends."""
_WITHIN_STEP_S: Final = 0.12
"""A fault follows a commit by at most this, so it can hit any part of a step."""
_STALL_S: Final = (1.0, 4.0)
_LONG_STALL_S: Final = (9.0, 11.0)
"""Longer than a connection may be silent, so the worker loses it and reconnects."""


class FaultType(Enum):
    """Type of a fault; the value is its name in the table."""

    COORDINATOR = "coordinator killed"
    CHECKPOINT = "coordinator killed while it saves a checkpoint"
    BOTH = "coordinator and worker killed at once"
    WORKER = "worker killed"
    STALL = "worker stopped for 1 to 4 s"
    LONG_STALL = "worker stopped for 9 to 11 s"
    DRAIN = "worker drained"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its time.

    Attributes:
        fault_type: Type of the fault.
        after_step: Steps committed before the fault, at least one of them since the last fault.
        delay_s: Time between that commit and the fault.
        victim: Index of the affected worker, as a fraction of the number of workers.
        stall_s: How long a stopped worker stays stopped.
    """

    fault_type: FaultType
    after_step: int
    delay_s: float
    victim: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Size:
    """Number of steps of a run, and of its faults.

    Every sixth kill of the coordinator also kills a worker, and every sixth happens while a
    checkpoint is written. Every fifth stall is a long one.
    """

    steps: int
    coordinator_kills: int
    worker_kills: int
    stalls: int
    drains: int

    @property
    def fault_counts(self) -> Counter[FaultType]:
        """Number of faults of each type."""
        sixth = self.coordinator_kills // 6
        return Counter(
            {
                FaultType.COORDINATOR: self.coordinator_kills - 2 * sixth,
                FaultType.CHECKPOINT: sixth,
                FaultType.BOTH: sixth,
                FaultType.WORKER: self.worker_kills,
                FaultType.STALL: self.stalls - self.stalls // 5,
                FaultType.LONG_STALL: self.stalls // 5,
                FaultType.DRAIN: self.drains,
            }
        )


def draw_faults(seed: int, size: Size) -> list[Fault]:
    """Return the faults in order, at random steps."""
    rng = random.Random(seed)
    fault_types = list(size.fault_counts.elements())
    rng.shuffle(fault_types)
    end_step = size.steps - _FINAL_STEPS
    assert end_step > _FIRST_STEP + len(fault_types), "a run needs a step for each fault"
    steps = sorted(rng.randrange(_FIRST_STEP, end_step) for _ in fault_types)
    return [_draw_fault(rng, *pair) for pair in zip(fault_types, steps, strict=True)]


def run_document(
    seed: int, size: Size, log: LogMode, *, keep_log: bool, sharded: bool = False
) -> dict[str, Any]:
    """Return the run spec: small steps without torch, with checkpoints and evaluations.

    Gradients are dense random values, so the digest changes if one of them is lost, counted
    twice, or added in another order.
    """
    return {
        "name": "chaos",
        "task": "scripted",
        "seed": seed,
        "exactness": "require",
        "scripted": {"blocks": 4, "block_bytes": 4096},
        "batch": {"samples": 12, "microbatch": 1},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01, "clip_norm": 1.0},
        "steps": size.steps,
        "evaluate_every": 50,
        "log": log,
        "checkpoint": {"every": 20, "keep_last": 2, "keep_log": keep_log},
        "exchange": {"topology": "sharded" if sharded else "star"},
    }


def count_faults(faults: Sequence[Fault]) -> Counter[FaultType]:
    """Return the number of faults of each type."""
    return Counter(fault.fault_type for fault in faults)


def _draw_fault(rng: random.Random, fault_type: FaultType, step: int) -> Fault:
    is_long = fault_type is FaultType.LONG_STALL
    return Fault(
        fault_type=fault_type,
        after_step=step,
        delay_s=rng.uniform(0.0, _WITHIN_STEP_S),
        victim=rng.random(),
        stall_s=rng.uniform(*(_LONG_STALL_S if is_long else _STALL_S)),
    )
