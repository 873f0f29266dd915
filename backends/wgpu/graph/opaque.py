"""Custom operators that are one node each in a graph: random numbers, part of a long reduction,
products with a split matrix, attention, and a whole layer.

Torch knows their shapes but, except for random numbers (`reference`), cannot compute them. The
lowering has a kernel for each, and replaces a layer by its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_library: Any = torch.library.Library("samestep", "DEF")  # type: ignore[no-untyped-call]
_library.define("keep(Tensor seed, int[] shape, float drop, int site) -> Tensor")
_library.define("uniform(Tensor seed, int[] shape, int site) -> Tensor")
_library.define("partial(Tensor x, int[] dims, int parts, str fold) -> Tensor")
for _name, _arguments in {
    "attention": "",
    "attention_queries": "Tensor packed, Tensor grad_output, Tensor delta, ",
    "attention_keys": "Tensor packed, Tensor grad_output, Tensor delta, ",
}.items():
    _library.define(
        f"{_name}(Tensor query, Tensor key, Tensor value, Tensor? mask, {_arguments}"
        "float scale, bool causal) -> Tensor"
    )
_library.define("joined_products(Tensor left, Tensor[] rights) -> Tensor")
_library.define("sum_of_products(Tensor[] lefts, Tensor[] rights) -> Tensor")
_library.define("layer_forward(Tensor[] inputs, int call) -> Tensor[]")
_library.define("layer_backward(Tensor[] grad_outputs, int call) -> Tensor[]")


def _fake(name: str) -> Callable[[_Function], _Function]:
    """Register the operator's result for fake tensors."""
    register: Any = torch.library.register_fake
    decorate: Callable[[_Function], _Function] = register(f"samestep::{name}", lib=_library)
    return decorate


class _TensorLike(Protocol):
    """Shape and dtype of a layer call's input or output."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def is_differentiable(self) -> bool: ...


class _Call(Protocol):
    """The attributes of a layer's call that the operators use."""

    @property
    def number(self) -> int: ...
    @property
    def inputs(self) -> Sequence[_TensorLike]: ...
    @property
    def outputs(self) -> Sequence[_TensorLike]: ...


_CallT = TypeVar("_CallT", bound=_Call)

_calls: list[_Call] = []
"""Calls of the current trace, by the number that the operators above take."""


class RegisteredCalls(Generic[_CallT]):
    """Context in which the operators' call numbers refer to these calls."""

    def __init__(self, calls: Sequence[_CallT] = ()) -> None:
        self.calls: list[_CallT] = [*calls]

    def __enter__(self) -> list[_CallT]:
        _calls[:] = self.calls
        return self.calls

    def __exit__(self, *_: object) -> None:
        _calls.clear()

    @staticmethod
    def add(call: _Call) -> None:
        """Register a call; its number is its index."""
        assert call.number == len(_calls)
        _calls.append(call)


@_fake("keep")
def _keep(seed: torch.Tensor, shape: Sequence[int], _drop: float, _site: int) -> torch.Tensor:
    return seed.new_empty(shape, dtype=torch.float32)


@_fake("uniform")
def _uniform(seed: torch.Tensor, shape: Sequence[int], _site: int) -> torch.Tensor:
    return seed.new_empty(shape, dtype=torch.float32)


@_fake("partial")
def _partial(x: torch.Tensor, dims: Sequence[int], parts: int, _fold: str) -> torch.Tensor:
    sizes = [size for dim, size in enumerate(x.shape) if dim not in dims]
    return x.new_empty([*sizes, parts])


@_fake("attention")
def _attention(query: torch.Tensor, *_: object) -> torch.Tensor:
    batch, heads, queries, _size = query.shape
    return query.new_empty(query.numel() + batch * heads * -(-queries // 4) * 8)


@_fake("attention_queries")
def _attention_queries(query: torch.Tensor, *_: object) -> torch.Tensor:
    batch, heads, queries, size = query.shape
    return query.new_empty((batch, queries, heads, size))


@_fake("attention_keys")
def _attention_keys(_query: torch.Tensor, key: torch.Tensor, *_: object) -> torch.Tensor:
    batch, groups, keys, size = key.shape
    return key.new_empty((2, batch, keys, groups, size))


@_fake("joined_products")
def _joined_products(left: torch.Tensor, rights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the result of `left @ cat(rights, 1)`."""
    return left.new_empty((left.shape[0], sum(right.shape[1] for right in rights)))


@_fake("sum_of_products")
def _sum_of_products(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the result of `cat(lefts, 1) @ cat(rights, 0)`."""
    return lefts[0].new_empty((lefts[0].shape[0], rights[0].shape[1]))


@_fake("layer_forward")
def _layer_forward(inputs: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    del inputs
    return [torch.empty(spec.shape, dtype=spec.dtype) for spec in _calls[call].outputs]


@_fake("layer_backward")
def _layer_backward(grad_outputs: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    del grad_outputs
    return [
        torch.empty(spec.shape, dtype=spec.dtype)
        for spec in _calls[call].inputs
        if spec.is_differentiable
    ]


KEEP: Final[Any] = torch.ops.samestep.keep.default
"""A dropout mask: 0 with probability `drop`, else 1 / (1 - drop)."""
UNIFORM: Final[Any] = torch.ops.samestep.uniform.default
"""Uniform random numbers in [0, 1), with 24 bits."""
PARTIAL: Final[Any] = torch.ops.samestep.partial.default
"""The first stage of a long reduction over `dims`; the last dimension has `parts` results."""
ATTENTION: Final[Any] = torch.ops.samestep.attention.default
"""Flat result: the output as (B, T, H, D); then, per 4 rows of (B, H, T), their 4 maxima and the
reciprocals of their 4 sums."""
ATTENTION_QUERIES: Final[Any] = torch.ops.samestep.attention_queries.default
"""The gradient of attention's queries, (B, T, H, D)."""
ATTENTION_KEYS: Final[Any] = torch.ops.samestep.attention_keys.default
"""The gradients of attention's keys and values, (2, B, S, G, D)."""
JOINED_PRODUCTS: Final[Any] = torch.ops.samestep.joined_products.default
SUM_OF_PRODUCTS: Final[Any] = torch.ops.samestep.sum_of_products.default
LAYER_FORWARD: Final[Any] = torch.ops.samestep.layer_forward.default
LAYER_BACKWARD: Final[Any] = torch.ops.samestep.layer_backward.default
