"""`worker export`: the result as a GGUF file, in a directory of its own with a card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from protocol import __version__
from protocol.base.errors import DataError
from protocol.spec.model_card import CARD, CardFacts, card_text
from worker.after.finished import Finished
from worker.after.gguf_file import Storage, Written, check_gguf, write_gguf
from worker.after.loading import load
from worker.after.merging import merged, new_directory


@dataclass(frozen=True, slots=True)
class Exported:
    """Where it is, and what came of it."""

    file: Path
    written: Written


def export_gguf(finished: Finished, base: str | None, storage: Storage, out: Path) -> Exported:
    """Write a language model, an adapter added to its base, as GGUF.

    Args:
        finished: What to write.
        base: Source of an adapter's base, if the user says.
        storage: Of matrices.
        out: A new directory.

    Raises:
        DataError: It cannot be loaded, llama.cpp has nothing for it, or `out` is there already.
        StorageDamaged: The file does not hold what was written.
        StorageFailed: The disk refuses.
    """
    check_gguf()
    name = finished.facts.name if finished.facts is not None else finished.directory.stem
    file = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "model"
    with new_directory(out) as new:
        loaded = load(finished, base)
        if loaded.trained is not None:
            raise DataError(
                "expected a language model for GGUF, got a classifier, which llama.cpp does not "
                "run; merge it (worker merge), or use it with worker classify"
            )
        path = new / f"{file}-{storage}.gguf"
        written = write_gguf(merged(loaded), loaded.tokenizer, path, storage, name)
        if finished.facts is not None:
            card = card_text(_facts(finished.facts, storage))
            (new / CARD).write_text(card, encoding="utf-8")
    return Exported(out / path.name, written)


def _facts(facts: CardFacts, storage: Storage) -> CardFacts:
    added = (
        "The run's adapter was added to its base, and the whole was" if facts.adapter else "It was"
    )
    sentence = (
        f"{added} written as GGUF afterwards (samestep {__version__}), matrices as {storage}; the "
        "file was read back, and every tensor in it is what was written."
    )
    return facts.model_copy(update={"adapter": False, "made": (*facts.made, sentence)})
