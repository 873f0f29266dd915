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

from backends.losses.vocabulary_loss import tokens_per_part
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
_SIZE_KEYS: Final = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip
_LAYER_FLOATS: Final = (6.0, 3.0, 1.0)
"""Floats per token that a layer stores for backward: multiples of the hidden size, of the
intermediate size, and, for eager attention, of heads x tokens of the sample.
"""
_LAYER_FLOATS_HALF: Final = (4.5, 1.5, 1.5)
"""`_LAYER_FLOATS` in bfloat16 and float16."""
_EXPERT_LAYER_FLOATS: Final = (1.5, 2.0, 3.0)
"""Floats per token that a layer of experts stores in place of multiples of the intermediate size: a
multiple of the hidden size; then, for each expert that a token is sent to, multiples of the hidden
and of the expert's intermediate size."""
_EXPERT_LAYER_FLOATS_HALF: Final = (1.5, 1.5, 1.5)
_ROUTER_FLOATS: Final = (1.25, 7.0)
"""Floats per token that a router stores for each expert, and, in addition, for each expert that the
token is sent to."""
_TRAINED_LAYER_FLOATS: Final = (4.0, 1.0)
"""Floats per token that a layer stores in addition if it is trained in full, for the inputs of its
matrix products: multiples of the hidden and of the intermediate size.
"""
_LAYERS_WITH_SEPARATE_INPUT: Final = (
    "o_proj", "out_proj", "down_proj", "dense", "c_proj", "wo", "fc2", "w2", "dense_4h_to_h",
)  # fmt: skip
"""Linear layers with an input that no other layer reads. The others of a module share one input."""
_TRANSIENT_FLOATS: Final = 5
"""Floats per token that backward of one layer allocates temporarily, as a multiple of the
intermediate size; halved in half precision."""
_TRANSIENT_LOGIT_FLOATS: Final = {"distil": 6, "classify": 0, "tag": 0, "embed": 0}
"""Floats that the loss allocates temporarily for each token whose logits are computed at once: a
multiple of the vocabulary, by task."""
_DEFAULT_TRANSIENT_LOGIT_FLOATS: Final = 3
_TRANSIENT_EXPERT_FLOATS: Final = (3.5, 1.0)
"""Floats per token that backward of a layer of experts allocates temporarily: multiples of the
hidden and of the expert's intermediate size."""

_EXPERTS_PER_TOKEN_KEYS: Final = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk",
)  # fmt: skip
"""Keys in config.json for the number of experts that a token is sent to."""

_MEMORY_SAVERS: Final = (
    ("model.gradient_checkpointing", True), ("model.base_dtype", "bfloat16"),
    ("model.base_dtype", "int8"), ("model.base_dtype", "int4"), ("batch.microbatch", 1),
)  # fmt: skip

Tensors = Mapping[str, BaseTensor]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a device.

    Attributes:
        weights: The stored base, the trained tensors, and a converted copy of the largest weight.
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
        """Bytes that the run needs even with the shortest samples."""
        return self.weights + self.gradients + self.microbatch_gradients

    @property
    def total(self) -> int:
        """Bytes that the longest samples need."""
        return self.weights + self.gradients + max(self.activations, self.microbatch_gradients)

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients + self.microbatch_gradients,
            "activations up to": self.activations,
        }
        return ", ".join(f"{name} {byte_size(size)}" for name, size in parts.items() if size)


