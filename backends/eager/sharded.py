"""The eager backend with the frozen base lying across the ranks of a group (torch's FSDP2).

Each rank holds a part of every frozen layer and gathers the rest when forward or backward reaches
it. What is trained is whole on every rank, so each rank's gradient of a microbatch is its own, and
sums are taken along the tree as ever. All ranks have to compute at the same time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from backends.base.interface import Trainable
from backends.eager import numerics
from backends.eager.eager import EagerBackend, EagerProgram
from protocol.base.errors import SamestepError


class ShardedBackend(EagerBackend):
    """One rank's device; torch.distributed is initialised."""

    def _program(self, trainable: Trainable) -> EagerProgram:
        if trainable.base_dtype != "float32":
            raise SamestepError(
                f"--shard lays a base in float32 across the ranks, not one in "
                f"{trainable.base_dtype}: leave out model.base_dtype, or --shard"
            )
        return ShardedProgram(self.device, trainable)


class ShardedProgram(EagerProgram):
    """This rank's part of a module, with its device thread."""

    _shares = False

    def _place(self, module: nn.Module) -> None:
        shard_frozen(module, self._device)


def shard_frozen(module: nn.Module, device: torch.device) -> None:
    """Give this rank its part of what is frozen, layer by layer, and all of what is trained.

    Raises:
        SamestepError: Nothing is frozen.
    """
    trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    if len(trained) == len(list(module.parameters())):
        raise SamestepError(
            "--shard lays a frozen base across the ranks, and this model has none: train it with "
            "lora, or leave out --shard"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (*_layers(module), module):
        own = {parameter for parameter in layer.parameters() if parameter in trained}
        fully_shard(layer, mesh=mesh, ignored_params=own)
    for tensor in (*trained, *module.buffers()):
        tensor.data = tensor.data.to(device).clone(memory_format=torch.contiguous_format)
        assert tensor.data_ptr() % numerics.ALIGNMENT_BYTES == 0


def _layers(module: nn.Module) -> list[nn.Module]:
    """What is gathered at once: the layers of each list of layers, innermost first."""
    found = [
        layer
        for stack in module.modules()
        if isinstance(stack, nn.ModuleList | nn.Sequential)
        for layer in stack
        if any(not parameter.requires_grad for parameter in layer.parameters())
    ]
    return found[::-1]
