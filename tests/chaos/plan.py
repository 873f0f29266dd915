"""Which faults a chaos run meets, and when: all of it follows from one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from protocol.spec.run_spec import LogMode

_FIRST_STEP: Final = 3
_CALM_STEPS: Final = 30
"""At the end: those who were hit last come back before the run is over."""
_WITHIN_STEP_S: Final = 0.12
"""A fault comes within so long after a commit, so at any moment of a step."""
_STALL_S: Final = (1.0, 4.0)
_LONG_STALL_S: Final = (9.0, 11.0)
"""Longer than a connection may be silent: it is lost, and made again."""


class Kind(Enum):
    """What is done; the value is its name in the table."""

    COORDINATOR = "coordinator killed"
    CHECKPOINT = "coordinator killed while it saves a checkpoint"
    BOTH = "coordinator and worker killed at once"
    WORKER = "worker killed"
    STALL = "worker stopped for 1 to 4 s"
    LONG_STALL = "worker stopped for 9 to 11 s"
    DRAIN = "worker told to leave"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: What is done.
        after_step: Not before so many steps are committed, and one since the fault before.
        delay_s: How long after that commit.
        victim: Which of the workers, a fraction of their number.
        stall_s: How long a stopped worker is stopped.
    """

    kind: Kind
    after_step: int
    delay_s: float
    victim: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything.

    Of the coordinator's kills every sixth takes a worker along, and every sixth comes while a
    checkpoint is written; every fifth stall is a long one.
    """

    steps: int
    coordinator_kills: int
    worker_kills: int
    stalls: int
    drains: int

    @property
    def kinds(self) -> Counter[Kind]:
        """How often each."""
        sixth = self.coordinator_kills // 6
        return Counter(
            {
                Kind.COORDINATOR: self.coordinator_kills - 2 * sixth,
                Kind.CHECKPOINT: sixth,
                Kind.BOTH: sixth,
                Kind.WORKER: self.worker_kills,
                Kind.STALL: self.stalls - self.stalls // 5,
                Kind.LONG_STALL: self.stalls // 5,
                Kind.DRAIN: self.drains,
            }
        )


def draw(seed: int, size: Size) -> list[Fault]:
    """The faults in order, spread over the steps at random."""
    source = random.Random(seed)
    kinds = list(size.kinds.elements())
    source.shuffle(kinds)
    last = size.steps - _CALM_STEPS
    assert last > _FIRST_STEP + len(kinds), "a fault needs a step"
    steps = sorted(source.randrange(_FIRST_STEP, last) for _ in kinds)
    return [_fault(source, kind, step) for kind, step in zip(kinds, steps, strict=True)]


def run_document(
    seed: int, size: Size, log: LogMode, *, keep_log: bool, sharded: bool = False
) -> dict[str, Any]:
    """The run spec: small steps without torch, checkpoints and evaluations now and then.

    Its gradients have the values of a dense random sum, so one lost, doubled, or added in another
    order shows in the digest.
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


def counts(faults: Sequence[Fault]) -> Counter[Kind]:
    """How often each kind is among them."""
    return Counter(fault.kind for fault in faults)


def _fault(source: random.Random, kind: Kind, step: int) -> Fault:
    long = kind is Kind.LONG_STALL
    return Fault(
        kind=kind,
        after_step=step,
        delay_s=source.uniform(0.0, _WITHIN_STEP_S),
        victim=source.random(),
        stall_s=source.uniform(*(_LONG_STALL_S if long else _STALL_S)),
    )
