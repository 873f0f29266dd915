"""Runs a module with other tensors in place of its parameters and buffers, then puts them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from protocol.base.errors import SamestepError


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, under every name they have."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


@contextmanager
def substituted(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While it is entered, what has one of these names is another tensor.

    Raises:
        SamestepError: One of them was changed meanwhile.
    """
    places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
    versions = {name: tensor._version for name, tensor in tensors.items()}  # noqa: SLF001
    try:
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            held: dict[str, torch.Tensor | None]
            held = owner._parameters if leaf in owner._parameters else owner._buffers  # type: ignore[assignment]  # noqa: SLF001
            places.append((held, leaf, held[leaf]))
            held[leaf] = tensor
        yield
        for (held, leaf, _), (name, tensor) in zip(places, tensors.items(), strict=True):
            if held[leaf] is not tensor or tensor._version != versions[name]:  # noqa: SLF001
                raise SamestepError(
                    f"{name!r} changes in forward, which no replica could follow; "
                    "use a layer without running state, an embedding without max_norm, or a plain "
                    "attribute for what follows from shapes alone"
                )
    finally:
        for held, leaf, before in reversed(places):
            held[leaf] = before
