"""How the models of `transformers` come to our attention: where they ask for an implementation.

They all do so by one call, which names the configured one and hands over the model's own formula.
For models whose authors state that torch's `scaled_dot_product_attention` computes the same, the
answer is ours, which computes an eligible call as one operator and leaves the others to whom they
belong. The model's masks stay as they are configured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from backends.wgpu.capture.attention import Fuses, fused_attention, sizes_of

_PLAIN: Final = frozenset(
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
"""What leaves the formula as it is, or is in the mask already, or is looked at below. Anything else
that a model hands over may change the formula: such a call is the model's own."""


def sdpa_can_be_traced() -> bool:
    """Whether the masks for torch's function can be made without looking at their values.

    Older releases of `transformers` leave a mask out if it hides nothing.
    """
    return hasattr(sys.modules.get("transformers.utils.import_utils"), "is_fake_tensor")


@contextmanager
def own_attention(module: nn.Module, fuses: Fuses) -> Iterator[None]:
    """While it is entered, parts of the module ask us first. Without `transformers`: nothing."""
    library = sys.modules.get("transformers.modeling_utils")
    interface: Any = getattr(library, "ALL_ATTENTION_FUNCTIONS", None)
    if not hasattr(interface, "get_interface"):
        yield
        return
    stating = [each for each in module.modules() if getattr(each, "_supports_sdpa", False)]
    parts = {id(part) for each in stating for part in each.modules()}
    usual = interface.get_interface

    def ours(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = usual(name, default)
        if name not in {"eager", "sdpa"}:
            return function
        return partial(_attend, function, parts, fuses, needs_mask=name == "sdpa")

    interface.get_interface = ours
    try:
        yield
    finally:
        del interface.get_interface


def _attend(  # noqa: PLR0917
    usual: Callable[..., Any],
    parts: set[int],
    fuses: Fuses,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *more: Any,
    needs_mask: bool,
    **words: Any,
) -> Any:
    """A call as `transformers` makes it; `needs_mask`: without one, what is seen is told elsewhere.

    Returns:
        (B, T, H, D), and None for the weights.
    """
    plain = not more and all(word in _PLAIN for word, given in words.items() if given is not None)
    plain = plain and not words.get("dropout") and not words.get("output_attentions")
    plain = plain and id(module) in parts and not (needs_mask and attention_mask is None)
    sizes = sizes_of(query, key, value, attention_mask) if plain else None
    if sizes is None or not fuses(sizes):
        return usual(module, query, key, value, attention_mask, *more, **words)
    given = words.get("scaling")
    scale: float = sizes.size**-0.5 if given is None else given
    result = fused_attention(query, key, value, attention_mask, scale, causal=False)
    return result.transpose(1, 2).contiguous(), None
