"""`worker merge`: adds an adapter to its base, giving a model that needs neither peft nor base.

Every target's weight W becomes W + (alpha / r) B A, in float32. The written model is read back, and
its logits are compared with those of base and adapter.
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
from worker.results.load import PROBE_TOKENS, LoadedModel, load, load_bare, probe, vocabulary_of
from worker.results.saved_model import SENTENCE_TRANSFORMERS_FILES, SavedModel

Dtype = Literal["float32", "bfloat16"]
TOLERANCE: Final = 1e-5
"""Relative to the largest logit, or to 1 if that is larger."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The merged model and its check.

    Attributes:
        directory: The new model's directory.
        difference: Largest difference between what both models compute.
        compared: What that is: logits, or the last states of a model without a head.
        tokens: Number of tokens compared.
        weights_digest: Digest of the new model's weights.
    """

    directory: Path
    difference: float
    compared: str
    tokens: int
    weights_digest: str


def merge(saved: SavedModel, base: str | None, out: Path, dtype: Dtype = "float32") -> MergeReport:
    """Write base and adapter as one model.

    Args:
        saved: The adapter.
        base: Source of its base; None: as recorded.
        out: New directory to write to.
        dtype: Type in which the weights are stored. Rounded weights are compared with what is read
            back, and the difference of logits to base and adapter is reported.

    Raises:
        DataError: It is no adapter, or cannot be loaded, or `out` is there already.
        SamestepError: What was written does not compute what adapter and base do.
        StorageFailed: The disk refuses.
    """
    if saved.whole:
        raise DataError(
            f"expected an adapter, got {str(saved.directory)!r}: it is a whole model already; "
            "use it as it is"
        )
    with new_directory(out) as new:
        loaded = load(saved, base)
        vocabulary = vocabulary_of(loaded.model)
        before = probe(loaded.model, vocabulary)
        model = merged(loaded)
        rounded = before
        if dtype != "float32":
            _round(model, getattr(torch, dtype))
            rounded = probe(model, vocabulary)
            model.to(getattr(torch, dtype))
        _save(model, loaded, new)
        if loaded.embeds:
            for name in SENTENCE_TRANSFORMERS_FILES:
                (new / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(saved.directory / name, new / name)
        del model
        again = _read_back(new, loaded)
        compare(rounded, after := probe(again.model, vocabulary))
        difference = float((before - after).abs().max())
        compared = "last states" if loaded.embeds else "logits"
        report = MergeReport(out, difference, compared, PROBE_TOKENS, again.weights_digest)
        if saved.facts is not None:
            text = card_text(_facts(saved.facts, report))
            (new / CARD).write_text(text, encoding="utf-8")
    return report


def _round(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round every weight to a narrower type, in float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).float())


def merged(loaded: LoadedModel) -> Any:
    """Add the adapter to the model's weights, in place.

    Raises:
        DataError: The adapter holds values that are not finite.
    """
    if not loaded.adapted:
        return loaded.model
    _untie(loaded.model)
    try:
        return loaded.model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise DataError(f"cannot merge the adapter: {error}") from None


def _untie(model: Any) -> None:
    """Give each adapted layer a weight of its own: the adapter belongs to that layer alone."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for layer in model.modules():
        adapts = hasattr(layer, "base_layer") and not hasattr(layer, "trainable_tokens_delta")
        weight = getattr(layer, "weight", None) if adapts else None
        if weight is not None and uses[id(weight)] > 1:
            layer.base_layer.weight = torch.nn.Parameter(weight.detach().clone(), False)
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False


def compare(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest difference between logits.

    Raises:
        SamestepError: It is larger than `TOLERANCE` allows, or not finite.
    """
    difference = float((expected - got).abs().max())
    allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
    if not difference <= allowed:
        raise SamestepError(
            f"expected the merged model's logits within {allowed:.2g} of those of base and "
            f"adapter, got {difference:.2g} off; nothing was written"
        )
    return difference


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes it once all is well; else nothing is left.

    Raises:
        DataError: There is something at `out`.
        StorageFailed: The disk refuses.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out: expected a new or empty directory, got {str(out)!r}; name another")
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    except OSError as error:
        raise StorageFailed("make", str(out), str(error.strerror)) from None
    try:
        yield new
        new.chmod(0o755)
        new.rename(out.absolute())
    except OSError as error:
        raise StorageFailed("write", str(out), str(error.strerror)) from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _save(model: Any, loaded: LoadedModel, new: Path) -> None:
    model.save_pretrained(new)
    files = tokenizer_files(loaded.tokenizer)
    for name, text in files.items():
        (new / name).write_text(text, encoding="utf-8")
    if not files:
        loaded.tokenizer.save_pretrained(new)
    if loaded.trained is not None:
        whole = loaded.trained.model.model_copy(
            update={
                "source": "merged",
                "name": None,
                "base_dtype": "float32",
                "added_tokens": (),
            }
        )
        result_info = loaded.trained.model_copy(update={"lora": None, "model": whole})
        (new / RESULT_INFO_FILE).write_text(result_info.document(), encoding="utf-8")


def _read_back(new: Path, loaded: LoadedModel) -> pretrained.Pretrained:
    spec, trained = ModelSpec(source=str(new)), loaded.trained
    padding = lambda: int(loaded.tokenizer.pad_token_id)  # noqa: E731
    found = load_bare(spec, trained, padding, embeds=loaded.embeds)
    found.model.eval()
    return found


def _facts(facts: CardFacts, report: MergeReport) -> CardFacts:
    sentence = (
        "The run's adapter was added to its base afterwards (samestep "
        f"{__version__}): the {report.compared} of {report.tokens} tokens differ by at most "
        f"{report.difference:.2g} from those of base and adapter. BLAKE3 of all weights here: "
        f"`{report.weights_digest}`."
    )
    return facts.model_copy(update={"adapter": False, "made": (*facts.made, sentence)})
