"""Shapes and dtypes of a model's base tensors, read from the headers of its files.

Names and shapes are those of the module. For a mixture of experts, files have one matrix per
expert, or stacks of matrices. transformers' modules always have stacks, of shape (experts, outputs,
inputs), with the gate and up matrices in one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import safe_open

from backends.quantization.quantize import STORAGE, group_size, stored_bytes
from protocol.base.regular_file import read_json
from protocol.spec.sections.model import BaseDtype

_SINGLE_FILE: Final = "model.safetensors"
_INDEX_FILE: Final = "model.safetensors.index.json"

_EXPERT_MATRIX: Final = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.weight")
_STACK_NAMES: Final = {
    "gate_proj": "gate_up_proj", "w1": "gate_up_proj", "up_proj": "up_proj", "w3": "up_proj",
    "down_proj": "down_proj", "w2": "down_proj",
}  # fmt: skip
_MODULE_NAMES: Final = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    "block_sparse_moe.gate.weight": "mlp.gate.weight",
    "backbone.": "model.",
}
"""Names in files of Granite, Mixtral and Nemotron, and the names in their modules."""
_MIXTRAL_EXPERTS: Final = re.compile(r"block_sparse_moe\.(experts\.\d)")
_NOT_LINEAR: Final = (".gate.weight", "mlp.router.weight", "moe.router.weight", "_bias")
"""Name endings of matrices that belong to no linear layer: routers of experts, and biases."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of the base.

    Attributes:
        shape: The shape in the module.
        dtype: The dtype in the file, as safetensors calls it.
        is_linear: Whether only matrix products read the tensor: the weight of a linear layer, or a
            stack of such weights.
    """

    shape: Shape
    dtype: str
    is_linear: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def matrix_elements(self) -> int:
        """Number of elements of one matrix."""
        return math.prod(self.shape[-2:])

    def is_low_precision(self, base_dtype: BaseDtype) -> bool:
        """Return whether `model.base_dtype` applies to the tensor and has fewer than 32 bits."""
        return base_dtype != "float32" and self.is_linear and bool(group_size(self.shape[-1]))

    def bytes_in(self, base_dtype: BaseDtype) -> int:
        """Return the size in memory with this `model.base_dtype`."""
        if self.is_low_precision(base_dtype):
            columns = self.shape[-1]
            return stored_bytes(self.elements // columns, columns, STORAGE[base_dtype])
        return 4 * self.elements


def stored_tensors(directory: Path) -> Iterator[tuple[str, list[int], str]]:
    """Yield name, shape and safetensors dtype of a directory's tensors, from headers only."""
    files = [directory / _SINGLE_FILE]
    if (directory / _INDEX_FILE).is_file():
        file_names = read_json(directory / _INDEX_FILE)["weight_map"]
        files = [directory / name for name in sorted(set(file_names.values()))]
    for file in files:
        if file.is_file():
            with safe_open(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 -- no mapping
                    tensor = tensors.get_slice(name)
                    yield name, tensor.get_shape(), tensor.get_dtype()


def base_tensors(directory: Path) -> dict[str, BaseTensor]:
    """Return a directory's tensors by their names in the module.

    The mapping is empty if the directory has no safetensors of the usual names.
    """
    headers = {
        _module_name(name): (tuple(shape), dtype)
        for name, shape, dtype in stored_tensors(directory)
    }
    headers = _stack_experts(headers)
    float32_stacks = _float32_stacks({name: shape for name, (shape, _) in headers.items()})
    return {
        name: BaseTensor(shape, dtype, _is_linear(name, shape) and name not in float32_stacks)
        for name, (shape, dtype) in headers.items()
    }


def _module_name(name: str) -> str:
    for old, new in _MODULE_NAMES.items():
        name = name.replace(old, new)
    return _MIXTRAL_EXPERTS.sub(r"mlp.\1", name)


def _stack_experts(headers: Mapping[str, tuple[Shape, str]]) -> dict[str, tuple[Shape, str]]:
    """Replace the matrices of single experts by stacks of them."""
    counts: dict[str, dict[str, int]] = {}
    matrices: dict[str, tuple[Shape, str]] = {}
    result: dict[str, tuple[Shape, str]] = {}
    for name, header in headers.items():
        match = _EXPERT_MATRIX.fullmatch(name)
        if match is None or match[2] not in _STACK_NAMES:
            result[name] = header
            continue
        layer_counts = counts.setdefault(match[1], {})
        layer_counts[match[2]] = layer_counts.get(match[2], 0) + 1
        matrices[f"{match[1]}.{match[2]}"] = header
    for layer, leaves in counts.items():
        is_gated = any(_STACK_NAMES[leaf] == "gate_up_proj" for leaf in leaves)
        for leaf, experts in leaves.items():
            (rows, columns), dtype = matrices[f"{layer}.{leaf}"]
            stack = _STACK_NAMES[leaf]
            if stack == "up_proj" and is_gated:
                continue  # the gate's stack contains it
            rows *= 2 if stack == "gate_up_proj" else 1
            result[f"{layer}.{stack}"] = (experts, rows, columns), dtype
    return result


def _float32_stacks(shapes: Mapping[str, Shape]) -> set[str]:
    """Return the names of expert stacks that stay in float32 with every base dtype.

    These stacks belong to experts with biases, are transposed, or have rows that cannot be divided
    into quantization groups.
    """
    stack_names: set[str] = set()
    layers = {name.rpartition(".")[0] for name, shape in shapes.items() if _is_stack(name, shape)}
    for layer in layers:
        names = [f"{layer}.{stack}" for stack in ("gate_up_proj", "up_proj", "down_proj")]
        stacks = {name: shapes[name] for name in names if name in shapes}
        first, down = next(iter(stacks.values())), stacks.get(names[2], ())
        is_plain = len(stacks) == 2 and first[2] == down[1]
        has_bias = any(f"{name}_bias" in shapes for name in stacks)
        if not is_plain or has_bias or not all(group_size(shape[2]) for shape in stacks.values()):
            stack_names |= stacks.keys()
    return stack_names


def _is_stack(name: str, shape: Shape) -> bool:
    return len(shape) == 3 and name.rpartition(".")[0].endswith(".experts")


def _is_linear(name: str, shape: Shape) -> bool:
    if _is_stack(name, shape):
        return name.endswith((".gate_up_proj", ".up_proj", ".down_proj"))
    return len(shape) == 2 and "embed" not in name and not name.endswith(_NOT_LINEAR)
