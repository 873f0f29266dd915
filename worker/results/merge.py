"""`worker merge`: merge an adapter into its base; the result needs neither peft nor the base.

peft adds each adapter's product to the weight of its layer, in float32: W + (alpha / r) B A for
plain LoRA. The written model is read back, and its outputs are compared with those of base and
adapter.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from protocol import __version__
from protocol.base.errors import DataError, SamestepError, StorageFailed
from protocol.spec.earlier_run import RESULT_INFO_FILE
from protocol.spec.model_card import CARD, CardFacts, card_text
from protocol.spec.sections.model import ModelSpec
from worker.models import pretrained
from worker.models.tokens import tokenizer_files
from worker.results.load import (
    PROBE_TOKENS,
    LoadedModel,
    load,
    load_without_adapter,
    probe,
    vocabulary_of,
)
from worker.results.saved_model import SENTENCE_TRANSFORMERS_FILES, SavedModel

Dtype = Literal["float32", "bfloat16"]
TOLERANCE: Final = 1e-5
"""Tolerance relative to the largest logit, or to 1 if that is larger."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The merged model and its check.

    Attributes:
        directory: The new model's directory.
        difference: Largest difference between the outputs of both models.
        output_name: Name of these outputs: logits, or last states for a model without a head.
        tokens: Number of compared tokens.
        weights_digest: Digest of the new model's weights.
    """

    directory: Path
    difference: float
    output_name: str
    tokens: int
    weights_digest: str


def merge(
    saved_model: SavedModel, base: str | None, out: Path, dtype: Dtype = "float32"
) -> MergeReport:
    """Write base and adapter as one model.

    Args:
        saved_model: The adapter.
        base: Source of its base; None: the recorded one.
        out: New directory to write to.
        dtype: Storage type of the weights. The model that is read back is compared with the
            rounded weights; the report has its difference from base and adapter.

    Raises:
        DataError: `saved_model` is not an adapter or cannot be loaded, or `out` is not empty.
        SamestepError: The written model does not compute the same as base and adapter.
        StorageFailed: A file operation failed.
    """
    if saved_model.is_complete:
        raise DataError(
            f"expected an adapter, got {str(saved_model.directory)!r}, which is a complete model "
            "already; use it as it is"
        )
    with new_directory(out) as directory:
        loaded_model = load(saved_model, base)
        vocabulary = vocabulary_of(loaded_model.model)
        original = probe(loaded_model.model, vocabulary)
        model = merge_weights(loaded_model)
        reference = original
        if dtype != "float32":
            _round_weights(model, getattr(torch, dtype))
            reference = probe(model, vocabulary)
            model.to(getattr(torch, dtype))
        _save(model, loaded_model, directory)
        if loaded_model.is_text_encoder:
            for name in SENTENCE_TRANSFORMERS_FILES:
                (directory / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(saved_model.directory / name, directory / name)
        del model
        written_model = _read_back(directory, loaded_model)
        check_outputs(reference, probed := probe(written_model.model, vocabulary))
        difference = float((original - probed).abs().max())
        output_name = "last states" if loaded_model.is_text_encoder else "logits"
        report = MergeReport(
            out, difference, output_name, PROBE_TOKENS, written_model.weights_digest
        )
        if saved_model.facts is not None:
            text = card_text(_card_facts(saved_model.facts, report))
            (directory / CARD).write_text(text, encoding="utf-8")
    return report


def _round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round every weight to a narrower type, in float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).float())


def merge_weights(loaded_model: LoadedModel) -> Any:
    """Add the adapter to the model's weights, in place.

    Raises:
        DataError: The adapter has values that are not finite.
    """
    if not loaded_model.has_adapter:
        return loaded_model.model
    _untie(loaded_model.model)
    try:
        return loaded_model.model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise DataError(f"cannot merge the adapter: {error}") from None


def _untie(model: Any) -> None:
    """Give each adapted layer a separate weight, because its adapter changes only this layer."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for layer in model.modules():
        is_adapted = hasattr(layer, "base_layer") and not hasattr(layer, "trainable_tokens_delta")
        weight = getattr(layer, "weight", None) if is_adapted else None
        if weight is not None and uses[id(weight)] > 1:
            layer.base_layer.weight = torch.nn.Parameter(weight.detach().clone(), False)
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False


def check_outputs(reference: torch.Tensor, values: torch.Tensor) -> float:
    """Check outputs against a reference; return the largest difference.

    Raises:
        SamestepError: The difference is larger than `TOLERANCE` allows, or not finite.
    """
    difference = float((reference - values).abs().max())
    tolerance = TOLERANCE * max(1.0, float(reference.abs().max()))
    if not difference <= tolerance:
        raise SamestepError(
            f"expected the merged model's logits within {tolerance:.2g} of those of base and "
            f"adapter, got a difference of {difference:.2g}; no file was written"
        )
    return difference


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `out` on success, and removed otherwise.

    Raises:
        DataError: `out` exists and is not an empty directory.
        StorageFailed: A file operation failed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out: expected a new or empty directory, got {str(out)!r}; name another")
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    except OSError as error:
        raise StorageFailed("make", str(out), str(error.strerror)) from None
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(out.absolute())
    except OSError as error:
        raise StorageFailed("write", str(out), str(error.strerror)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _save(model: Any, loaded_model: LoadedModel, directory: Path) -> None:
    model.save_pretrained(directory)
    files = tokenizer_files(loaded_model.tokenizer)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    if not files:
        loaded_model.tokenizer.save_pretrained(directory)
    if loaded_model.result_info is not None:
        merged_spec = loaded_model.result_info.model.model_copy(
            update={
                "source": "merged",
                "name": None,
                "base_dtype": "float32",
                "added_tokens": (),
            }
        )
        result_info = loaded_model.result_info.model_copy(
            update={"lora": None, "model": merged_spec}
        )
        (directory / RESULT_INFO_FILE).write_text(result_info.document(), encoding="utf-8")


def _read_back(directory: Path, loaded_model: LoadedModel) -> pretrained.Pretrained:
    spec, result_info = ModelSpec(source=str(directory)), loaded_model.result_info
    padding = lambda: int(loaded_model.tokenizer.pad_token_id)  # noqa: E731
    pretrained_model = load_without_adapter(
        spec, result_info, padding, is_text_encoder=loaded_model.is_text_encoder
    )
    pretrained_model.model.eval()
    return pretrained_model


def _card_facts(facts: CardFacts, report: MergeReport) -> CardFacts:
    sentence = (
        "The run's adapter was merged into its base afterwards (samestep "
        f"{__version__}): the {report.output_name} of {report.tokens} tokens differ by at most "
        f"{report.difference:.2g} from those of base and adapter. BLAKE3 of all weights: "
        f"`{report.weights_digest}`."
    )
    return facts.model_copy(update={"adapter": False, "made": (*facts.made, sentence)})
