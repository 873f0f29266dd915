"""How the ranks of a group talk: documents and arrays, from rank 0 to all or to one, and back.

Through torch.distributed's gloo, on the host: what is sent are arrays of the host. The collectives
of a sharded base are another matter, and have NCCL on cards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.rendezvous import rendezvous

from backends.base.interface import Batch
from protocol.base.address import format_address
from protocol.base.errors import DeviceError, Unreachable

MEETING: Final = timedelta(minutes=5)
"""Until rank 0 answers; torchrun starts all ranks of a group at one time."""
_PATIENCE: Final = timedelta(days=365)
"""Ranks may wait for a run as long as it takes; one that is lost closes its connections."""

Arrays = Mapping[str, NDArray[Any]]


class RankGroup:
    """All processes of the group.

    Attributes:
        rank: This one's.
        size: How many there are.
        cards: Whether each rank has a CUDA card.
        local_rank: Among those on this machine: which device is its own.
    """

    def __init__(self, *, cards: bool) -> None:
        self.cards = cards and torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if self.cards else "gloo"
        store, self.rank, self.size = _met()
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=_PATIENCE
        )
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def tell(self, order: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Rank 0: to all others."""
        for data in _packed(order, arrays or {}):
            with _losing_a_rank():
                dist.broadcast(data, 0)

    def hear(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Another rank: the next of what rank 0 tells.

        Raises:
            DeviceError: Rank 0 is gone.
        """
        return _unpacked(lambda data: dist.broadcast(data, 0))

    def send(self, rank: int, order: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """To one."""
        for data in _packed(order, arrays or {}):
            with _losing_a_rank():
                dist.send(data, rank)

    def receive(self, rank: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """From one.

        Raises:
            DeviceError: It is gone.
        """
        return _unpacked(lambda data: dist.recv(data, rank))

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()


def _met() -> tuple[Any, int, int]:
    """Connect to where the ranks meet; the store there, this rank, and how many there are.

    Raises:
        Unreachable: Rank 0 does not answer.
    """
    at = format_address(os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
    try:
        store, rank, size = next(rendezvous("env://", timeout=MEETING))
    except dist.DistError:
        raise Unreachable(
            f"no answer from {at}, where the ranks meet, within {MEETING.total_seconds():.0f} s; "
            "check --master-addr and --master-port (or --rdzv-endpoint) of torchrun, and the "
            "firewall between the machines"
        ) from None
    store.set_timeout(_PATIENCE)
    return store, rank, size


@contextmanager
def _losing_a_rank() -> Iterator[None]:
    """What torch raises then, in words."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError("the group of ranks", "a rank was lost") from error


def _packed(order: Mapping[str, Any], arrays: Arrays) -> list[torch.Tensor]:
    """A length, a header, and the bytes of each array."""
    described = [(name, a.dtype.str, list(a.shape)) for name, a in arrays.items()]
    header = json.dumps({"order": order, "arrays": described}).encode()
    flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays.values()]
    return [
        torch.tensor([len(header)], dtype=torch.int64),
        torch.frombuffer(bytearray(header), dtype=torch.uint8),
        *(
            torch.from_numpy(each if each.flags.writeable else each.copy())
            for each in flat
            if len(each)
        ),
    ]


def _unpacked(fill: Any) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    with _losing_a_rank():
        length = torch.zeros(1, dtype=torch.int64)
        fill(length)
        header = torch.empty(int(length), dtype=torch.uint8)
        fill(header)
        document = json.loads(header.numpy().tobytes())
        arrays = {}
        for name, kind, shape in document["arrays"]:
            array = np.empty(shape, np.dtype(kind))
            if array.nbytes:
                fill(torch.from_numpy(array.reshape(-1).view(np.uint8)))
            arrays[name] = array
    return document["order"], arrays


def batches_apart(batches: list[Batch]) -> tuple[list[float], dict[str, NDArray[Any]]]:
    """Weights, and all arrays under the number of their batch."""
    arrays = {f"{n} {name}": a for n, b in enumerate(batches) for name, a in b.arrays.items()}
    return [batch.weight for batch in batches], arrays


def batches_together(weights: list[float], arrays: Arrays) -> list[Batch]:
    """What `batches_apart` was given."""
    found: list[dict[str, NDArray[Any]]] = [{} for _ in weights]
    for key, array in arrays.items():
        number, _, name = key.partition(" ")
        found[int(number)][name] = array
    return [Batch(held, weight) for held, weight in zip(found, weights, strict=True)]
