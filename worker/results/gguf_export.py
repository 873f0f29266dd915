"""`worker export`: write a result as a GGUF file with a model card, in a new directory."""

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
from worker.results.merge import merge_weights, new_directory
from worker.results.modelfile import NAME as MODELFILE
from worker.results.modelfile import modelfile
from worker.results.saved_model import SavedModel


@dataclass(frozen=True, slots=True)
class GgufExport:
    """The exported file, and a summary of its content."""

    file: Path
    summary: GgufSummary


def export_gguf(
    saved_model: SavedModel, base: str | None, storage: Storage, out: Path
) -> GgufExport:
    """Write a language model as GGUF; an adapter is merged into its base first.

    Args:
        saved_model: The model to export.
        base: Source of an adapter's base; None: the recorded one.
        storage: Encoding of matrices.
        out: New directory to write to.

    Raises:
        DataError: The model cannot be loaded, llama.cpp does not support it, or `out` exists.
        StorageDamaged: The file read back differs from what was written.
        StorageFailed: A file operation failed.
    """
    check_gguf()
    name = saved_model.facts.name if saved_model.facts is not None else saved_model.directory.stem
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "model"
    saved_model.refuse_embeddings()
    with new_directory(out) as directory:
        loaded_model = load(saved_model, base)
        if loaded_model.result_info is not None:
            raise DataError(
                "expected a language model for GGUF, got a classifier, which llama.cpp does not "
                "run; merge it (worker merge), or use it with worker classify"
            )
        path = directory / f"{stem}-{storage}.gguf"
        model = merge_weights(loaded_model)
        summary = write_gguf(model, loaded_model.tokenizer, path, storage, name)
        text = modelfile(loaded_model.tokenizer, path.name, context_length(model.config))
        (directory / MODELFILE).write_text(text, encoding="utf-8")
        if saved_model.facts is not None:
            card = card_text(_card_facts(saved_model.facts, storage))
            (directory / CARD).write_text(card, encoding="utf-8")
    return GgufExport(out / path.name, summary)


def _card_facts(facts: CardFacts, storage: Storage) -> CardFacts:
    subject = (
        "The run's adapter was merged into its base, and the model was"
        if facts.adapter
        else "It was"
    )
    sentence = (
        f"{subject} exported to GGUF afterwards (samestep {__version__}), with matrices as "
        f"{storage}. The file was read back, and every tensor equals the one that was written."
    )
    return facts.model_copy(update={"adapter": False, "made": (*facts.made, sentence)})