def estimate(run: ModelRun) -> DeviceMemory | None:
    """Estimate a run's device memory; None if the sizes of the model's weights are unknown."""
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
            _low_rank_elements(lora, name, tensor) for name, tensor in adapted_matrices.items()
        )
        trained_elements += sum(tensor.elements for tensor in _fully_trained_tensors(lora, tensors))
        weights += _FLOAT32_BYTES * trained_elements
    microbatches = -(-run.batch.samples // run.batch.microbatch)
    gradients = _FLOAT32_BYTES * trained_elements * math.ceil(math.log2(microbatches))
    activations = _activation_bytes(run, config, tensors, adapted_matrices, length)
    return DeviceMemory(weights, gradients, activations, _FLOAT32_BYTES * trained_elements)


def check_device_memory(run: ModelRun, device: str, memory_bytes: int) -> str:
    """Check that a run's model fits a device; return the estimate in one line.

    The line is empty if there is no estimate.

    Args:
        run: The run.
        device: Name of the device in errors.
        memory_bytes: The device's memory.

    Raises:
        DeviceOutOfMemory: Weights and gradients alone need more; the message advises settings.
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
    """Return advice: the settings that make the run fit, cheapest first, or other hardware."""
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
    low_precision_sizes = [
        matrix.matrix_elements for matrix in matrices if matrix.is_low_precision(model.base_dtype)
    ]
    float32_sizes = [
        matrix.elements
        for matrix in matrices
        if len(matrix.shape) == 2 and not matrix.is_low_precision(model.base_dtype)
    ]
    largest_low_precision = max(low_precision_sizes, default=0)
    if model.precision == "float32":
        return _FLOAT32_BYTES * largest_low_precision
    bytes_needed = _HALF_BYTES * max(float32_sizes, default=0)
    if model.precision != model.base_dtype:
        bytes_needed += _HALF_BYTES * largest_low_precision + _FLOAT32_BYTES * min(
            largest_low_precision, PART_ELEMENTS
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


def _low_rank_elements(lora: LoraSpec, name: str, tensor: BaseTensor) -> int:
    """Return the number of elements of the low-rank matrices of one matrix or one stack."""
    ranks = (rank for key, rank in lora.rank_pattern.items() if is_named(name, (key,)))
    rows, columns = tensor.shape[-2:]
    return next(ranks, lora.r) * math.prod(tensor.shape[:-2]) * (rows + columns)


def _fully_trained_tensors(lora: LoraSpec, tensors: Tensors) -> list[BaseTensor]:
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
        layers: Number of layers that have experts.
        count: Experts per layer.
        per_token: Experts that a token is sent to.
        intermediate_size: Intermediate size of one expert.
        shared_intermediate_size: Intermediate size of the shared experts, which read all tokens; 0
            if there are none.
        float32_adapted_elements: Elements per layer of the adapted stacks that are stored in
            float32; PEFT adds each of them to its low-rank product in float32.
    """

    layers: int
    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    float32_adapted_elements: int


def _expert_sizes(
    run: ModelRun, config: Mapping[str, Any], tensors: Tensors, adapted: Tensors
) -> _Experts | None:
    """Return the sizes of a mixture's experts; None for other models."""
    down_stacks = {
        name: tensor
        for name, tensor in tensors.items()
        if len(tensor.shape) == 3 and name.endswith("down_proj")
    }
    if not down_stacks:
        return None
    name, down_stack = next(iter(down_stacks.items()))
    prefix = name.removesuffix("experts.down_proj")
    shared_sizes = [
        tensor.shape[0]
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}shared_expert") and name.endswith("up_proj.weight")
    ]
    float32_adapted_elements = sum(
        tensor.elements
        for tensor in adapted.values()
        if len(tensor.shape) == 3 and not tensor.is_low_precision(run.model.base_dtype)
    )
    per_token = next(
        (config[key] for key in _EXPERTS_PER_TOKEN_KEYS if isinstance(config.get(key), int)), 1
    )
    return _Experts(
        layers=len(down_stacks), count=down_stack.shape[0], per_token=per_token,
        intermediate_size=down_stack.matrix_elements // config["hidden_size"],
        shared_intermediate_size=sum(shared_sizes),
        float32_adapted_elements=float32_adapted_elements // len(down_stacks),
    )  # fmt: skip


