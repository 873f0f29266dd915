"""`worker export`: writes a result as a GGUF file with a model card, in a new directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from protocol import __version__
from protocol.base.errors import DataError
from protocol.spec.model_card import CARD, CardFacts, card_text
from worker.models.gguf_families import context_length
from worker.results.gguf_file import GgufSummary, Storage, check_gguf, write_gguf
from worker.results.load import load
from worker.results.merge import merged, new_directory
from worker.results.modelfile import NAME as MODELFILE
from worker.results.modelfile import modelfile
from worker.results.saved_model import SavedModel


@dataclass(frozen=True, slots=True)
class GgufExport:
    """The file, and a summary of its content."""

    file: Path
    written: GgufSummary


def export_gguf(saved: SavedModel, base: str | None, storage: Storage, out: Path) -> GgufExport:
    """Write a language model, an adapter added to its base, as GGUF.

    Args:
        saved: The model to export.
        base: Source of an adapter's base; None: as recorded.
        storage: Encoding of matrices.
        out: New directory to write to.

    Raises:
        DataError: It cannot be loaded, llama.cpp has nothing for it, or `out` is there already.
        StorageDamaged: The file does not hold what was written.
        StorageFailed: The disk refuses.
    """
    check_gguf()
    name = saved.facts.name if saved.facts is not None else saved.directory.stem
    file = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "model"
    saved.refuse_embeddings()
    with new_directory(out) as new:
        loaded = load(saved, base)
        if loaded.trained is not None:
            raise DataError(
                "expected a language model for GGUF, got a classifier, which llama.cpp does not "
                "run; merge it (worker merge), or use it with worker classify"
            )
        path = new / f"{file}-{storage}.gguf"
        model = merged(loaded)
        written = write_gguf(model, loaded.tokenizer, path, storage, name)
        text = modelfile(loaded.tokenizer, path.name, context_length(model.config))
        (new / MODELFILE).write_text(text, encoding="utf-8")
        if saved.facts is not None:
            card = card_text(_facts(saved.facts, storage))
            (new / CARD).write_text(card, encoding="utf-8")
    return GgufExport(out / path.name, written)


def _facts(facts: CardFacts, storage: Storage) -> CardFacts:
    added = (
        "The run's adapter was added to its base, and the whole was" if facts.adapter else "It was"
    )
    sentence = (
        f"{added} written as GGUF afterwards (samestep {__version__}), matrices as {storage}; the "
        "file was read back, and every tensor in it is what was written."
    )
    return facts.model_copy(update={"adapter": False, "made": (*facts.made, sentence)})
