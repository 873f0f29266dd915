"""Track the chunks of one attempt that workers average: which sums have arrived at which owner,
which averages have arrived, and their digests.

Pure. The values of an average and its owner's digest may come from two members, in any order. An
average is used only once both have arrived and match.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.base.errors import OutOfOrder
from protocol.exact.reduction.average import Array
from protocol.exact.reduction.chunk_grid import ChunkGrid, chunk_digest
from protocol.exact.reduction.reducer import Origin
from protocol.exact.reduction.tree import Subtree, root
from protocol.exact.reduction.tree_sum import TreeSum
from protocol.wire.messages import AveragedGradient, ChunkReduced, SumsArrived
from protocol.wire.peers import COORDINATOR, OwnerTable


@dataclass(frozen=True, slots=True)
class WrongAverage:
    """An owner's average does not match the digest it announced, or another owner's."""

    owner: str
    block: str
    detail: str

    def __str__(self) -> str:
        return (
            f"the averages of block {self.block!r} that worker {self.owner!r} sent do not match "
            f"the digest that it reported ({self.detail}): none of them is applied; run 'worker "
            "doctor' on it, and continue without it"
        )


class PeerSums:
    """The chunks of one attempt that workers average; in a star there are none.

    Attributes:
        number: The number of the table in force.
        table: The table in force.
        bits: The bit in `Share.owed` of each worker that the first table lists.
        origins: The workers and subtrees that made up the averages.

    Args:
        grid: The run's chunks.
        microbatches: Number of microbatches in the step.
        owners: The number of the table at the start, and the table.
        average_of: Returns the array of a chunk's average.
    """

    def __init__(
        self, grid: ChunkGrid, microbatches: int, owners: tuple[int, OwnerTable],
        average_of: Callable[[int], Array],
    ) -> None:  # fmt: skip
        self.number, self.table = number, table = owners
        self._tables = [table]
        workers = [name for name in table.members if name != COORDINATOR]
        self.bits = {name: bit for bit, name in enumerate(workers)}
        self.origins: set[Origin] = set()
        self._grid = grid
        self._average_of = average_of
        self._microbatches = microbatches
        self._reduced: dict[int, tuple[str, bytes]] = {}
        self._arrived_digests: dict[int, bytes] = {}
        own_chunks = table.owned_by(COORDINATOR)
        self._open = {number for number in range(grid.count) if number not in own_chunks}
        self._arrived = {name: self._nothing() for name in workers}
        self._since = dict.fromkeys(workers, number)

    def _nothing(self) -> TreeSum[bool]:
        return TreeSum(self._microbatches, lambda left, right: left and right)

    # Tables.

    def reown(self, number: int, table: OwnerTable) -> tuple[set[str], set[int]]:
        """Switch to another table of owners.

        Returns:
            The workers that must collect sums again, and the chunks that the coordinator takes
            over.
        """
        changed_owner = {
            chunk for chunk in self._open if table.owner(chunk) != self.table.owner(chunk)
        }
        taken_over = changed_owner & table.owned_by(COORDINATOR)
        gaining_workers = {table.owner(chunk) for chunk in changed_owner - taken_over}
        self._open -= taken_over
        for chunk in taken_over:
            self._arrived_digests.pop(chunk, None)
        self.number, self.table = number, table
        self._tables.append(table)
        self._arrived = {
            name: self._nothing() if name in gaining_workers else self._arrived[name]
            for name in table.members
            if name != COORDINATOR
        }
        self._since.update(dict.fromkeys(gaining_workers, number))
        return gaining_workers, taken_over

    @property
    def owed_to(self) -> int:
        """The bits of all workers that own a chunk, to which sums are therefore owed."""
        owner_names = {self.table.members[owner] for owner in {*self.table.owners}}
        return sum(1 << self.bits[name] for name in owner_names if name != COORDINATOR)

    @property
    def owners(self) -> set[str]:
        """Workers whose averages are outstanding."""
        return {self.table.owner(chunk) for chunk in self._open}

    def collecting(self) -> dict[str, int]:
        """Return the number of outstanding averages of each worker."""
        counts = dict.fromkeys(self._arrived, 0)
        for chunk in self._open:
            counts[self.table.owner(chunk)] += 1
        return counts

    # Sums, at their owners.

    def arrived(self, owner: str, message: SumsArrived) -> bool:
        """Note that an owner has all its chunks of a subtree; return whether that counts."""
        if owner not in self._arrived or message.owners < self._since[owner]:
            return False
        self._arrived[owner].put(message.subtree, value=True)
        return True

    def missing(self, subtree: Subtree) -> set[int]:
        """Return the microbatches of a subtree that some owner lacks."""
        return {leaf for name in self.owners for leaf in self._arrived[name].missing(subtree)}

    def lacking(self) -> set[str]:
        """Return the owners that lack sums."""
        everything = root(self._microbatches)
        return {name for name in self.owners if any(self._arrived[name].missing(everything))}

    # Averages.

    def reduced(
        self, owner: str, message: ChunkReduced, origin: Origin
    ) -> int | WrongAverage | None:
        """Take an owner's digest of its average.

        Returns:
            The chunk, if its average can be used now; or the fault.

        Raises:
            OutOfOrder: The worker never owned that chunk.
        """
        number = self._checked(owner, message)
        earlier = self._reduced.get(number)
        if earlier is not None and earlier[1] != message.digest:
            return self._wrong_average(owner, number, f"worker {earlier[0]!r} computed others")
        if earlier is None:
            self._reduced[number] = (owner, message.digest)
            self.origins.add(origin)
        return self._compare_digests(number)

    def average(
        self, sender: str, message: AveragedGradient, values: Array
    ) -> int | WrongAverage | None:
        """Take the values of an average; returns and raises like `reduced`."""
        number = self._checked(sender, message)
        if number in self._arrived_digests:
            return None
        if number in self._open:
            self._average_of(number)[:] = values
            self._arrived_digests[number] = chunk_digest(values)
        return self._compare_digests(number)

    def _checked(self, sender: str, message: ChunkReduced | AveragedGradient) -> int:
        """Return the number of a chunk that the sender owns or owned, or writes for its owner."""
        kind = type(message).__name__
        if message.owners > self.number or not self._grid.has(message.block, message.chunk):
            raise OutOfOrder(f"{kind}: there is no such chunk or table")
        number = self._grid.number(message.block, message.chunk)
        # A late or repeated message may refer to an earlier table.
        owned = any(table.owner(number) == sender for table in self._tables)
        writes = isinstance(message, AveragedGradient)
        if not owned and not (writes and any(table.scribe == sender for table in self._tables)):
            raise OutOfOrder(
                f"{kind}: {sender!r} does not own chunk {message.chunk} of block {message.block}"
            )
        return number

    def _compare_digests(self, number: int) -> int | WrongAverage | None:
        if number not in self._reduced or number not in self._arrived_digests:
            return None
        owner, digest = self._reduced[number]
        if digest != self._arrived_digests[number]:
            return self._wrong_average(
                owner, number, f"they came from {self.table.scribe or owner!r}"
            )
        if number not in self._open:
            return None
        self._open.discard(number)
        return number

    def _wrong_average(self, owner: str, number: int, detail: str) -> WrongAverage:
        block, _ = self._grid.chunk(number)
        return WrongAverage(owner, self._grid.blocks[block].name, detail)

    def digests(self) -> NDArray[np.uint8]:
        """Return the digests of all averages, in order; all have arrived."""
        digests = b"".join(
            self._arrived_digests.get(number) or chunk_digest(self._average_of(number))
            for number in range(self._grid.count)
        )
        return np.frombuffer(digests, np.uint8)
