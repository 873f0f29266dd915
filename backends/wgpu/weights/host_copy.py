"""The host's copy of a frozen tensor: of no use once the device has it.

Traces look at shapes alone, evaluations run on the device, and only trained tensors are ever given
away. So a model whose base takes a few bits on the device need not stay on the host in float32.
"""

from __future__ import annotations

import torch

from protocol.base.errors import SamestepError


def release(parameter: torch.Tensor) -> None:
    """Let go of the values; the shape stays, and whatever reads it after all gets float32 NaN.

    Whole numbers, which have no NaN, are few, and stay.
    """
    if not parameter.is_floating_point():
        return
    parameter.data = torch.full((), torch.nan).expand(parameter.shape)


def is_released(parameter: torch.Tensor) -> bool:
    """Whether the host has let go of the values."""
    has_one_value = parameter.numel() > 0 and not any(parameter.stride())
    return has_one_value and bool(parameter.view(-1)[0].isnan())


def refuse_released(module: torch.nn.Module) -> None:
    """A module can be given to a device once.

    Raises:
        SamestepError: Its frozen parameters are gone already.
    """
    for name, parameter in module.named_parameters():
        if is_released(parameter):
            raise SamestepError(
                f"the values of {name!r} were let go of when a device had taken them; build the "
                "task again for another program"
            )
