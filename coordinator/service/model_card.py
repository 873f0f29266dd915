"""The card beside what a run has trained: see `protocol.spec.model_card`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coordinator.disk.durable_file import replace_file
from coordinator.storage.directory.journal import entries_of
from coordinator.storage.directory.journal_records import Evaluated
from coordinator.storage.directory.run_directory import RunDirectory
from protocol import __version__
from protocol.spec.manifest import Manifest
from protocol.spec.model_card import CARD, CardFacts, Measured, card_text
from protocol.spec.run_spec import RunSpec


def write_card(
    directory: RunDirectory, spec: RunSpec, manifest: Manifest, result: Mapping[str, Any]
) -> None:
    """Write it into the export's directory, unless the task has written one of its own.

    It is not among the files that `result.json` lists: people add a licence to it.

    Args:
        directory: The run's.
        spec: What was asked for.
        manifest: What the workers found.
        result: What `result.json` will say.

    Raises:
        StorageFailed: The disk refuses.
    """
    if CARD in manifest.export.files:
        return
    facts = CardFacts.of(spec, manifest, result, __version__, [*_measured(directory.journal)])
    replace_file(directory.path / manifest.export.directory / CARD, card_text(facts).encode())


def _measured(journal: Path) -> Iterator[Measured]:
    """The newest figures of each step: those of steps that a restart did again come twice."""
    found = {record.step: record.metrics for record in entries_of(journal, Evaluated)}
    for step in sorted(found):
        yield Measured(step=step, figures=found[step])
