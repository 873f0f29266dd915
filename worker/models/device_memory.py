"""Estimate what a run takes of a device's memory, before its model is loaded.

Sizes of weights come from the heads of the model's files. Activations are those of decoders as
Llama's, by sizes in config.json; of other models they are not estimated. docs/workers.md has the
formula, and tests compare it with a device's counters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError

from backends.base.narrowing import PART_ELEMENTS
from protocol.base.errors import DataError, DeviceOutOfMemory
from protocol.base.limits import byte_size
from protocol.spec.files.sources import model_source
from protocol.spec.run_spec import ModelRun
from protocol.spec.sections.model import LoraSpec, ModelSpec
from worker.models.lora import ATTENTION
from worker.models.main_memory import bytes_in, is_narrow, stored_tensors
from worker.models.vocabulary_loss import tokens_at_once

_FLOAT: Final = 4
_HALF: Final = 2
_SIZES: Final = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip
_KEPT: Final = (6.0, 3.0, 1.0)
"""Floats that a layer keeps of a token for backward: per hidden size, per intermediate size, and
per head and token of a sample where attention is eager."""
_KEPT_IN_HALF: Final = (4.5, 1.5, 1.5)
"""Likewise, in bfloat16 and float16."""
_KEPT_IF_TRAINED: Final = (4.0, 1.0)
"""Besides, by a layer that is trained in full: inputs of its products, per hidden and intermediate
size."""
_PASSING: Final = 5, 3
"""Floats of a token that the backward of one layer and the loss take for a while: per intermediate
size (half of it in half precision) and, for each token whose logits are computed at once, per token
of the vocabulary."""

_AFTER_HEAD: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Keys of models that change their logits, which then are computed all at once."""

_LESS_MEMORY: Final = (
    ("model.gradient_checkpointing", True), ("model.base_dtype", "bfloat16"),
    ("model.base_dtype", "int8"), ("model.base_dtype", "int4"), ("batch.microbatch", 1),
)  # fmt: skip

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a device.

    Attributes:
        weights: The base as it is stored, what is trained, and one weight that is widened.
        gradients: Sums of trained tensors along the tree, if one device computes a whole step.
        activations: Of one microbatch of the longest samples; 0 if not estimated.
        microbatch_gradients: Of one microbatch; they take the place of activations in backward.
    """

    weights: int
    gradients: int
    activations: int
    microbatch_gradients: int

    @property
    def certain(self) -> int:
        """Taken whatever the data is."""
        return self.weights + self.gradients + self.microbatch_gradients

    @property
    def total(self) -> int:
        """Taken at most."""
        return self.weights + self.gradients + max(self.activations, self.microbatch_gradients)

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients + self.microbatch_gradients,
            "activations up to": self.activations,
        }
        return ", ".join(f"{name} {byte_size(size)}" for name, size in parts.items() if size)


def estimate(run: ModelRun) -> DeviceMemory | None:
    """Estimate a run's device memory; None if the model's files do not say their sizes."""
    if run.model.source is None:
        return None
    try:
        directory = Path(model_source(run.model.source))
        shapes = {name: shape for name, shape, _ in stored_tensors(directory)}
        config = json.loads((directory / "config.json").read_bytes())
    except (DataError, OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None  # loading it reports the error, or is not from safetensors
    if not shapes:
        return None
    base_dtype, lora = run.model.base_dtype, run.lora
    config = config.get("text_config", config)
    weights = sum(bytes_in(name, shape, base_dtype) for name, shape in shapes.items())
    if lora is not None:
        weights += _converted(run.model, shapes, is_tied=bool(config.get("tie_word_embeddings")))
    adapted = {} if lora is None else _adapted(lora, shapes)
    trained = sum(lora.r * (s[0] + s[1]) for s in adapted.values()) if lora is not None else 0
    weights += _FLOAT * trained
    if lora is None:
        trained = sum(math.prod(shape) for shape in shapes.values())
    microbatches = -(-run.batch.samples // run.batch.microbatch)
    gradients = _FLOAT * trained * math.ceil(math.log2(microbatches))
    activations = _activations(run, config, shapes, adapted)
    return DeviceMemory(weights, gradients, activations, _FLOAT * trained)


def check_device_memory(run: ModelRun, device: str, memory_bytes: int) -> str:
    """Check that a run's model fits a device; return the estimate in one line, or an empty text.

    Args:
        run: The run.
        device: What errors call the device.
        memory_bytes: Its memory.

    Raises:
        DeviceOutOfMemory: Weights and gradients alone take more; says what to set.
    """
    needed = estimate(run)
    if needed is None:
        return ""
    if needed.certain > memory_bytes:
        raise DeviceOutOfMemory(
            device,
            f"expected a run that fits into {byte_size(memory_bytes)}, got one that takes "
            f"{byte_size(needed.total)} ({needed}); {_what_to_set(run, memory_bytes)}",
        )
    line = f"memory: about {byte_size(needed.total)} of {byte_size(memory_bytes)} ({needed})"
    if needed.total > memory_bytes:
        line += f"; if samples are as long as data.max_tokens, {_what_to_set(run, memory_bytes)}"
    return line


def _what_to_set(run: ModelRun, memory_bytes: int) -> str:
    """The first settings with which all of it fits, the cheapest first."""
    settings: dict[str, str] = {}
    for key, value in _LESS_MEMORY:
        section, _, name = key.partition(".")
        if run.lora is None and key == "model.base_dtype":
            continue
        part = getattr(run, section).model_copy(update={name: value})
        run = run.model_copy(update={section: part})
        settings[key] = str(value).lower()
        needed = estimate(run)
        if needed is not None and needed.total <= memory_bytes:
            shown = " ".join(f"--set {key}={value}" for key, value in settings.items())
            return f"{shown} takes {byte_size(needed.total)}"
    if run.lora is None:
        return "train with lora (--set lora.r=8), or on a larger device"
    return "use a larger device, or shard a float32 base: torchrun -m worker --shard"


def _converted(model: ModelSpec, shapes: Shapes, *, is_tied: bool) -> int:
    """Room for the largest frozen matrix, converted to the type in which it is computed with."""
    linear = {n: s for n, s in shapes.items() if len(s) == 2 and ("embed" not in n or is_tied)}
    narrow = [math.prod(s) for n, s in linear.items() if is_narrow(n, s, model.base_dtype)]
    wide = [math.prod(s) for n, s in linear.items() if not is_narrow(n, s, model.base_dtype)]
    largest = max(narrow, default=0)
    if model.precision == "float32":
        return _FLOAT * largest
    room = _HALF * max(wide, default=0)
    if model.precision != model.base_dtype:
        room += _HALF * largest + _FLOAT * min(largest, PART_ELEMENTS)
    return room


def _adapted(lora: LoraSpec, shapes: Shapes) -> Shapes:
    """The matrices that LoRA's stand beside."""
    matrices = {n.removesuffix(".weight"): s for n, s in shapes.items() if len(s) == 2}
    if lora.targets == "all-linear":
        return {n: s for n, s in matrices.items() if "embed" not in n and "head" not in n}
    leaves = {name.rpartition(".")[2] for name in matrices}
    usual = next((names for names in ATTENTION if leaves.issuperset(names)), ())
    targets = lora.targets or usual
    return {n: s for n, s in matrices.items() if n.rpartition(".")[2] in targets}


