"""Loads a run's result as a torch model with its tokenizer: base and adapter, checked.

The base is loaded and rounded by the same code as in the run; peft adds the adapter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from backends.base import draws
from backends.base.frozen_base import round_frozen_base
from protocol.base.errors import DataError, describe_error
from protocol.spec.earlier_run import RESULT_INFO_FILE
from protocol.spec.files.sources import model_source
from protocol.spec.sections.model import ModelSpec
from worker.models import pretrained
from worker.models.added_tokens import fill_rows
from worker.models.lora import LOG_SCALE, adapter_name
from worker.models.tokens import load_tokenizer, tokenizer_in
from worker.results.saved_model import ADAPTER_WEIGHTS, SavedModel
from worker.tasks.labels.result_info import ResultInfo

_PEFT_PREFIX = "base_model.model."
PROBE_TOKENS = 24
"""Number of tokens whose logits are compared between two models."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode with its tokenizer.

    Attributes:
        model: The model, with its adapter if there is one.
        tokenizer: The tokenizer that it was trained with.
        base: Digest of the base's weights.
        trained: What a classify run wrote beside its result.
        embeds: Whether it is an encoder of texts, without a head.
    """

    model: Any
    tokenizer: Any
    base: str
    trained: ResultInfo | None
    embeds: bool = False

    @property
    def adapted(self) -> bool:
        """Whether the model has an adapter."""
        return hasattr(self.model, "merge_and_unload")


def load(saved: SavedModel, base: str | None) -> LoadedModel:
    """Load a result.

    Args:
        saved: The result.
        base: Source of the base model; None: as recorded.

    Raises:
        DataError: A model, adapter or tokenizer cannot be loaded, or the base is another one.
    """
    has_info = (saved.directory / RESULT_INFO_FILE).is_file()
    trained = ResultInfo.read(saved.directory) if has_info else None
    source = model_source(saved.base(base))
    loaded = _base(source, trained, embeds=saved.embeds)
    _refuse_another_base(saved, source, loaded.weights_digest)
    if trained is None and not loaded.drawn.keys() <= _saved(saved):
        pretrained.refuse_drawn_weights(loaded, source, "take a model with its head")
    model: Any = loaded.model
    model.requires_grad_(requires_grad=False)
    has_tokenizer = (saved.directory / "tokenizer.json").is_file()
    tokenizer = tokenizer_in(saved.directory) if has_tokenizer else load_tokenizer(source)
    if saved.adapter is not None and has_tokenizer:
        fill_rows(model, len(tokenizer), ())  # the adapter has their values
    if saved.adapter is not None:
        if saved.facts is not None:
            round_frozen_base(model, saved.facts.base_dtype)
        elif trained is not None:
            round_frozen_base(model, trained.model.base_dtype)
        model = _with_adapter(model, saved)
    model.eval()
    return LoadedModel(model, tokenizer, loaded.weights_digest, trained, saved.embeds)


def _base(source: str, trained: ResultInfo | None, *, embeds: bool) -> pretrained.Pretrained:
    spec = ModelSpec(source=source)
    if trained is not None:
        spec = trained.model.model_copy(update={"source": source})
    padding = lambda: int(load_tokenizer(source).pad_token_id)  # noqa: E731
    return load_bare(spec, trained, padding, embeds=embeds)


def load_bare(
    spec: ModelSpec,
    trained: ResultInfo | None,
    padding: Callable[[], int],
    *,
    embeds: bool = False,
) -> pretrained.Pretrained:
    """Load a model without an adapter, with the head that its result is for.

    Args:
        spec: Names the model.
        trained: What a run with labels wrote; None for what generates text.
        padding: Gives the tokenizer's padding token.
        embeds: Whether it is an encoder of texts.
    """
    if embeds:
        return pretrained.without_pooler(pretrained.load_encoder(spec))
    if trained is None:
        return pretrained.load_text_model(spec)
    if trained.task == "tag":
        return pretrained.load_tagger(spec, trained.labels, trained.seed)
    return pretrained.load_classifier(
        spec, trained.labels, padding(), trained.seed, problem=trained.problem
    )


def _saved(saved: SavedModel) -> set[str]:
    """Names of the parameters in an adapter's file.

    Raises:
        DataError: Its file cannot be read.
    """
    if saved.adapter is None:
        return set()
    try:
        with safe_open(saved.directory / ADAPTER_WEIGHTS, "np") as tensors:
            return {name.removeprefix(_PEFT_PREFIX) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot add the adapter {str(saved.directory)!r} to its base: {describe_error(error)}"
        ) from None


def _refuse_another_base(saved: SavedModel, source: str, digest: str) -> None:
    base_digest = saved.facts.digests.get("base_weights") if saved.facts is not None else None
    if saved.adapter is not None and base_digest is not None and digest != base_digest:
        raise DataError(
            f"the model {source!r} is not the one that {str(saved.directory)!r} was trained on: "
            "its weights have another digest; get that model's files again, or name them: "
            "--base DIR"
        )


def _with_adapter(model: Any, saved: SavedModel) -> Any:
    """Add the adapter to the model.

    Raises:
        DataError: The adapter's tensors are not what its configuration says.
    """
    import peft  # noqa: PLC0415 -- a whole model does without

    directory = str(saved.directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = peft.PeftModel.from_pretrained(model, directory)
        expected = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
        with safe_open(saved.directory / ADAPTER_WEIGHTS, "np") as tensors:
            names = tensors.keys()
            stored = {adapter_name(name) for name in names} - {LOG_SCALE}
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise DataError(
            f"cannot add the adapter {directory!r} to its base: {describe_error(error)}"
        ) from None
    if expected != stored:
        odd = min(expected ^ stored)
        raise DataError(
            f"expected the {len(expected)} tensors of the adapter's configuration in "
            f"{directory!r}, got {len(stored)}, which differ in {odd!r}; is it the adapter of "
            "another model?"
        )
    return adapted


def probe(model: Any, vocabulary: int) -> torch.Tensor:
    """Logits for a few tokens that are the same everywhere, float32; last states without a head.

    A text of an encoder-decoder ends with its end token, which classifiers look for.
    """
    ids, end = probe_tokens(vocabulary), model.config.eos_token_id
    if model.config.is_encoder_decoder and isinstance(end, int):
        ids[ids == end] = (end + 1) % vocabulary
        ids[0, -1] = end
    target = {"decoder_input_ids": ids} if is_seq2seq(model) else {}
    with torch.no_grad():
        output = model(input_ids=ids, **target)
    values: torch.Tensor = output.logits if "logits" in output else output.last_hidden_state
    return values.float()


def is_seq2seq(model: Any) -> bool:
    """Return whether a model makes one text of another."""
    return bool(model.config.is_encoder_decoder and model.can_generate())


def probe_tokens(vocabulary: int) -> torch.Tensor:
    """Return a few token numbers that are the same everywhere, int64 (1, PROBE_TOKENS)."""
    drawn = draws.hashes(draws.key_of("probe"), PROBE_TOKENS) % vocabulary
    return torch.from_numpy(drawn.astype("int64"))[None]


def vocabulary_of(model: Any) -> int:
    """Size of a model's vocabulary."""
    return int(model.get_input_embeddings().weight.shape[0])
