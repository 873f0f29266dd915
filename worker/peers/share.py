"""This worker's side of the exchange: sums go to the owners of their chunks, averages come back.

Pure: no clock, socket, file, thread or randomness. Each event is a method that returns actions, to
be done in order. A table says who averages which chunk: in a star the coordinator all of them, else
workers, this one perhaps among them. An owner merges sums along the tree, scales them, and sends
the average to all. Sums for other workers are kept until the step is over: where an owner is lost
its chunks get other owners, which are sent them again. Whatever is late or comes twice changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.exact.reduction.chunk_grid import DIGEST_BYTES, ChunkGrid, chunk_digest
from protocol.exact.reduction.codecs import packed, unpacked
from protocol.exact.reduction.float32 import Array
from protocol.exact.reduction.reducer import NonFinite, Origin, Reducer, origin_document
from protocol.exact.reduction.tree import Subtree, is_subtree
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import Codecs
from protocol.wire.messages import (
    AveragedBlockGradient,
    AveragedGradient,
    AverageDigests,
    AveragedNonBlockGradient,
    AverageMismatch,
    AveragesRequest,
    BlockGradientPayload,
    Cancel,
    ChunkReduced,
    Commit,
    Credit,
    GradientPayload,
    Message,
    NonBlockGradientPayload,
    NonFiniteSum,
    Owners,
    StepPlan,
    SumsArrived,
)
from protocol.wire.peers import COORDINATOR, OwnerTable, parse
from worker.logic.actions import Transmit
from worker.logic.events import AveragesReady, StepId

Body = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ToPeer:
    """Send a message to another worker; averages overtake sums that wait."""

    peer: str
    message: Message
    body: NDArray[Any]


@dataclass(frozen=True, slots=True)
class LastCame:
    """The last average of a step that workers average is here, before the step's commit."""

    step: int
    attempt: int


Action = ToPeer | Transmit | AveragesReady | LastCame


class Averages:
    """The averages of one attempt, as far as they are here.

    Attributes:
        arrays: By block, flat float32; empty until a chunk of it is here.
        senders: By chunk, who sent its average.

    Args:
        grid: The run's chunks.
    """

    def __init__(self, grid: ChunkGrid) -> None:
        self._grid = grid
        self.arrays: list[Array] = [np.empty(0, np.float32)] * len(grid.blocks)
        self.senders: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        return len(self.senders) == self._grid.count

    def part(self, number: int) -> Array:
        """The array of a chunk's average, to read or to write."""
        number, chunk = self._grid.chunk(number)
        block = self._grid.blocks[number]
        if not len(self.arrays[number]):
            self.arrays[number] = np.empty(block.elements, np.float32)
        return self.arrays[number][block.chunk_slice(chunk)]

    def put(self, number: int, sender: str, values: Array) -> None:
        """Take an average; one that is here already changes nothing."""
        if number in self.senders:
            return
        self.senders[number] = sender
        block, _ = self._grid.chunk(number)
        if len(self._grid.of_block(block)) == 1:
            self.arrays[block] = values
        else:
            self.part(number)[:] = values


@dataclass(slots=True)
class _Attempt:
    """One attempt at a step that this worker computes a part of.

    Attributes:
        id: Term, step and attempt, as messages carry them.
        owners: The number of the plan's table; 0: only the coordinator averages.
        table: The table in force.
        credit: How many chunks of each subtree the coordinator may be sent by now.
        held_back: Payloads for the coordinator that are not allowed yet, by chunk and subtree.
        reducer: Of the chunks that are this worker's.
        sums: By subtree and block what this worker has computed, to be sent again.
        arrived: By worker and subtree, of which of this worker's chunks the sum is here.
        former: Owners by earlier tables of this attempt.
        digests: By chunk of the averages that are here.
        expected: What all digests must be.
    """

    id: dict[str, int]
    owners: int
    table: OwnerTable
    microbatches: int
    averages: Averages
    credit: int
    reducer: Reducer[int]
    owned: set[int] = field(default_factory=set)
    held_back: list[tuple[int, Subtree, Transmit]] = field(default_factory=list)
    sums: dict[tuple[Subtree, int], tuple[float, Array]] = field(default_factory=dict)
    arrived: dict[tuple[str, Subtree], set[int]] = field(default_factory=dict)
    announced: set[tuple[str, Subtree]] = field(default_factory=set)
    former: set[tuple[int, str]] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    expected: bytes | None = None
    committed: bool = False
    is_requested: bool = False

    def is_at(self, message: Cancel | Credit | Commit | AverageDigests) -> bool:
        """Whether a message is about this attempt."""
        return (message.step, message.attempt) == (self.id["step"], self.id["attempt"])


