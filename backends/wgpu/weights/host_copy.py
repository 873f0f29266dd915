"""Release the host's copy of frozen tensors once the device has them.

Traces read only shapes, evaluations run on the device, and only trained tensors are exported. So
the host does not need the frozen values, which may take several times as much memory as the
device's quantized base.
"""

from __future__ import annotations

import torch

from protocol.base.errors import SamestepError


def release(parameter: torch.Tensor) -> None:
    """Release the values and keep the shape; any later read gets float32 NaN. Integers are not
    released, since they have no NaN and are small.
    """
    if not parameter.is_floating_point():
        return
    parameter.data = torch.full((), torch.nan).expand(parameter.shape)


def is_released(parameter: torch.Tensor) -> bool:
    """Whether the host has released the values."""
    has_one_value = parameter.numel() > 0 and not any(parameter.stride())
    return has_one_value and bool(parameter.view(-1)[0].isnan())


def refuse_released_module(module: torch.nn.Module) -> None:
    """Refuse a module whose frozen values were released to another device.

    Raises:
        SamestepError: Its frozen values were released before.
    """
    for name, parameter in module.named_parameters():
        if is_released(parameter):
            raise SamestepError(
                f"the values of {name!r} were released after their upload to a device; build the "
                "task again for another program"
            )
