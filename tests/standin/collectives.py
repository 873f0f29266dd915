"""Collectives of the stand-in accelerator: gloo computes them on copies on the host.

Like those of NCCL, they run on a separate stream. An access that does not wait is reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_init


def _move_states(
    parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor], device: torch.device
) -> None:
    """Move parameters and buffers to a device.

    This replaces a function of torch that sets `Tensor.data`, which torch forbids between the CPU
    and the stand-in.
    """
    for parameter in parameters:
        moved_parameter = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, moved_parameter)
    for buffer in buffers:
        torch.utils.swap_tensors(buffer, buffer.to(device))


_fsdp_init._move_states_to_device = _move_states  # type: ignore[assignment]


class StreamWork(dist.Work):
    """A collective that was submitted to a stream.

    Args:
        copy_event: Event on the stream after the result is on the device.
        device: The device of the result.
    """

    def __init__(self, copy_event: torch.Event, device: torch.device) -> None:
        super().__init__()
        self._copy_event, self._device = copy_event, device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the caller's stream wait, but not the host, as with NCCL."""
        del timeout
        torch.accelerator.current_stream(self._device).wait_event(self._copy_event)
        return True


class HostCollectives(dist.ProcessGroup):
    """The collective that a frozen base sharded over ranks needs: gathering the shards of a layer.

    Args:
        store: The store where the ranks meet.
        rank: Rank of this process in the group.
        size: Number of ranks.
        timeout: Time limit for a missing rank.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[torch.device, torch.Stream] = {}

    @property
    def group_name(self) -> Any:
        """Return the name under which torch registers the group."""
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802 -- torch's name
        """See `ProcessGroup`."""
        return "standin"

    def all_gather_single(
        self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None
    ) -> StreamWork:
        """Copy the shard to the host, gather all shards there, and copy the result back."""
        del opts
        device = shard.device
        stream = self._stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            host_output = torch.empty_like(output, device="cpu")
            self._gloo._allgather_base(host_output, shard.cpu()).wait()
            output.copy_(host_output)
            for tensor in (shard, output):
                tensor.record_stream(stream)
            copy_event = torch.Event(device)
            copy_event.record(stream)
        return StreamWork(copy_event, device)

    _allgather_base: Any = all_gather_single
    """The method's name before torch 2.13."""

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]
