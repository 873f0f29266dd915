"""What decides how a layer computes, but for its number: tells like layers without running them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

_NUMBERS: Final = frozenset({
    "layer_idx",
    "layer_id",
    "layer_index",
    "layer_number",
    "layer_num",
})  # fmt: skip
"""What models call a layer's place among the layers."""
_PLACE: Final = re.compile(r"\.\d+\.")
"""The number in the name of a module, which peft's layers keep."""
_TENSORS: Final = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def structure(layer: nn.Module) -> str:
    """All attributes of the layer and its parts, without tensors and without its number.

    What is no plain value counts by identity: layers that share a configuration are alike, those
    with objects of their own are not.
    """
    parts = []
    for name, module in layer.named_modules():
        held = {
            key: _described(value)
            for key, value in sorted(vars(module).items())
            if key not in _TENSORS | _NUMBERS and (module is not layer or key != "forward")
        }
        parts.append((name, id(type(module)), held))
    return repr(parts)


@contextmanager
def without_number(layer: nn.Module) -> Iterator[None]:
    """While it is entered, a forward that asks for the layer's number gets an AttributeError."""
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    for module in layer.modules():
        held = vars(module)
        hidden += [(held, key, held.pop(key)) for key in _NUMBERS & held.keys()]
    try:
        yield
    finally:
        for held, key, value in hidden:
            held[key] = value


def _described(value: object) -> str:
    if isinstance(value, str):
        return repr(_PLACE.sub(".#.", value))
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, dict):
        return f"{{{','.join(f'{key!r}:{_described(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{','.join(map(_described, value))}]"
    return f"{type(value).__name__} {id(value)}"
