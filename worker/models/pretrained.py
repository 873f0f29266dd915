"""Loads Hugging Face models, or starts them from a configuration, with the same bits everywhere.

What a checkpoint lacks (a new head) is drawn by `backends.base.draws`, and so are the weights of a
new model, since transformers draws them with torch's generator. Code that comes with a model is
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
from backends.base.frozen_base import expert_layers
from backends.base.interface import Array
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

_OTHERS_NARROW_FORMS: Final = ("bitsandbytes", "gptq", "awq")
_DEVIATION: Final = 0.02
"""Of new weights, where the model's configuration names none (BERT's own)."""
_PROBLEM_TYPE: Final[Mapping[str, str]] = {
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
"""What a saved model's configuration says; of single labels nothing."""
_HUB_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model ready to train, in float32, and its configuration.

    Attributes:
        model: All of it.
        config: Its configuration.
        weights_digest: Of all weights, those that were drawn included.
        forward_options: Go along with every forward: a cache for generating is of no use here.
        added_tokens: The tokens that the run adds (`worker.models.added_tokens`).
        drawn: The parameters that the source lacks, which were drawn, with their elements; none
            of a model that was started from its configuration.
    """

    model: torch.nn.Module
    config: Any
    weights_digest: str
    forward_options: Mapping[str, Any]
    drawn: Mapping[str, int] = field(default_factory=dict)
    added_tokens: tuple[int, ...] = ()

    @property
    def vocabulary(self) -> int:
        """How many tokens it knows: rows of its embedding."""
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
    """A model with a head for these labels; the head is drawn where the source has none.

    Args:
        spec: Names the source.
        labels: In the order of their numbers.
        padding: The tokenizer's padding token: decoders look for the last token before it.
        seed: The run's.
        problem: Which kind of labels.

    Raises:
        DataError: The source has no such model, or it cannot be loaded without running its code.
        MainMemoryTooSmall: This machine has no room for it.
    """
    labeled = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "ignore_mismatched_sizes": True,
        **({"problem_type": _PROBLEM_TYPE[problem]} if problem in _PROBLEM_TYPE else {}),
    }
    loaded = _load(transformers.AutoModelForSequenceClassification, spec, seed, labeled)
    if not list(_rows_before_positions(loaded.model)):
        loaded.config.pad_token_id = padding
    return loaded


def load_tagger(spec: ModelSpec, names: Sequence[str], seed: int) -> Pretrained:
    """An encoder with a head for tags of tokens; errors as of `load_classifier`.

    Args:
        spec: Names the source.
        names: Of the tags, in the order of their numbers.
        seed: The run's.
    """
    labeled = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "ignore_mismatched_sizes": True,
    }
    return _load(transformers.AutoModelForTokenClassification, spec, seed, labeled)


def load_seq2seq(spec: ModelSpec, seed: int) -> Pretrained:
    """An encoder-decoder with its language-modeling head; errors as of `load_classifier`."""
    return _load(transformers.AutoModelForSeq2SeqLM, spec, seed, {})


def load_encoder(spec: ModelSpec) -> Pretrained:
    """A model without a head, of encoders and decoders alike; errors as of `load_classifier`."""
    loaded = _load(transformers.AutoModel, spec, 0, {})
    if loaded.config.is_encoder_decoder:
        raise DataError(
            f"expected an encoder such as BERT, or a decoder such as Qwen, in {spec.source!r}, got "
            f"an encoder-decoder of type {loaded.config.model_type!r}; {_ANOTHER}"
        )
    return loaded


def without_pooler(loaded: Pretrained) -> Pretrained:
    """Freeze the head that some encoders put on their first token, which embeddings do not read; it
    may lack in a checkpoint."""
    of_pooler = {name for name, _ in loaded.model.named_parameters() if "pooler." in name}
    for name, parameter in loaded.model.named_parameters():
        parameter.requires_grad_(name not in of_pooler)
    drawn = {name: size for name, size in loaded.drawn.items() if name not in of_pooler}
    return replace(loaded, drawn=drawn)


def load_masked_lm(spec: ModelSpec) -> Pretrained:
    """An encoder with its head for masked tokens; errors as of `load_classifier`."""
    return _load(transformers.AutoModelForMaskedLM, spec, 0, {})


def load_text_model(spec: ModelSpec) -> Pretrained:
    """A model of text without labels: an encoder-decoder, an encoder with its head for masked
    tokens, or else a decoder."""
    assert spec.source is not None
    place, keywords = locate(spec.source)
    if "gguf_file" not in keywords:
        try:
            config = json.loads((Path(place) / "config.json").read_bytes())
        except (OSError, ValueError):
            config = {}
        if isinstance(config, dict) and config.get("is_encoder_decoder"):
            return load_seq2seq(spec, 0)
        kinds = config.get("architectures") if isinstance(config, dict) else None
        if any(str(kind).endswith("ForMaskedLM") for kind in kinds or []):
            return load_masked_lm(spec)
    return load_causal_lm(spec, 0)


def load_causal_lm(spec: ModelSpec, seed: int) -> Pretrained:
    """A decoder with its language-modelling head; errors as of `load_classifier`.

    Args:
        spec: Names the source.
        seed: Of a head that the source lacks. Beside an adapter it is 0, whatever the run's: so
            the adapter finds its base again.
    """
    return _decoder(_load(transformers.AutoModelForCausalLM, spec, seed, {}), spec)


def _decoder(loaded: Pretrained, spec: ModelSpec) -> Pretrained:
    is_narrow = spec.base_dtype != "float32"
    with stored_dtypes.pages_released_after_use(loaded.model) if is_narrow else nullcontext():
        check_causality(loaded.model, loaded.vocabulary, loaded.forward_options)
    return loaded


def refuse_drawn_weights(loaded: Pretrained, source: str, remedy: str) -> None:
    """See that all weights came from the source: what is drawn has learned nothing.

    Raises:
        DataError: Some were drawn; what to do.
    """
    if loaded.drawn:
        raise DataError(
            f"the checkpoint {source!r} lacks {min(loaded.drawn)}, without which its training has "
            f"no effect; {remedy}"
        )


def start_causal_lm(run: RunSpec, vocabulary: int, end: int) -> Pretrained:
    """A new decoder of `model.config`, its weights as `draw_initial_weights` has them.

    Args:
        run: Its model's config names model_type and sizes; vocab_size may be left out.
        vocabulary: How many tokens there are.
        end: The token that ends a text.

    Raises:
        DataError: transformers has no such model, or cannot make it with these sizes.
        MainMemoryTooSmall: This machine has no room for it.
    """
    spec = run.model
    assert spec is not None
    assert spec.config is not None
    quiet()
    given: dict[str, Any]
    given = {"vocab_size": vocabulary, "bos_token_id": end, "eos_token_id": end} | spec.config
    if given["vocab_size"] < vocabulary:
        raise DataError(
            f"expected model.config.vocab_size of at least {vocabulary}, the tokenizer's, "
            f"got {given['vocab_size']}: --set model.config.vocab_size={vocabulary}"
        )
    model_type = str(given.pop("model_type"))
    try:
        _check_keys(spec.config, transformers.AutoConfig.for_model(model_type), model_type)
        config = transformers.AutoConfig.for_model(model_type, **given)
        make = partial(
            transformers.AutoModelForCausalLM.from_config,
            config,
            attn_implementation=spec.attention,
            dtype=getattr(torch, spec.dtype),
            trust_remote_code=False,
        )
        with torch.device("meta"):
            elements = sum(each.numel() for each in make().parameters())
        main_memory.check_bytes_fit(4 * elements * _copies(run))
        model = draw_initial_weights(make, run.seed)
    except (DataError, MainMemoryTooSmall):
        raise
    except Exception as error:  # (sizes that do not fit raise errors of all kinds)
        if describe_error(error) == NO_MEMORY:
            raise
        raise DataError(
            f"cannot make a {model_type} from model.config: {describe_error(error)}; "
            "check its sizes"
        ) from None
    return _decoder(_ready(model, spec, {}), spec)


def _copies(run: RunSpec) -> int:
    """How many times main memory holds the parameters of a new model, at the least.

    What is trained is there as it began, twice, and in the replica with its moments; how much more
    the device takes of it is the device's to say.
    """
    if run.captures:
        return 1
    # A stretch has parameters and moments of its own, and gives their difference away.
    alone = 0 if run.replicas is None else 2 + moment_count(run.optimizer)
    return 2 + state_arrays(run.update) + alone


def check_length(model: torch.nn.Module, max_tokens: int) -> None:
    """Refuse samples longer than the model has positions; their length is `data.max_tokens`.

    Raises:
        DataError: They are.
    """
    longest = positions(model)
    if max_tokens > longest:
        raise DataError(
            f"expected data.max_tokens of at most {longest}, the model's positions, "
            f"got {max_tokens}; --set data.max_tokens={longest}"
        )


def positions(model: torch.nn.Module) -> float:
    """Return the most tokens that a sample may have, infinity where the model sets no limit.

    RoBERTa and the models after it number positions from behind their padding token, so the first
    `padding_idx + 1` rows of their table stand for no token.
    """
    longest = getattr(model.config, "max_position_embeddings", None)
    limits = [math.inf if longest is None else int(longest)]
    limits += [rows - unused for rows, unused in _rows_before_positions(model)]
    return min(limits)


def _rows_before_positions(model: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the size of each table of positions that begin behind padding, and its unused rows."""
    for module in model.modules():
        table = getattr(getattr(module, "position_embeddings", None), "weight", None)
        padding = getattr(module, "padding_idx", None)
        if table is not None and padding is not None:
            yield len(table), padding + 1


