"""The eager backend with the frozen base sharded across the ranks of a group (torch's FSDP2).

Each rank stores a shard of every frozen layer, and gathers the other shards when forward or
backward reaches the layer. Trained tensors are whole on every rank, so each rank computes gradients
of its own microbatches, and adds along the tree like any device. All ranks must compute at the same
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from backends.base.interface import Trainable
from backends.eager import numerics
from backends.eager.eager import EagerBackend, EagerProgram
from backends.eager.sharded_base import SHARDABLE_TYPES, HalfLinear, convert_base_to_half
from protocol.base.errors import SamestepError
from protocol.spec.sections.model import BaseDtype

_COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
"""Time limit of a collective, after which the group is torn down and its worker ends. The ranks'
own connection has no limit, since waiting for a run may take any time."""


class ShardedBackend(EagerBackend):
    """One rank's device. torch.distributed must be initialized, and all ranks must create their
    backends together."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__(kind, index)
        collectives = dist.Backend.default_device_backend_map.get(self.device.type)
        if collectives is None:
            raise SamestepError(
                f"torch has no collectives for {self.device.type}, which --shard needs"
            )
        self._group = dist.new_group(backend=collectives, timeout=_COLLECTIVE_TIMEOUT)

    def _build_program(self, trainable: Trainable) -> EagerProgram:
        if trainable.base_dtype not in ("float32", *SHARDABLE_TYPES):
            raise SamestepError(
                f"expected a base in float32 or half precision with --shard, got "
                f"{trainable.base_dtype}; write model.base_dtype=bfloat16, or remove --shard"
            )
        mesh = DeviceMesh.from_group(self._group, self.device.type)
        return ShardedProgram(self.device, trainable, mesh)


class ShardedProgram(EagerProgram):
    """This rank's shard of a module, with its device thread."""

    _can_share_parameters = False

    def __init__(self, device: torch.device, trainable: Trainable, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        super().__init__(device, trainable)

    def _quantize_base(self, module: nn.Module, base_dtype: BaseDtype) -> None:
        if base_dtype != "float32":
            convert_base_to_half(module, base_dtype, self._device)

    def _move_to_device(self, module: nn.Module) -> None:
        shard_frozen(module, self._device, self._mesh)


def shard_frozen(module: nn.Module, device: torch.device, mesh: DeviceMesh) -> None:
    """Shard the frozen parameters layer by layer; trained ones stay whole on every rank.

    FSDP2 gathers tensors of one type together. So the float32 tensors (norms, biases) of a layer in
    half precision stay whole, too, and a head in half precision is a separate unit.

    Raises:
        SamestepError: Nothing is frozen.
    """
    unsharded = {parameter for parameter in module.parameters() if parameter.requires_grad}
    if len(unsharded) == len(list(module.parameters())):
        raise SamestepError(
            "expected a frozen base to shard with --shard, found none; train with lora, or remove "
            "--shard"
        )
    layers = _layers(module)
    heads = _half_precision_heads(module, layers)
    assigned_ids: set[int] = set()
    for unit in (*layers, *heads, module):
        parts = [part for part in unit.modules() if id(part) not in assigned_ids]
        assigned_ids |= {id(part) for part in parts}
        own_parameters = {tensor for part in parts for tensor in part.parameters(recurse=False)}
        unsharded |= _tensors_of_minority_dtypes(own_parameters - unsharded)
        # Losses in parts use a head's weight after the head's forward, and before its backward.
        options: dict[str, Any] = {"reshard_after_forward": False} if unit in heads else {}
        fully_shard(unit, mesh=mesh, ignored_params=own_parameters & unsharded, **options)
    for tensor in (*unsharded, *module.buffers()):
        _replace_memory(tensor, tensor.data.to(device).clone(memory_format=torch.contiguous_format))
        assert tensor.data_ptr() % numerics.ALIGNMENT_BYTES == 0


def _half_precision_heads(module: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the linear layers in half precision that are outside `layers`."""
    layer_part_ids = {id(part) for layer in layers for part in layer.modules()}
    return [
        part
        for part in module.modules()
        if isinstance(part, HalfLinear) and id(part) not in layer_part_ids
    ]


def _tensors_of_minority_dtypes(tensors: Collection[nn.Parameter]) -> set[nn.Parameter]:
    """Return the tensors that do not have the most common type, counted by elements."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += tensor.numel()
    return {tensor for tensor in tensors if tensor.dtype != elements.most_common(1)[0][0]}


def _replace_memory(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Make a tensor use the memory of `values`; the tensor stays the same object."""
    if torch._has_compatible_shallow_copy_type(tensor, values):  # noqa: SLF001 -- as Module.to does
        tensor.data = values
        return
    is_parameter = isinstance(tensor, nn.Parameter)
    moved_tensor = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    torch.utils.swap_tensors(tensor, moved_tensor)  # type: ignore[no-untyped-call]


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the units that FSDP2 gathers: the layers with frozen parameters in each list of
    layers, innermost first."""
    layers = [
        layer
        for stack in module.modules()
        if isinstance(stack, nn.ModuleList | nn.Sequential)
        for layer in stack
        if any(not parameter.requires_grad for parameter in layer.parameters())
    ]
    return layers[::-1]
