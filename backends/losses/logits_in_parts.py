"""Stand-in for logits that are too large to be computed at once, which a model's head returns."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_Function = Callable[..., Any]

_ELEMENTWISE_OPERATORS: Final = (
    "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__", "__neg__",
)  # fmt: skip
_ELEMENTWISE: Final = frozenset({
    *_ELEMENTWISE_OPERATORS, "add", "sub", "mul", "div", "true_divide", "neg", "tanh",
})  # fmt: skip
"""Functions that treat all tokens alike if their other arguments are constants: a bias, a scale."""
_OTHER_OPERATORS: Final = (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__pow__", "__rpow__", "__rsub__",
    "__rtruediv__", "__matmul__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__",
    "__len__", "__iter__", "__contains__", "__abs__", "__bool__", "__float__",
)  # fmt: skip
"""Operators that need the tensor; Python does not look for them in `__getattr__`."""
_CROSS_ENTROPY: Final = inspect.signature(nn.functional.cross_entropy)


@dataclass(frozen=True, slots=True)
class _Settings:
    """Torch's settings when the head was called.

    Attributes:
        device: Type of the head's device.
        has_gradients: Whether autograd recorded.
        autocast_dtype: The type of autocast; None if autocast was off.
    """

    device: str
    has_gradients: bool
    autocast_dtype: torch.dtype | None

    @staticmethod
    def current(device: str) -> _Settings:
        is_autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else None
        return _Settings(device, torch.is_grad_enabled(), dtype)

    def run(self, function: _Function, *arguments: Any, has_gradients: bool = True) -> Any:
        """Call a function with these settings; without gradients if the caller wants none."""
        autocast: Any = nullcontext()
        dtype = self.autocast_dtype
        if dtype != _Settings.current(self.device).autocast_dtype:
            autocast = torch.autocast(self.device, dtype, enabled=dtype is not None)
        with torch.set_grad_enabled(self.has_gradients and has_gradients), autocast:
            return function(*arguments)


class LogitsInParts:
    """Logits of more tokens than are computed at once.

    Stands for a tensor, (..., vocabulary). Functions that treat all tokens alike are recorded, and
    so are changes of shape. Cross-entropy is computed in parts. Every other function gets the full
    tensor, with the values that the tensor would have without this class.

    Attributes:
        states: The head's inputs, (..., hidden size).
        shape: Shape of the logits.
    """

    def __init__(
        self,
        states: torch.Tensor,
        vocabulary: int,
        tokens_per_part: int,
        *,
        compute_rows: _Function,
        compute_all: Callable[[], torch.Tensor],
        settings: _Settings,
    ) -> None:
        self.states = states
        self.shape = torch.Size((*states.shape[:-1], vocabulary))
        self._tokens_per_part = tokens_per_part
        self._compute_rows = compute_rows
        self._compute_all = compute_all
        self._settings = settings
        self._tensor: torch.Tensor | None = None
        self._source: LogitsInParts | None = None
        self._derived: list[weakref.ref[LogitsInParts]] = []

    @staticmethod
    def of(
        head: _Function, states: torch.Tensor, vocabulary: int, tokens_per_part: int
    ) -> LogitsInParts:
        """Return the logits of a head.

        Args:
            head: The head's forward.
            states: The head's inputs, (..., hidden size).
            vocabulary: Number of logits per token.
            tokens_per_part: Number of tokens whose logits are computed at once.
        """
        settings = _Settings.current(states.device.type)
        states = states.clone()  # the model may change the original in place before it is used
        return LogitsInParts(
            states,
            vocabulary,
            tokens_per_part,
            compute_rows=head,
            compute_all=lambda: head(states),
            settings=settings,
        )

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """The device that computes the logits."""
        return self.states.device

    def dim(self) -> int:
        """Return the number of dimensions, as `torch.Tensor.dim`."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Behave as `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Behave as `torch.Tensor.numel`."""
        return self.shape.numel()

    def compute(self, function: _Function, *arrays: torch.Tensor) -> list[torch.Tensor]:
        """Return `function(logits, *arrays)` for each part; autograd keeps no logits.

        Args:
            function: Takes logits, (tokens, vocabulary), and the arrays' rows of these tokens.
            arrays: Arrays with one row for each token.
        """

        def compute_part(states: torch.Tensor, *rows: torch.Tensor) -> Any:
            has_gradients = torch.is_grad_enabled()
            logits = self._settings.run(self._compute_rows, states, has_gradients=has_gradients)
            assert logits.shape[-1] == self.shape[-1], (
                "the head's out_features differ from its outputs"
            )
            return function(logits, *rows)

        if self._tensor is not None:
            logits = self._tensor.flatten(0, -2)
            return [function(*part) for part in _split(self._tokens_per_part, logits, *arrays)]
        states = self.states.flatten(0, -2)
        parts = _split(self._tokens_per_part, states, *arrays)
        return [checkpoint(compute_part, *part, use_reentrant=False) for part in parts]

    def cross_entropy(
        self,
        labels: torch.Tensor,
        *,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """Compute torch's `cross_entropy` in parts, for labels of shape (tokens,), int64."""

        def part_loss(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(
                logits,
                expected,
                ignore_index=ignore_index,
                reduction="none" if reduction == "none" else "sum",
                label_smoothing=label_smoothing,
            )

        parts = self.compute(part_loss, labels)
        if reduction == "none":
            return torch.cat(parts)
        total = torch.stack(parts).sum()
        return total if reduction == "sum" else total / (labels != ignore_index).sum()

    def full_tensor(self) -> torch.Tensor:
        """Compute the tensor, and the tensors of all derived logits.

        Derived logits are computed now, because code may change this tensor in place.
        """
        if self._source is not None:
            self._source.full_tensor()  # which computes this tensor, too
        if self._tensor is None:
            tensor: torch.Tensor = self._settings.run(self._compute_all)
            self._tensor = tensor
            for reference in self._derived:
                if (derived := reference()) is not None:
                    derived.full_tensor()
            return tensor
        return self._tensor

    def float(self) -> LogitsInParts:
        """Behave as `torch.Tensor.float`."""
        return self._map(torch.Tensor.float)

    def contiguous(self) -> LogitsInParts:
        """Behave as `torch.Tensor.contiguous`."""
        return self._map(torch.Tensor.contiguous)

    def tanh(self) -> LogitsInParts:
        """Behave as `torch.Tensor.tanh`."""
        return self._map(torch.Tensor.tanh)

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        """Behave as `torch.Tensor.to`."""
        if arguments in {(self.device,), (torch.float32,)} and not keywords:
            return self._map(lambda logits: logits.to(*arguments))
        return self.full_tensor().to(*arguments, **keywords)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Behave as `torch.Tensor.flatten`."""
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if end == self.ndim - 1:
            return self.full_tensor().flatten(start_dim, end_dim)
        states = self.states.flatten(start, end)
        return self._derive(states, self._compute_rows, lambda logits: logits.flatten(start, end))

    def view(self, *sizes: Any) -> Any:
        """Behave as `torch.Tensor.view`."""
        return self._reshape("view", sizes)

    def reshape(self, *sizes: Any) -> Any:
        """Behave as `torch.Tensor.reshape`."""
        return self._reshape("reshape", sizes)

    def __getitem__(self, index: Any) -> Any:
        slices = _slices_of(index, self.ndim)
        if slices is None or slices[-1] != slice(None):
            return self.full_tensor()[index]
        return self._derive(self.states[slices], self._compute_rows, lambda logits: logits[slices])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.full_tensor(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: _Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute cross-entropy in parts, record functions that treat all tokens alike, and call
        every other function with the full tensor."""
        del types
        keywords = dict(kwargs or {})
        if func is nn.functional.cross_entropy:
            loss = _cross_entropy_of(_CROSS_ENTROPY.bind(*args, **keywords).arguments)
            if loss is not None:
                return loss
        name = getattr(func, "__name__", "")
        if name in _ELEMENTWISE and args and isinstance(args[0], cls) and not keywords:
            return args[0].apply(func, *args[1:])
        return func(*_replace_logits(args), **_replace_logits(keywords))

    def apply(self, function: _Function, *arguments: Any) -> Any:
        """Record `function(logits, *arguments)` if the arguments are constants; else compute the
        result."""
        constants = [_constant_of(argument, self) for argument in arguments]
        if any(constant is None for constant in constants):
            return function(self.full_tensor(), *_replace_logits(arguments))
        return self._derive(
            self.states,
            lambda states: function(self._compute_rows(states), *constants),
            lambda logits: function(logits, *arguments),
        )

    def _map(self, function: _Function) -> LogitsInParts:
        return self._derive(
            self.states, lambda states: function(self._compute_rows(states)), function
        )

    def _reshape(self, name: str, sizes: tuple[Any, ...]) -> Any:
        shape = [*sizes[0]] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else [*sizes]
        if -1 in shape:
            known_elements = math.prod(size for size in shape if size != -1)
            shape[shape.index(-1)] = self.numel() // max(1, known_elements)
        if shape[-1] != self.shape[-1] or math.prod(shape) != self.numel():
            return getattr(self.full_tensor(), name)(*sizes)
        states = self.states.reshape(*shape[:-1], self.states.shape[-1])
        return self._derive(
            states, self._compute_rows, lambda logits: getattr(logits, name)(*sizes)
        )

    def _derive(
        self, states: torch.Tensor, compute_rows: _Function, derive_tensor: _Function
    ) -> LogitsInParts:
        derived = LogitsInParts(
            states,
            self.shape[-1],
            self._tokens_per_part,
            compute_rows=compute_rows,
            compute_all=lambda: derive_tensor(self.full_tensor()),
            settings=self._settings,
        )
        derived._source = self
        self._derived = [reference for reference in self._derived if reference() is not None]
        self._derived.append(weakref.ref(derived))
        if self._tensor is not None:
            derived.full_tensor()
        return derived


def _elementwise_operator(name: str) -> _Function:
    def operator(logits: LogitsInParts, *arguments: Any) -> Any:
        return logits.apply(getattr(torch.Tensor, name), *arguments)

    return operator


def _full_tensor_operator(name: str) -> _Function:
    def operator(logits: LogitsInParts, *arguments: Any) -> Any:
        return getattr(logits.full_tensor(), name)(*_replace_logits(arguments))

    return operator


for _name in _ELEMENTWISE_OPERATORS:
    setattr(LogitsInParts, _name, _elementwise_operator(_name))
for _name in _OTHER_OPERATORS:
    setattr(LogitsInParts, _name, _full_tensor_operator(_name))


def _cross_entropy_of(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the loss; None if the targets are no labels, or the call has class weights.

    Args:
        arguments: Arguments of `torch.nn.functional.cross_entropy`, by name.
    """
    options = {name: value for name, value in arguments.items() if value is not None}
    logits, labels = options.pop("input"), options.pop("target")
    if not isinstance(logits, LogitsInParts) or not isinstance(labels, torch.Tensor):
        return None
    has_labels = logits.ndim - 1 == labels.dim() == 1 and labels.dtype == torch.int64
    if not has_labels or options.keys() - {"reduction", "ignore_index", "label_smoothing"}:
        return None
    return logits.cross_entropy(labels, **options)


def _split(tokens_per_part: int, *arrays: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    parts: list[tuple[torch.Tensor, ...]] = [array.split(tokens_per_part) for array in arrays]  # type: ignore[no-untyped-call]
    return zip(*parts, strict=True)


def _slices_of(index: Any, dimensions: int) -> tuple[slice, ...] | None:
    """Return an index as one slice for each dimension; None for another kind of index."""
    indices = [*index] if isinstance(index, tuple) else [index]
    ellipses = [dimension for dimension, entry in enumerate(indices) if entry is Ellipsis]
    first = ellipses[0] if ellipses else len(indices)
    missing = dimensions - len(indices) + len(ellipses)
    indices[first : first + 1] = [slice(None)] * missing
    return tuple(indices) if all(isinstance(entry, slice) for entry in indices) else None


def _constant_of(value: Any, logits: LogitsInParts) -> Any:
    """Return a value that combines with the logits of each token in the same way, else None."""
    if isinstance(value, int | float):
        return value
    if not isinstance(value, torch.Tensor) or value.dim() > logits.ndim:
        return None
    if value.dim() == 0:
        return value.clone()  # the original may change in place before it is used
    is_row = value.numel() == value.shape[-1] and value.shape[-1] in {1, logits.shape[-1]}
    return value.reshape(-1).clone() if is_row else None


def _replace_logits(values: Any) -> Any:
    """Replace logits in parts by full tensors, in arguments or keywords."""
    if isinstance(values, LogitsInParts):
        return values.full_tensor()
    if isinstance(values, list | tuple):
        return type(values)(_replace_logits(value) for value in values)
    return (
        {k: _replace_logits(v) for k, v in values.items()} if isinstance(values, dict) else values
    )
