"""Substitute fused attention in models of `transformers`.

All models look up their attention implementation by one call, with the configured name and the
model's eager function as default. For models that declare support for torch's
`scaled_dot_product_attention`, the lookup returns a function that computes eligible calls as one
operator and delegates all other calls. Masks are unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from backends.wgpu.capture.attention import AttentionPolicy, fused_attention, sizes_of

_IGNORABLE_ARGUMENTS: Final = frozenset(
    {
        "cache_position",
        "deterministic",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "scaling",
        "sliding_window",
        "use_cache",
    }
)
"""Arguments that do not change the formula, are part of the mask, or are checked in `_attend`. A
call with any other argument may use another formula and is delegated to the model."""


def can_trace_sdpa() -> bool:
    """Whether masks for torch's function can be built without reading their values.

    Older releases of `transformers` read them, in order to omit a mask that masks no position.
    """
    return hasattr(sys.modules.get("transformers.utils.import_utils"), "is_fake_tensor")


@contextmanager
def replace_attention(module: nn.Module, fuses: AttentionPolicy) -> Iterator[None]:
    """Substitute the attention of the module's parts within the context, if `transformers` is
    loaded."""
    library = sys.modules.get("transformers.modeling_utils")
    interface: Any = getattr(library, "ALL_ATTENTION_FUNCTIONS", None)
    if not hasattr(interface, "get_interface"):
        yield
        return
    supporting = [
        submodule for submodule in module.modules() if getattr(submodule, "_supports_sdpa", False)
    ]
    part_ids = {id(part) for submodule in supporting for part in submodule.modules()}
    original = interface.get_interface

    def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = original(name, default)
        if name not in {"eager", "sdpa"}:
            return function
        return partial(_attend, function, part_ids, fuses, needs_mask=name == "sdpa")

    interface.get_interface = get_interface
    try:
        yield
    finally:
        del interface.get_interface


def _attend(  # noqa: PLR0917
    original: Callable[..., Any],
    part_ids: set[int],
    fuses: AttentionPolicy,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *extra: Any,
    needs_mask: bool,
    **options: Any,
) -> Any:
    """Compute a call of `transformers`, or delegate it to the model's function.

    Args:
        original: The model's function.
        part_ids: Ids of the modules that may use the fused operator.
        fuses: Which attention becomes one operator.
        module: The module that calls.
        query: (B, H, T, D).
        key: (B, G, S, D).
        value: (B, G, S, D).
        attention_mask: As for the model's function.
        extra: Further positional arguments; with any, the call is delegated.
        needs_mask: Whether a call without a mask is delegated.
        options: Keyword arguments of the model's function.

    Returns:
        (B, T, H, D), and None for the weights.
    """
    is_plain = not extra and all(
        name in _IGNORABLE_ARGUMENTS for name, argument in options.items() if argument is not None
    )
    is_plain = is_plain and not options.get("dropout") and not options.get("output_attentions")
    is_plain = is_plain and id(module) in part_ids and not (needs_mask and attention_mask is None)
    sizes = sizes_of(query, key, value, attention_mask) if is_plain else None
    if sizes is None or not fuses(sizes):
        return original(module, query, key, value, attention_mask, *extra, **options)
    argument = options.get("scaling")
    scale: float = sizes.head_size**-0.5 if argument is None else argument
    result = fused_attention(query, key, value, attention_mask, scale, causal=False)
    return result.transpose(1, 2).contiguous(), None