class GradientExchange:
    """This worker's side of the exchange, as long as it is in a run.

    Attributes:
        came: How many messages of peers have come; it tells whether one that waits makes progress.

    Args:
        me: This worker's name.
        blocks: The manifest's.
        exchange: How gradients travel.
    """

    def __init__(self, me: str, blocks: tuple[Block, ...], exchange: Codecs) -> None:
        self.me = me
        self.arrivals = 0
        self._grid = ChunkGrid(blocks)
        self._blocks = blocks
        self._exchange = exchange
        self._star = OwnerTable.star(self._grid.count)
        self._number, self._table = 0, self._star
        self._now: _Attempt | None = None
        self._averages: dict[tuple[int, int], Averages] = {}
        self._newest = (-1, -1, -1)
        self._early: list[tuple[str, GradientPayload | AveragedGradient, Body]] = []
        self._early_bytes = 0

    # What the coordinator says.

    def hear(self, message: Message, body: Body | None) -> list[Action]:
        """Take a message of the coordinator's.

        Raises:
            RemoteProtocolError: It does not fit.
        """
        match message:
            case StepPlan():
                return self.begin(message)
            case Credit():
                return self.allow(message)
            case Cancel():
                return self.cancel(message)
            case Commit():
                return self.commit(message)
        assert body is not None
        match message:
            case Owners():
                return self.own(message.number, parse(OwnerTable, body.tobytes()))
            case AverageDigests():
                return self.expect(message, body)
            case _:
                assert isinstance(message, GradientPayload | AveragedGradient)
                return self.receive(COORDINATOR, message, body)

    def own(self, number: int, table: OwnerTable) -> list[Action]:
        """From now on the owners are these; a step that workers average goes on with them.

        Raises:
            OutOfOrder: The table is not one of this run's chunks.
        """
        if len(table.owners) != self._grid.count:
            raise OutOfOrder(f"Owners: expected {self._grid.count} chunks, got {len(table.owners)}")
        self._number, self._table = number, table
        now = self._now
        if now is None or not now.owners:
            return self._receive_early()
        before, now.table = now.table, table
        now.announced.clear()
        now.former.update((each, before.owner(each)) for each in range(self._grid.count))
        self._take_up(now)
        has_changed = (self.me in before.members) != (self.me in table.members)
        actions: list[Action] = []
        for (subtree, block), (weight, values) in now.sums.items():
            for each in self._grid.of_block(block):
                if has_changed or before.owner(each) != table.owner(each):
                    actions += self._deliver(now, each, subtree, weight, values)
        return [*actions, *self._announce(now), *self._resend(now, before), *self._receive_early()]

    def _resend(self, now: _Attempt, previous: OwnerTable) -> list[Action]:
        """The coordinator gets averages from another one than before: give it what is here."""
        scribe = now.table.scribe
        if previous.scribe == scribe or scribe not in (None, self.me):
            return []
        here = [n for n in now.averages.senders if scribe == self.me or n in now.reducer]
        return [self._average_for_the_coordinator(now, number) for number in here]

    def begin(self, plan: StepPlan) -> list[Action]:
        """A new attempt at a step; of the one before nothing is wanted any more.

        Raises:
            OutOfOrder: It follows a table that has not come.
        """
        if plan.owners not in (0, self._number):
            raise OutOfOrder(f"StepPlan: expected table {self._number}, got {plan.owners}")
        key = (plan.step, plan.attempt)
        self._averages = {at: here for at, here in self._averages.items() if at >= key}
        averages = self._averages.setdefault(key, Averages(self._grid))
        reducer = Reducer[int](plan.microbatches, self._exchange, (), averages.part)
        self._now = now = _Attempt(
            {"term": plan.term, "step": plan.step, "attempt": plan.attempt}, plan.owners,
            self._table if plan.owners else self._star, plan.microbatches, averages, plan.uploads,
            reducer,
        )  # fmt: skip
        self._newest = (plan.term, *key)
        self._take_up(now)
        return self._receive_early()

    def _take_up(self, now: _Attempt) -> None:
        """Reduce the chunks that are this worker's; drop partial sums of what is another's now."""
        now.owned = now.table.owned_by(self.me)
        dropped = now.reducer.own(now.owned)
        for there in now.arrived.values():  # a later table may give them back, without their sums
            there.difference_update(dropped)

    def drop(self) -> None:
        """This worker gets a state from the coordinator: the attempt goes on without it."""
        self._now = None

    def allow(self, credit: Credit) -> list[Action]:
        """More may be sent to the coordinator."""
        now = self._now
        if now is None or not now.is_at(credit):
            return []
        now.credit = max(credit.uploads, now.credit)
        ready = [action for number, _, action in now.held_back if number < now.credit]
        now.held_back = [entry for entry in now.held_back if entry[0] >= now.credit]
        return [*ready]

    def cancel(self, message: Cancel) -> list[Action]:
        """Others have computed these subtrees: what is held of them is not sent."""
        now = self._now
        if now is not None and now.is_at(message):
            subtrees = {Subtree(lo, hi) for lo, hi in message.subtrees}
            now.held_back = [entry for entry in now.held_back if entry[1] not in subtrees]
        return []

    def expect(self, message: AverageDigests, digests: Body) -> list[Action]:
        """The step is durable, and these are the digests of its averages; the commit follows.

        Raises:
            OutOfOrder: There are not as many as chunks.
        """
        if len(digests) != DIGEST_BYTES * self._grid.count:
            raise OutOfOrder(f"AverageDigests: {len(digests)} bytes for {self._grid.count} chunks")
        if self._now is not None and self._now.is_at(message):
            self._now.expected = digests.tobytes()
        return []

    def commit(self, message: Commit) -> list[Action]:
        """The step is durable: it is to be taken once all of its averages are here.

        Raises:
            OutOfOrder: They are not, and only the coordinator sends them; or their digests.
        """
        now, key = self._now, (message.step, message.attempt)
        if message.scalars is None:  # the step is skipped
            self._forget(message.step)
            return []
        if now is None or not now.is_at(message):
            return self._take(key, self._averages.get(key))
        now.committed = True
        now.held_back.clear()
        if not now.owners:
            return self._take(key, now.averages)
        if now.expected is None:
            raise OutOfOrder(f"Commit of step {message.step} before the digests of its averages")
        return self._settle(now) or self._ask_if_lost(now)

    def _take(self, key: tuple[int, int], averages: Averages | None) -> list[Action]:
        if averages is None or not averages.complete:
            raise OutOfOrder(f"Commit of step {key[0]} before all of its averaged blocks")
        self._forget(key[0])
        return [AveragesReady(StepId(*key), averages.arrays)]

    def _forget(self, step: int) -> None:
        """This step is over."""
        self._now = None
        self._averages = {at: here for at, here in self._averages.items() if at[0] > step}

    def waits(self) -> list[Action]:
        """Nothing has come for long, though the step is committed: ask the coordinator."""
        now = self._now
        return self._ask(now) if now is not None and now.committed else []

    # What this worker computes, and what others send.

    def contribute(
        self, subtree: Subtree, block: int, weight: float, values: Array
    ) -> list[Action]:
        """A block's sum over a subtree is computed: send each chunk to its owner.

        `values` may be kept until the step is over, and are not changed by anyone.
        """
        now = self._now
        if now is None or now.committed:
            return []
        if now.owners:
            now.sums[subtree, block] = (weight, values)
        actions: list[Action] = []
        for number in self._grid.of_block(block):
            actions += self._deliver(now, number, subtree, weight, values)
        return actions

    def _deliver(
        self, now: _Attempt, number: int, subtree: Subtree, weight: float, values: Array
    ) -> list[Action]:
        index, chunk = self._grid.chunk(number)
        block, owner = self._blocks[index], now.table.owner(number)
        part = values[block.chunk_slice(chunk)]
        if owner == self.me:
            return self._put(now, number, (self.me, subtree, weight), part.copy())
        kind = BlockGradientPayload if block.kind == "block" else NonBlockGradientPayload
        message = kind(
            **now.id, owners=self._number if now.owners else 0, block=index, chunk=chunk,
            lo=subtree.lo, hi=subtree.hi, weight=weight,
        )  # fmt: skip
        body = packed(part, self._exchange.precision)
        if owner != COORDINATOR and self.me in now.table.members:
            return [ToPeer(owner, message, body)]
        action = Transmit(message, body)
        if owner == COORDINATOR and number >= now.credit:
            now.held_back.append((number, subtree, action))
            return []
        return [action]

    def receive(
        self, sender: str, message: GradientPayload | AveragedGradient, body: Body
    ) -> list[Action]:
        """A sum or an average, from another worker or from the coordinator.

        Raises:
            OutOfOrder: The sender is not the one that may send this.
        """
        if sender == COORDINATOR and isinstance(message, AveragedGradient):
            return self._averaged(message, body)
        now = self._now
        message_id = (message.term, message.step, message.attempt)
        if message_id > self._newest or message.owners > self._number:
            return self._keep_early(sender, message, body)
        if now is None or message_id < self._newest:
            return []
        self.arrivals += 1
        if isinstance(message, GradientPayload):
            return self._sum(now, sender, message, body)
        return self._average(now, sender, message, body)

    def _averaged(self, message: AveragedGradient, body: Body) -> list[Action]:
        """An average from the coordinator, maybe of a step that this worker computes nothing of.

        By attempt: a block of one that was given up must not be taken for the next one's.
        """
        key, number = (message.step, message.attempt), self._number_of(message)
        averages = self._averages.setdefault(key, Averages(self._grid))
        averages.put(number, COORDINATOR, self._values(message, body))
        now = self._now
        if now is None or not now.owners or now.averages is not averages:
            return []
        self.arrivals += 1
        return self._settle(now)

    def _number_of(self, message: GradientPayload | AveragedGradient) -> int:
        return self._grid.number(message.block, message.chunk)

    def _values(self, message: GradientPayload | AveragedGradient, body: Body) -> Array:
        is_sum = isinstance(message, GradientPayload)
        codec = self._exchange.precision if is_sum else self._exchange.averages
        return unpacked(body, codec, self._grid.elements(self._number_of(message)))

    def _keep_early(
        self, sender: str, message: GradientPayload | AveragedGradient, body: Body
    ) -> list[Action]:
        """It belongs to a step or a table of which the coordinator's word has not come."""
        if self._early_bytes + body.nbytes > limits.PEER_EARLY_BYTES:
            raise OutOfOrder(f"{sender!r} sends more than may wait for its step")
        self._early.append((sender, message, body))
        self._early_bytes += body.nbytes
        return []

    def _receive_early(self) -> list[Action]:
        """Process messages that arrived before this attempt."""
        early, self._early, self._early_bytes = self._early, [], 0
        actions: list[Action] = []
        for sender, message, body in early:
            actions += self.receive(sender, message, body)
        return actions

    def _sum(
        self, now: _Attempt, sender: str, message: GradientPayload, body: Body
    ) -> list[Action]:
        if (message.worker != "") != (sender == COORDINATOR):
            raise OutOfOrder(f"{sender!r} sends a sum as {message.worker!r}")
        if not is_subtree(message.subtree, now.microbatches):
            raise OutOfOrder(
                f"{message.subtree} is no subtree over {now.microbatches} microbatches"
            )
        number = self._number_of(message)
        if number not in now.reducer:
            return []  # it had another owner when this was sent
        contribution = (message.worker or sender, message.subtree, message.weight)
        return self._put(now, number, contribution, self._values(message, body))

    def _put(
        self, now: _Attempt, number: int, contribution: tuple[str, Subtree, float], values: Array
    ) -> list[Action]:
        """Add a sum: whose it is, of which subtree, with which weight."""
        worker, subtree, weight = contribution
        result = now.reducer.put(number, worker, subtree, weight, values)
        if isinstance(result, NonFinite):
            message = NonFiniteSum(
                **now.id, lo=result.subtree.lo, hi=result.subtree.hi, worker=result.worker,
                block=self._grid.chunk(number)[0], device="",
            )  # fmt: skip
            return [Transmit(message)]
        now.arrived.setdefault((worker, subtree), set()).add(number)
        announced = self._announce(now, (worker, subtree))
        if result is None:
            return announced
        return [*self._reduced(now, number, result.origin), *announced, *self._settle(now)]

    def _announce(self, now: _Attempt, only: tuple[str, Subtree] | None = None) -> list[Action]:
        """Tell the coordinator of which subtrees all that is this worker's is here."""
        if not now.owned:
            return []
        actions: list[Action] = []
        for worker, subtree in [only] if only is not None else list(now.arrived):
            there = now.arrived[worker, subtree]
            whole = len(there) >= len(now.owned) and now.owned <= there
            if whole and (worker, subtree) not in now.announced:
                now.announced.add((worker, subtree))
                message = SumsArrived(
                    **now.id, owners=self._number, worker=worker, lo=subtree.lo, hi=subtree.hi
                )
                actions.append(Transmit(message))
        return actions

    def _reduced(self, now: _Attempt, number: int, origin: Origin) -> list[Action]:
        """An average is made: all are to have it, and the coordinator its digest."""
        values = now.averages.part(number)
        now.averages.senders[number] = self.me
        digest = now.digests[number] = chunk_digest(values)
        message, body = self._average_message(now, number)
        block, chunk = self._grid.chunk(number)
        reduced = ChunkReduced(
            **now.id, owners=self._number, block=block, chunk=chunk, digest=digest
        )
        actions: list[Action] = [ToPeer(peer, message, body) for peer in self._other_members(now)]
        actions.append(Transmit(reduced, origin_document(origin)))
        if now.table.scribe in (None, self.me):
            actions.append(Transmit(message, body))
        return actions

    def _other_members(self, now: _Attempt) -> list[str]:
        """The other members, those after this one first: not all owners begin with the same."""
        members = now.table.members
        if self.me not in members:
            return []  # it was an owner when the sums came: the coordinator passes this on
        own_index = members.index(self.me)
        return [*members[own_index + 1 :], *members[:own_index]]

    def _average_for_the_coordinator(self, now: _Attempt, number: int) -> Transmit:
        return Transmit(*self._average_message(now, number))

    def _average_message(self, now: _Attempt, number: int) -> tuple[AveragedGradient, NDArray[Any]]:
        block, chunk = self._grid.chunk(number)
        is_block = self._blocks[block].kind == "block"
        kind = AveragedBlockGradient if is_block else AveragedNonBlockGradient
        message = kind(**now.id, owners=self._number, block=block, chunk=chunk)
        return message, packed(now.averages.part(number), self._exchange.averages)

    def _average(
        self, now: _Attempt, sender: str, message: AveragedGradient, body: Body
    ) -> list[Action]:
        number = self._number_of(message)
        if sender != now.table.owner(number) and (number, sender) not in now.former:
            raise OutOfOrder(
                f"{sender!r} sends the average of chunk {message.chunk} of block {message.block}, "
                "which another owns"
            )
        if number in now.averages.senders:
            return []
        values = self._values(message, body)
        now.averages.put(number, sender, values)
        now.digests[number] = chunk_digest(values)
        actions: list[Action] = []
        if now.table.scribe == self.me:
            actions = [self._average_for_the_coordinator(now, number)]
        return [*actions, *self._settle(now)]

    # The end of a step that workers average.

    def _settle(self, now: _Attempt) -> list[Action]:
        """All is here and the step is committed: take it, if it is what the coordinator has."""
        if not now.averages.complete:
            return []
        key = (now.id["step"], now.id["attempt"])
        if not now.committed:
            return [LastCame(*key)]
        wrong = [n for n in range(self._grid.count) if not self._is_expected(now, n)]
        return self._mismatch(now, wrong) if wrong else self._take(key, now.averages)

    def _is_expected(self, now: _Attempt, number: int) -> bool:
        assert now.expected is not None, "a commit follows the digests"
        if number not in now.digests:
            now.digests[number] = chunk_digest(now.averages.part(number))
        return now.digests[number] == now.expected[DIGEST_BYTES * number :][:DIGEST_BYTES]

    def _mismatch(self, now: _Attempt, wrong: list[int]) -> list[Action]:
        """Nothing of the step is applied here."""
        block, chunk = self._grid.chunk(wrong[0])
        message = AverageMismatch(
            **now.id, owners=self._number, block=block, chunk=chunk,
            owner=now.averages.senders[wrong[0]],
        )  # fmt: skip
        for number in wrong:
            del now.digests[number], now.averages.senders[number]
        return [Transmit(message), *self._ask(now)]

    def lost(self, peer: str) -> list[Action]:
        """There is no link to this worker any more."""
        del peer
        now = self._now
        return self._ask_if_lost(now) if now is not None and now.committed else []

    def _ask_if_lost(self, now: _Attempt) -> list[Action]:
        """A committed average whose owner has changed meanwhile may never come."""
        is_outside = not now.averages.complete and self.me not in now.table.members
        return self._ask(now) if is_outside or now.former else []

    def _ask(self, now: _Attempt) -> list[Action]:
        if now.is_requested or now.averages.complete:
            return []
        now.is_requested = True
        return [Transmit(AveragesRequest(**now.id))]
