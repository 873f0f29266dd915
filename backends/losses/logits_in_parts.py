"""What a model's head returns in place of logits that are too large to be computed at once."""

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
"""Functions that treat all tokens alike if all else are constants: a bias, a scale, a cap."""
_OTHER_OPERATORS: Final = (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__pow__", "__rpow__", "__rsub__",
    "__rtruediv__", "__matmul__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__",
    "__len__", "__iter__", "__contains__", "__abs__", "__bool__", "__float__",
)  # fmt: skip
"""Operators that need the tensor; Python does not look for them in `__getattr__`."""
_CROSS_ENTROPY: Final = inspect.signature(nn.functional.cross_entropy)


@dataclass(frozen=True, slots=True)
class _Settings:
    """How torch computed when the head was reached.

    Attributes:
        device: The type of its device.
        has_gradients: Whether autograd recorded.
        half: The type of autocast; None if it was off.
    """

    device: str
    has_gradients: bool
    half: torch.dtype | None

    @staticmethod
    def of_now(device: str) -> _Settings:
        is_half = torch.is_autocast_enabled(device)
        half = torch.get_autocast_dtype(device) if is_half else None
        return _Settings(device, torch.is_grad_enabled(), half)

    def run(self, function: _Function, *arguments: Any, has_gradients: bool = True) -> Any:
        """Call a function as then; without gradients if the caller wants none."""
        autocast: Any = nullcontext()
        if self.half != _Settings.of_now(self.device).half:
            autocast = torch.autocast(self.device, self.half, enabled=self.half is not None)
        with torch.set_grad_enabled(self.has_gradients and has_gradients), autocast:
            return function(*arguments)


