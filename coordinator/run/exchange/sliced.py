"""The slices of one attempt that members average among themselves, as far as the coordinator
knows: which node sums have arrived at which owner, which averages are there, and their digests.

Pure. The values of an average and the owner's word on it may come from two members, in any order.
Only an average of which both are there and fit is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.base.errors import OutOfPlace
from protocol.exact.slice_merge import Origin
from protocol.exact.slices import SliceGrid, slice_digest
from protocol.exact.tree import Node
from protocol.exact.tree_sum import TreeSum
from protocol.exact.update import Array
from protocol.spec.manifest import Block
from protocol.wire.messages import SliceAverage, SliceDone, SumsArrived
from protocol.wire.peers import OwnerTable


@dataclass(frozen=True, slots=True)
class WrongAverage:
    """What an owner sent is not what it said, or what another one made of the same sums."""

    owner: str
    block: str
    told: str

    def __str__(self) -> str:
        return (
            f"the averages of block {self.block!r} that worker {self.owner!r} sent are not those "
            f"of which it told the digest ({self.told}): nothing of them is applied; let 'worker "
            "doctor' look at it, and go on without it"
        )


class SlicedSums:
    """See the module's text.

    Attributes:
        number: Of the table in force.
        table: That.
        bits: For each owner of this attempt a number, in what workers owe.
        ways: Whose nodes made up the sums.

    Args:
        blocks: The manifest's.
        microbatches: Of the step.
        number: Of the table.
        table: The owners at its start.
        averages: Where averages go, an array for each block.
    """

    def __init__(
        self, blocks: tuple[Block, ...], microbatches: int, number: int, table: OwnerTable,
        averages: list[Array],
    ) -> None:  # fmt: skip
        self.number = number
        self.table = table
        self._tables = [table]
        self.bits = {name: bit for bit, name in enumerate(table.members)}
        self.ways: set[Origin] = set()
        self._blocks = blocks
        self._grid = SliceGrid(blocks)
        self._averages = averages
        self._microbatches = microbatches
        self._told: dict[int, tuple[str, bytes]] = {}
        self._there: dict[int, bytes] = {}
        self._open = {b: set(self._grid.of_block(b)) for b in range(len(blocks))}
        self._arrived = {name: self._nothing() for name in table.members}
        self._since = dict.fromkeys(table.members, number)

    def _nothing(self) -> TreeSum[bool]:
        return TreeSum(self._microbatches, lambda left, right: left and right)

    # Tables.

    def reown(self, number: int, table: OwnerTable) -> set[str]:
        """Other owners from now on; gives those that have to collect sums anew."""
        gaining = {
            table.owner(each)
            for slices in self._open.values()
            for each in slices
            if table.owner(each) != self.table.owner(each)
        }
        self.number, self.table = number, table
        self._tables.append(table)
        self._arrived = {
            name: self._nothing() if name in gaining else self._arrived[name]
            for name in table.members
        }
        self._since.update(dict.fromkeys(gaining, number))
        return gaining

    @property
    def owed_to(self) -> int:
        """The bits of all that own anything: sums are owed to them, and to nobody else."""
        return sum(1 << self.bits[self.table.members[owner]] for owner in {*self.table.owners})

    @property
    def owners(self) -> set[str]:
        """Whose averages are still to come."""
        return {self.table.owner(each) for slices in self._open.values() for each in slices}

    def collecting(self) -> dict[str, int]:
        """By owner how many of its averages are still to come."""
        found = dict.fromkeys(self.table.members, 0)
        for slices in self._open.values():
            for each in slices:
                found[self.table.owner(each)] += 1
        return found

    # Node sums, at their owners.

    def arrived(self, owner: str, message: SumsArrived) -> bool:
        """All of a node that goes to this owner is there; whether that counts."""
        if owner not in self._arrived or message.owners < self._since[owner]:
            return False
        self._arrived[owner].put(message.node, value=True)
        return True

    def missing(self, node: Node) -> set[int]:
        """Microbatches of the node that an owner needs and has not."""
        needing = self.owners
        return {
            leaf for name in self._arrived if name in needing
            for leaf in self._arrived[name].missing(node)
        }  # fmt: skip

    def lacking(self) -> set[str]:
        """Owners that have not all sums."""
        everything = Node(0, self._microbatches)
        return {name for name in self.owners if any(self._arrived[name].missing(everything))}

    # Averages.

    def told(self, owner: str, message: SliceDone, origin: Origin) -> list[int] | WrongAverage:
        """An owner has averaged a slice; gives the blocks that are whole with that.

        Raises:
            OutOfPlace: It never owned that slice, or has told another digest.
        """
        self._check(owner, message)
        known = self._told.get(message.slice)
        if known is not None and known[1] != message.digest:
            return self._wrong(owner, message.slice, f"worker {known[0]!r} made others of them")
        if known is None:
            self.ways.add(origin)
            self._told[message.slice] = (owner, message.digest)
        return self._fit(message.slice)

    def came(self, sender: str, message: SliceAverage, values: Array) -> list[int] | WrongAverage:
        """The values of an average; gives the blocks that are whole with that."""
        if message.slice in self._there:
            return []
        block, part = self._grid.place(message.slice)
        self._check(sender, message, scribe=True)
        self._averages[block][part] = values
        self._there[message.slice] = slice_digest(values)
        return self._fit(message.slice)

    def _check(
        self, sender: str, message: SliceDone | SliceAverage, *, scribe: bool = False
    ) -> None:
        if message.slice >= self._grid.count or message.owners > self.number:
            raise OutOfPlace(f"{type(message).__name__}: there is no such slice or table")
        if sender not in self.bits:
            raise OutOfPlace(f"{type(message).__name__} of {sender!r}, which owns nothing")
        # Who comes late, or is asked to tell again, speaks of what an earlier table gave it.
        owned = any(table.owner(message.slice) == sender for table in self._tables)
        wrote = scribe and any(table.scribe == sender for table in self._tables)
        if not owned and not wrote:
            raise OutOfPlace(
                f"{type(message).__name__}: slice {message.slice} is not of {sender!r}"
            )

    def _fit(self, number: int) -> list[int] | WrongAverage:
        block, _ = self._grid.place(number)
        if number not in self._told or number not in self._there:
            return []
        owner, digest = self._told[number]
        if digest != self._there[number]:
            return self._wrong(owner, number, f"they came from {self.table.scribe or owner!r}")
        was_open = number in self._open[block]
        self._open[block].discard(number)
        return [block] if was_open and not self._open[block] else []

    def _wrong(self, owner: str, number: int, told: str) -> WrongAverage:
        block, _ = self._grid.place(number)
        return WrongAverage(owner, self._blocks[block].name, told)

    def block_of(self, number: int) -> str:
        """The name of a slice's block.

        Raises:
            OutOfPlace: There is no such slice.
        """
        if number >= self._grid.count:
            raise OutOfPlace(f"there is no slice {number}")
        return self._blocks[self._grid.place(number)[0]].name

    def owner(self, number: int) -> str:
        """Who owns a slice now."""
        return self.table.owner(number)

    def digests(self) -> NDArray[np.uint8]:
        """Of all averages, in order; all are there."""
        joined = b"".join(self._there[number] for number in range(self._grid.count))
        return np.frombuffer(joined, np.uint8)
