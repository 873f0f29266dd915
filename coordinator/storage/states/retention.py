"""Choose the checkpoints to keep: the last ones, the best, and always an intact one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coordinator.disk.durable_file import remove_temporaries
from coordinator.storage.states.checkpoint import (
    checkpoint_path,
    checkpoint_steps,
    find_checkpoint,
    read_metrics,
    remove_checkpoint,
)
from protocol.base.errors import Mismatch, StorageDamaged, StorageFailed
from protocol.spec.manifest import Manifest
from protocol.spec.sections.checkpoint import CheckpointSpec


@dataclass(frozen=True, slots=True)
class PruneResult:
    """The result of pruning: steps of checkpoints, and the first step that the log must keep."""

    kept_steps: tuple[int, ...]
    removed_steps: tuple[int, ...]
    intact_step: int | None
    """The newest intact checkpoint; the log is needed from there on."""


def best_steps(root: Path, retention: CheckpointSpec, steps: Iterable[int]) -> set[int]:
    """Return the step with the best metric; of equal metrics, the earliest.

    Steps whose metrics cannot be read are included: each of them may be the best.
    """
    if retention.metric is None:
        return set()
    sign = 1.0 if retention.better == "higher" else -1.0
    values: dict[int, float] = {}
    unknown: set[int] = set()
    for step in steps:
        try:
            metrics = read_metrics(root, step)
        except (StorageDamaged, StorageFailed):
            unknown.add(step)
            continue
        if metrics is not None and retention.metric in metrics.figures:
            values[step] = sign * metrics.figures[retention.metric]
    best = max(values, key=lambda step: (values[step], -step), default=None)
    return unknown if best is None else unknown | {best}


def best_step(root: Path, retention: CheckpointSpec) -> int | None:
    """Return the step with the best metric; None without metrics, or if some cannot be read."""
    best = best_steps(root, retention, checkpoint_steps(root))
    return best.pop() if len(best) == 1 else None


def prune_checkpoints(
    root: Path,
    run_id: str,
    manifest: Manifest,
    retention: CheckpointSpec,
    except_step: int | None = None,
) -> PruneResult:
    """Remove the checkpoints that the retention does not keep, except that of `except_step`.

    The newest intact checkpoint (every file matches its hash) is always kept. Without an intact
    checkpoint, nothing is removed.

    Raises:
        StorageFailed: A write failed.
    """
    steps = checkpoint_steps(root)
    intact = next((s for s in reversed(steps) if _is_intact(root, s, run_id, manifest)), None)
    if intact is None:
        return PruneResult(tuple(steps), (), None)
    keep = {intact, *steps[-retention.keep_last :]} | best_steps(root, retention, steps)
    if retention.keep_log:
        keep.add(steps[0])  # the log starts there
    removed_steps = [step for step in steps if step not in {*keep, except_step}]
    for step in removed_steps:
        remove_checkpoint(checkpoint_path(root, step))
    remove_temporaries(root)
    return PruneResult(
        tuple(s for s in steps if s not in removed_steps), tuple(removed_steps), intact
    )


def _is_intact(root: Path, step: int, run_id: str, manifest: Manifest) -> bool:
    try:
        find_checkpoint(root, step, run_id, manifest)
    except (StorageDamaged, StorageFailed, Mismatch):
        return False
    return True
