"""Random numbers as a function of (seed, site, element) instead of torch's generators.

A number that torch draws during a trace would become a constant of the program and differ between
processes. So each random function is computed here from uniform words, or refused.
`refuse_undeclared_draws` and `refuse_foreign_draws` refuse other draws: by operators inside torch's
composites, and from the generators of Python and NumPy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import fx

from backends.wgpu.graph.opaque import KEEP, UNIFORM
from protocol.base.errors import SamestepError

_SMALLEST_UNIFORM: Final = 2.0**-25
"""Replaces the uniform number 0 in logarithms; smaller than all other uniform numbers."""
_MOST_INTEGERS: Final = 2**24
"""Largest range of random integers: the number of distinct uniform float32 values."""
_SELU: Final = 1.7580993408473766
"""Scale times alpha of `selu`, as in torch's `alpha_dropout`."""


class Draws:
    """Draws from `seed`, a (2,) int32 tensor of two random words.

    Attributes:
        sites: Number of draws so far, which is the number of the next draw.
    """

    def __init__(self, seed: torch.Tensor) -> None:
        self.seed = seed
        self.sites = 0

    def replacement(self, func: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the replacement of a random function of torch, or None."""
        name = _RULES.get(func)
        return None if name is None else getattr(self, name)

    def dropout(
        self,
        x: torch.Tensor,
        p: float = 0.5,
        train: bool = True,  # noqa: FBT001, FBT002
    ) -> torch.Tensor:
        """Replace `torch.dropout`."""
        noise = self._noise(x, x.shape, p) if train else None
        return x if noise is None else x * noise

    def dropout_(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """Replace `torch.dropout_`, in place, since other code may read the tensor."""
        noise = self._noise(x, x.shape, p) if train else None
        return x if noise is None else x.mul_(noise)

    def feature_dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """Drop whole channels of (N, C, ...)."""
        noise = self._noise(x, _channels(x), p) if train else None
        return x if noise is None else x * noise

    def feature_dropout_(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """Replace `feature_dropout_`, in place."""
        noise = self._noise(x, _channels(x), p) if train else None
        return x if noise is None else x.mul_(noise)

    def alpha_dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """Apply dropout that preserves mean and variance of `selu`'s outputs."""
        return self._alpha(x, x.shape, p) if train and p else x

    def alpha_dropout_(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """Replace `alpha_dropout_`, in place."""
        return x.copy_(self._alpha(x, x.shape, p)) if train and p else x

    def feature_alpha_dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """Apply `alpha_dropout` to whole channels."""
        return self._alpha(x, _channels(x), p) if train and p else x

    def feature_alpha_dropout_(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """Replace `feature_alpha_dropout_`, in place."""
        return x.copy_(self._alpha(x, _channels(x), p)) if train and p else x

    def rrelu(
        self,
        x: torch.Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,  # noqa: FBT001, FBT002
        **options: Any,
    ) -> torch.Tensor:
        """Draw a slope per negative element; without training use the mean slope."""
        _refuse_generator_and_out(options)
        slope: Any = (lower + upper) / 2
        if training:
            slope = lower + (upper - lower) * self._uniform(x.shape)
        return torch.where(x <= 0, x * slope, x)

    def rrelu_(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replace `rrelu_`, in place."""
        return x.copy_(self.rrelu(x, *args, **kwargs))

    def rand(self, *size: Any, **options: Any) -> torch.Tensor:
        """Draw uniform numbers in [0, 1)."""
        return _with_options(self._uniform(_size(size, options)), options)

    def rand_like(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Draw uniform numbers in [0, 1), of the shape of `x`."""
        return _with_options(self._uniform(x.shape), {"dtype": x.dtype} | options)

    def uniform_(self, x: torch.Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Any:
        """Fill with uniform numbers; torch names the bounds `from` and `to`."""
        low, high = options.pop("from", low), options.pop("to", high)
        _refuse_generator_and_out(options)
        return x.copy_(low + (high - low) * self._uniform(x.shape))

    def randn(self, *size: Any, **options: Any) -> torch.Tensor:
        """Draw normal numbers."""
        return _with_options(self._normal(_size(size, options)), options)

    def randn_like(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Draw normal numbers, of the shape of `x`."""
        return _with_options(self._normal(x.shape), {"dtype": x.dtype} | options)

    def normal_(self, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **options: Any) -> Any:
        """Fill with normal numbers."""
        _refuse_generator_and_out(options)
        return x.copy_(mean + std * self._normal(x.shape))

    def normal(self, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> torch.Tensor:
        """Draw normal numbers, for numbers and a size, or for tensors."""
        if size is None:
            shapes = [x.shape for x in (mean, std) if isinstance(x, torch.Tensor)]
            size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        return _with_options(mean + std * self._normal(size), options)

    def exponential_(self, x: torch.Tensor, lambd: float = 1.0, **options: Any) -> torch.Tensor:
        """Fill with exponential numbers."""
        _refuse_generator_and_out(options)
        return x.copy_(self._exponential(x.shape) / lambd)

    def bernoulli(self, x: torch.Tensor, p: Any = None, **options: Any) -> torch.Tensor:
        """Draw 1 with the probabilities in x, or with probability p, and 0 otherwise."""
        _refuse_generator_and_out(options)
        return (self._uniform(x.shape) < (x if p is None else p)).to(x.dtype)

    def bernoulli_(self, x: torch.Tensor, p: Any = 0.5, **options: Any) -> torch.Tensor:
        """Fill with 1 with probability p, and 0 otherwise."""
        return x.copy_(self.bernoulli(x, p, **options))

    def randint(self, *bounds: Any, **options: Any) -> torch.Tensor:
        """Draw integers; arguments (high, size) or (low, high, size)."""
        remaining = list(bounds)
        size = options.pop("size") if "size" in options else remaining.pop()
        high = options.pop("high") if "high" in options else remaining.pop()
        low = options.pop("low", remaining.pop() if remaining else 0)
        return _with_options(self._integers(low, high, size), {"dtype": torch.int64} | options)

    def randint_like(self, x: torch.Tensor, *bounds: Any, **options: Any) -> torch.Tensor:
        """Draw integers of the shape of `x`; arguments (high) or (low, high)."""
        remaining = list(bounds)
        high = options.pop("high") if "high" in options else remaining.pop()
        low = options.pop("low", remaining.pop() if remaining else 0)
        return _with_options(self._integers(low, high, x.shape), {"dtype": x.dtype} | options)

    def lstm(self, *arguments: Any) -> Any:
        """Run an LSTM with dropout between layers, which torch would draw inside the operator."""
        return self._recurrent(torch.lstm, *arguments)

    def gru(self, *arguments: Any) -> Any:
        """Run a GRU; see `lstm`."""
        return self._recurrent(torch.gru, *arguments)

    def rnn_tanh(self, *arguments: Any) -> Any:
        """Run an RNN with tanh; see `lstm`."""
        return self._recurrent(torch.rnn_tanh, *arguments)

    def rnn_relu(self, *arguments: Any) -> Any:
        """Run an RNN with ReLU; see `lstm`."""
        return self._recurrent(torch.rnn_relu, *arguments)

    def _recurrent(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a recurrent network layer by layer.

        Arguments are torch's: input, state, weights, biases, layers, dropout, training,
        bidirectional and batch first. A packed sequence has other arguments and is left to torch.
        """
        x, state, weights, biases, layers, dropout, training, *form = arguments
        if isinstance(biases, (list, tuple)) or layers == 1 or not (dropout and training):
            return function(*arguments)
        states = [state] if isinstance(state, torch.Tensor) else list(state)
        weights_per_layer, ends = len(weights) // layers, []
        for layer in range(layers):
            initial_states = [part.chunk(layers)[layer] for part in states]
            layer_weights = weights[weights_per_layer * layer : weights_per_layer * (layer + 1)]
            layer_state = initial_states[0] if isinstance(state, torch.Tensor) else initial_states
            x, *end = function(x, layer_state, layer_weights, biases, 1, 0.0, training, *form)
            ends.append(end)
            if layer < layers - 1:
                x = self.dropout(x, dropout)
        return x, *(torch.cat(parts) for parts in zip(*ends, strict=True))

    def _site(self) -> int:
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            raise SamestepError(
                "expected no random numbers (dropout) inside torch.utils.checkpoint, got a draw in "
                "its recomputation, which Vulkan and canonical arithmetic cannot repeat; remove "
                "the dropout, or use model.gradient_checkpointing instead"
            )
        site, self.sites = self.sites, self.sites + 1
        return site

    def _noise(self, x: torch.Tensor, shape: Sequence[int], p: float) -> torch.Tensor | None:
        """Return a dropout mask; None if p is 0."""
        _refuse_probability(p)
        if p == 0.0:
            return None
        if p == 1.0:
            return x.new_zeros(list(shape))
        noise: torch.Tensor = KEEP(self.seed, list(shape), float(p), self._site())
        return noise

    def _alpha(self, x: torch.Tensor, shape: Sequence[int], p: float) -> torch.Tensor:
        _refuse_probability(p)
        if p == 1.0:
            return x * 0.0
        mask = (self._uniform(shape) >= p).to(x.dtype)
        scale = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p))
        return x * (mask * scale) + ((mask - 1) * (_SELU * scale) + _SELU * scale * p)

    def _uniform(self, shape: Sequence[int]) -> torch.Tensor:
        values: torch.Tensor = UNIFORM(self.seed, list(shape), self._site())
        return values

    def _exponential(self, shape: Sequence[int]) -> torch.Tensor:
        return -self._uniform(shape).clamp(min=_SMALLEST_UNIFORM).log()

    def _normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Draw normal numbers by the Box-Muller transform."""
        radius = (2 * self._exponential(shape)).sqrt()
        return radius * (2 * math.pi * self._uniform(shape)).cos()

    def _integers(self, low: int, high: int, shape: Sequence[int]) -> torch.Tensor:
        if not 0 < high - low <= _MOST_INTEGERS:
            raise SamestepError(
                f"expected a range of 1 to {_MOST_INTEGERS} integers to draw from on the vulkan "
                f"backend, got {low} to {high}; draw from a smaller range"
            )
        return (self._uniform(shape) * (high - low)).floor().to(torch.int64) + low


_Tensor = torch.Tensor
_RULES: Final[Mapping[Any, str]] = {
    **{
        getattr(torch, name): name
        for name in (
            "alpha_dropout", "alpha_dropout_", "bernoulli", "dropout", "dropout_",
            "feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout",
            "feature_dropout_", "gru", "lstm", "normal", "rand", "rand_like", "randint",
            "randint_like", "randn", "randn_like", "rnn_relu", "rnn_tanh", "rrelu", "rrelu_",
        )
    },
    **{
        getattr(_Tensor, name): name
        for name in ("bernoulli", "bernoulli_", "exponential_", "normal_", "uniform_")
    },
}  # fmt: skip
"""Torch's random functions, and the methods above that replace them."""


def _channels(x: torch.Tensor) -> list[int]:
    return [*x.shape[:2], *(1 for _ in x.shape[2:])]


def _size(sizes: Sequence[Any], options: dict[str, Any]) -> list[int]:
    size = options.pop("size", sizes)
    return list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)


def _with_options(values: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    _refuse_generator_and_out(options)
    dtype = options.get("dtype")
    values = values if dtype is None else values.to(dtype)
    return values.requires_grad_() if options.get("requires_grad") else values


def _refuse_generator_and_out(options: Mapping[str, Any]) -> None:
    if options.get("generator") is not None or options.get("out") is not None:
        raise SamestepError(
            "expected random numbers without generator= and out=, got one of them; Vulkan and "
            "canonical arithmetic draw from the run's seed, so leave it out"
        )


def _refuse_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise SamestepError(f"expected a dropout probability between 0 and 1, got {p}")


def refuse_undeclared_draws(graph: fx.GraphModule) -> None:
    """Refuse a graph with an operator that draws from torch's generator.

    Raises:
        SamestepError: The graph has such an operator.
    """
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            name = str(node.target).removeprefix("aten.").split(".")[0]
            module = str(node.meta.get("module", "")) or "the loss"
            raise _foreign_draw_error(repr(name), module)


@contextmanager
def refuse_foreign_draws() -> Iterator[None]:
    """Refuse draws from the global generators of Python, NumPy and torch within the context.

    Raises:
        SamestepError: A generator's state has changed.
    """
    states = _generator_states()
    yield
    for name, state in _generator_states().items():
        if state != states[name]:
            raise _foreign_draw_error(f"from {name}", "forward or the loss")


def _generator_states() -> dict[str, object]:
    numbers = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return {
        "Python's random module": random.getstate(),
        "numpy.random": (numbers["key"].tobytes(), numbers["pos"]),
        "torch's own generator": torch.get_rng_state().numpy().tobytes(),
    }


def _foreign_draw_error(draw: str, origin: str) -> SamestepError:
    return SamestepError(
        f"expected random numbers from torch.rand or torch.randn, got a draw {draw} in {origin}, "
        "which Vulkan and canonical arithmetic would repeat in every step; use those functions, or "
        "a cpu or cuda worker in native arithmetic"
    )
