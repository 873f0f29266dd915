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
    """An average contradicts its owner's digest, or two owners' digests contradict each other."""

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
        table_number: The number of the table in force.
        table: The table in force.
        bits: The bit in `Share.outstanding_bits` of each worker that the first table lists.
        origins: The workers and subtrees that made up the averages.

    Args:
        grid: The run's chunks.
        microbatches: Number of microbatches in the step.
        numbered_table: The number of the first table, and the table.
        average_of: Returns the array of a chunk's average.
    """

    def __init__(
        self, grid: ChunkGrid, microbatches: int, numbered_table: tuple[int, OwnerTable],
        average_of: Callable[[int], Array],
    ) -> None:  # fmt: skip
        self.table_number, self.table = table_number, table = numbered_table
        self._tables = [table]
        workers = [name for name in table.members if name != COORDINATOR]
        self.bits = {name: bit for bit, name in enumerate(workers)}
        self.origins: set[Origin] = set()
        self._grid = grid
        self._average_of = average_of
        self._microbatches = microbatches
        self._owner_digests: dict[int, tuple[str, bytes]] = {}
        self._average_digests: dict[int, bytes] = {}
        own_chunks = table.chunks_of(COORDINATOR)
        self._outstanding_chunks = {chunk for chunk in range(grid.count) if chunk not in own_chunks}
        self._arrived_sums = {name: self._empty_sum() for name in workers}
        self._first_table_numbers = dict.fromkeys(workers, table_number)

    def _empty_sum(self) -> TreeSum[bool]:
        return TreeSum(self._microbatches, lambda left, right: left and right)

    # Tables.

    def switch_table(self, table_number: int, table: OwnerTable) -> tuple[set[str], set[int]]:
        """Switch to another table of owners.

        Returns:
            The workers that must collect sums again, and the chunks that the coordinator takes
            over.
        """
        changed_owner = {
            chunk
            for chunk in self._outstanding_chunks
            if table.owner(chunk) != self.table.owner(chunk)
        }
        chunks_taken_over = changed_owner & table.chunks_of(COORDINATOR)
        gaining_workers = {table.owner(chunk) for chunk in changed_owner - chunks_taken_over}
        self._outstanding_chunks -= chunks_taken_over
        for chunk in chunks_taken_over:
            self._average_digests.pop(chunk, None)
        self.table_number, self.table = table_number, table
        self._tables.append(table)
        self._arrived_sums = {
            name: self._empty_sum() if name in gaining_workers else self._arrived_sums[name]
            for name in table.members
            if name != COORDINATOR
        }
        self._first_table_numbers.update(dict.fromkeys(gaining_workers, table_number))
        return gaining_workers, chunks_taken_over

    @property
    def owner_bits(self) -> int:
        """The bits of all workers that own chunks: every worker owes its sums to these owners."""
        owner_names = {self.table.members[owner] for owner in {*self.table.owners}}
        return sum(1 << self.bits[name] for name in owner_names if name != COORDINATOR)

    @property
    def outstanding_owners(self) -> set[str]:
        """Workers whose averages are outstanding."""
        return {self.table.owner(chunk) for chunk in self._outstanding_chunks}

    def outstanding_counts(self) -> dict[str, int]:
        """Return the number of outstanding averages of each worker."""
        counts = dict.fromkeys(self._arrived_sums, 0)
        for chunk in self._outstanding_chunks:
            counts[self.table.owner(chunk)] += 1
        return counts

    # Sums, at their owners.

    def take_arrival(self, owner: str, message: SumsArrived) -> bool:
        """Note that an owner has all its chunks of a subtree.

        Returns:
            False if the owner must collect the sums again, because its table was out of date.
        """
        if owner not in self._arrived_sums or message.owners < self._first_table_numbers[owner]:
            return False
        self._arrived_sums[owner].put(message.subtree, value=True)
        return True

    def missing_microbatches(self, subtree: Subtree) -> set[int]:
        """Return the microbatches of a subtree that some owner lacks."""
        return {
            leaf
            for name in self.outstanding_owners
            for leaf in self._arrived_sums[name].missing(subtree)
        }

    def owners_lacking_sums(self) -> set[str]:
        """Return the owners that lack sums."""
        everything = root(self._microbatches)
        return {
            name
            for name in self.outstanding_owners
            if any(self._arrived_sums[name].missing(everything))
        }

    # Averages.

    def take_digest(
        self, owner: str, message: ChunkReduced, origin: Origin
    ) -> int | WrongAverage | None:
        """Take an owner's digest of its average.

        Returns:
            The chunk, if its average can be used now; or the fault.

        Raises:
            OutOfOrder: The worker never owned that chunk.
        """
        chunk = self._chunk_of_sender(owner, message)
        earlier = self._owner_digests.get(chunk)
        if earlier is not None and earlier[1] != message.digest:
            return self._wrong_average(owner, chunk, f"worker {earlier[0]!r} reported another")
        if earlier is None:
            self._owner_digests[chunk] = (owner, message.digest)
            self.origins.add(origin)
        return self._compare_digests(chunk)

    def take_average(
        self, sender: str, message: AveragedGradient, values: Array
    ) -> int | WrongAverage | None:
        """Take the values of an average; returns and raises like `take_digest`."""
        chunk = self._chunk_of_sender(sender, message)
        if chunk in self._average_digests:
            return None
        if chunk in self._outstanding_chunks:
            self._average_of(chunk)[:] = values
            self._average_digests[chunk] = chunk_digest(values)
        return self._compare_digests(chunk)

    def _chunk_of_sender(self, sender: str, message: ChunkReduced | AveragedGradient) -> int:
        """Return the number of a chunk that the sender owns or owned, or sends as the scribe (the
        member that sends all averages to the coordinator)."""
        message_name = type(message).__name__
        if message.owners > self.table_number or not self._grid.has(message.block, message.chunk):
            raise OutOfOrder(f"{message_name}: there is no such chunk or table")
        chunk = self._grid.number(message.block, message.chunk)
        # A late or repeated message may refer to an earlier table.
        is_owner = any(table.owner(chunk) == sender for table in self._tables)
        may_be_scribe = isinstance(message, AveragedGradient)
        if not is_owner and not (
            may_be_scribe and any(table.scribe == sender for table in self._tables)
        ):
            raise OutOfOrder(
                f"{message_name}: worker {sender!r} does not own chunk {message.chunk} of block "
                f"{message.block}"
            )
        return chunk

    def _compare_digests(self, chunk: int) -> int | WrongAverage | None:
        if chunk not in self._owner_digests or chunk not in self._average_digests:
            return None
        owner, digest = self._owner_digests[chunk]
        if digest != self._average_digests[chunk]:
            return self._wrong_average(
                owner, chunk, f"they came from {self.table.scribe or owner!r}"
            )
        if chunk not in self._outstanding_chunks:
            return None
        self._outstanding_chunks.discard(chunk)
        return chunk

    def _wrong_average(self, owner: str, chunk: int, detail: str) -> WrongAverage:
        block, _ = self._grid.chunk(chunk)
        return WrongAverage(owner, self._grid.blocks[block].name, detail)

    def digests(self) -> NDArray[np.uint8]:
        """Return the digests of all averages in chunk order, flat uint8; all must have arrived."""
        digests = b"".join(
            self._average_digests.get(chunk) or chunk_digest(self._average_of(chunk))
            for chunk in range(self._grid.count)
        )
        return np.frombuffer(digests, np.uint8)