def _sample_tokens(run: ModelRun) -> int:
    """Return the most tokens that a sample may have; all samples of a capture have equally many."""
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
    if any(not isinstance(config.get(name), int) for name in _SIZE_KEYS):
        return 0
    hidden, intermediate, layers, heads, vocabulary = (config[name] for name in _SIZE_KEYS)
    is_half = run.model.precision != "float32"
    experts = _expert_sizes(run, config, tensors, adapted_matrices)
    per_hidden, per_inner, per_head = _LAYER_FLOATS_HALF if is_half else _LAYER_FLOATS
    dense_layers = layers if experts is None else layers - experts.layers
    stored_floats = layers * per_hidden * hidden + dense_layers * per_inner * intermediate
    if run.model.attention == "eager":
        stored_floats += layers * per_head * heads * length
    if run.lora is None:
        stored_floats += layers * (
            _TRAINED_LAYER_FLOATS[0] * hidden + _TRAINED_LAYER_FLOATS[1] * intermediate
        )
    else:
        experts_per_token = 0 if experts is None else experts.per_token
        stored_floats += _lora_floats(
            run.lora, adapted_matrices, experts_per_token, is_half=is_half
        )
    tokens = run.batch.microbatch * length
    transient_floats = (
        tokens * _TRANSIENT_FLOATS * intermediate / (1 + is_half) if dense_layers else 0.0
    )
    copy_bytes = float(_half_copy_bytes(run, tensors, adapted_matrices)) if is_half else 0.0
    if experts is not None:
        stored_floats += experts.layers * _expert_layer_floats(run, experts, hidden)
        per_hidden, per_inner = _TRANSIENT_EXPERT_FLOATS
        transient_floats = max(
            transient_floats, tokens * (per_hidden * hidden + per_inner * experts.intermediate_size)
        )
        copy_bytes += _FLOAT32_BYTES * experts.layers * experts.float32_adapted_elements
    logit_tokens = min(tokens, tokens_per_part(vocabulary))
    loss_floats = (
        logit_tokens
        * _TRANSIENT_LOGIT_FLOATS.get(run.task, _DEFAULT_TRANSIENT_LOGIT_FLOATS)
        * vocabulary
    )
    if run.lora is None and loss_floats and logit_tokens < tokens:
        # Gradients of the head for two parts at once.
        loss_floats += 2 * hidden * vocabulary
    if not run.model.gradient_checkpointing:
        return int(
            _FLOAT32_BYTES * (tokens * stored_floats + max(transient_floats, loss_floats))
            + copy_bytes
        )
    one_layer_bytes = (
        _FLOAT32_BYTES * (tokens * stored_floats / layers + transient_floats) + copy_bytes / layers
    )
    return int(
        _FLOAT32_BYTES * tokens * layers * hidden
        + max(one_layer_bytes, _FLOAT32_BYTES * loss_floats)
    )


def _half_copy_bytes(run: ModelRun, tensors: Tensors, adapted: Tensors) -> int:
    """Return the bytes of the half-precision copies of parameters that autograd keeps."""
    if run.lora is not None:
        return _HALF_BYTES * sum(
            _low_rank_elements(run.lora, name, tensor) for name, tensor in adapted.items()
        )
    return _HALF_BYTES * sum(
        tensor.elements
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and "embed" not in name
    )


def _expert_layer_floats(run: ModelRun, experts: _Experts, hidden: int) -> float:
    """Return the floats per token that a layer of experts stores, without attention and norms."""
    is_half = run.model.precision != "float32"
    per_hidden, *per_expert_sizes = _EXPERT_LAYER_FLOATS_HALF if is_half else _EXPERT_LAYER_FLOATS
    if run.lora is None:  # inputs of matrix products
        per_expert_sizes = [floats + 1 for floats in per_expert_sizes]
    per_inner = (_LAYER_FLOATS_HALF if is_half else _LAYER_FLOATS)[1]
    per_expert = (
        per_expert_sizes[0] * hidden
        + per_expert_sizes[1] * experts.intermediate_size
        + _ROUTER_FLOATS[1]
    )
    router = _ROUTER_FLOATS[0] * experts.count
    return (
        per_hidden * hidden
        + experts.per_token * per_expert
        + router
        + per_inner * experts.shared_intermediate_size
    )


def _lora_floats(
    lora: LoraSpec, adapted: Tensors, experts_per_token: int, *, is_half: bool
) -> float:
    """Return the floats per token that backward of all low-rank matrices needs.

    These are their inputs and the low-rank products. `_LAYER_FLOATS` counts the input of attention.
    """
    low_rank_floats, inputs = 0.0, dict[str, float]()
    for name, matrix in adapted.items():
        module, _, leaf = name.rpartition(".")
        if len(matrix.shape) == 3:
            low_rank_floats += experts_per_token * lora.r
            inputs[name] = experts_per_token * matrix.shape[-1]
            continue
        low_rank_floats += lora.r
        if lora.dropout:  # the input after dropout, and the mask in bytes
            low_rank_floats += 1.25 * matrix.shape[1]
        elif leaf in _LAYERS_WITH_SEPARATE_INPUT:
            inputs[name] = matrix.shape[1]
        elif "att" not in module:
            inputs[module] = matrix.shape[1]
    return low_rank_floats + sum(inputs.values()) / (1 + is_half)