def _activations(run: ModelRun, config: Mapping[str, Any], shapes: Shapes, adapted: Shapes) -> int:
    if any(not isinstance(config.get(name), int) for name in _SIZES):
        return 0
    hidden, inner, layers, heads, vocabulary = (config[name] for name in _SIZES)
    length = run.data.max_tokens
    is_half = run.model.precision != "float32"
    per_hidden, per_inner, per_head = _KEPT_IN_HALF if is_half else _KEPT
    layer = per_hidden * hidden + per_inner * inner
    if run.model.attention == "eager":
        layer += per_head * heads * length
    if run.lora is None:
        layer += _KEPT_IF_TRAINED[0] * hidden + _KEPT_IF_TRAINED[1] * inner
    else:
        layer += run.lora.r * len(adapted) / layers
        if run.lora.dropout:  # its input as well, and the mask in bytes
            layer += 1.25 * sum(shape[1] for shape in adapted.values()) / layers
    kept = layers * hidden + layer if run.model.gradient_checkpointing else layers * layer
    tokens = run.batch.microbatch * length
    at_once = min(tokens, _tokens_at_once(run, config))
    passing = max(tokens * _PASSING[0] * inner / (1 + is_half), at_once * _PASSING[1] * vocabulary)
    if run.lora is None and at_once < tokens:  # gradients of the head, of two parts
        passing += 2 * hidden * vocabulary
    copies = 0
    if is_half and run.lora is None:  # autograd keeps each weight in half
        matrices = [math.prod(s) for n, s in shapes.items() if len(s) == 2 and "embed" not in n]
        copies = _HALF * sum(matrices) // (layers if run.model.gradient_checkpointing else 1)
    return int(_FLOAT * (tokens * kept + passing)) + copies


def _tokens_at_once(run: ModelRun, config: Mapping[str, Any]) -> int:
    """How many tokens of a microbatch have logits at the same time."""
    in_parts = run.task in ("causal-lm", "dpo") and not any(config.get(k) for k in _AFTER_HEAD)
    tokens = run.batch.microbatch * run.data.max_tokens
    return tokens_at_once(config["vocab_size"]) if in_parts else tokens