def initial_values(module: torch.nn.Module, blocks: Sequence[Block]) -> list[Array]:
    """The blocks' tensors as they are in the module, copied: one flat array per block."""
    parameters = dict(module.named_parameters())
    return [
        np.concatenate([parameters[t.name].detach().numpy().reshape(-1) for t in block.tensors])
        for block in blocks
    ]


def locate(source: str, *, tokenizer: bool = False) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` is given for a run spec's source: a place, and keywords.

    Args:
        source: A model's, or a tokenizer's own.
        tokenizer: What is looked for is a tokenizer, beside a model or alone.

    Raises:
        DataError: There is no such source.
    """
    found = (sources.tokenizer_source if tokenizer else sources.model_source)(source)
    keywords: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if found.endswith(sources.GGUF):
        return str(Path(found).parent), keywords | {"gguf_file": Path(found).name}
    keywords["local_files_only"] = os.path.isdir(found) or not _hub_answers(found)  # noqa: PTH112
    return found, keywords


def _hub_answers(name: str) -> bool:
    """Asked once and shortly: the hub's own library tries for a minute, and says so line by line.

    Raises:
        DataError: It does not answer, and nothing of that name was fetched before.
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
_ANOTHER: Final = "take another model: --set model.source=DIR, or another task: --set task=NAME"
_TAKEN: Final = {
    "AutoModelForSeq2SeqLM": "an encoder-decoder such as T5 or BART",
    "AutoModelForMaskedLM": "an encoder such as BERT or RoBERTa",
    "AutoModelForCausalLM": "a decoder such as Llama or Qwen",
    "AutoModelForSequenceClassification": "a model with a head for classes, such as BERT",
    "AutoModelForTokenClassification": "a model with a head for tags, such as BERT",
}
"""What each of transformers' classes takes, for whoever gives it a model of another kind."""


def refusal(what: str, source: str, error: Exception) -> DataError:
    """The error that something cannot be loaded, in one line."""
    return DataError(f"cannot load the {what} {source!r}: {describe_error(error)}")


def quiet() -> None:
    """A worker's log is its own; and a fork after tokenizing is none of the tokenizer's."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # What one of these libraries tells the other is nothing a user can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    disk_weights.hide_progress_bar()


def _load(kind: Any, spec: ModelSpec, seed: int, extra: Mapping[str, Any]) -> Pretrained:
    assert spec.source is not None
    quiet()
    place, keywords = locate(spec.source)
    narrow, dtype = spec.base_dtype != "float32", torch.float32
    if "gguf_file" not in keywords:
        keywords["use_safetensors"] = True  # never pickles
        _refuse_others_narrow_forms(place, spec.source)
        main_memory.check_model_fits(place, base_dtype=spec.base_dtype)
        dtype = stored_dtypes.dtype_of(place) if narrow else dtype
    progress.say(f"reading the model {spec.source!r}")
    model, report = _read(kind, spec, place, dtype, {**extra, **keywords})
    drawn = {*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}
    if narrow and expert_layers(model):
        model.set_experts_implementation("eager")  # others compute with a whole stack
    if dtype != torch.float32 and not stored_dtypes.widen_but_the_base(model, drawn):
        model, report = _read(kind, spec, place, torch.float32, {**extra, **keywords})
    if "gguf_file" in keywords:
        # Its weights are plain float32 now.
        model.hf_quantizer, model.is_quantized = None, False
        vars(model).pop("quantization_method", None)
        vars(model.config).pop("quantization_config", None)
    _refuse_what_is_not_there(model, drawn, spec.source)
    _draw(model, drawn, seed)
    sizes = {name: each.numel() for name, each in model.named_parameters() if name in drawn}
    return _ready(model, spec, sizes)


def _refuse_others_narrow_forms(place: str, source: str) -> None:
    """What only a library's own kernels widen has other bits on each device.

    Raises:
        DataError: The checkpoint is so.
    """
    try:
        config = json.loads((Path(place) / "config.json").read_bytes())
        method = str(config["quantization_config"]["quant_method"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if method.partition("_")[0] in _OTHERS_NARROW_FORMS:
        raise DataError(
            f"the checkpoint {source!r} is stored by {method}, which only its own kernels can "
            "read; use the model that it was quantized from, which model.base_dtype nf4 (or int4, "
            "int8) stores in as few bits"
        )


def _read(
    kind: Any, spec: ModelSpec, place: str, dtype: torch.dtype, keywords: Mapping[str, Any]
) -> tuple[Any, Any]:
    assert spec.source is not None
    narrow = spec.base_dtype != "float32"
    of_gguf = "gguf_file" in keywords
    try:
        if of_gguf:
            labels = {key: keywords[key] for key in ("id2label", "label2id") if key in keywords}
            config = gguf_config.read_config(place, keywords["gguf_file"], labels)
            keywords = {k: v for k, v in keywords.items() if k not in labels} | {"config": config}
        with disk_weights.weights_on_disk(Path(place)) if narrow else nullcontext():
            return tuple(
                kind.from_pretrained(
                    place,
                    dtype=dtype,
                    attn_implementation=spec.attention,
                    output_loading_info=True,
                    **keywords,
                )
            )
    except SamestepError:
        raise
    except Exception as error:  # (half a file raises errors of all kinds)
        if describe_error(error) == NO_MEMORY:
            raise
        if _UNKNOWN_TYPE in str(error) and kind.__name__ in _TAKEN:
            raise DataError(
                f"expected {_TAKEN[kind.__name__]} in {spec.source!r}, got a model of type "
                f"{_model_type(place)!r}; {_ANOTHER}"
            ) from None
        raise refusal("model", spec.source, error) from None


def _model_type(place: str) -> str:
    try:
        return str(json.loads((Path(place) / "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "unknown"


def _refuse_what_is_not_there(model: Any, drawn: Collection[str], source: str) -> None:
    """A head and a pooler may be new; a body whose layers are drawn is another model.

    Raises:
        DataError: The checkpoint lacks some of it, or has it in other shapes.
    """
    body = getattr(model, "base_model_prefix", "") + "."
    lacking = sorted(
        name
        for name, _ in model.named_parameters()
        if name in drawn and name.startswith(body) and ".pooler." not in name
    )
    if lacking:
        raise DataError(
            f"the checkpoint {source!r} lacks {len(lacking)} weights that its config.json asks for "
            f"(such as {lacking[0]!r}), or has them in other shapes; get the files of one model"
        )


def _ready(model: Any, spec: ModelSpec, drawn: Mapping[str, int]) -> Pretrained:
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
    # Not buffers that are computed anew at each start: their last bits depend on the machine.
    is_narrow = spec.base_dtype != "float32"
    arrays = stored_dtypes.Float32View(model.state_dict(), releases=is_narrow)
    cached = "use_cache" in inspect.signature(model.forward).parameters
    options = {"use_cache": False} if cached else {}
    return Pretrained(model, model.config, digest_arrays(arrays), options, drawn)


def _check_keys(given: Mapping[str, Any], config: Any, model_type: str) -> None:
    """Else transformers takes a misspelt size for one it does not know, and keeps the default."""
    for key in given:
        if not hasattr(config, key):
            near = difflib.get_close_matches(key, vars(config), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"unknown key 'model.config.{key}' of {model_type}{hint}")


def _draw(model: Any, names: Collection[str], seed: int) -> None:
    """Draw these parameters: matrices by the configuration's deviation, about zero.

    What transformers sets to one value keeps it: norms are ones, biases zeros.
    """
    deviation = getattr(model.config, "initializer_range", None) or _DEVIATION
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in names or _constant(parameter):
                continue
            if parameter.dim() > 1:
                key = draws.key_of(seed, name)
                fill(parameter, draws.with_deviation(key, parameter.numel(), deviation))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _constant(parameter: torch.Tensor) -> bool:
    """Whether it holds one plain value, as no random draw does; fresh memory might hold any."""
    first = float(parameter.reshape(-1)[0]) if parameter.numel() else 0.0
    return first in {0.0, 1.0} and bool((parameter == first).all())


def fill(parameter: torch.Tensor, values: Array) -> None:
    """Copy flat values in."""
    parameter.copy_(torch.from_numpy(values.reshape(tuple(parameter.shape))))
