"""`model.precision: float16`: mixed precision as in torch's autocast on GPUs.

A matrix product's operands are rounded to float16, multiplied and summed in float32, and the sum is
rounded to float16. This module expresses that in plain operators, for torch on the CPU and for
traces. Norms, softmax, losses and sums convert float16 inputs to float32; every other operator
computes in its inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_PRODUCTS: Final = frozenset({
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmv", "addbmm",
    "baddbmm", "einsum", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
})  # fmt: skip
"""Names of the products among the functions of torch and `torch.nn.functional`, and among the
methods of tensors."""
_FLOAT32_FUNCTIONS: Final = frozenset({
    "softmax", "log_softmax", "softmin", "softplus", "layer_norm", "rms_norm", "group_norm",
    "instance_norm", "normalize", "norm", "vector_norm", "cosine_similarity", "cdist", "pdist",
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
    "poisson_nll_loss", "gaussian_nll_loss", "margin_ranking_loss", "hinge_embedding_loss",
    "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss", "soft_margin_loss",
    "multilabel_soft_margin_loss", "sum", "mean", "prod", "cumsum", "cumprod", "logsumexp",
    "logcumsumexp", "var", "std", "var_mean", "std_mean", "exp", "exp2", "expm1", "log", "log2",
    "log10", "log1p", "pow", "__pow__", "__rpow__", "rsqrt", "reciprocal", "sinh", "cosh", "tan",
    "asin", "acos", "erfinv",
})  # fmt: skip
"""Functions that torch's autocast computes in float32 on a GPU."""
_ADDEND_KEYWORDS: Final = frozenset({"bias", "attn_mask"})

_active_modes: list[HalfProducts] = []


class HalfProducts(TorchFunctionMode):
    """Mode in which products have float16 operands and results."""

    def __enter__(self) -> Any:
        """Activate the mode."""
        _active_modes.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        _active_modes.pop()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Round a product's operands and result; convert inputs of float32 functions to float32."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if stand_in := stand_in_function(types):
            with self:
                return stand_in(func, types, args, kwargs)
        if name in _PRODUCTS:
            return _product(func, name, args, kwargs)
        if name in _FLOAT32_FUNCTIONS:
            args, kwargs = pytree.tree_map(_to_float32, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)


def stand_in_function(types: Sequence[type]) -> Callable[..., Any] | None:
    """Return the `__torch_function__` of a class that stands for tensors, such as `LogitsInParts`;
    None if there is none.

    It calls functions of tensors, so it must run with the mode enabled.
    """
    classes = [class_ for class_ in types if not issubclass(class_, torch.Tensor)]
    return getattr(classes[0], "__torch_function__") if classes else None  # noqa: B009 -- untyped


def computes_in_half() -> bool:
    """Whether the mode is active."""
    return bool(_active_modes)


@contextmanager
def half_products(*, enabled: bool) -> Iterator[None]:
    """Activate `HalfProducts` if `enabled`."""
    if not enabled:
        yield
        return
    with HalfProducts():
        yield


def round_to_half(x: torch.Tensor) -> torch.Tensor:
    """Round to float16 and return float32."""
    return x.half().float()


def _product(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Compute a product with rounded operands; addends such as a bias stay float32."""
    addends = {"linear": {2}, "bilinear": {3}, "scaled_dot_product_attention": {3}}.get(name, set())
    addends = {2} if name.startswith("conv") else addends
    addends = {0} if name in {"addmm", "addmv", "addbmm", "baddbmm"} else addends
    operands = [
        _to_float32(x) if index in addends else pytree.tree_map(_round_operand, x)
        for index, x in enumerate(args)
    ]
    keywords = {
        key: _to_float32(x) if key in _ADDEND_KEYWORDS else pytree.tree_map(_round_operand, x)
        for key, x in kwargs.items()
    }
    result = func(*operands, **keywords)
    is_float32 = isinstance(result, torch.Tensor) and result.dtype == torch.float32
    return result.half() if is_float32 else result


def _round_operand(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.dtype not in {torch.float32, torch.float16}:
        return x
    return round_to_half(x)


def _to_float32(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float16 else x
