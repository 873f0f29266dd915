"""Estimate how much device memory a run takes, before its model is loaded.

Sizes of weights come from the headers of the model's files. Activations are estimated for decoders
like Llama, by the sizes in config.json, and not for other models. docs/workers.md has the formula,
and tests compare it with a device's counters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError

from backends.losses.vocabulary_loss import tokens_at_once
from backends.quantization.mapped_weights import PART_ELEMENTS
from protocol.base.errors import DataError, DeviceOutOfMemory
from protocol.base.limits import byte_size
from protocol.datasets.capture_index import read_index
from protocol.spec.files.sources import model_source
from protocol.spec.run_spec import ModelRun
from protocol.spec.sections.model import LoraSpec, ModelSpec
from worker.models.base_tensors import BaseTensor, base_tensors
from worker.models.lora import ATTENTION, is_named

_FLOAT32_BYTES: Final = 4
_HALF_BYTES: Final = 2
_SIZES: Final = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip
_LAYER_FLOATS: Final = (6.0, 3.0, 1.0)
"""Floats per token that a layer stores for backward: as multiples of the hidden size, of the
intermediate size, and, if attention is eager, per head and token of the sample.
"""
_LAYER_FLOATS_HALF: Final = (4.5, 1.5, 1.5)
"""The same in bfloat16 and float16."""
_KEPT_BY_EXPERTS: Final = (1.5, 2.0, 3.0)
"""Besides, by a layer of experts: per hidden size; and per hidden and per intermediate size of each
expert that a token is sent to."""
_KEPT_BY_EXPERTS_IN_HALF: Final = (1.5, 1.5, 1.5)
_KEPT_BY_ROUTER: Final = (1.25, 7.0)
"""Likewise, per expert, and per expert that a token is sent to."""
_TRAINED_LAYER_FLOATS: Final = (4.0, 1.0)
"""Further floats per token of a layer that is trained in full, the inputs of its matrix products:
as multiples of the hidden and of the intermediate size.
"""
_OWN_INPUT: Final = (
    "o_proj", "out_proj", "down_proj", "dense", "c_proj", "wo", "fc2", "w2", "dense_4h_to_h",
)  # fmt: skip
"""Layers that read what no other layer reads; the others of a module share their input."""
_TRANSIENT_FLOATS: Final = 5
"""Floats of a token that the backward of one layer takes for a while, per intermediate size; half
of it in half precision."""
_PASSING_LOGITS: Final = {"distil": 6, "classify": 0, "tag": 0, "embed": 0}
"""Likewise of the loss, for each token whose logits are computed at once, per token of the
vocabulary, by task."""
_PASSING_LOGITS_OF_OTHERS: Final = 3
_PASSING_EXPERTS: Final = (3.5, 1.0)
"""Likewise, the backward of a layer of experts: per hidden and intermediate size."""

_CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
"""Keys of how many experts a token is sent to."""

_MEMORY_SAVERS: Final = (
    ("model.gradient_checkpointing", True), ("model.base_dtype", "bfloat16"),
    ("model.base_dtype", "int8"), ("model.base_dtype", "int4"), ("batch.microbatch", 1),
)  # fmt: skip

Tensors = Mapping[str, BaseTensor]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a device.

    Attributes:
        weights: The stored base, the trained tensors, and one widened weight.
        gradients: Gradient sums along the tree, if one device computes a whole step.
        activations: Activations of one microbatch of the longest samples; 0 if not estimated.
        microbatch_gradients: Gradients of one microbatch; they replace activations during backward.
    """

    weights: int
    gradients: int
    activations: int
    microbatch_gradients: int

    @property
    def minimum(self) -> int:
        """Bytes that any data needs."""
        return self.weights + self.gradients + self.microbatch_gradients

    @property
    def total(self) -> int:
        """Most bytes that the longest samples need."""
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
        tensors = base_tensors(directory)
        config = json.loads((directory / "config.json").read_bytes())
        length = _sample_tokens(run)
    except (DataError, OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None  # loading reports the error, or does not use safetensors
    if not tensors:
        return None
    base_dtype, lora = run.model.base_dtype, run.lora
    config = config.get("text_config", config)
    weights = sum(tensor.bytes_in(base_dtype) for tensor in tensors.values())
    adapted_matrices: Tensors = {}
    if lora is None:
        trained_elements = sum(tensor.elements for tensor in tensors.values())
    else:
        weights += _converted_bytes(
            run.model, tensors, is_tied=bool(config.get("tie_word_embeddings"))
        )
        adapted_matrices = _adapted_matrices(lora, tensors)
        trained_elements = sum(
            _low_rank(lora, name, tensor) for name, tensor in adapted_matrices.items()
        )
        trained_elements += sum(tensor.elements for tensor in _trained_in_full(lora, tensors))
        weights += _FLOAT32_BYTES * trained_elements
    microbatches = -(-run.batch.samples // run.batch.microbatch)
    gradients = _FLOAT32_BYTES * trained_elements * math.ceil(math.log2(microbatches))
    activations = _activation_bytes(run, config, tensors, adapted_matrices, length)
    return DeviceMemory(weights, gradients, activations, _FLOAT32_BYTES * trained_elements)


def check_device_memory(run: ModelRun, device: str, memory_bytes: int) -> str:
    """Check that a run's model fits a device; return the estimate in one line, or an empty text.

    Args:
        run: The run.
        device: Name of the device in errors.
        memory_bytes: Its memory.

    Raises:
        DeviceOutOfMemory: Weights and gradients alone need more; the message says what to set.
    """
    memory = estimate(run)
    if memory is None:
        return ""
    if memory.minimum > memory_bytes:
        raise DeviceOutOfMemory(
            device,
            f"expected a run that fits into {byte_size(memory_bytes)}, got one that takes "
            f"{byte_size(memory.total)} ({memory}); {_advice(run, memory_bytes)}",
        )
    line = f"memory: about {byte_size(memory.total)} of {byte_size(memory_bytes)} ({memory})"
    if memory.total > memory_bytes:
        line += f"; if samples are as long as data.max_tokens, {_advice(run, memory_bytes)}"
    return line


def _advice(run: ModelRun, memory_bytes: int) -> str:
    """Return the settings, cheapest first, with which the run fits."""
    settings: dict[str, str] = {}
    for key, value in _MEMORY_SAVERS:
        section, _, name = key.partition(".")
        if run.lora is None and key == "model.base_dtype":
            continue
        new_section = getattr(run, section).model_copy(update={name: value})
        run = run.model_copy(update={section: new_section})
        settings[key] = str(value).lower()
        memory = estimate(run)
        if memory is not None and memory.total <= memory_bytes:
            flags = " ".join(f"--set {key}={value}" for key, value in settings.items())
            return f"{flags} takes {byte_size(memory.total)}"
    if run.lora is None:
        return "train with lora (--set lora.r=8), or on a larger device"
    return "use a larger device, or shard the base in bfloat16: torchrun -m worker --shard"


def _converted_bytes(model: ModelSpec, tensors: Tensors, *, is_tied: bool) -> int:
    """Return the bytes of the largest frozen matrix, converted to the dtype of its products."""
    matrices = [
        matrix
        for name, matrix in tensors.items()
        if matrix.is_linear or (is_tied and "embed" in name and len(matrix.shape) == 2)
    ]
    narrow_sizes = [
        matrix.matrix_elements for matrix in matrices if matrix.is_narrow(model.base_dtype)
    ]
    wide_sizes = [
        matrix.elements
        for matrix in matrices
        if len(matrix.shape) == 2 and not matrix.is_narrow(model.base_dtype)
    ]
    largest_narrow = max(narrow_sizes, default=0)
    if model.precision == "float32":
        return _FLOAT32_BYTES * largest_narrow
    bytes_needed = _HALF_BYTES * max(wide_sizes, default=0)
    if model.precision != model.base_dtype:
        bytes_needed += _HALF_BYTES * largest_narrow + _FLOAT32_BYTES * min(
            largest_narrow, PART_ELEMENTS
        )
    return bytes_needed


def _adapted_matrices(lora: LoraSpec, tensors: Tensors) -> Tensors:
    """Return the matrices, and stacks of matrices, that LoRA adapts."""
    parameters = {
        name: tensor
        for name, tensor in tensors.items()
        if any(is_named(name, (target,)) for target in lora.target_parameters)
    }
    matrices = {
        layer_name.removesuffix(".weight"): matrix
        for layer_name, matrix in tensors.items()
        if len(matrix.shape) == 2
    }
    if lora.targets == "all-linear":
        return parameters | {
            layer_name: matrix
            for layer_name, matrix in matrices.items()
            if matrix.is_linear and "head" not in layer_name
        }
    leaves = {name.rpartition(".")[2] for name in matrices}
    default_targets = next((names for names in ATTENTION if leaves.issuperset(names)), ())
    targets = lora.targets or default_targets
    return parameters | {
        layer_name: matrix
        for layer_name, matrix in matrices.items()
        if is_named(layer_name, targets)
    }


def _low_rank(lora: LoraSpec, name: str, tensor: BaseTensor) -> int:
    """Return the elements of the low-rank matrices for one matrix, or for all of a stack."""
    ranks = (rank for key, rank in lora.rank_pattern.items() if is_named(name, (key,)))
    rows, columns = tensor.shape[-2:]
    return next(ranks, lora.r) * math.prod(tensor.shape[:-2]) * (rows + columns)


def _trained_in_full(lora: LoraSpec, tensors: Tensors) -> list[BaseTensor]:
    """Return the tensors of `lora.modules_to_save`, which peft copies."""
    return [
        tensor
        for name, tensor in tensors.items()
        if is_named(name.rpartition(".")[0], lora.modules_to_save)
    ]


@dataclass(frozen=True, slots=True)
class _Experts:
    """A mixture's experts.

    Attributes:
        layers: Layers that have them.
        count: Experts of a layer.
        chosen: Experts that a token is sent to.
        inner: Intermediate size of one.
        shared_inner: That of the experts which all tokens are sent to; 0 without.
        widened: Elements of a layer's adapted stacks that are added up with their low-rank
            products, in float32: those which the base dtype does not narrow.
    """

    layers: int
    count: int
    chosen: int
    inner: int
    shared_inner: int
    widened: int


def _experts(
    run: ModelRun, config: Mapping[str, Any], tensors: Tensors, adapted: Tensors
) -> _Experts | None:
    """The experts of a mixture; None without."""
    downs = {n: t for n, t in tensors.items() if len(t.shape) == 3 and n.endswith("down_proj")}
    if not downs:
        return None
    layer, down = next(iter(downs.items()))
    prefix = layer.removesuffix("experts.down_proj")
    shared = [
        tensor.shape[0]
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}shared_expert") and name.endswith("up_proj.weight")
    ]
    widened = sum(
        tensor.elements
        for tensor in adapted.values()
        if len(tensor.shape) == 3 and not tensor.is_narrow(run.model.base_dtype)
    )
    chosen = next((config[key] for key in _CHOSEN if isinstance(config.get(key), int)), 1)
    return _Experts(
        layers=len(downs), count=down.shape[0], chosen=chosen,
        inner=down.matrix_elements // config["hidden_size"], shared_inner=sum(shared),
        widened=widened // len(downs),
    )  # fmt: skip


def _sample_tokens(run: ModelRun) -> int:
    """The most tokens of a sample; those of a capture all have as many."""
    if run.task != "distil":
        return run.data.max_tokens
    return read_index(Path(run.data.train)).facts.layout.tokens


def _activation_bytes(
    run: ModelRun,
    config: Mapping[str, Any],
    tensors: Tensors,
    adapted_matrices: Tensors,
    length: int,
) -> int:
    if any(not isinstance(config.get(name), int) for name in _SIZES):
        return 0
    hidden, intermediate, layers, heads, vocabulary = (config[name] for name in _SIZES)
    is_half = run.model.precision != "float32"
    experts = _experts(run, config, tensors, adapted_matrices)
    per_hidden, per_inner, per_head = _LAYER_FLOATS_HALF if is_half else _LAYER_FLOATS
    dense = layers if experts is None else layers - experts.layers
    whole = layers * per_hidden * hidden + dense * per_inner * intermediate
    if run.model.attention == "eager":
        whole += layers * per_head * heads * length
    if run.lora is None:
        whole += layers * (
            _TRAINED_LAYER_FLOATS[0] * hidden + _TRAINED_LAYER_FLOATS[1] * intermediate
        )
    else:
        chosen = 0 if experts is None else experts.chosen
        whole += _kept_by_lora(run.lora, adapted_matrices, chosen, is_half=is_half)
    tokens = run.batch.microbatch * length
    transient_floats = tokens * _TRANSIENT_FLOATS * intermediate / (1 + is_half) if dense else 0.0
    copy_bytes = float(_kept_in_half(run, tensors, adapted_matrices)) if is_half else 0.0
    if experts is not None:
        whole += experts.layers * _kept_by_experts(run, experts, hidden)
        per_hidden, per_inner = _PASSING_EXPERTS
        transient_floats = max(
            transient_floats, tokens * (per_hidden * hidden + per_inner * experts.inner)
        )
        copy_bytes += _FLOAT32_BYTES * experts.layers * experts.widened
    logit_tokens = min(tokens, tokens_at_once(vocabulary))
    loss = logit_tokens * _PASSING_LOGITS.get(run.task, _PASSING_LOGITS_OF_OTHERS) * vocabulary
    if run.lora is None and loss and logit_tokens < tokens:  # gradients of the head, for two parts
        loss += 2 * hidden * vocabulary
    if not run.model.gradient_checkpointing:
        return int(_FLOAT32_BYTES * (tokens * whole + max(transient_floats, loss)) + copy_bytes)
    of_layer = _FLOAT32_BYTES * (tokens * whole / layers + transient_floats) + copy_bytes / layers
    return int(_FLOAT32_BYTES * tokens * layers * hidden + max(of_layer, _FLOAT32_BYTES * loss))


def _kept_in_half(run: ModelRun, tensors: Tensors, adapted: Tensors) -> int:
    """Return the bytes of the half-precision copies of parameters that autograd keeps."""
    if run.lora is not None:
        return _HALF_BYTES * sum(
            _low_rank(run.lora, name, tensor) for name, tensor in adapted.items()
        )
    return _HALF_BYTES * sum(
        tensor.elements
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and "embed" not in name
    )


def _kept_by_experts(run: ModelRun, experts: _Experts, hidden: int) -> float:
    """Return the floats per token that a layer of experts keeps besides attention and norms."""
    is_half = run.model.precision != "float32"
    per_hidden, *per_chosen = _KEPT_BY_EXPERTS_IN_HALF if is_half else _KEPT_BY_EXPERTS
    if run.lora is None:  # inputs of products
        per_chosen = [floats + 1 for floats in per_chosen]
    per_inner = (_LAYER_FLOATS_HALF if is_half else _LAYER_FLOATS)[1]
    of_one = per_chosen[0] * hidden + per_chosen[1] * experts.inner + _KEPT_BY_ROUTER[1]
    router = _KEPT_BY_ROUTER[0] * experts.count
    return per_hidden * hidden + experts.chosen * of_one + router + per_inner * experts.shared_inner


def _kept_by_lora(lora: LoraSpec, adapted: Tensors, chosen: int, *, is_half: bool) -> float:
    """Return the floats per token that low-rank matrices keep, in all layers: their inputs and
    the low-rank products. The input of attention is counted in `_LAYER_FLOATS`."""
    kept, inputs = 0.0, dict[str, float]()
    for name, matrix in adapted.items():
        module, _, leaf = name.rpartition(".")
        if len(matrix.shape) == 3:
            kept += chosen * lora.r
            inputs[name] = chosen * matrix.shape[-1]
            continue
        kept += lora.r
        if lora.dropout:  # its input too, and the mask in bytes
            kept += 1.25 * matrix.shape[1]
        elif leaf in _OWN_INPUT:
            inputs[name] = matrix.shape[1]
        elif "att" not in module:
            inputs[module] = matrix.shape[1]
    return kept + sum(inputs.values()) / (1 + is_half)
