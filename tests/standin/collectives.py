"""Collectives of the stand-in accelerator: gloo's, through copies on the host.

As NCCL's they run on a stream of their own, and whoever does not wait for them is reported.
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
    """Torch's own sets `Tensor.data`, which it forbids between the CPU and such a device."""
    for parameter in parameters:
        moved = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, moved)
    for buffer in buffers:
        torch.utils.swap_tensors(buffer, buffer.to(device))


_fsdp_init._move_states_to_device = _move_states  # type: ignore[assignment]


class Arrival(dist.Work):
    """A collective that has been run on a stream.

    Args:
        copied: Happens on that stream when the result is on the device.
        device: Where that is.
    """

    def __init__(self, copied: torch.Event, device: torch.device) -> None:
        super().__init__()
        self._copied, self._device = copied, device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As with NCCL the stream of the caller waits, and the host does not."""
        del timeout
        torch.accelerator.current_stream(self._device).wait_event(self._copied)
        return True


class HostCollectives(dist.ProcessGroup):
    """What a frozen base needs that is sharded over ranks: its layers gathered.

    Args:
        store: Where the ranks meet.
        rank: Of this process in the group.
        size: How many there are.
        timeout: For a rank that does not come.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[torch.device, torch.Stream] = {}

    @property
    def group_name(self) -> Any:
        """By which torch registers it."""
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802 -- torch's name
        """See `ProcessGroup`."""
        return "standin"

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Arrival:
        """Copy to the host, gather there, and copy what has been gathered back."""
        del opts
        device = given.device
        stream = self._stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            gathered = torch.empty_like(output, device="cpu")
            self._gloo._allgather_base(gathered, given.cpu()).wait()
            output.copy_(gathered)
            for tensor in (given, output):
                tensor.record_stream(stream)
            copied = torch.Event(device)
            copied.record(stream)
        return Arrival(copied, device)

    _allgather_base: Any = all_gather_single
    """Its name before torch 2.13."""

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]
