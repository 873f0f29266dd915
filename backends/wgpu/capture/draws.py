"""Random numbers as a function of (seed, site, element), in place of torch's own generators.

What torch draws in a trace would be a constant of the program, other in every process. So each
operator that draws is computed here from uniform words, or refused. `refuse_foreign_draws` sees to
what passes by: operators inside torch's own composites, and Python's and numpy's generators.
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

_SMALLEST: Final = 2.0**-25
"""Below every uniform number but 0, whose logarithm it stands in for."""
_MOST_INTEGERS: Final = 2**24
"""Different numbers that a uniform float32 tells apart."""
_SELU: Final = 1.7580993408473766
"""Scale times alpha of `selu`, as in torch's `alpha_dropout`."""


class Draws:
    """Draws from `seed`, a (2,) int32 tensor of two random words.

    Attributes:
        sites: How many draws there were: each has a number of its own.
    """

    def __init__(self, seed: torch.Tensor) -> None:
        self.seed = seed
        self.sites = 0

    def known(self, func: Callable[..., Any]) -> Callable[..., Any] | None:
        """What computes this function of torch's here, if it draws and can be."""
        name = _RULES.get(func)
        return None if name is None else getattr(self, name)

    def dropout(
        self,
        x: torch.Tensor,
        p: float = 0.5,
        train: bool = True,  # noqa: FBT001, FBT002
    ) -> torch.Tensor:
        """As torch's."""
        noise = self._noise(x, x.shape, p) if train else None
        return x if noise is None else x * noise

    def dropout_(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """In place: others may read what it changes."""
        noise = self._noise(x, x.shape, p) if train else None
        return x if noise is None else x.mul_(noise)

    def feature_dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """Whole channels of (N, C, ...)."""
        noise = self._noise(x, _channels(x), p) if train else None
        return x if noise is None else x * noise

    def feature_dropout_(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """The same, in place."""
        noise = self._noise(x, _channels(x), p) if train else None
        return x if noise is None else x.mul_(noise)

    def alpha_dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """Keeps the mean and variance of what `selu` gives."""
        return self._alpha(x, x.shape, p) if train and p else x

    def alpha_dropout_(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """The same, in place."""
        return x.copy_(self._alpha(x, x.shape, p)) if train and p else x

    def feature_alpha_dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """The same for whole channels."""
        return self._alpha(x, _channels(x), p) if train and p else x

    def feature_alpha_dropout_(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        """In place."""
        return x.copy_(self._alpha(x, _channels(x), p)) if train and p else x

    def rrelu(
        self,
        x: torch.Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,  # noqa: FBT001, FBT002
        **more: Any,
    ) -> torch.Tensor:
        """A slope for each negative element; without training their mean."""
        _refuse_own(more)
        slope: Any = (lower + upper) / 2
        if training:
            slope = lower + (upper - lower) * self._uniform(x.shape)
        return torch.where(x <= 0, x * slope, x)

    def rrelu_(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In place."""
        return x.copy_(self.rrelu(x, *args, **kwargs))

    def rand(self, *size: Any, **more: Any) -> torch.Tensor:
        """Uniform in [0, 1)."""
        return _as_asked(self._uniform(_size(size, more)), more)

    def rand_like(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        """The same."""
        return _as_asked(self._uniform(x.shape), {"dtype": x.dtype} | more)

    def uniform_(self, x: torch.Tensor, low: float = 0.0, high: float = 1.0, **more: Any) -> Any:
        """In place; torch calls the bounds `from` and `to`."""
        low, high = more.pop("from", low), more.pop("to", high)
        _refuse_own(more)
        return x.copy_(low + (high - low) * self._uniform(x.shape))

    def randn(self, *size: Any, **more: Any) -> torch.Tensor:
        """Normal."""
        return _as_asked(self._normal(_size(size, more)), more)

    def randn_like(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        """The same."""
        return _as_asked(self._normal(x.shape), {"dtype": x.dtype} | more)

    def normal_(self, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **more: Any) -> Any:
        """In place."""
        _refuse_own(more)
        return x.copy_(mean + std * self._normal(x.shape))

    def normal(self, mean: Any, std: Any = 1.0, size: Any = None, **more: Any) -> torch.Tensor:
        """Of numbers and a size, or of tensors."""
        if size is None:
            shapes = [x.shape for x in (mean, std) if isinstance(x, torch.Tensor)]
            size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        return _as_asked(mean + std * self._normal(size), more)

    def exponential_(self, x: torch.Tensor, lambd: float = 1.0, **more: Any) -> torch.Tensor:
        """In place."""
        _refuse_own(more)
        return x.copy_(self._exponential(x.shape) / lambd)

    def bernoulli(self, x: torch.Tensor, p: Any = None, **more: Any) -> torch.Tensor:
        """One with the probability that x gives, or p."""
        _refuse_own(more)
        return (self._uniform(x.shape) < (x if p is None else p)).to(x.dtype)

    def bernoulli_(self, x: torch.Tensor, p: Any = 0.5, **more: Any) -> torch.Tensor:
        """In place."""
        return x.copy_(self.bernoulli(x, p, **more))

    def randint(self, *given: Any, **more: Any) -> torch.Tensor:
        """Whole numbers of (high, size) or (low, high, size)."""
        rest = list(given)
        size = more.pop("size") if "size" in more else rest.pop()
        high = more.pop("high") if "high" in more else rest.pop()
        low = more.pop("low", rest.pop() if rest else 0)
        return _as_asked(self._integers(low, high, size), {"dtype": torch.int64} | more)

    def randint_like(self, x: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        """Of (high) or (low, high)."""
        rest = list(given)
        high = more.pop("high") if "high" in more else rest.pop()
        low = more.pop("low", rest.pop() if rest else 0)
        return _as_asked(self._integers(low, high, x.shape), {"dtype": x.dtype} | more)

    def lstm(self, *given: Any) -> Any:
        """Dropout between layers, which torch draws inside of its own operator."""
        return self._recurrent(torch.lstm, *given)

    def gru(self, *given: Any) -> Any:
        """The same."""
        return self._recurrent(torch.gru, *given)

    def rnn_tanh(self, *given: Any) -> Any:
        """The same."""
        return self._recurrent(torch.rnn_tanh, *given)

    def rnn_relu(self, *given: Any) -> Any:
        """The same."""
        return self._recurrent(torch.rnn_relu, *given)

    def _recurrent(self, function: Callable[..., Any], *given: Any) -> Any:
        """Layer by layer.

        Arguments are torch's: input, state, weights, biases, layers, dropout, training,
        bidirectional and batch first. A packed sequence has others, and is left to torch.
        """
        x, state, weights, biases, layers, dropout, training, *form = given
        if isinstance(biases, (list, tuple)) or layers == 1 or not (dropout and training):
            return function(*given)
        states = [state] if isinstance(state, torch.Tensor) else list(state)
        each, ends = len(weights) // layers, []
        for layer in range(layers):
            begin = [part.chunk(layers)[layer] for part in states]
            own = weights[each * layer : each * (layer + 1)]
            held = begin[0] if isinstance(state, torch.Tensor) else begin
            x, *end = function(x, held, own, biases, 1, 0.0, training, *form)
            ends.append(end)
            if layer < layers - 1:
                x = self.dropout(x, dropout)
        return x, *(torch.cat(parts) for parts in zip(*ends, strict=True))

    def _site(self) -> int:
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            raise SamestepError(
                "Vulkan and canonical arithmetic cannot draw the same numbers again in backward, "
                "as torch.utils.checkpoint asks for: draw nothing (no dropout) inside of it, or, "
                "for a model that a run spec names, set model.gradient_checkpointing"
            )
        site, self.sites = self.sites, self.sites + 1
        return site

    def _noise(self, x: torch.Tensor, shape: Sequence[int], p: float) -> torch.Tensor | None:
        """What a dropout multiplies with; None for nothing to do."""
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
        kept = (self._uniform(shape) >= p).to(x.dtype)
        scale = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p))
        return x * (kept * scale) + ((kept - 1) * (_SELU * scale) + _SELU * scale * p)

    def _uniform(self, shape: Sequence[int]) -> torch.Tensor:
        drawn: torch.Tensor = UNIFORM(self.seed, list(shape), self._site())
        return drawn

    def _exponential(self, shape: Sequence[int]) -> torch.Tensor:
        return -self._uniform(shape).clamp(min=_SMALLEST).log()

    def _normal(self, shape: Sequence[int]) -> torch.Tensor:
        """By Box and Muller."""
        radius = (2 * self._exponential(shape)).sqrt()
        return radius * (2 * math.pi * self._uniform(shape)).cos()

    def _integers(self, low: int, high: int, shape: Sequence[int]) -> torch.Tensor:
        if not 0 < high - low <= _MOST_INTEGERS:
            raise SamestepError(
                f"expected a range of 1 to {_MOST_INTEGERS} whole numbers to draw from, got "
                f"{low} to {high}; the vulkan backend draws no more"
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
"""Functions of torch's by the method above that computes them."""


def _channels(x: torch.Tensor) -> list[int]:
    return [*x.shape[:2], *(1 for _ in x.shape[2:])]


def _size(given: Sequence[Any], more: dict[str, Any]) -> list[int]:
    size = more.pop("size", given)
    return list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)


def _as_asked(drawn: torch.Tensor, more: Mapping[str, Any]) -> torch.Tensor:
    _refuse_own(more)
    dtype = more.get("dtype")
    drawn = drawn if dtype is None else drawn.to(dtype)
    return drawn.requires_grad_() if more.get("requires_grad") else drawn


def _refuse_own(more: Mapping[str, Any]) -> None:
    if more.get("generator") is not None or more.get("out") is not None:
        raise SamestepError(
            "Vulkan and canonical arithmetic draw random numbers from the run's seed, not from a "
            "private generator of the model, and into no tensor that is given as out"
        )


def _refuse_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise SamestepError(f"expected a dropout probability between 0 and 1, got {p}")


def refuse_undrawn(graph: fx.GraphModule) -> None:
    """No operator of the graph draws by a generator of torch's.

    Raises:
        SamestepError: One does.
    """
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            name = str(node.target).removeprefix("aten.").split(".")[0]
            module = str(node.meta.get("module", "")) or "the loss"
            raise _undrawn(repr(name), module)


@contextmanager
def refuse_foreign_draws() -> Iterator[None]:
    """While it is entered, nothing draws from the global generators of Python, numpy and torch.

    Raises:
        SamestepError: Something did.
    """
    before = _states()
    yield
    for name, state in _states().items():
        if state != before[name]:
            raise _undrawn(f"from {name}", "forward or the loss")


def _states() -> dict[str, object]:
    numbers = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return {
        "Python's random module": random.getstate(),
        "numpy.random": (numbers["key"].tobytes(), numbers["pos"]),
        "torch's own generator": torch.get_rng_state().numpy().tobytes(),
    }


def _undrawn(what: str, where: str) -> SamestepError:
    return SamestepError(
        f"Vulkan and canonical arithmetic cannot draw {what}, as {where} asks for: it would be the "
        "same numbers in every step; draw by torch.rand or torch.randn, or use a cpu or cuda "
        "worker in native arithmetic"
    )
