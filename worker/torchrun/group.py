"""Communication between the ranks of a group: documents and arrays, between rank 0 and the others.

Uses torch.distributed's gloo, as the arrays are in host memory. The collectives of a sharded base
are separate (`backends.eager.sharded`) and use NCCL on CUDA cards.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
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
from protocol.base.errors import (
    DeviceError,
    SamestepError,
    Unreachable,
    describe_error,
)

RENDEZVOUS_TIMEOUT: Final = timedelta(minutes=5)
"""Time for all ranks to connect; torchrun starts them at once."""
_PATIENCE: Final = timedelta(days=365)
"""Ranks may wait very long for a run; a lost rank closes its connections."""

LOSS_TIMEOUT_S: Final = 10.0
"""Time for a rank to end by itself when another is lost."""

GROUP: Final = "the group of ranks"
_LOST: Final = "a rank was lost"
_LOSS: Final = "lost rank"
"""In the store where the ranks meet: why one of them ends."""

Arrays = Mapping[str, NDArray[Any]]
EMBEDDED: Final = "embedded"
"""Beside the sums of a subtree: the rows of its microbatch, if the loss couples all samples."""


class RankGroup:
    """The processes of the group.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        cards: Whether each rank has a card.
        local_rank: Rank among those on this machine, which is its device's number.
        loss: Why a rank is lost; empty if none is. Others may be waiting for it in a collective,
            which only the end of its process interrupts.
    """

    def __init__(self, *, cards: bool) -> None:
        self.cards = cards and torch.accelerator.is_available()
        self._store, self.rank, self.size = _rendezvous()
        dist.init_process_group(
            "gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=_PATIENCE
        )
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.loss = ""
        self._reported_loss = ""
        self._closed = threading.Event()

    @contextmanager
    def lockstep(self, *, may_refuse: bool = False) -> Iterator[None]:
        """Context of what all ranks compute at once; the group is lost if it fails here.

        Args:
            may_refuse: Whether a refusal is the same on every rank, which then goes on.

        Raises:
            DeviceError: Another rank failed first, with its reason.
        """
        try:
            yield
        except Exception as error:
            if self.loss or (may_refuse and is_refusal(error)):
                raise
            own = f"rank {self.rank}: {describe_error(error)}"
            self.loss = self._first_loss(own)
            if self.loss != own:
                raise DeviceError(GROUP, self.loss) from error
            raise

    def lose(self, reason: str) -> None:
        """Give the group up; the other ranks end with the reason, whatever they wait for."""
        self.loss = self._first_loss(f"rank {self.rank}: {reason}")

    def watch_loss(self, on_loss: Callable[[str], None]) -> None:
        """Have a thread wait for the loss of a rank, as this one may wait for that in a collective.

        Args:
            on_loss: Called in that thread with why the rank is lost, unless the group has closed.
        """
        store, _, _ = _rendezvous()  # a connection of its own, as this waits on it

        def watch() -> None:
            try:
                self._reported_loss = store.get(_LOSS).decode()
            except RuntimeError:  # rank 0, which has the store, is gone
                self._reported_loss = _LOST
            if not self._closed.wait(LOSS_TIMEOUT_S):
                on_loss(self._reported_loss)

        threading.Thread(target=watch, name="loss of a rank", daemon=True).start()

    def _first_loss(self, own: str) -> str:
        """Return why the first rank that failed is lost; this one, for its own reason, if none."""
        if self._reported_loss:
            return self._reported_loss
        try:
            return bytes(self._store.compare_set(_LOSS, "", own)).decode()
        except RuntimeError:  # rank 0, which has the store, is gone
            return own if self.rank == 0 else _LOST

    def tell(self, order: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Send an order from rank 0 to all others.

        Raises:
            DeviceError: A rank is lost.
        """
        if self.loss:
            raise DeviceError(GROUP, self.loss)
        for data in _packed(order, arrays or {}):
            with self._watched():
                dist.broadcast(data, 0)

    def hear(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Receive the next order of rank 0.

        Raises:
            DeviceError: Rank 0 is lost.
        """
        with self._watched():
            return _unpacked(lambda data: dist.broadcast(data, 0))

    def send(self, rank: int, order: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Send to one rank."""
        for data in _packed(order, arrays or {}):
            with self._watched():
                dist.send(data, rank)

    def receive(self, rank: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Receive from one rank.

        Raises:
            DeviceError: That rank is lost.
        """
        with self._watched():
            return _unpacked(lambda data: dist.recv(data, rank))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Convert torch's error for a lost rank to a DeviceError."""
        try:
            yield
        except RuntimeError as error:
            self.loss = self._first_loss(_LOST)
            raise DeviceError(GROUP, self.loss) from error

    def close(self) -> None:
        """Leave the group; the other ranks do so, too."""
        self._closed.set()
        dist.destroy_process_group()


def is_refusal(error: Exception) -> bool:
    """Whether an error is about the input, not about this rank's device."""
    return isinstance(error, SamestepError) and not isinstance(error, DeviceError)


def _rendezvous() -> tuple[Any, int, int]:
    """Connect to where the ranks meet; the store there, this rank, and how many there are.

    Raises:
        Unreachable: Rank 0 does not answer.
    """
    at = format_address(os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
    try:
        store, rank, size = next(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
    except dist.DistError:
        raise Unreachable(
            f"no answer from {at}, where the ranks meet, within "
            f"{RENDEZVOUS_TIMEOUT.total_seconds():.0f} s; "
            "check --master-addr and --master-port (or --rdzv-endpoint) of torchrun, and the "
            "firewall between the machines"
        ) from None
    store.set_timeout(_PATIENCE)
    return store, rank, size


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


def flatten_batches(batches: list[Batch]) -> tuple[list[float], dict[str, NDArray[Any]]]:
    """The batches' weights, and all their arrays named by batch number and name."""
    arrays = {f"{n} {name}": a for n, b in enumerate(batches) for name, a in b.arrays.items()}
    return [batch.weight for batch in batches], arrays


def rebuild_batches(weights: list[float], arrays: Arrays) -> list[Batch]:
    """Inverse of `flatten_batches`."""
    found: list[dict[str, NDArray[Any]]] = [{} for _ in weights]
    for key, array in arrays.items():
        number, _, name = key.partition(" ")
        found[int(number)][name] = array
    return [Batch(values, weight) for values, weight in zip(found, weights, strict=True)]
