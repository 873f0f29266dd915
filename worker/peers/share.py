"""A member's part in averaging slices: its own node sums go to their owners, averages come back.

Pure: no clock, socket, file, thread or randomness. Each event is a method that returns actions, to
be done in order. The owner of a slice merges node sums along the tree, with the class by which the
coordinator does it, scales them, and sends the average to all. Node sums are kept until the step is
over: where an owner is lost its slices get others, which are sent them again. Whatever is late or
comes twice changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.base import limits
from protocol.base.errors import OutOfPlace
from protocol.exact.codecs import packed, unpacked
from protocol.exact.slice_merge import Infinite, SliceMerge, origin_document
from protocol.exact.slices import DIGEST_BYTES, SliceGrid, slice_digest
from protocol.exact.tree import Node, is_node
from protocol.exact.update import Array
from protocol.spec.manifest import Block
from protocol.spec.replicas_spec import Codecs
from protocol.wire.messages import (
    AveragedGradient,
    Message,
    SliceAverage,
    SliceDone,
    SliceSum,
    SlicesWanted,
    SumNotFinite,
    SumsArrived,
    WrongSlice,
)
from protocol.wire.peers import OwnerTable

Body = NDArray[np.uint8]
COORDINATOR: Final = ""
"""As a sender: it passes on what comes from members that have no links."""


@dataclass(frozen=True, slots=True)
class ToPeer:
    """Send a message to another member; averages come before sums that wait."""

    peer: str
    message: Message
    body: NDArray[Any]


@dataclass(frozen=True, slots=True)
class ToCoordinator:
    """Send a message to the coordinator."""

    message: Message
    body: NDArray[Any] | bytes | None = None


@dataclass(frozen=True, slots=True)
class AllAveraged:
    """All averages of a committed step are here, and are what the coordinator says."""

    step: int
    attempt: int
    averages: list[Array]


@dataclass(frozen=True, slots=True)
class LastCame:
    """The last average of a step is here, whether that is committed or not."""

    step: int
    attempt: int


Action = ToPeer | ToCoordinator | AllAveraged | LastCame


@dataclass(slots=True)
class _Attempt:
    """One attempt at a step.

    Attributes:
        merges: Of the slices that are this member's.
        sums: By node and block, what this member has computed: kept to be sent again.
        arrived: By worker and node, how many of this member's slices have its sum.
        digests: Of the averages that are here, by slice.
        expected: What they must be, once the step is committed.
    """

    place: dict[str, int]
    microbatches: int
    averages: list[Array]
    merges: dict[int, SliceMerge] = field(default_factory=dict)
    sums: dict[tuple[Node, int], tuple[float, Array]] = field(default_factory=dict)
    arrived: dict[tuple[str, Node], set[int]] = field(default_factory=dict)
    announced: set[tuple[str, Node]] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    senders: dict[int, str] = field(default_factory=dict)
    expected: Body | None = None
    asked: bool = False


class SlicePart:
    """One member's part, as long as it is in a run.

    Attributes:
        came: How many slices have come; it tells whether one that waits makes progress.

    Args:
        me: This member's name.
        blocks: The manifest's.
        exchange: How gradients travel.
    """

    def __init__(self, me: str, blocks: tuple[Block, ...], exchange: Codecs) -> None:
        self.me = me
        self.came = 0
        self._grid = SliceGrid(blocks)
        self._blocks = blocks
        self._exchange = exchange
        self._number = 0
        self._table: OwnerTable | None = None
        self._mine: frozenset[int] = frozenset()
        """The slices that are this member's by the present table."""
        self._now: _Attempt | None = None
        self._newest = (-1, -1, -1)
        self._early: list[tuple[str, SliceSum | SliceAverage, Body]] = []
        self._early_bytes = 0
        self._owned_before: set[tuple[int, str]] = set()

    # What the coordinator says.

    def own(self, number: int, table: OwnerTable) -> list[Action]:
        """From now on the owners are these; a step in progress goes on with them.

        Raises:
            OutOfPlace: The table is not one of this run's slices.
        """
        if len(table.owners) != self._grid.count:
            raise OutOfPlace(f"Owners: expected {self._grid.count} slices, got {len(table.owners)}")
        before, self._number, self._table = self._table, number, table
        place = table.members.index(self.me) if self.me in table.members else None
        self._mine = frozenset(n for n, owner in enumerate(table.owners) if owner == place)
        now = self._now
        if now is None:
            return self._again()
        now.announced.clear()
        actions: list[Action] = []
        if before is not None:
            self._owned_before.update(
                (each, before.owner(each)) for each in range(self._grid.count)
            )
        self._take_up(now)
        member_before = before is not None and self.me in before.members
        for (node, block), (weight, values) in now.sums.items():
            for slice_number in self._grid.of_block(block):
                moved = before is None or before.owner(slice_number) != table.owner(slice_number)
                if moved or member_before != (self.me in table.members):
                    actions += self._deliver(now, slice_number, node, weight, values)
        return [*actions, *self._announce(now), *self._tell_again(now, before), *self._again()]

    def _tell_again(self, now: _Attempt, before: OwnerTable | None) -> list[Action]:
        """The coordinator gets averages from another one than before: give it what is here."""
        assert self._table is not None
        if before is None or before.scribe == self._table.scribe:
            return []
        mine = [n for n in now.digests if self._table.scribe == self.me or n in now.merges]
        if self._table.scribe not in (None, self.me):
            return []
        return [self._average_for_the_coordinator(now, number) for number in mine]

    def begin(self, place: dict[str, int], microbatches: int) -> list[Action]:
        """A new attempt at a step; of the one before nothing is wanted any more.

        Args:
            place: Epoch, step and attempt, as messages carry them.
            microbatches: Of the step.
        """
        arrays = [np.empty(block.elements, np.float32) for block in self._blocks]
        self._now = now = _Attempt(place, microbatches, arrays)
        self._newest = (place["epoch"], place["step"], place["attempt"])
        self._owned_before.clear()
        self._take_up(now)
        return self._again()

    def _take_up(self, now: _Attempt) -> None:
        """The slices that are this member's have a merge each; what is another's now is dropped."""
        assert self._table is not None, "a plan by owners comes after their table"
        mine = self._mine
        for number in [n for n, merge in now.merges.items() if n not in mine and not merge.done]:
            del now.merges[number]
            for there in now.arrived.values():  # a later table may give it back, without its sums
                there.discard(number)
        for number in mine - now.merges.keys():
            now.merges[number] = SliceMerge(now.microbatches, self._exchange)

    def drop(self) -> None:
        """The attempt that is in progress here has come to nothing."""
        self._now = None

    def commit(self, place: dict[str, int], digests: Body) -> list[Action]:
        """The step is durable, and these are the digests of its slices' averages.

        Raises:
            OutOfPlace: There are not as many as slices.
        """
        now = self._now
        if len(digests) != DIGEST_BYTES * self._grid.count:
            raise OutOfPlace(f"SliceDigests: expected {self._grid.count}, got {len(digests)} bytes")
        if now is None or now.place != place:
            return []
        now.expected = digests
        return self._settle(now) or self._ask_if_lost(now)

    def waits(self) -> list[Action]:
        """Nothing has come for long, though the step is committed: ask the coordinator."""
        now = self._now
        return self._ask(now) if now is not None and now.expected is not None else []

    def averaged(self, message: AveragedGradient, values: Array) -> list[Action]:
        """A chunk of averages from the coordinator."""
        now = self._now
        if now is None or message.step != now.place["step"]:
            return []
        if message.attempt != now.place["attempt"]:
            return []
        piece = self._blocks[message.block].chunk_slice(message.chunk)
        now.averages[message.block][piece] = values
        for number in self._grid.of_block(message.block):
            _, part = self._grid.place(number)
            # All slices that end in this chunk: the earlier chunks of a block come before it.
            if piece.start < part.stop <= piece.stop or part.stop == part.start:
                self._has(now, number, COORDINATOR)
        return self._settle(now)

    # What this member computes, and what peers send.

    def contribute(self, node: Node, block: int, weight: float, values: Array) -> list[Action]:
        """A block's sum over a node is computed: send each slice to its owner.

        `values` are kept until the step is over, and are not changed by anyone.
        """
        now = self._now
        if now is None or now.expected is not None:
            return []
        now.sums[node, block] = (weight, values)
        actions: list[Action] = []
        for number in self._grid.of_block(block):
            actions += self._deliver(now, number, node, weight, values)
        return actions

    def _deliver(
        self, now: _Attempt, number: int, node: Node, weight: float, values: Array
    ) -> list[Action]:
        assert self._table is not None
        _, part = self._grid.place(number)
        owner = self._table.owner(number)
        if owner == self.me:
            return self._put(now, number, (self.me, node, weight), values[part].copy())
        message = SliceSum(
            **now.place, owners=self._number, slice=number, worker=self.me,
            lo=node.lo, hi=node.hi, weight=weight,
        )  # fmt: skip
        body = packed(values[part], self._exchange.precision)
        if self.me in self._table.members:
            return [ToPeer(owner, message, body)]
        return [ToCoordinator(message, body)]

    def receive(self, sender: str, message: SliceSum | SliceAverage, body: Body) -> list[Action]:
        """A slice from another member, or from the coordinator for one that has no links.

        Raises:
            OutOfPlace: The sender is not the one that may send this.
        """
        if isinstance(message, SliceSum) and sender not in (COORDINATOR, message.worker):
            raise OutOfPlace(f"{sender!r} sends a sum as {message.worker!r}")
        now = self._now
        theirs = (message.epoch, message.step, message.attempt)
        if theirs > self._newest or message.owners > self._number:
            return self._keep_early(sender, message, body)
        if now is None or theirs < self._newest:
            return []
        self.came += 1
        if isinstance(message, SliceSum):
            return self._sum(now, message, body)
        return self._average(now, sender, message, body)

    def _keep_early(
        self, sender: str, message: SliceSum | SliceAverage, body: Body
    ) -> list[Action]:
        """It belongs to a step or a table of which the coordinator's word has not come."""
        if self._early_bytes + body.nbytes > limits.PEER_EARLY_BYTES:
            raise OutOfPlace(f"{sender!r} sends more than may wait for its step")
        self._early.append((sender, message, body))
        self._early_bytes += body.nbytes
        return []

    def _again(self) -> list[Action]:
        """What came early may be in place by now."""
        early, self._early, self._early_bytes = self._early, [], 0
        actions: list[Action] = []
        for sender, message, body in early:
            actions += self.receive(sender, message, body)
        return actions

    def _sum(self, now: _Attempt, message: SliceSum, body: Body) -> list[Action]:
        if not is_node(message.node, now.microbatches):
            raise OutOfPlace(f"{message.node} is no node over {now.microbatches} microbatches")
        if message.slice not in now.merges:
            return []  # it had another owner when this was sent
        values = unpacked(body, self._exchange.precision, self._grid.elements(message.slice))
        sent = (message.worker, message.node, message.weight)
        return self._put(now, message.slice, sent, values)

    def _put(
        self, now: _Attempt, number: int, sent: tuple[str, Node, float], values: Array
    ) -> list[Action]:
        """Add a sum: whose it is, of which node, with which weight."""
        worker, node, weight = sent
        block, part = self._grid.place(number)
        merge = now.merges[number]
        found = merge.put(worker, node, weight, values, now.averages[block][part])
        if isinstance(found, Infinite):
            return [
                ToCoordinator(
                    SumNotFinite(
                        **now.place, slice=number, worker=found.worker,
                        lo=found.node.lo, hi=found.node.hi,
                    )
                )
            ]  # fmt: skip
        now.arrived.setdefault((worker, node), set()).add(number)
        done = self._done(now, number) if found else []
        return [*done, *self._announce(now, (worker, node)), *(self._settle(now) if found else [])]

    def _announce(self, now: _Attempt, only: tuple[str, Node] | None = None) -> list[Action]:
        """Tell the coordinator of which nodes all that is this member's is here."""
        assert self._table is not None
        mine = self._mine
        if not mine:
            return []
        actions: list[Action] = []
        for worker, node in [only] if only is not None else list(now.arrived):
            there = now.arrived[worker, node]
            whole = len(there) >= len(mine) and mine <= there
            if whole and (worker, node) not in now.announced:
                now.announced.add((worker, node))
                message = SumsArrived(
                    **now.place, owners=self._number, worker=worker, lo=node.lo, hi=node.hi
                )
                actions.append(ToCoordinator(message))
        return actions

    def _done(self, now: _Attempt, number: int) -> list[Action]:
        """An average is made: all are to have it, and the coordinator its digest."""
        assert self._table is not None
        block, part = self._grid.place(number)
        self._has(now, number, self.me)
        place = {**now.place, "owners": self._number, "slice": number}
        average = SliceAverage(**place)
        body = packed(now.averages[block][part], self._exchange.averages)
        done = SliceDone(**place, digest=now.digests[number])
        others = self._others()
        actions: list[Action] = [ToPeer(peer, average, body) for peer in others]
        actions.append(ToCoordinator(done, origin_document(now.merges[number].origin)))
        if self._table.scribe in (None, self.me):
            actions.append(self._average_for_the_coordinator(now, number))
        return actions

    def _others(self) -> list[str]:
        """The other members, those after this one first: not all owners begin with the same."""
        assert self._table is not None
        members = self._table.members
        if self.me not in members:
            return []  # it was an owner when the sums came: the coordinator passes this on
        mine = members.index(self.me)
        return [*members[mine + 1 :], *members[:mine]]

    def _average_for_the_coordinator(self, now: _Attempt, number: int) -> ToCoordinator:
        block, part = self._grid.place(number)
        message = SliceAverage(**now.place, owners=self._number, slice=number)
        return ToCoordinator(message, packed(now.averages[block][part], self._exchange.averages))

    def _average(
        self, now: _Attempt, sender: str, message: SliceAverage, body: Body
    ) -> list[Action]:
        assert self._table is not None
        number = message.slice
        rightful = sender == self._table.owner(number) or (number, sender) in self._owned_before
        if not rightful:
            raise OutOfPlace(f"{sender!r} sends the average of slice {number}, which another owns")
        if number in now.digests:
            return []
        block, part = self._grid.place(number)
        elements = self._grid.elements(number)
        now.averages[block][part] = unpacked(body, self._exchange.averages, elements)
        self._has(now, number, sender)
        told: list[Action] = []
        if self._table.scribe == self.me:
            told = [self._average_for_the_coordinator(now, number)]
        return [*told, *self._settle(now)]

    def _has(self, now: _Attempt, number: int, sender: str) -> None:
        """A slice's average is here, for good."""
        block, part = self._grid.place(number)
        now.digests[number] = slice_digest(now.averages[block][part])
        now.senders[number] = sender

    # The end of a step.

    def _settle(self, now: _Attempt) -> list[Action]:
        """All is here and the step is committed: take it, if it is what the coordinator has."""
        if len(now.digests) < self._grid.count:
            return []
        if now.expected is None:
            return [LastCame(now.place["step"], now.place["attempt"])]
        have = b"".join(now.digests[number] for number in range(self._grid.count))
        expected = now.expected.tobytes()
        if have != expected:
            return self._wrong(now, expected)
        self._now = None
        return [AllAveraged(now.place["step"], now.place["attempt"], now.averages)]

    def _wrong(self, now: _Attempt, expected: bytes) -> list[Action]:
        """Nothing of the step is applied here."""
        wrong = [
            number
            for number in range(self._grid.count)
            if now.digests[number] != expected[DIGEST_BYTES * number :][:DIGEST_BYTES]
        ]
        told = WrongSlice(**now.place, slice=wrong[0], owner=now.senders[wrong[0]])
        for number in wrong:
            del now.digests[number]
        return [ToCoordinator(told), *self._ask(now)]

    def lost(self, peer: str) -> list[Action]:
        """There is no link to this member any more."""
        del peer
        now = self._now
        return self._ask_if_lost(now) if now is not None and now.expected is not None else []

    def _ask_if_lost(self, now: _Attempt) -> list[Action]:
        """A committed slice whose owner has changed meanwhile may never come."""
        assert self._table is not None
        number = next((n for n in range(self._grid.count) if n not in now.digests), None)
        gone = number is not None and self.me not in self._table.members
        return self._ask(now) if gone or self._owned_before else []

    def _ask(self, now: _Attempt) -> list[Action]:
        if now.asked or len(now.digests) == self._grid.count:
            return []
        now.asked = True
        return [ToCoordinator(SlicesWanted(**now.place))]

    def waiting_for(self) -> dict[str, int]:
        """By owner how many slices of the step in progress have not come."""
        if self._now is None or self._table is None:
            return {}
        missing = (n for n in range(self._grid.count) if n not in self._now.digests)
        return dict(Counter(self._table.owner(number) for number in missing))
