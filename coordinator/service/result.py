"""The result of a run: trained tensors, the journal's last line, a model card, and
`result.json`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from coordinator.disk.artifacts import write_json, write_model
from coordinator.disk.canonical_json import json_digest
from coordinator.disk.durable_file import replace_file
from coordinator.run.outputs.actions import Finish
from coordinator.run.outputs.events import Evaluated
from coordinator.run.run import Run
from coordinator.storage.directory.journal import records_of_type
from coordinator.storage.directory.journal_records import Ended
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.run_storage import RunStorage
from coordinator.storage.states.checkpoint_state import load_replica
from protocol import __version__
from protocol.base import limits
from protocol.exact.replica import Replica
from protocol.spec.manifest import BEST, Manifest
from protocol.spec.model_card import CARD, CardFacts, EvaluationRecord, card_text
from protocol.spec.run_spec import RunSpec

_METRIC_BYTES: Final = 11
"""Bytes of a number and of the length of its name in a message."""
_NAME_CHARACTERS: Final = 64
"""The longest name in a message."""


async def write_result(
    run: Run, storage: RunStorage, replica: Replica, end: Finish, wall_s: float
) -> tuple[Path, dict[str, object]]:
    """Write the result; `result.json` is written last, with the journal's head.

    Args:
        run: The run, which is over.
        storage: The run's files.
        replica: The trained state.
        end: How the run ended.
        wall_s: Seconds since training began, in this process.

    Returns:
        The directory of the trained tensors, and the content of `result.json`.

    Raises:
        StorageFailed: A write failed.
        RunFailed: Another coordinator owns the directory now; none of its files is overwritten.
    """
    assert run.manifest is not None
    path = storage.directory.path
    await storage.check()
    if storage.has_capture:
        exported = await storage.end_capture(is_complete=end.outcome == "finished")
    else:
        exported = await asyncio.to_thread(write_model, path, run.manifest, replica)
        exported |= await _write_best(run, storage)
    model = path / run.manifest.export.directory
    weights = await asyncio.to_thread(replica.weights_digest)
    state = await asyncio.to_thread(replica.state_digest)
    document: dict[str, object] = {
        "run_id": run.run_id,
        "outcome": end.outcome,
        "steps": run.steps_committed,
        "weights_digest": weights,
        "losses": [loss if math.isfinite(loss) else None for loss in run.losses],
        "eval": {name: v if math.isfinite(v) else None for name, v in run.metrics.items()},
        "exact": run.progress is not None and not run.progress.is_mixed,
        "workers": run.members.microbatches(),
        "wall_s": round(wall_s, 3),
        "exported": exported,
    }
    record = Ended(
        term=run.term, step=run.steps_committed, outcome=end.outcome, reason=end.reason,
        weights_digest=weights, state_digest=state,
        result_digest=json_digest(document),
    )  # fmt: skip
    document["journal_head"] = await storage.end_journal(record)
    if not storage.has_capture:
        await asyncio.to_thread(write_card, storage.directory, run.spec, run.manifest, document)
    await asyncio.to_thread(write_json, storage.directory.result_file, document)
    return model, document


async def _write_best(run: Run, storage: RunStorage) -> dict[str, str]:
    """Write the state with the best metric, if the run spec names a metric.

    Returns:
        BLAKE3 of each file, by its path below the run's directory.
    """
    checkpoint, run_manifest = await storage.best_checkpoint(), run.manifest
    if checkpoint is None or run_manifest is None:
        return {}
    export = run_manifest.export.model_copy(update={"directory": BEST})
    manifest = run_manifest.model_copy(update={"export": export})

    def work() -> dict[str, str]:
        # The paths in a checkpoint follow the run's own manifest.
        replica = load_replica(checkpoint, run_manifest, run.spec.step_optimizer)
        return write_model(storage.directory.path, manifest, replica)

    return await asyncio.to_thread(work)


def metrics_to_send(result: Mapping[str, object]) -> dict[str, float | None]:
    """Return the metrics of a result if all of them fit into a message; else no metrics."""
    metrics = result.get("eval")
    if not isinstance(metrics, dict):
        return {}
    metric_bytes = sum(len(name.encode()) + _METRIC_BYTES for name in metrics)
    has_long_name = any(len(name) > _NAME_CHARACTERS for name in metrics)
    return {} if has_long_name or metric_bytes > limits.END_METRICS_BYTES else metrics


def write_card(
    directory: RunDirectory, spec: RunSpec, manifest: Manifest, result: Mapping[str, Any]
) -> None:
    """Write a model card into the export's directory, unless the task has written one.

    `result.json` has no digest of the card: people add a license to the card.

    Args:
        directory: Directory of the run.
        spec: The run spec.
        manifest: The run's manifest.
        result: The content of `result.json`.

    Raises:
        StorageFailed: A write failed.
    """
    if CARD in manifest.export.files:
        return
    facts = CardFacts.of(spec, manifest, result, __version__, [*_newest_metrics(directory.journal)])
    replace_file(directory.path / manifest.export.directory / CARD, card_text(facts).encode())


def _newest_metrics(journal: Path) -> Iterator[EvaluationRecord]:
    """Yield the newest metrics of each step; a step that was redone may have several."""
    metrics = {record.step: record.metrics for record in records_of_type(journal, Evaluated)}
    for step in sorted(metrics):
        yield EvaluationRecord(step=step, figures=metrics[step])
