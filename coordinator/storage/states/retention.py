"""Which checkpoints are kept: the last few, the best, and always one that is known to be whole."""

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
from protocol.spec.run_spec import CheckpointSpec


@dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning did: steps of checkpoints, and the first step that the log must keep."""

    kept: tuple[int, ...]
    removed: tuple[int, ...]
    good: int | None
    """The newest checkpoint that is whole; the log is needed from there on."""


def best_steps(root: Path, retention: CheckpointSpec, steps: Iterable[int]) -> set[int]:
    """The checkpoint with the best figure, the earliest of equals, and those whose figures cannot
    be read: one of them may be the best."""
    if retention.metric is None:
        return set()
    sign = 1.0 if retention.better == "higher" else -1.0
    figures: dict[int, float] = {}
    unknown: set[int] = set()
    for step in steps:
        try:
            kept = read_metrics(root, step)
        except (StorageDamaged, StorageFailed):
            unknown.add(step)
            continue
        if kept is not None and retention.metric in kept.figures:
            figures[step] = sign * kept.figures[retention.metric]
    best = max(figures, key=lambda step: (figures[step], -step), default=None)
    return unknown if best is None else unknown | {best}


def best_step(root: Path, retention: CheckpointSpec) -> int | None:
    """The checkpoint with the best figure; None if there are no figures, or some cannot be read."""
    best = best_steps(root, retention, checkpoint_steps(root))
    return best.pop() if len(best) == 1 else None


def prune(
    root: Path,
    run_id: str,
    manifest: Manifest,
    retention: CheckpointSpec,
    held: int | None = None,
) -> Pruned:
    """Remove the checkpoints that the retention does not keep; not the one that is `held`.

    The newest one that is whole (every file compared with its hash) is always kept. If none is,
    none is removed.

    Raises:
        StorageFailed: The disk refuses.
    """
    steps = checkpoint_steps(root)
    good = next((s for s in reversed(steps) if _is_whole(root, s, run_id, manifest)), None)
    if good is None:
        return Pruned(tuple(steps), (), None)
    keep = {good, *steps[-retention.keep_last :]} | best_steps(root, retention, steps)
    if retention.keep_log:
        keep.add(steps[0])  # the log is replayed from there
    removed = [step for step in steps if step not in {*keep, held}]
    for step in removed:
        remove_checkpoint(checkpoint_path(root, step))
    remove_temporaries(root)
    return Pruned(tuple(s for s in steps if s not in removed), tuple(removed), good)


def _is_whole(root: Path, step: int, run_id: str, manifest: Manifest) -> bool:
    try:
        find_checkpoint(root, step, run_id, manifest)
    except (StorageDamaged, StorageFailed, Mismatch):
        return False
    return True
