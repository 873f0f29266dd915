"""Communication of JSON documents and arrays between rank 0 and the other ranks of a group.

This uses torch.distributed's gloo, because the arrays are in main memory. The collectives of a
sharded base are separate (`backends.eager.sharded`) and use NCCL on CUDA cards.
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
"""Time for all ranks to connect; torchrun starts them together."""
_COLLECTIVE_TIMEOUT: Final = timedelta(days=365)
"""Timeout of collectives and of the store. Ranks may wait very long for a run; if a rank is lost,
closed connections end the wait."""

_POLL_INTERVAL_S: Final = 1.0
LOSS_TIMEOUT_S: Final = 10.0
"""Time after the loss of a rank in which the other ranks can end in order."""

GROUP: Final = "the group of ranks"
_RANK_LOST: Final = "a rank was lost"
_LOSS_KEY: Final = "lost rank"
"""Key in the rendezvous store: why the first lost rank failed."""

Arrays = Mapping[str, NDArray[Any]]
EMBEDDINGS: Final = "embedded"
"""Name of the array with a subtree's embeddings, if the loss couples samples."""


class RankGroup:
    """This process's membership in the group of ranks.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        uses_cards: Whether each rank computes on a card.
        local_rank: Rank within this machine; with cards, also the number of the rank's card.
        loss_reason: Why a rank is lost; empty if none is. Other ranks may be waiting for the lost
            rank in a collective, which only the end of their process interrupts.

    Args:
        uses_cards: Whether the ranks may use cards.

    Raises:
        Unreachable: Rank 0 does not answer.
    """

    def __init__(self, *, uses_cards: bool) -> None:
        self.uses_cards = uses_cards and torch.accelerator.is_available()
        self._store, self.rank, self.size = _rendezvous()
        dist.init_process_group(
            "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.loss_reason = ""
        self._stored_reason = ""
        self._end_event = threading.Event()
        self._watch_thread: threading.Thread | None = None

    @contextmanager
    def lockstep(self, *, may_refuse: bool = False) -> Iterator[None]:
        """Context for a computation in which all ranks take part; a failure abandons the group.

        Args:
            may_refuse: Whether a refusal occurs on every rank, so that the group continues.

        Raises:
            DeviceError: Another rank failed first, with its reason.
        """
        try:
            yield
        except Exception as error:
            if self.loss_reason or (may_refuse and is_refusal(error)):
                raise
            own_reason = f"rank {self.rank}: {describe_error(error)}"
            self.loss_reason = self._first_loss(own_reason)
            if self.loss_reason != own_reason:
                raise DeviceError(GROUP, self.loss_reason) from error
            raise

    def abandon(self, reason: str) -> None:
        """Abandon the group; the other ranks end with this reason, even inside a collective."""
        self.loss_reason = self._first_loss(f"rank {self.rank}: {reason}")

    def watch_loss(self, on_loss: Callable[[str], None]) -> None:
        """Start a thread that waits for the loss of a rank, because a collective waits forever.

        Args:
            on_loss: Called in that thread with the reason, unless `end_watch` is called within
                `LOSS_TIMEOUT_S`.
        """
        store, _, _ = _rendezvous()  # a separate connection, as another thread uses it

        def watch() -> None:
            # A thread that waits inside the store while the interpreter ends aborts the process.
            while not self._stored_reason:
                if self._end_event.wait(_POLL_INTERVAL_S):
                    return
                try:
                    if store.check([_LOSS_KEY]):
                        self._stored_reason = store.get(_LOSS_KEY).decode()
                except RuntimeError:  # rank 0, which owns the store, is lost
                    self._stored_reason = _RANK_LOST
            if not self._end_event.wait(LOSS_TIMEOUT_S):
                on_loss(self._stored_reason)

        self._watch_thread = threading.Thread(target=watch, name="loss of a rank", daemon=True)
        self._watch_thread.start()

    def end_watch(self) -> None:
        """End the thread that `watch_loss` started; call this before the process ends."""
        self._end_event.set()
        if self._watch_thread is not None:
            self._watch_thread.join(_POLL_INTERVAL_S)

    def _first_loss(self, own_reason: str) -> str:
        """Return why the first rank failed; `own_reason` if this rank is the first."""
        if self._stored_reason:
            return self._stored_reason
        try:
            return bytes(self._store.compare_set(_LOSS_KEY, "", own_reason)).decode()
        except RuntimeError:  # rank 0, which owns the store, is lost
            return own_reason if self.rank == 0 else _RANK_LOST

    def send_order(self, order: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Send an order from rank 0 to all other ranks.

        Raises:
            DeviceError: A rank is lost.
        """
        if self.loss_reason:
            raise DeviceError(GROUP, self.loss_reason)
        for data in _encode(order, arrays or {}):
            with self._lost_rank_errors():
                dist.broadcast(data, 0)

    def receive_order(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Receive the next order from rank 0.

        Raises:
            DeviceError: Rank 0 is lost.
        """
        with self._lost_rank_errors():
            return _decode(lambda data: dist.broadcast(data, 0))

    def send(self, rank: int, document: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Send a document and arrays to one rank.

        Raises:
            DeviceError: The rank is lost.
        """
        for data in _encode(document, arrays or {}):
            with self._lost_rank_errors():
                dist.send(data, rank)

    def receive(self, rank: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Receive a document and arrays from one rank.

        Raises:
            DeviceError: The rank is lost.
        """
        with self._lost_rank_errors():
            return _decode(lambda data: dist.recv(data, rank))

    @contextmanager
    def _lost_rank_errors(self) -> Iterator[None]:
        """Context that converts torch's error for a lost rank to a DeviceError."""
        try:
            yield
        except RuntimeError as error:
            self.loss_reason = self._first_loss(_RANK_LOST)
            raise DeviceError(GROUP, self.loss_reason) from error

    def close(self) -> None:
        """Leave the group; every rank must call this."""
        self.end_watch()
        dist.destroy_process_group()


def is_refusal(error: Exception) -> bool:
    """Return whether an error is about the input, not about this rank's device."""
    return isinstance(error, SamestepError) and not isinstance(error, DeviceError)


def _rendezvous() -> tuple[Any, int, int]:
    """Connect to the rendezvous; return its store, this process's rank, and the number of ranks.

    Raises:
        Unreachable: Rank 0 does not answer.
    """
    address = format_address(
        os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    )
    try:
        store, rank, size = next(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
    except dist.DistError:
        raise Unreachable(
            f"no answer from the ranks' rendezvous at {address} within "
            f"{RENDEZVOUS_TIMEOUT.total_seconds():.0f} s; "
            "check --master-addr and --master-port (or --rdzv-endpoint) of torchrun, and the "
            "firewall between the machines"
        ) from None
    store.set_timeout(_COLLECTIVE_TIMEOUT)
    return store, rank, size


def _encode(document: Mapping[str, Any], arrays: Arrays) -> list[torch.Tensor]:
    """Encode a message as the header's length, the header, and the bytes of each array."""
    descriptions = [(name, a.dtype.str, list(a.shape)) for name, a in arrays.items()]
    header = json.dumps({"order": document, "arrays": descriptions}).encode()
    flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays.values()]
    return [
        torch.tensor([len(header)], dtype=torch.int64),
        torch.frombuffer(bytearray(header), dtype=torch.uint8),
        *(
            torch.from_numpy(array if array.flags.writeable else array.copy())
            for array in flat
            if len(array)
        ),
    ]


def _decode(fill: Any) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Decode a message; `fill` receives the message's next bytes into a tensor."""
    length = torch.zeros(1, dtype=torch.int64)
    fill(length)
    header = torch.empty(int(length), dtype=torch.uint8)
    fill(header)
    document = json.loads(header.numpy().tobytes())
    arrays = {}
    for name, dtype, shape in document["arrays"]:
        array = np.empty(shape, np.dtype(dtype))
        if array.nbytes:
            fill(torch.from_numpy(array.reshape(-1).view(np.uint8)))
        arrays[name] = array
    return document["order"], arrays


def flatten_batches(batches: list[Batch]) -> tuple[list[float], dict[str, NDArray[Any]]]:
    """Return the batches' weights, and all their arrays, keyed by batch number and name."""
    arrays = {f"{n} {name}": a for n, b in enumerate(batches) for name, a in b.arrays.items()}
    return [batch.weight for batch in batches], arrays


def rebuild_batches(weights: list[float], arrays: Arrays) -> list[Batch]:
    """Rebuild the batches that `flatten_batches` flattened."""
    batch_arrays: list[dict[str, NDArray[Any]]] = [{} for _ in weights]
    for key, array in arrays.items():
        number, _, name = key.partition(" ")
        batch_arrays[int(number)][name] = array
    return [Batch(values, weight) for values, weight in zip(batch_arrays, weights, strict=True)]
