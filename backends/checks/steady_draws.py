"""Replace random draws by one value for all elements, so that a batch's loss can be compared with
the losses of its parts.

With real draws the parts get other noise than the batch, so their losses cannot be compared. With
steady draws only a coupling of samples makes them differ. The same mode estimates rounding: it
changes the last bit of rounded results at random, so the spread of a few runs shows the effect of
rounding (discrete stochastic arithmetic; Vignes, 1993,
doi.org/10.1016/0378-4754(93)90003-D).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, Final, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

LEVELS: Final = (0.6, 0.93, 0.06)
"""Quantiles that replace draws: the first is the default; the others are near 1 and 0, where masks
change."""

_MAX_DRAWS: Final = 4096
"""Limit on draws of one computation, since a rejection sampler never ends with steady draws."""

_ROUNDING_OPERATORS: Final = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm", "_addmm_activation",
    "convolution", "convolution_backward", "_convolution", "mkldnn_rnn_layer", "_cudnn_rnn",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "sum", "mean", "var", "var_mean", "std", "prod", "cumsum", "cumprod", "logcumsumexp",
    "logsumexp", "linalg_vector_norm", "norm", "linalg_solve_ex", "linalg_inv_ex",
    "linalg_cholesky_ex", "cholesky_solve", "linalg_solve_triangular", "_linalg_det",
    "_linalg_slogdet", "_linalg_svd", "_linalg_eigh", "_cdist_forward", "_fft_r2c", "_fft_c2c",
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
    "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    "nll_loss_forward", "nll_loss2d_forward", "_ctc_loss", "mse_loss", "embedding_dense_backward",
    "index_add", "scatter_add", "exp", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "tanh",
    "sigmoid", "log_sigmoid_forward", "erf", "erfc", "gelu", "gelu_backward", "silu", "softplus",
    "pow", "sqrt", "rsqrt", "div", "reciprocal", "lgamma", "digamma", "atan2", "acos", "asin",
})  # fmt: skip
"""Operators whose rounding may depend on the sizes of their operands: they sum in another order, or
use another kernel."""

_UNTAGGED_OPERATORS: Final = frozenset({
    "random_", "random", "binomial", "_sample_dirichlet", "normal_functional",
})  # fmt: skip
"""Random operators that torch does not tag as random."""


class TooManyDrawsError(Exception):
    """The computation draws more often than `_MAX_DRAWS`."""


class SteadyDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """A mode in which torch's random operators return the quantile `level` of their distribution,
    or, where no formula gives it, a similar value or the mean.

    Args:
        level: The quantile, in (0, 1).
        jitter: Seed of changes to the last bit of rounded results; None for no changes.

    Attributes:
        has_draws: Whether the computation drew random numbers.
        has_undecided_draws: Whether some draws could not be made steady, so that two computations
            may differ because of them.
        epsilon: Machine epsilon of the narrowest floating type of a result.
    """

    def __init__(self, level: float, jitter: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_draws = False
        self.has_undecided_draws = False
        self.epsilon = float(torch.finfo(torch.float64).eps)
        self._level = level
        self._draw_count = 0
        self._jitter = jitter
        self._generators: dict[torch.device, torch.Generator] = {}
        self._saved_states: tuple[Any, Any] = (None, None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid torch's own check, which imports its compiler and takes a second."""
        return False

    def __enter__(self) -> Self:
        """See `TorchDispatchMode`."""
        self._saved_states = _other_generator_states()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        """See `TorchDispatchMode`."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if _other_generator_states() != self._saved_states:
            self.has_undecided_draws = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        del types
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags or name in _UNTAGGED_OPERATORS:
            result = self._replace_draws(name, func, args, kwargs or {}, result)
        results = result if isinstance(result, tuple | list) else (result,)
        for output in results:
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                self.epsilon = max(self.epsilon, float(torch.finfo(output.dtype).eps))
        if self._jitter is None or name not in _ROUNDING_OPERATORS or _schema(func).is_mutable:
            return result
        if isinstance(result, tuple):
            return tuple(map(self._jitter_rounding, result))
        return self._jitter_rounding(result)

    def _replace_draws(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        arguments = _schema(func).arguments
        arguments_by_name = {
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value()
        }
        arguments_by_name |= {
            argument.name: value for argument, value in zip(arguments, args, strict=False)
        }
        arguments_by_name |= kwargs
        name = name.removesuffix("_functional")
        value_of = _STEADY_VALUES.get(name.removesuffix("_") or name)
        if name == "native_dropout":
            return self._replace_dropout(arguments_by_name, result)
        if value_of is None:
            # Fused attention and recurrent layers draw internally, if they have dropout.
            dropout_rates = [
                arguments_by_name[argument]
                for argument in ("dropout_p", "dropout", "p")
                if argument in arguments_by_name
            ]
            self.has_undecided_draws |= (
                any(dropout_rates)
                if dropout_rates
                else bool(arguments_by_name.get("training", True))
            )
            return result
        self._count_draw()
        output = result[0] if isinstance(result, tuple) else result
        value = value_of(self._level, arguments_by_name, output)
        output.copy_(value) if isinstance(value, torch.Tensor) else output.fill_(value)
        return result

    def _replace_dropout(self, arguments_by_name: Mapping[str, Any], result: Any) -> Any:
        p = float(arguments_by_name["p"])
        if arguments_by_name["train"] is False or not p:
            return result
        self._count_draw()
        mask = 1 - self._level < 1 - p
        scale = 1 / (1 - p) if mask else 0.0
        return arguments_by_name["input"] * scale, torch.full_like(result[1], mask)

    def _count_draw(self) -> None:
        self.has_draws = True
        self._draw_count += 1
        if self._draw_count > _MAX_DRAWS:
            raise TooManyDrawsError

    def _jitter_rounding(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.is_sparse:
            return value
        device = value.device
        if device not in self._generators:
            generator = torch.Generator(device)
            self._generators[device] = generator.manual_seed(self._jitter or 0)
        noise = torch.rand(
            value.shape, generator=self._generators[device], device=device, dtype=torch.float32
        )
        epsilon = torch.finfo(value.dtype).eps
        return value * (1 + (noise * 2 - 1).to(value.dtype) * epsilon)


def _schema(func: Any) -> Any:
    return func._schema  # noqa: SLF001 -- torch has no public name for it


def _other_generator_states() -> tuple[Any, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 -- the global one
    return (kind, np.asarray(keys).tobytes(), position, has_gauss, cached), random.getstate()


def _normal(level: float, mean: Any, deviation: Any) -> Any:
    return mean + NormalDist().inv_cdf(level) * deviation


def _normal_value(level: float, arguments_by_name: Mapping[str, Any], out: torch.Tensor) -> Any:
    del out
    return _normal(level, arguments_by_name.get("mean", 0.0), arguments_by_name.get("std", 1.0))


def _integer_value(level: float, arguments_by_name: Mapping[str, Any], out: torch.Tensor) -> Any:
    low, high = (
        arguments_by_name.get("low", arguments_by_name.get("from")) or 0,
        arguments_by_name.get("high", arguments_by_name.get("to")),
    )
    if high is None:
        high = 2**24 if out.is_floating_point() else min(2**24, torch.iinfo(out.dtype).max)
    return low + (high - low) * level // 1


def _bernoulli_value(level: float, arguments_by_name: Mapping[str, Any], out: torch.Tensor) -> Any:
    p = arguments_by_name.get("p", arguments_by_name.get("self"))
    return (1 - level < p).to(out.dtype) if isinstance(p, torch.Tensor) else float(1 - level < p)


def _multinomial_value(
    level: float, arguments_by_name: Mapping[str, Any], out: torch.Tensor
) -> Any:
    # Computed on the host: cards compute `cumsum` in no fixed order, and some have no float64.
    weights: torch.Tensor = arguments_by_name["self"].detach().cpu().double()
    count = out.shape[-1]
    if count > 1 and not arguments_by_name.get("replacement", False):
        return weights.topk(count, dim=-1).indices
    is_reached = weights.cumsum(-1) > level * weights.sum(-1, keepdim=True)
    return is_reached.long().argmax(-1, keepdim=True).expand(out.shape)


def _gamma_value(level: float, arguments_by_name: Mapping[str, Any], out: torch.Tensor) -> Any:
    del out
    shape: torch.Tensor = arguments_by_name["self"]
    # Not the quantile, which has no formula; like it, this is positive and grows with the level.
    return shape * math.exp(NormalDist().inv_cdf(level) / 4)


def _poisson_value(level: float, arguments_by_name: Mapping[str, Any], out: torch.Tensor) -> Any:
    del out
    rate: torch.Tensor = arguments_by_name["self"]
    return _normal(level, rate, rate.sqrt()).clamp_min(0).floor()


_SteadyValue = Callable[[float, Mapping[str, Any], torch.Tensor], Any]

_STEADY_VALUES: Final[Mapping[str, _SteadyValue]] = {
    "rand": lambda u, *_: u,
    "rand_like": lambda u, *_: u,
    "uniform": lambda u, a, _: a["from"] + u * (a["to"] - a["from"]),
    "randn": lambda u, *_: _normal(u, 0.0, 1.0),
    "randn_like": lambda u, *_: _normal(u, 0.0, 1.0),
    "normal": _normal_value,
    "log_normal": lambda u, a, _: math.exp(_normal(u, a["mean"], a["std"])),
    "randint": _integer_value,
    "randint_like": _integer_value,
    "random": _integer_value,
    "randperm": lambda _u, _a, out: torch.arange(len(out), dtype=out.dtype, device=out.device),
    "bernoulli": _bernoulli_value,
    "exponential": lambda u, a, _: -math.log1p(-u) / a["lambd"],
    "geometric": lambda u, a, _: math.ceil(math.log1p(-u) / math.log1p(-a["p"])),
    "cauchy": lambda u, a, _: a["median"] + a["sigma"] * math.tan(math.pi * (u - 0.5)),
    "multinomial": _multinomial_value,
    "poisson": _poisson_value,
    "binomial": lambda _u, a, _out: (a["count"] * a["prob"]).round(),
    "_standard_gamma": _gamma_value,
    "_sample_dirichlet": lambda _u, a, _out: a["self"] / a["self"].sum(-1, keepdim=True),
}
"""For each operator, the function of level, arguments by name and real draws that returns the
steady value."""
