"""The end of a run: trained tensors, the journal's last line, a card, and `result.json`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from coordinator.disk.artifacts import write_json, write_model
from coordinator.disk.canonical_json import json_digest
from coordinator.run.outputs.actions import Finish
from coordinator.run.run import Run
from coordinator.service.model_card import write_card
from coordinator.storage.directory.journal_records import Ended
from coordinator.storage.run_storage import RunStorage
from coordinator.storage.states.saved_state import load_replica
from protocol.base import limits
from protocol.exact.replica import Replica
from protocol.spec.manifest import BEST

_FIGURE_BYTES: Final = 11
"""Of a number and the length of its name, in a message."""
_NAME_CHARACTERS: Final = 64
"""Of a name in a message."""


async def write_result(
    run: Run, storage: RunStorage, replica: Replica, end: Finish, wall_s: float
) -> tuple[Path, dict[str, object]]:
    """Write what a run leaves behind; `result.json` comes last, with the journal's head.

    Args:
        run: The run, over.
        storage: Its files.
        replica: The trained state.
        end: How it ended.
        wall_s: Seconds since training began, in this process.

    Returns:
        Where the trained tensors are, and what `result.json` says.

    Raises:
        StorageFailed: The disk refuses.
        RunFailed: The directory has another coordinator now; nothing of it is written over.
    """
    assert run.manifest is not None
    path = storage.directory.path
    await storage.check()
    if storage.captures:
        exported = await storage.end_capture(whole=end.outcome == "finished")
    else:
        exported = await asyncio.to_thread(write_model, path, run.manifest, replica)
        exported |= await _write_best(run, storage)
    model = path / run.manifest.export.directory
    digests = await asyncio.to_thread(replica.digests)
    document: dict[str, object] = {
        "run_id": run.run_id,
        "outcome": end.outcome,
        "steps": run.step,
        "weights_digest": digests.weights,
        "losses": [loss if math.isfinite(loss) else None for loss in run.losses],
        "eval": {name: v if math.isfinite(v) else None for name, v in run.metrics.items()},
        "exact": run.progress is not None and not run.progress.mixed,
        "workers": run.members.microbatches(),
        "wall_s": round(wall_s, 3),
        "exported": exported,
    }
    record = Ended(
        epoch=run.epoch, step=run.step, outcome=end.outcome, reason=end.reason,
        weights_digest=digests.weights, state_digest=digests.state,
        result_digest=json_digest(document),
    )  # fmt: skip
    document["journal_head"] = await storage.end_journal(record)
    if not storage.captures:
        told = storage.directory, run.spec, run.manifest, document
        await asyncio.to_thread(write_card, *told)
    await asyncio.to_thread(write_json, storage.directory.result_file, document)
    return model, document


async def _write_best(run: Run, storage: RunStorage) -> dict[str, str]:
    """The state with the best held-out figure, where the run spec says which figure.

    Returns:
        BLAKE3 of each file, by its path below the run's directory.
    """
    checkpoint, settled = await storage.best(), run.manifest
    if checkpoint is None or settled is None:
        return {}
    export = settled.export.model_copy(update={"directory": BEST})
    manifest = settled.model_copy(update={"export": export})

    def work() -> dict[str, str]:
        # A checkpoint's files lie where the run's own manifest says.
        replica = load_replica(checkpoint, settled, run.spec.update)
        return write_model(storage.directory.path, manifest, replica)

    return await asyncio.to_thread(work)


def metrics_to_send(result: Mapping[str, object]) -> dict[str, float | None]:
    """The held-out figures of a result, if they fit a message; else none of them."""
    figures = result.get("eval")
    if not isinstance(figures, dict):
        return {}
    needed = sum(len(name.encode()) + _FIGURE_BYTES for name in figures)
    long = any(len(name) > _NAME_CHARACTERS for name in figures)
    return {} if long or needed > limits.END_METRICS_BYTES else figures