class LogitsInParts:
    """Logits of more tokens than are computed at once.

    They stand for a tensor, (..., vocabulary). What is done to the logits of all tokens alike is
    noted, and so are changes of shape. Cross-entropy is computed in parts. Everything else gets the
    tensor: then it is computed as a whole, with the values that it would have without this class.

    Attributes:
        states: The head's inputs, (..., hidden size).
        shape: Of the logits.
    """

    def __init__(
        self,
        states: torch.Tensor,
        vocabulary: int,
        at_once: int,
        *,
        of_rows: _Function,
        of_all: Callable[[], torch.Tensor],
        settings: _Settings,
    ) -> None:
        self.states = states
        self.shape = torch.Size((*states.shape[:-1], vocabulary))
        self._at_once = at_once
        self._of_rows = of_rows
        self._of_all = of_all
        self._settings = settings
        self._tensor: torch.Tensor | None = None
        self._source: LogitsInParts | None = None
        self._derived: list[weakref.ref[LogitsInParts]] = []

    @staticmethod
    def of(head: _Function, states: torch.Tensor, vocabulary: int, at_once: int) -> LogitsInParts:
        """Return the logits of a head.

        Args:
            head: Its forward.
            states: Its inputs, (..., hidden size).
            vocabulary: How many logits a token has.
            at_once: For how many tokens they are computed at once.
        """
        settings = _Settings.of_now(states.device.type)
        states = states.clone()  # the model may change its own in place before they are used
        return LogitsInParts(
            states,
            vocabulary,
            at_once,
            of_rows=head,
            of_all=lambda: head(states),
            settings=settings,
        )

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """The device that computes them."""
        return self.states.device

    def dim(self) -> int:
        """As `torch.Tensor.dim`."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """As `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """As `torch.Tensor.numel`."""
        return self.shape.numel()

    def compute(self, function: _Function, *arrays: torch.Tensor) -> list[torch.Tensor]:
        """Return `function(logits, *arrays)` of each part; autograd keeps no logits.

        Args:
            function: Takes logits, (tokens, vocabulary), and what belongs to these tokens.
            arrays: One row for each token.
        """

        def of_part(states: torch.Tensor, *rows: torch.Tensor) -> Any:
            has_gradients = torch.is_grad_enabled()
            logits = self._settings.run(self._of_rows, states, has_gradients=has_gradients)
            assert logits.shape[-1] == self.shape[-1], "out_features of the head"
            return function(logits, *rows)

        if self._tensor is not None:
            logits = self._tensor.flatten(0, -2)
            return [function(*part) for part in _split(self._at_once, logits, *arrays)]
        states = self.states.flatten(0, -2)
        parts = _split(self._at_once, states, *arrays)
        return [checkpoint(of_part, *part, use_reentrant=False) for part in parts]

    def cross_entropy(
        self,
        labels: torch.Tensor,
        *,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """As `torch.nn.functional.cross_entropy`, for labels of shape (tokens,), int64."""

        def losses_of(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(
                logits,
                expected,
                ignore_index=ignore_index,
                reduction="none" if reduction == "none" else "sum",
                label_smoothing=label_smoothing,
            )

        parts = self.compute(losses_of, labels)
        if reduction == "none":
            return torch.cat(parts)
        total = torch.stack(parts).sum()
        return total if reduction == "sum" else total / (labels != ignore_index).sum()

    def whole(self) -> torch.Tensor:
        """Compute the tensor, and those of logits derived from it, as code may change it in
        place."""
        if self._source is not None:
            self._source.whole()  # which computes this one, too
        if self._tensor is None:
            tensor: torch.Tensor = self._settings.run(self._of_all)
            self._tensor = tensor
            for reference in self._derived:
                if (derived := reference()) is not None:
                    derived.whole()
            return tensor
        return self._tensor

    def float(self) -> LogitsInParts:
        """As `torch.Tensor.float`."""
        return self._map(torch.Tensor.float)

    def contiguous(self) -> LogitsInParts:
        """As `torch.Tensor.contiguous`."""
        return self._map(torch.Tensor.contiguous)

    def tanh(self) -> LogitsInParts:
        """As `torch.Tensor.tanh`."""
        return self._map(torch.Tensor.tanh)

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        """As `torch.Tensor.to`."""
        if arguments in {(self.device,), (torch.float32,)} and not keywords:
            return self._map(lambda logits: logits.to(*arguments))
        return self.whole().to(*arguments, **keywords)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """As `torch.Tensor.flatten`."""
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if end == self.ndim - 1:
            return self.whole().flatten(start_dim, end_dim)
        states = self.states.flatten(start, end)
        return self._derive(states, self._of_rows, lambda logits: logits.flatten(start, end))

    def view(self, *sizes: Any) -> Any:
        """As `torch.Tensor.view`."""
        return self._reshape("view", sizes)

    def reshape(self, *sizes: Any) -> Any:
        """As `torch.Tensor.reshape`."""
        return self._reshape("reshape", sizes)

    def __getitem__(self, index: Any) -> Any:
        slices = _slices_of(index, self.ndim)
        if slices is None or slices[-1] != slice(None):
            return self.whole()[index]
        return self._derive(self.states[slices], self._of_rows, lambda logits: logits[slices])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: _Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute cross-entropy in parts, note what treats all tokens alike, and give the tensor to
        every other function."""
        del types
        keywords = dict(kwargs or {})
        if func is nn.functional.cross_entropy:
            loss = _cross_entropy_of(_CROSS_ENTROPY.bind(*args, **keywords).arguments)
            if loss is not None:
                return loss
        name = getattr(func, "__name__", "")
        if name in _ELEMENTWISE and args and isinstance(args[0], cls) and not keywords:
            return args[0].apply(func, *args[1:])
        return func(*_with_tensors(args), **_with_tensors(keywords))

    def apply(self, function: _Function, *arguments: Any) -> Any:
        """Note `function(logits, *arguments)` if the arguments are constants; else compute it."""
        constants = [_constant_of(argument, self) for argument in arguments]
        if any(constant is None for constant in constants):
            return function(self.whole(), *_with_tensors(arguments))
        return self._derive(
            self.states,
            lambda states: function(self._of_rows(states), *constants),
            lambda logits: function(logits, *arguments),
        )

    def _map(self, function: _Function) -> LogitsInParts:
        return self._derive(self.states, lambda states: function(self._of_rows(states)), function)

    def _reshape(self, name: str, sizes: tuple[Any, ...]) -> Any:
        shape = [*sizes[0]] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else [*sizes]
        if -1 in shape:
            others = math.prod(size for size in shape if size != -1)
            shape[shape.index(-1)] = self.numel() // max(1, others)
        if shape[-1] != self.shape[-1] or math.prod(shape) != self.numel():
            return getattr(self.whole(), name)(*sizes)
        states = self.states.reshape(*shape[:-1], self.states.shape[-1])
        return self._derive(states, self._of_rows, lambda logits: getattr(logits, name)(*sizes))

    def _derive(
        self, states: torch.Tensor, of_rows: _Function, of_tensor: _Function
    ) -> LogitsInParts:
        derived = LogitsInParts(
            states,
            self.shape[-1],
            self._at_once,
            of_rows=of_rows,
            of_all=lambda: of_tensor(self.whole()),
            settings=self._settings,
        )
        derived._source = self
        self._derived = [reference for reference in self._derived if reference() is not None]
        self._derived.append(weakref.ref(derived))
        if self._tensor is not None:
            derived.whole()
        return derived


def _elementwise(name: str) -> _Function:
    def operator(logits: LogitsInParts, *arguments: Any) -> Any:
        return logits.apply(getattr(torch.Tensor, name), *arguments)

    return operator


def _of_tensor(name: str) -> _Function:
    def operator(logits: LogitsInParts, *arguments: Any) -> Any:
        return getattr(logits.whole(), name)(*_with_tensors(arguments))

    return operator


for _name in _ELEMENTWISE_OPERATORS:
    setattr(LogitsInParts, _name, _elementwise(_name))
for _name in _OTHER_OPERATORS:
    setattr(LogitsInParts, _name, _of_tensor(_name))


def _cross_entropy_of(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the loss; None if it is not one of labels, or has weights of classes.

    Args:
        arguments: Of `torch.nn.functional.cross_entropy`, by its names.
    """
    options = {name: value for name, value in arguments.items() if value is not None}
    logits, labels = options.pop("input"), options.pop("target")
    if not isinstance(logits, LogitsInParts) or not isinstance(labels, torch.Tensor):
        return None
    is_of_labels = logits.ndim - 1 == labels.dim() == 1 and labels.dtype == torch.int64
    if not is_of_labels or options.keys() - {"reduction", "ignore_index", "label_smoothing"}:
        return None
    return logits.cross_entropy(labels, **options)


def _split(at_once: int, *arrays: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    pieces: list[tuple[torch.Tensor, ...]] = [array.split(at_once) for array in arrays]  # type: ignore[no-untyped-call]
    return zip(*pieces, strict=True)


def _slices_of(index: Any, dimensions: int) -> tuple[slice, ...] | None:
    """Return an index as one slice for each dimension; None if it is another kind of index."""
    indices = [*index] if isinstance(index, tuple) else [index]
    ellipses = [dimension for dimension, entry in enumerate(indices) if entry is Ellipsis]
    first = ellipses[0] if ellipses else len(indices)
    missing = dimensions - len(indices) + len(ellipses)
    indices[first : first + 1] = [slice(None)] * missing
    return tuple(indices) if all(isinstance(entry, slice) for entry in indices) else None


def _constant_of(value: Any, logits: LogitsInParts) -> Any:
    """Return what combines with the logits of each token in the same way; None if it does not."""
    if isinstance(value, int | float):
        return value
    if not isinstance(value, torch.Tensor) or value.dim() > logits.ndim:
        return None
    if value.dim() == 0:
        return value.clone()  # as it may change in place before it is used
    is_row = value.numel() == value.shape[-1] and value.shape[-1] in {1, logits.shape[-1]}
    return value.reshape(-1).clone() if is_row else None


def _with_tensors(values: Any) -> Any:
    """Replace logits in parts by tensors, in arguments or keywords."""
    if isinstance(values, LogitsInParts):
        return values.whole()
    if isinstance(values, list | tuple):
        return type(values)(_with_tensors(value) for value in values)
    return {k: _with_tensors(v) for k, v in values.items()} if isinstance(values, dict) else values
