"""Loads a Hugging Face classifier and its tokenizer so that every machine has the same bits.

What the checkpoint lacks (a new head) is drawn by `backends.draws`, since transformers draws it
with torch's generator. Code that comes with a model is never run.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import transformers
from transformers.utils import logging as transformers_logging

from backends import draws
from protocol.errors import DataError
from protocol.run_spec import LoraSpec, ModelSpec
from worker import sources
from worker.tasks.digest import digest_arrays

_DEVIATION: Final = 0.02
"""Of new weights, where the model's configuration names none (BERT's own)."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A classifier ready to train, with its configuration and tokenizer."""

    model: torch.nn.Module
    config: Any
    tokenizer: Any
    weights_digest: str


def load(spec: ModelSpec, labels: Sequence[str], seed: int) -> Pretrained:
    """Load model and tokenizer.

    Raises:
        DataError: The source has no such model, or it cannot be loaded without running its code.
    """
    _quiet()
    source = sources.model_source(spec.source)
    local = os.path.isdir(source)  # noqa: PTH112  (a hub name is no path)
    common = {"local_files_only": local, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, use_fast=True, **common)
        model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            source,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=spec.attention,
            id2label=dict(enumerate(labels)),
            label2id={label: number for number, label in enumerate(labels)},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **common,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        line = " ".join(str(error).split())[:300]
        raise DataError(f"cannot load the model {spec.source!r}: {line}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    mismatched = (entry[0] for entry in report["mismatched_keys"])
    _draw_missing(model, {*report["missing_keys"], *mismatched}, seed)
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    return Pretrained(model, model.config, tokenizer, digest_arrays(arrays))


def add_lora(pretrained: Pretrained, spec: LoraSpec, seed: int) -> torch.nn.Module:
    """Freeze the model and put low-rank matrices beside its targets; the head is trained too.

    Raises:
        DataError: A target is not in the model.
    """
    import peft  # noqa: PLC0415  (full fine-tuning does without)

    config = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=spec.r,
        lora_alpha=_whole(spec.alpha),  # type: ignore[arg-type]  # fractions work too
        lora_dropout=spec.dropout,
        target_modules=list(spec.targets),
        modules_to_save=head_modules(pretrained.model),
    )
    try:
        module: torch.nn.Module = peft.get_peft_model(pretrained.model, config)
    except ValueError as error:
        line = " ".join(str(error).split())[:300]
        raise DataError(f"cannot add LoRA to {', '.join(spec.targets)}: {line}") from None
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_A." in name:  # as kaiming_uniform_ with a = sqrt(5), peft's own rule
                _fill(parameter, draws.symmetric(
                    draws.key_of(seed, name), parameter.numel(), 1 / math.sqrt(parameter.shape[1])
                ))  # fmt: skip
            elif ".lora_B." in name:
                parameter.zero_()
    return module


def head_modules(model: torch.nn.Module) -> list[str]:
    """Names of the parts around the encoder that have parameters: the classification head."""
    encoder = getattr(model, "base_model_prefix", "")
    return [
        name
        for name, child in model.named_children()
        if name != encoder and any(True for _ in child.parameters())
    ]


def adapter_config(spec: LoraSpec, source: str, modules_to_save: Iterable[str]) -> dict[str, Any]:
    """What `PeftModel.from_pretrained` reads, in the keys that every version of peft knows."""
    return {
        "base_model_name_or_path": source,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _whole(spec.alpha),
        "lora_dropout": spec.dropout,
        "modules_to_save": list(modules_to_save),
        "peft_type": "LORA",
        "r": spec.r,
        "target_modules": list(spec.targets),
        "task_type": "SEQ_CLS",
    }


def adapter_name(name: str) -> str:
    """A parameter's name in a peft module as the adapter's file has it."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def _draw_missing(model: torch.nn.Module, missing: set[str], seed: int) -> None:
    deviation = getattr(model.config, "initializer_range", None) or _DEVIATION
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in missing:
                continue
            if parameter.dim() > 1:
                key = draws.key_of(seed, name)
                _fill(parameter, draws.with_deviation(key, parameter.numel(), deviation))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _fill(parameter: torch.nn.Parameter, values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    parameter.copy_(torch.from_numpy(values.reshape(tuple(parameter.shape))))


def _whole(value: float) -> float:
    return int(value) if value.is_integer() else value


def _quiet() -> None:
    """A worker's log is its own; and a fork after tokenising is none of the tokenizer's."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # What one of these libraries tells the other is nothing a user can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
