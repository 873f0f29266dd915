"""A proxy of the model for evaluation: a call of the model runs on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from protocol.base.errors import SamestepError

Forward = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class ModelProxy(nn.Module):
    """A proxy that behaves like the module when called.

    Args:
        module: The module; its plain attributes can be read.
        run: Computes the module's forward, with tensors on the host.
    """

    def __init__(self, module: nn.Module, run: Forward) -> None:
        super().__init__()
        object.__setattr__(self, "_samestep_module", module)
        object.__setattr__(self, "_samestep_run", run)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the device."""
        return self._samestep_run(args, kwargs)

    def get_output_embeddings(self) -> None:
        """Return None, so that a call computes all logits at once."""

    def __getattr__(self, name: str) -> Any:
        """Return plain attributes and trained parameters, but no submodule or method."""
        value = getattr(object.__getattribute__(self, "_samestep_module"), name)
        if isinstance(value, nn.Parameter) and value.requires_grad:  # the host has a copy
            return nn.Parameter(value.detach(), requires_grad=False)
        if callable(value) or isinstance(value, torch.Tensor | nn.Module):
            raise _part_error(name)
        return value

    def __getitem__(self, name: Any) -> Any:
        """Refuse access to the parts of a list or dictionary of modules."""
        raise _part_error(name)


def _part_error(name: Any) -> SamestepError:
    return SamestepError(
        f"expected an evaluation that only calls the model, got one that reads its {name!r}, "
        "which the vulkan backend does not support; use a cpu or cuda worker"
    )
