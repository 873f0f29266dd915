"""What a task's evaluation is given for the model: a call runs on the device, nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from protocol.base.errors import SamestepError

Forward = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class StandIn(nn.Module):
    """Looks like the module to whoever calls it.

    Args:
        module: The module that it stands for; its plain attributes can be read.
        run: Gives what the module's forward gives, with tensors on the host.
    """

    def __init__(self, module: nn.Module, run: Forward) -> None:
        super().__init__()
        object.__setattr__(self, "_samestep_module", module)
        object.__setattr__(self, "_samestep_run", run)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the device."""
        return self._samestep_run(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Configuration, trained parameters and the like, but no part that computes."""
        value = getattr(object.__getattribute__(self, "_samestep_module"), name)
        if isinstance(value, nn.Parameter) and value.requires_grad:  # the host has it, too
            return nn.Parameter(value.detach(), requires_grad=False)
        if callable(value) or isinstance(value, torch.Tensor | nn.Module):
            raise _part_is_read(name)
        return value

    def __getitem__(self, name: Any) -> Any:
        """Of a module that is a list or a dictionary: its parts."""
        raise _part_is_read(name)


def _part_is_read(name: Any) -> SamestepError:
    return SamestepError(
        f"the evaluation reads {name!r} of the model; on the vulkan backend it may only "
        "call the model itself, which runs on the device"
    )
