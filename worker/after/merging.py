"""An adapter added to its base for good: a whole model that needs neither peft nor the base.

Every target's weight W becomes W + (alpha / r) B A, in float32. What was written is read back, and
its logits are compared with those of base and adapter side by side.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from protocol import __version__
from protocol.base.errors import DataError, SamestepError, StorageFailed
from protocol.spec.model_card import CARD, CardFacts, card_text
from protocol.spec.run_spec import ModelSpec
from worker.after.finished import Finished
from worker.after.loading import PROBE_TOKENS, Loaded, load, probe, vocabulary_of
from worker.models import pretrained
from worker.models.tokens import tokenizer_files
from worker.tasks.trained import FILE

TOLERANCE: Final = 1e-5
"""Of the largest logit, or of 1 if that is larger."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What came of it.

    Attributes:
        directory: The new model's.
        difference: Of logits, the largest.
        tokens: How many the logits are of.
        weights_digest: Of the new model.
    """

    directory: Path
    difference: float
    tokens: int
    weights_digest: str


def merge(finished: Finished, base: str | None, out: Path) -> Merged:
    """Write base and adapter as one model.

    Args:
        finished: The adapter.
        base: Source of its base, if the user says.
        out: A new directory.

    Raises:
        DataError: It is no adapter, or cannot be loaded, or `out` is there already.
        SamestepError: What was written does not compute what adapter and base do.
        StorageFailed: The disk refuses.
    """
    if finished.whole:
        raise DataError(
            f"expected an adapter, got {str(finished.directory)!r}: it is a whole model already; "
            "use it as it is"
        )
    with new_directory(out) as new:
        loaded = load(finished, base)
        vocabulary = vocabulary_of(loaded.model)
        before = probe(loaded.model, vocabulary)
        model = merged(loaded)
        _save(model, loaded, new)
        del model
        again = _read_back(new, loaded)
        difference = compare(before, probe(again.model, vocabulary))
        found = Merged(out, difference, PROBE_TOKENS, again.weights_digest)
        if finished.facts is not None:
            text = card_text(_facts(finished.facts, found))
            (new / CARD).write_text(text, encoding="utf-8")
    return found


def merged(loaded: Loaded) -> Any:
    """The model with the adapter added to its weights; the loaded one is used up.

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
    places: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)] = places.get(id(parameter), 0) + 1
    for layer in model.modules():
        weight = getattr(layer, "weight", None) if hasattr(layer, "base_layer") else None
        if weight is not None and places[id(weight)] > 1:
            layer.base_layer.weight = torch.nn.Parameter(weight.detach().clone(), False)
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False


def compare(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference of logits.

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


def _save(model: Any, loaded: Loaded, new: Path) -> None:
    model.save_pretrained(new)
    files = tokenizer_files(loaded.tokenizer)
    for name, text in files.items():
        (new / name).write_text(text, encoding="utf-8")
    if not files:
        loaded.tokenizer.save_pretrained(new)
    if loaded.trained is not None:
        whole = loaded.trained.model.model_copy(
            update={"source": "merged", "name": None, "base_dtype": "float32"}
        )
        told = loaded.trained.model_copy(update={"lora": None, "model": whole})
        (new / FILE).write_text(told.document(), encoding="utf-8")


def _read_back(new: Path, loaded: Loaded) -> pretrained.Pretrained:
    spec, trained = ModelSpec(source=str(new)), loaded.trained
    if trained is None:
        found = pretrained.load_causal_lm(spec, 0)
    else:
        padding = int(loaded.tokenizer.pad_token_id)
        found = pretrained.load_classifier(spec, trained.labels, padding, trained.seed)
    found.model.eval()
    return found


def _facts(facts: CardFacts, found: Merged) -> CardFacts:
    sentence = (
        "The run's adapter was added to its base afterwards (samestep "
        f"{__version__}): the logits of {found.tokens} tokens differ by at most "
        f"{found.difference:.2g} from those of base and adapter. BLAKE3 of all weights here: "
        f"`{found.weights_digest}`."
    )
    return facts.model_copy(update={"adapter": False, "made": (*facts.made, sentence)})
