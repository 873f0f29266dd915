"""The tensors of a model's base as its module has them, by the heads of its files.

Files have the matrices of each of a mixture's experts, or stacks of them. transformers' modules
have stacks: (experts, outputs, inputs), gate and up in one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import safe_open

from backends.quantization.quantize import STORAGE, group_of, stored_bytes
from protocol.base.regular_file import read_json
from protocol.spec.sections.model import BaseDtype

_ONE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"

_OF_ONE_EXPERT: Final = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.weight")
_STACK: Final = {
    "gate_proj": "gate_up_proj", "w1": "gate_up_proj", "up_proj": "up_proj", "w3": "up_proj",
    "down_proj": "down_proj", "w2": "down_proj",
}  # fmt: skip
_RENAMED: Final = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    "block_sparse_moe.gate.weight": "mlp.gate.weight",
    "backbone.": "model.",
}
"""Names of Granite's files, Mixtral's and Nemotron's."""
_OF_MIXTRAL: Final = re.compile(r"block_sparse_moe\.(experts\.\d)")
_NO_LAYERS: Final = (".gate.weight", "mlp.router.weight", "moe.router.weight", "_bias")
"""Ends of names of matrices that belong to no linear layer: they choose experts, or are added."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of the base.

    Attributes:
        shape: The shape in the module.
        dtype: The dtype in the file, as safetensors calls it.
        is_linear: Whether only matrix products read it: the weight of a linear layer, or a stack of
            such weights.
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

    def is_narrow(self, base_dtype: BaseDtype) -> bool:
        """Whether this `model.base_dtype` stores it in fewer bits."""
        return base_dtype != "float32" and self.is_linear and bool(group_of(self.shape[-1]))

    def bytes_in(self, base_dtype: BaseDtype) -> int:
        """Size in memory, as it is stored to compute."""
        if self.is_narrow(base_dtype):
            columns = self.shape[-1]
            return stored_bytes(self.elements // columns, columns, STORAGE[base_dtype])
        return 4 * self.elements


def stored_tensors(directory: Path) -> Iterator[tuple[str, list[int], str]]:
    """Yield name, shape and dtype (as safetensors says it) of a directory's tensors, unread."""
    files = [directory / _ONE]
    if (directory / _INDEX).is_file():
        named = read_json(directory / _INDEX)["weight_map"]
        files = [directory / name for name in sorted(set(named.values()))]
    for file in files:
        if file.is_file():
            with safe_open(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 -- no mapping
                    part = tensors.get_slice(name)
                    yield name, part.get_shape(), part.get_dtype()


def base_tensors(directory: Path) -> dict[str, BaseTensor]:
    """Return a directory's tensors by the names that parameters have in the module.

    Empty if the directory has no safetensors of the usual names.
    """
    heads = {
        _renamed(name): (tuple(shape), dtype) for name, shape, dtype in stored_tensors(directory)
    }
    heads = _stacked(heads)
    wide = _wide_stacks({name: shape for name, (shape, _) in heads.items()})
    return {
        name: BaseTensor(shape, dtype, _is_linear(name, shape) and name not in wide)
        for name, (shape, dtype) in heads.items()
    }


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return _OF_MIXTRAL.sub(r"mlp.\1", name)


def _stacked(heads: Mapping[str, tuple[Shape, str]]) -> dict[str, tuple[Shape, str]]:
    """Replace the matrices of single experts by their stacks."""
    counts: dict[str, dict[str, int]] = {}
    parts: dict[str, tuple[Shape, str]] = {}
    result: dict[str, tuple[Shape, str]] = {}
    for name, head in heads.items():
        match = _OF_ONE_EXPERT.fullmatch(name)
        if match is None or match[2] not in _STACK:
            result[name] = head
            continue
        of_layer = counts.setdefault(match[1], {})
        of_layer[match[2]] = of_layer.get(match[2], 0) + 1
        parts[f"{match[1]}.{match[2]}"] = head
    for layer, leaves in counts.items():
        is_gated = any(_STACK[leaf] == "gate_up_proj" for leaf in leaves)
        for leaf, experts in leaves.items():
            (rows, columns), dtype = parts[f"{layer}.{leaf}"]
            stack = _STACK[leaf]
            if stack == "up_proj" and is_gated:
                continue  # half of its gate's stack
            rows *= 2 if stack == "gate_up_proj" else 1
            result[f"{layer}.{stack}"] = (experts, rows, columns), dtype
    return result


def _wide_stacks(shapes: Mapping[str, Shape]) -> set[str]:
    """Return the stacks that no base dtype narrows: of experts with biases, of transposed matrices,
    or of rows without groups."""
    wide: set[str] = set()
    layers = {name.rpartition(".")[0] for name, shape in shapes.items() if _is_stack(name, shape)}
    for layer in layers:
        names = [f"{layer}.{stack}" for stack in ("gate_up_proj", "up_proj", "down_proj")]
        of_layer = {name: shapes[name] for name in names if name in shapes}
        first, down = next(iter(of_layer.values())), of_layer.get(names[2], ())
        is_plain = len(of_layer) == 2 and first[2] == down[1]
        has_bias = any(f"{name}_bias" in shapes for name in of_layer)
        if not is_plain or has_bias or not all(group_of(entry[2]) for entry in of_layer.values()):
            wide |= of_layer.keys()
    return wide


def _is_stack(name: str, shape: Shape) -> bool:
    return len(shape) == 3 and name.rpartition(".")[0].endswith(".experts")


def _is_linear(name: str, shape: Shape) -> bool:
    if _is_stack(name, shape):
        return name.endswith((".gate_up_proj", ".up_proj", ".down_proj"))
    return len(shape) == 2 and "embed" not in name and not name.endswith(_NO_LAYERS)
