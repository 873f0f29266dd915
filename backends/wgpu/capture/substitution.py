"""Run a module with substituted parameters and buffers, then restore them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from protocol.base.errors import SamestepError


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, then buffers, under all their names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


@contextmanager
def substitute_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Substitute the module's tensors of these names within the context.

    Raises:
        SamestepError: The module changed one of the tensors.
    """
    originals: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
    versions = {name: tensor._version for name, tensor in tensors.items()}  # noqa: SLF001
    try:
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            owner_tensors: dict[str, torch.Tensor | None]
            owner_tensors = owner._parameters if leaf in owner._parameters else owner._buffers  # type: ignore[assignment]  # noqa: SLF001
            originals.append((owner_tensors, leaf, owner_tensors[leaf]))
            owner_tensors[leaf] = tensor
        yield
        for (owner_tensors, leaf, _), (name, tensor) in zip(
            originals, tensors.items(), strict=True
        ):
            if owner_tensors[leaf] is not tensor or tensor._version != versions[name]:  # noqa: SLF001
                raise SamestepError(
                    f"expected tensors that stay the same, got {name!r}, which changes in forward; "
                    "use a layer without running state, an embedding without max_norm, or a plain "
                    "attribute for values that depend on shapes alone"
                )
    finally:
        for owner_tensors, leaf, original in reversed(originals):
            owner_tensors[leaf] = original
