"""Load Hugging Face models, or create them from a configuration, with the same bits everywhere.

Weights that a checkpoint lacks (a new head), and those of a new model, are drawn by
`backends.base.draws`, not by torch's generator as in transformers. Code that comes with a model is
never run.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import urllib.parse
import urllib.request
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import huggingface_hub
import numpy as np
import torch
import transformers
from transformers.utils import logging as transformers_logging

from backends.base import draws, progress
from backends.base.interface import Array
from backends.quantization.frozen_base import expert_layers
from protocol.base.errors import (
    NO_MEMORY,
    DataError,
    MainMemoryTooSmall,
    SamestepError,
    describe_error,
)
from protocol.exact.digest import digest_arrays
from protocol.exact.update import moment_count, state_arrays
from protocol.spec.files import sources
from protocol.spec.manifest import Block
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.data import Problem
from protocol.spec.sections.model import ModelSpec
from protocol.wire import dial
from protocol.wire.dial import DialError
from worker.models import disk_weights, gguf_config, main_memory, stored_dtypes
from worker.models.causality import check_causality
from worker.models.initial_weights import draw_initial_weights

_UNSUPPORTED_QUANTIZERS: Final = ("bitsandbytes", "gptq", "awq")
_DEFAULT_DEVIATION: Final = 0.02
"""Standard deviation of new weights, as in BERT, if the model's configuration has none."""
_PROBLEM_TYPE: Final[Mapping[str, str]] = {
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
"""Value of `problem_type` in a saved model's configuration; single labels have none."""
_HUB_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A loaded model and its configuration.

    Attributes:
        model: The whole model, in float32; a base that will be stored in low precision may have
            the dtype of its files.
        config: The model's configuration.
        weights_digest: Digest of all weights, drawn ones included.
        forward_options: Keywords of every forward. They turn off the cache, which only generation
            needs.
        drawn_parameters: Number of elements of each parameter that the source lacks and that is
            drawn; empty for a new model.
        added_tokens: The tokens that the run adds (`worker.models.added_tokens`).
    """

    model: torch.nn.Module
    config: Any
    weights_digest: str
    forward_options: Mapping[str, Any]
    drawn_parameters: Mapping[str, int] = field(default_factory=dict)
    added_tokens: tuple[int, ...] = ()

    @property
    def vocabulary(self) -> int:
        """Return the size of the vocabulary: the number of rows of the embedding."""
        embedding = getattr(self.model.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
        return int(embedding or self.config.get_text_config().vocab_size)


def load_classifier(
    spec: ModelSpec,
    labels: Sequence[str],
    padding: int,
    seed: int,
    *,
    problem: Problem = "single-label",
) -> Pretrained:
    """Load a model with a head for these labels; the head is drawn if the source has none.

    Args:
        spec: The section `model`, which names the source.
        labels: Names of the labels, by number.
        padding: The tokenizer's padding token. Decoders classify by the last token before padding.
        seed: The run's seed.
        problem: single-label, multi-label or regression.

    Raises:
        DataError: The source has no such model, or loading it would run its code.
        MainMemoryTooSmall: This machine has too little memory for the model.
    """
    head_options = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "ignore_mismatched_sizes": True,
        **({"problem_type": _PROBLEM_TYPE[problem]} if problem in _PROBLEM_TYPE else {}),
    }
    loaded = _load(transformers.AutoModelForSequenceClassification, spec, seed, head_options)
    if not list(_padded_position_tables(loaded.model)):
        loaded.config.pad_token_id = padding
    return loaded


def load_tagger(spec: ModelSpec, names: Sequence[str], seed: int) -> Pretrained:
    """Load an encoder with a head that tags tokens; errors as for `load_classifier`.

    Args:
        spec: The section `model`, which names the source.
        names: Names of the tags, by number.
        seed: The run's seed.
    """
    head_options = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "ignore_mismatched_sizes": True,
    }
    return _load(transformers.AutoModelForTokenClassification, spec, seed, head_options)


def load_seq2seq(spec: ModelSpec, seed: int) -> Pretrained:
    """Load an encoder-decoder with its language-modeling head; errors as for `load_classifier`."""
    return _load(transformers.AutoModelForSeq2SeqLM, spec, seed, {})


def load_encoder(spec: ModelSpec) -> Pretrained:
    """Load an encoder or decoder without a head; errors as for `load_classifier`."""
    loaded = _load(transformers.AutoModel, spec, 0, {})
    if loaded.config.is_encoder_decoder:
        raise DataError(
            f"expected an encoder such as BERT, or a decoder such as Qwen, in {spec.source!r}, got "
            f"an encoder-decoder of type {loaded.config.model_type!r}; {_OTHER_MODEL_OR_TASK}"
        )
    return loaded


def freeze_pooler(loaded: Pretrained) -> Pretrained:
    """Freeze the pooler of an encoder, which embeddings do not use and a checkpoint may lack."""
    pooler_names = {name for name, _ in loaded.model.named_parameters() if "pooler." in name}
    for name, parameter in loaded.model.named_parameters():
        parameter.requires_grad_(name not in pooler_names)
    drawn_parameters = {
        name: size for name, size in loaded.drawn_parameters.items() if name not in pooler_names
    }
    return replace(loaded, drawn_parameters=drawn_parameters)


def load_masked_lm(spec: ModelSpec) -> Pretrained:
    """Load an encoder with its masked-language-modeling head; errors as for `load_classifier`."""
    return _load(transformers.AutoModelForMaskedLM, spec, 0, {})


def load_text_model(spec: ModelSpec) -> Pretrained:
    """Load a language model: an encoder-decoder, an encoder with its masked-language-modeling head,
    or else a decoder; errors as for `load_classifier`.
    """
    assert spec.source is not None
    location, keywords = locate(spec.source)
    if "gguf_file" not in keywords:
        try:
            config = json.loads((Path(location) / "config.json").read_bytes())
        except (OSError, ValueError):
            config = {}
        if isinstance(config, dict) and config.get("is_encoder_decoder"):
            return load_seq2seq(spec, 0)
        architectures = config.get("architectures") if isinstance(config, dict) else None
        if any(str(architecture).endswith("ForMaskedLM") for architecture in architectures or []):
            return load_masked_lm(spec)
    return load_causal_lm(spec, 0)


def load_causal_lm(spec: ModelSpec, seed: int) -> Pretrained:
    """Load a decoder with its language-modeling head; errors as for `load_classifier`.

    Args:
        spec: The section `model`, which names the source.
        seed: Seed of a head that the source lacks. For an adapter the seed is always 0, so the
            adapter's base can be loaded again without the run's seed.
    """
    return _check_decoder(_load(transformers.AutoModelForCausalLM, spec, seed, {}), spec)


def _check_decoder(loaded: Pretrained, spec: ModelSpec) -> Pretrained:
    is_low_precision = spec.base_dtype != "float32"
    with stored_dtypes.release_pages_after_use(loaded.model) if is_low_precision else nullcontext():
        check_causality(loaded.model, loaded.vocabulary, loaded.forward_options)
    return loaded


def refuse_drawn_weights(loaded: Pretrained, source: str, remedy: str) -> None:
    """Refuse a model with drawn weights, which are untrained.

    Raises:
        DataError: Some weights were drawn; the message ends with `remedy`.
    """
    if loaded.drawn_parameters:
        raise DataError(
            f"the checkpoint {source!r} lacks {min(loaded.drawn_parameters)}, without which its "
            f"training has no effect; {remedy}"
        )


def create_causal_lm(run: RunSpec, vocabulary: int, end_token: int) -> Pretrained:
    """Create a decoder from `model.config`, with weights from `draw_initial_weights`.

    Args:
        run: The run spec. Its `model.config` has model_type and sizes; vocab_size is optional.
        vocabulary: Number of tokens of the tokenizer.
        end_token: The token that ends a text.

    Raises:
        DataError: transformers has no such model, or cannot create it with these sizes.
        MainMemoryTooSmall: This machine has too little memory for the model.
    """
    spec = run.model
    assert spec is not None
    assert spec.config is not None
    silence_libraries()
    config_keys: dict[str, Any]
    config_keys = {
        "vocab_size": vocabulary,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
    } | spec.config
    if config_keys["vocab_size"] < vocabulary:
        raise DataError(
            f"expected model.config.vocab_size of at least {vocabulary}, the tokenizer's, "
            f"got {config_keys['vocab_size']}: --set model.config.vocab_size={vocabulary}"
        )
    model_type = str(config_keys.pop("model_type"))
    try:
        _check_config_keys(spec.config, transformers.AutoConfig.for_model(model_type), model_type)
        config = transformers.AutoConfig.for_model(model_type, **config_keys)
        make = partial(
            transformers.AutoModelForCausalLM.from_config,
            config,
            attn_implementation=spec.attention,
            dtype=getattr(torch, spec.dtype),
            trust_remote_code=False,
        )
        with torch.device("meta"):
            elements = sum(parameter.numel() for parameter in make().parameters())
        main_memory.check_bytes_fit(4 * elements * _parameter_copies(run))
        model = draw_initial_weights(make, run.seed)
    except (DataError, MainMemoryTooSmall):
        raise
    except Exception as error:  # (sizes that do not match raise errors of many kinds)
        if describe_error(error) == NO_MEMORY:
            raise
        raise DataError(
            f"cannot create a {model_type} from model.config: {describe_error(error)}; "
            "check its sizes"
        ) from None
    return _check_decoder(_finish_loading(model, spec, {}), spec)


def _parameter_copies(run: RunSpec) -> int:
    """Return how many copies of a new model's parameters main memory holds at least.

    There are two copies of the initial values, and the replica with its moments. Device memory is
    checked elsewhere.
    """
    if run.is_capture:
        return 1
    # An inner phase has separate parameters and moments, and sends the parameters' change.
    per_replica = 0 if run.replicas is None else 2 + moment_count(run.optimizer)
    return 2 + state_arrays(run.step_optimizer) + per_replica


def check_length(model: torch.nn.Module, max_tokens: int) -> None:
    """Refuse a `data.max_tokens` above the number of the model's positions.

    Raises:
        DataError: Samples may be longer than the model allows.
    """
    max_positions = max_sample_tokens(model)
    if max_tokens > max_positions:
        raise DataError(
            f"expected data.max_tokens of at most {max_positions}, the model's positions, "
            f"got {max_tokens}; --set data.max_tokens={max_positions}"
        )


def max_sample_tokens(model: torch.nn.Module) -> float:
    """Return the most tokens that a sample may have; infinity if the model has no limit.

    RoBERTa and its successors number positions from `padding_idx + 1`, so earlier rows are unused.
    """
    config_positions = getattr(model.config, "max_position_embeddings", None)
    limits = [math.inf if config_positions is None else int(config_positions)]
    limits += [row_count - unused_rows for row_count, unused_rows in _padded_position_tables(model)]
    return min(limits)


def _padded_position_tables(model: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the numbers of rows and of unused rows of each position table with a padding index."""
    for module in model.modules():
        table = getattr(getattr(module, "position_embeddings", None), "weight", None)
        padding = getattr(module, "padding_idx", None)
        if table is not None and padding is not None:
            yield len(table), padding + 1


def initial_values(module: torch.nn.Module, blocks: Sequence[Block]) -> list[Array]:
    """Return a copy of the blocks' parameters, one flat array per block."""
    parameters = dict(module.named_parameters())
    return [
        np.concatenate(
            [parameters[tensor.name].detach().numpy().reshape(-1) for tensor in block.tensors]
        )
        for block in blocks
    ]


def locate(source: str, *, tokenizer: bool = False) -> tuple[str, dict[str, Any]]:
    """Return the location and keywords with which `from_pretrained` loads a run spec's source.

    Args:
        source: Source of a model, or of a tokenizer.
        tokenizer: Whether to locate a tokenizer instead of a model.

    Raises:
        DataError: There is no such source.
    """
    location = (sources.tokenizer_source if tokenizer else sources.model_source)(source)
    keywords: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if location.endswith(sources.GGUF):
        return str(Path(location).parent), keywords | {"gguf_file": Path(location).name}
    keywords["local_files_only"] = os.path.isdir(location) or not _hub_answers(location)  # noqa: PTH112
    return location, keywords


def _hub_answers(name: str) -> bool:
    """Return whether the hub accepts a connection within `_HUB_TIMEOUT_S`.

    The hub's own library retries for a minute. Behind a proxy, the result is True.

    Raises:
        DataError: The hub does not answer, and the model is not in the cache.
    """
    address = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    elif urllib.request.getproxies().get(address.scheme):
        return True
    else:
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            with dial.connect_blocking(address.hostname or "", port, _HUB_TIMEOUT_S):
                return True
        except DialError as error:
            reason = error.observation
    if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        raise DataError(
            f"cannot fetch the model {name!r}: the hub at {address.hostname} does not answer "
            f"({reason}); give a model's directory: --set model.source=DIR"
        )
    return False


_UNKNOWN_TYPE: Final = "Unrecognized configuration class"
_OTHER_MODEL_OR_TASK: Final = (
    "take another model: --set model.source=DIR, or another task: --set task=NAME"
)
_EXPECTED_MODELS: Final = {
    "AutoModelForSeq2SeqLM": "an encoder-decoder such as T5 or BART",
    "AutoModelForMaskedLM": "an encoder such as BERT or RoBERTa",
    "AutoModelForCausalLM": "a decoder such as Llama or Qwen",
    "AutoModelForSequenceClassification": "a model with a head for classes, such as BERT",
    "AutoModelForTokenClassification": "a model with a head for tags, such as BERT",
}
"""The model that each class of transformers loads, for error messages."""


def load_error(noun: str, source: str, error: Exception) -> DataError:
    """Return a one-line error for a source that cannot be loaded: a model or a tokenizer."""
    return DataError(f"cannot load the {noun} {source!r}: {describe_error(error)}")


def silence_libraries() -> None:
    """Turn off the libraries' warnings and progress bars, which do not belong in a worker's log."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # otherwise it warns about forks
    # A user cannot act on deprecations between these libraries.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    disk_weights.hide_progress_bar()


def _load(
    auto_class: Any, spec: ModelSpec, seed: int, head_options: Mapping[str, Any]
) -> Pretrained:
    assert spec.source is not None
    silence_libraries()
    location, keywords = locate(spec.source)
    is_low_precision, dtype = spec.base_dtype != "float32", torch.float32
    if "gguf_file" not in keywords:
        keywords["use_safetensors"] = True  # pickles could run code
        _refuse_foreign_quantization(location, spec.source)
        main_memory.check_model_fits(location, base_dtype=spec.base_dtype)
        dtype = stored_dtypes.dtype_of(location) if is_low_precision else dtype
    progress.report(f"reading the model {spec.source!r}")
    model, report = _load_pretrained(
        auto_class, spec, location, dtype, {**head_options, **keywords}
    )
    drawn_names = {*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}
    if is_low_precision and expert_layers(model):
        # Other implementations need all experts of a layer in one float32 stack.
        model.set_experts_implementation("eager")
    if dtype != torch.float32 and not stored_dtypes.convert_except_base(model, drawn_names):
        model, report = _load_pretrained(
            auto_class, spec, location, torch.float32, {**head_options, **keywords}
        )
    if "gguf_file" in keywords:
        # transformers has dequantized the weights to float32, but still marks them as quantized.
        model.hf_quantizer, model.is_quantized = None, False
        vars(model).pop("quantization_method", None)
        vars(model.config).pop("quantization_config", None)
    _refuse_missing_weights(model, drawn_names, spec.source)
    _draw_parameters(model, drawn_names, seed)
    drawn_sizes = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if name in drawn_names
    }
    return _finish_loading(model, spec, drawn_sizes)


def _refuse_foreign_quantization(location: str, source: str) -> None:
    """Refuse quantized checkpoints that only a library's kernels can dequantize.

    The bits of these kernels' results depend on the device.

    Raises:
        DataError: The checkpoint is quantized in such a way.
    """
    try:
        config = json.loads((Path(location) / "config.json").read_bytes())
        method = str(config["quantization_config"]["quant_method"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if method.partition("_")[0] in _UNSUPPORTED_QUANTIZERS:
        raise DataError(
            f"the checkpoint {source!r} is quantized with {method}, which only its own kernels can "
            "read; use the model that it was quantized from, and set model.base_dtype to nf4 (or "
            "int4, int8) to store it in as few bits"
        )


def _load_pretrained(
    auto_class: Any, spec: ModelSpec, location: str, dtype: torch.dtype, keywords: Mapping[str, Any]
) -> tuple[Any, Any]:
    assert spec.source is not None
    is_low_precision = spec.base_dtype != "float32"
    is_gguf = "gguf_file" in keywords
    try:
        if is_gguf:
            labels = {key: keywords[key] for key in ("id2label", "label2id") if key in keywords}
            config = gguf_config.read_config(location, keywords["gguf_file"], labels)
            keywords = {
                keyword: value for keyword, value in keywords.items() if keyword not in labels
            } | {"config": config}
        with disk_weights.weights_on_disk(Path(location)) if is_low_precision else nullcontext():
            return tuple(
                auto_class.from_pretrained(
                    location,
                    dtype=dtype,
                    attn_implementation=spec.attention,
                    output_loading_info=True,
                    **keywords,
                )
            )
    except SamestepError:
        raise
    except Exception as error:  # (a truncated file raises errors of many kinds)
        if describe_error(error) == NO_MEMORY:
            raise
        if _UNKNOWN_TYPE in str(error) and auto_class.__name__ in _EXPECTED_MODELS:
            raise DataError(
                f"expected {_EXPECTED_MODELS[auto_class.__name__]} in {spec.source!r}, got a model "
                f"of type {_model_type(location)!r}; {_OTHER_MODEL_OR_TASK}"
            ) from None
        raise load_error("model", spec.source, error) from None


def _model_type(location: str) -> str:
    try:
        return str(json.loads((Path(location) / "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "unknown"


def _refuse_missing_weights(model: Any, drawn_names: Collection[str], source: str) -> None:
    """Refuse a checkpoint that lacks weights of the model's body; a head and a pooler may be new.

    Raises:
        DataError: The checkpoint lacks such weights, or has them in other shapes.
    """
    body_prefix = getattr(model, "base_model_prefix", "") + "."
    missing_names = sorted(
        name
        for name, _ in model.named_parameters()
        if name in drawn_names and name.startswith(body_prefix) and ".pooler." not in name
    )
    if missing_names:
        raise DataError(
            f"the checkpoint {source!r} lacks {len(missing_names)} weights that its config.json "
            f"asks for (such as {missing_names[0]!r}), or has them in other shapes; use weights "
            "and config.json of the same model"
        )


def _finish_loading(model: Any, spec: ModelSpec, drawn_parameters: Mapping[str, int]) -> Pretrained:
    if getattr(model.config, "output_router_logits", False):
        raise DataError(
            "the model's configuration asks for a balancing loss of its experts "
            "(output_router_logits), which does not add up over samples; set it to false"
        )
    if spec.gradient_checkpointing:
        try:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise DataError(
                "expected a model that supports gradient checkpointing, got: "
                f"{describe_error(error)}; --set model.gradient_checkpointing=false"
            ) from None
    # Unsaved buffers are not digested: their last bits depend on the machine.
    is_low_precision = spec.base_dtype != "float32"
    arrays = stored_dtypes.Float32View(model.state_dict(), releases_pages=is_low_precision)
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    options = {"use_cache": False} if has_cache else {}
    return Pretrained(model, model.config, digest_arrays(arrays), options, drawn_parameters)


def _check_config_keys(config_keys: Mapping[str, Any], config: Any, model_type: str) -> None:
    """Refuse unknown keys: transformers ignores a misspelled size and uses the default."""
    for key in config_keys:
        if not hasattr(config, key):
            close_names = difflib.get_close_matches(key, vars(config), n=1)
            hint = f"; did you mean {close_names[0]!r}?" if close_names else ""
            raise DataError(f"unknown key 'model.config.{key}' of {model_type}{hint}")


def _draw_parameters(model: Any, names: Collection[str], seed: int) -> None:
    """Draw these parameters: matrices from a normal distribution, whose deviation is configured.

    Parameters that transformers sets to zeros or ones are unchanged. Other vectors become zeros if
    they are biases, else ones.
    """
    deviation = getattr(model.config, "initializer_range", None) or _DEFAULT_DEVIATION
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in names or _is_constant(parameter):
                continue
            if parameter.dim() > 1:
                key = draws.derive_key(seed, name)
                fill(parameter, draws.uniforms_with_deviation(key, parameter.numel(), deviation))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _is_constant(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is all zeros or all ones; fresh memory may have any values."""
    first_value = float(parameter.reshape(-1)[0]) if parameter.numel() else 0.0
    return first_value in {0.0, 1.0} and bool((parameter == first_value).all())


def fill(parameter: torch.Tensor, values: Array) -> None:
    """Copy flat values into a parameter."""
    parameter.copy_(torch.from_numpy(values.reshape(tuple(parameter.shape))))
