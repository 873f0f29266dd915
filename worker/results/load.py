"""Load a run's result as a torch model with its tokenizer, and check base and adapter.

The base is loaded and rounded by the run's code; peft adds the adapter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from backends.base import draws
from backends.quantization.frozen_base import round_frozen_base
from protocol.base.errors import DataError, describe_error
from protocol.spec.earlier_run import RESULT_INFO_FILE
from protocol.spec.files.sources import model_source
from protocol.spec.sections.model import ModelSpec
from worker.models import pretrained
from worker.models.added_tokens import fill_rows
from worker.models.lora import LOG_SCALE, adapter_name
from worker.models.tokens import load_saved_tokenizer, load_tokenizer
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
        base_digest: Digest of the base's weights.
        result_info: Result info of a run with labels, a classifier or tagger; None otherwise.
        is_text_encoder: Whether the model is a text encoder without a head.
    """

    model: Any
    tokenizer: Any
    base_digest: str
    result_info: ResultInfo | None
    is_text_encoder: bool = False

    @property
    def has_adapter(self) -> bool:
        """Whether the model has an adapter."""
        return hasattr(self.model, "merge_and_unload")


def load(saved_model: SavedModel, base: str | None) -> LoadedModel:
    """Load a result.

    Args:
        saved_model: The result.
        base: Source of the base model; None: the recorded one.

    Raises:
        DataError: A model, adapter or tokenizer cannot be loaded, or the adapter was trained on
            another base.
    """
    has_info = (saved_model.directory / RESULT_INFO_FILE).is_file()
    result_info = ResultInfo.read(saved_model.directory) if has_info else None
    source = model_source(saved_model.base(base))
    pretrained_model = _load_base(source, result_info, is_text_encoder=saved_model.is_text_encoder)
    _refuse_another_base(saved_model, source, pretrained_model.weights_digest)
    if result_info is None and not pretrained_model.drawn_parameters.keys() <= _adapter_parameters(
        saved_model
    ):
        pretrained.refuse_drawn_weights(pretrained_model, source, "use a model with its head")
    model: Any = pretrained_model.model
    model.requires_grad_(requires_grad=False)
    has_tokenizer = (saved_model.directory / "tokenizer.json").is_file()
    tokenizer = (
        load_saved_tokenizer(saved_model.directory) if has_tokenizer else load_tokenizer(source)
    )
    if saved_model.adapter is not None and has_tokenizer:
        fill_rows(model, len(tokenizer), ())  # the adapter contains the values of added rows
    if saved_model.adapter is not None:
        if saved_model.facts is not None:
            round_frozen_base(model, saved_model.facts.base_dtype)
        elif result_info is not None:
            round_frozen_base(model, result_info.model.base_dtype)
        model = _add_adapter(model, saved_model)
    model.eval()
    return LoadedModel(
        model, tokenizer, pretrained_model.weights_digest, result_info, saved_model.is_text_encoder
    )


def _load_base(
    source: str, result_info: ResultInfo | None, *, is_text_encoder: bool
) -> pretrained.Pretrained:
    spec = ModelSpec(source=source)
    if result_info is not None:
        spec = result_info.model.model_copy(update={"source": source})
    padding = lambda: int(load_tokenizer(source).pad_token_id)  # noqa: E731
    return load_without_adapter(spec, result_info, padding, is_text_encoder=is_text_encoder)


def load_without_adapter(
    spec: ModelSpec,
    result_info: ResultInfo | None,
    padding: Callable[[], int],
    *,
    is_text_encoder: bool = False,
) -> pretrained.Pretrained:
    """Load a model without an adapter, with the head that its task requires.

    Args:
        spec: The model section of a run spec.
        result_info: Result info of a run with labels; None for a model that generates text.
        padding: Returns the tokenizer's padding token.
        is_text_encoder: Whether the model is a text encoder.
    """
    if is_text_encoder:
        return pretrained.freeze_pooler(pretrained.load_encoder(spec))
    if result_info is None:
        return pretrained.load_text_model(spec)
    if result_info.task == "tag":
        return pretrained.load_tagger(spec, result_info.labels, result_info.seed)
    return pretrained.load_classifier(
        spec, result_info.labels, padding(), result_info.seed, problem=result_info.problem
    )


def _adapter_parameters(saved_model: SavedModel) -> set[str]:
    """Return the names of the parameters in an adapter's file.

    Raises:
        DataError: The file cannot be read.
    """
    if saved_model.adapter is None:
        return set()
    try:
        with safe_open(saved_model.directory / ADAPTER_WEIGHTS, "np") as tensors:
            return {name.removeprefix(_PEFT_PREFIX) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot add the adapter {str(saved_model.directory)!r} to its base: "
            f"{describe_error(error)}"
        ) from None


def _refuse_another_base(saved_model: SavedModel, source: str, digest: str) -> None:
    base_digest = (
        saved_model.facts.digests.get("base_weights") if saved_model.facts is not None else None
    )
    if saved_model.adapter is not None and base_digest is not None and digest != base_digest:
        raise DataError(
            f"expected the base that {str(saved_model.directory)!r} was trained on, got "
            f"{source!r}, whose weights have another digest; name the right base: --base DIR"
        )


def _add_adapter(model: Any, saved_model: SavedModel) -> Any:
    """Add the adapter to the model.

    Raises:
        DataError: The adapter's tensors do not match its configuration.
    """
    import peft  # noqa: PLC0415 -- only adapters need it

    directory = str(saved_model.directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted_model = peft.PeftModel.from_pretrained(model, directory)
        expected_names = set(
            peft.get_peft_model_state_dict(adapted_model, save_embedding_layers=False)
        )
        with safe_open(saved_model.directory / ADAPTER_WEIGHTS, "np") as tensors:
            names = tensors.keys()
            stored_names = {adapter_name(name) for name in names} - {LOG_SCALE}
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise DataError(
            f"cannot add the adapter {directory!r} to its base: {describe_error(error)}"
        ) from None
    if expected_names != stored_names:
        unmatched_name = min(expected_names ^ stored_names)
        raise DataError(
            f"expected the {len(expected_names)} tensors of the adapter's configuration in "
            f"{directory!r}, got {len(stored_names)}, which differ in {unmatched_name!r}; check "
            "that the adapter belongs to this base"
        )
    return adapted_model


def probe(model: Any, vocabulary: int) -> torch.Tensor:
    """Return logits, or last states without a head, for fixed probe tokens, as float32.

    The probe of an encoder-decoder ends with its end token, which classifiers look for.
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
    """Return whether a model generates one text from another."""
    return bool(model.config.is_encoder_decoder and model.can_generate())


def probe_tokens(vocabulary: int) -> torch.Tensor:
    """Return fixed token ids below `vocabulary`, int64 (1, PROBE_TOKENS)."""
    hashes = draws.hashes(draws.derive_key("probe"), PROBE_TOKENS) % vocabulary
    return torch.from_numpy(hashes.astype("int64"))[None]


def vocabulary_of(model: Any) -> int:
    """Return the size of a model's vocabulary."""
    return int(model.get_input_embeddings().weight.shape[0])
