"""The model that a run has made, as torch has it: base, adapter and tokenizer, checked.

The base is loaded and rounded as the run did, by the same code; peft puts the adapter in.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from backends.base import draws
from backends.base.frozen_base import round_frozen_base
from protocol.base.errors import DataError, in_words
from protocol.spec.run_spec import ModelSpec
from protocol.spec.sources import model_source
from worker.after.finished import ADAPTER_WEIGHTS, Finished
from worker.models import pretrained
from worker.models.lora import adapter_name
from worker.models.tokens import load_tokenizer, tokenizer_in
from worker.tasks.trained import FILE, Trained

_PEFT_PREFIX = "base_model.model."
PROBE_TOKENS = 24
"""Logits of so many are compared where one model is to be another."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Ready to compute, in evaluation mode.

    Attributes:
        model: With the adapter inside, if there is one.
        tokenizer: That it was trained with.
        base: Digest of the weights before anything was added.
        trained: What a classify run wrote beside its result.
    """

    model: Any
    tokenizer: Any
    base: str
    trained: Trained | None

    @property
    def adapted(self) -> bool:
        """Whether there is an adapter inside."""
        return hasattr(self.model, "merge_and_unload")


def load(finished: Finished, base: str | None) -> Loaded:
    """Load a result.

    Args:
        finished: What it is.
        base: Source of the base model, if the user says.

    Raises:
        DataError: A model, adapter or tokenizer cannot be loaded, or the base is another one.
    """
    trained = Trained.read(finished.directory) if (finished.directory / FILE).is_file() else None
    source = model_source(finished.base(base))
    loaded = _base(source, trained)
    _refuse_another_base(finished, source, loaded.weights_digest)
    if trained is None and not loaded.drawn.keys() <= _saved(finished):
        pretrained.refuse_drawn_weights(loaded, source, "take a model with its head")
    model: Any = loaded.model
    model.requires_grad_(requires_grad=False)
    if finished.adapter is not None:
        if finished.facts is not None:
            round_frozen_base(model, finished.facts.base_dtype)
        elif trained is not None:
            round_frozen_base(model, trained.model.base_dtype)
        model = _with_adapter(model, finished)
    model.eval()
    own = (finished.directory / "tokenizer.json").is_file()
    tokenizer = tokenizer_in(finished.directory) if own else load_tokenizer(source)
    return Loaded(model, tokenizer, loaded.weights_digest, trained)


def _base(source: str, trained: Trained | None) -> pretrained.Pretrained:
    if trained is None:
        return pretrained.load_causal_lm(ModelSpec(source=source), 0)
    tokenizer = load_tokenizer(source)
    padding = int(tokenizer.pad_token_id)
    model = trained.model.model_copy(update={"source": source})
    return pretrained.load_classifier(model, trained.labels, padding, trained.seed)


def _saved(finished: Finished) -> set[str]:
    """Names of the parameters that an adapter brings along whole.

    Raises:
        DataError: Its file cannot be read.
    """
    if finished.adapter is None:
        return set()
    try:
        with safe_open(finished.directory / ADAPTER_WEIGHTS, "np") as tensors:
            return {name.removeprefix(_PEFT_PREFIX) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot add the adapter {str(finished.directory)!r} to its base: {in_words(error)}"
        ) from None


def _refuse_another_base(finished: Finished, source: str, digest: str) -> None:
    known = finished.facts.digests.get("base_weights") if finished.facts is not None else None
    if finished.adapter is not None and known is not None and digest != known:
        raise DataError(
            f"the model {source!r} is not the one that {str(finished.directory)!r} was trained on: "
            "its weights have another digest; get that model's files again, or name them: "
            "--base DIR"
        )


def _with_adapter(model: Any, finished: Finished) -> Any:
    """The model with the adapter inside.

    Raises:
        DataError: The adapter's tensors are not what its configuration says.
    """
    import peft  # noqa: PLC0415 -- a whole model does without

    place = str(finished.directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = peft.PeftModel.from_pretrained(model, place)
        expected = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
        with safe_open(finished.directory / ADAPTER_WEIGHTS, "np") as tensors:
            names = tensors.keys()
            there = {adapter_name(name) for name in names}
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise DataError(
            f"cannot add the adapter {place!r} to its base: {in_words(error)}"
        ) from None
    if expected != there:
        odd = min(expected ^ there)
        raise DataError(
            f"expected in {place!r} the tensors that its {len(expected)} places in the model want, "
            f"got {len(there)}, which differ in {odd!r}; is it the adapter of another model?"
        )
    return adapted


def probe(model: Any, vocabulary: int) -> torch.Tensor:
    """Logits for a few tokens that are the same everywhere, float32.

    A text of an encoder-decoder ends with its end token, which classifiers look for.
    """
    ids, end = probe_tokens(vocabulary), model.config.eos_token_id
    if model.config.is_encoder_decoder and isinstance(end, int):
        ids[ids == end] = (end + 1) % vocabulary
        ids[0, -1] = end
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits.float()
    return logits


def probe_tokens(vocabulary: int) -> torch.Tensor:
    """Return a few token numbers that are the same everywhere, int64 (1, PROBE_TOKENS)."""
    drawn = draws.hashes(draws.key_of("probe"), PROBE_TOKENS) % vocabulary
    return torch.from_numpy(drawn.astype("int64"))[None]


def vocabulary_of(model: Any) -> int:
    """How many tokens a model knows."""
    return int(model.get_input_embeddings().weight.shape[0])
