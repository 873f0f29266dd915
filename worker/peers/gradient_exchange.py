"""A worker's side of the exchange: sums go to the owners of their chunks, averages come back.

Pure: no clock, socket, file, thread or randomness. Each event is a method that returns actions, to
be executed in order. A table lists the owner of each chunk, which averages it: in a star the
coordinator owns all chunks, otherwise workers do. An owner merges sums along the tree, scales them,
and sends the average to everyone. Sums for other workers are kept until the step ends: if an owner
is lost, its chunks get new owners, which receive the sums again. Late and duplicate messages are
ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.exact.reduction.average import Array
from protocol.exact.reduction.chunk_grid import DIGEST_BYTES, ChunkGrid, chunk_digest
from protocol.exact.reduction.codecs import pack, unpack
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
    """Send a message to another worker; averages overtake queued sums."""

    peer: str
    message: Message
    body: NDArray[Any]


@dataclass(frozen=True, slots=True)
class LastAverage:
    """Report that all averages of a sharded step have arrived before its commit."""

    step: int
    attempt: int


Action = ToPeer | Transmit | AveragesReady | LastAverage


class Averages:
    """The averages of one attempt that have arrived so far.

    Attributes:
        arrays: By block, flat float32; empty until the block's first chunk arrives.
        senders: By chunk number, the sender of its average.

    Args:
        grid: The run's chunks.
    """

    def __init__(self, grid: ChunkGrid) -> None:
        self._grid = grid
        self.arrays: list[Array] = [np.empty(0, np.float32)] * len(grid.blocks)
        self.senders: dict[int, str] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.senders) == self._grid.count

    def part(self, number: int) -> Array:
        """Return a writable view of a chunk's average."""
        index, chunk = self._grid.chunk(number)
        block = self._grid.blocks[index]
        if not len(self.arrays[index]):
            self.arrays[index] = np.empty(block.elements, np.float32)
        return self.arrays[index][block.chunk_slice(chunk)]

    def put(self, number: int, sender: str, values: Array) -> None:
        """Store an average; ignore a duplicate."""
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
    """One attempt at a step of which this worker computes a part.

    Attributes:
        id: Term, step and attempt, as fields of messages.
        owners: Number of the plan's table; 0 if the coordinator averages all chunks.
        table: The current table of owners.
        microbatches: Number of microbatches of the step.
        averages: The averages that have arrived.
        credit: How many chunks of each subtree may be sent to the coordinator so far.
        delayed_payloads: Payloads for the coordinator above the credit, with chunk and subtree.
        reducer: Adds the sums of the chunks that this worker owns.
        owned_chunks: Numbers of the chunks that this worker owns.
        sums: By subtree and block, weight and values that this worker computed, to send again.
        arrived_chunks: By worker and subtree, the owned chunks whose sum has arrived.
        reported_sums: Worker and subtree of sums that were reported to the coordinator.
        former_owners: Chunk and owner in earlier tables of this attempt.
        digests: By chunk, the digest of the average that has arrived.
        committed_digests: The digests of all averages that the coordinator committed.
        is_requested: Whether missing averages were requested from the coordinator.
    """

    id: dict[str, int]
    owners: int
    table: OwnerTable
    microbatches: int
    averages: Averages
    credit: int
    reducer: Reducer[int]
    owned_chunks: set[int] = field(default_factory=set)
    delayed_payloads: list[tuple[int, Subtree, Transmit]] = field(default_factory=list)
    sums: dict[tuple[Subtree, int], tuple[float, Array]] = field(default_factory=dict)
    arrived_chunks: dict[tuple[str, Subtree], set[int]] = field(default_factory=dict)
    reported_sums: set[tuple[str, Subtree]] = field(default_factory=set)
    former_owners: set[tuple[int, str]] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    committed_digests: bytes | None = None
    is_committed: bool = False
    is_requested: bool = False

    def is_of_attempt(self, message: Cancel | Credit | Commit | AverageDigests) -> bool:
        """Return whether a message belongs to this attempt."""
        return (message.step, message.attempt) == (self.id["step"], self.id["attempt"])


class GradientExchange:
    """This worker's side of the exchange during one run.

    Attributes:
        arrivals: Number of sums and averages received; it grows while the exchange makes progress.

    Args:
        me: This worker's name.
        blocks: The manifest's blocks.
        exchange: Codecs of sums and averages.
    """

    def __init__(self, me: str, blocks: tuple[Block, ...], exchange: Codecs) -> None:
        self.me = me
        self.arrivals = 0
        self._grid = ChunkGrid(blocks)
        self._blocks = blocks
        self._exchange = exchange
        self._star_table = OwnerTable.star(self._grid.count)
        self._table_number, self._table = 0, self._star_table
        self._attempt: _Attempt | None = None
        self._averages: dict[tuple[int, int], Averages] = {}
        self._newest_id = (-1, -1, -1)
        self._deferred_messages: list[tuple[str, GradientPayload | AveragedGradient, Body]] = []
        self._deferred_bytes = 0

    # Messages of the coordinator.

    def receive_from_coordinator(self, message: Message, body: Body | None) -> list[Action]:
        """Handle a message of the coordinator.

        Raises:
            RemoteProtocolError: The message does not fit.
        """
        match message:
            case StepPlan():
                return self.begin(message)
            case Credit():
                return self.extend_credit(message)
            case Cancel():
                return self.cancel(message)
            case Commit():
                return self.commit(message)
        assert body is not None
        match message:
            case Owners():
                return self.set_owners(message.number, parse(OwnerTable, body.tobytes()))
            case AverageDigests():
                return self.set_digests(message, body)
            case _:
                assert isinstance(message, GradientPayload | AveragedGradient)
                return self.receive(COORDINATOR, message, body)

    def set_owners(self, number: int, table: OwnerTable) -> list[Action]:
        """Use a new table of owners, also for the current attempt if workers average it.

        Raises:
            OutOfOrder: The table has the wrong number of chunks.
        """
        if len(table.owners) != self._grid.count:
            raise OutOfOrder(f"Owners: expected {self._grid.count} chunks, got {len(table.owners)}")
        self._table_number, self._table = number, table
        attempt = self._attempt
        if attempt is None or not attempt.owners:
            return self._receive_deferred()
        previous_table, attempt.table = attempt.table, table
        attempt.reported_sums.clear()
        attempt.former_owners.update((n, previous_table.owner(n)) for n in range(self._grid.count))
        self._update_owned_chunks(attempt)
        # A member sends sums to peers directly; the coordinator forwards those of other workers.
        has_new_route = (self.me in previous_table.members) != (self.me in table.members)
        actions: list[Action] = []
        for (subtree, block), (weight, values) in attempt.sums.items():
            for chunk in self._grid.of_block(block):
                if has_new_route or previous_table.owner(chunk) != table.owner(chunk):
                    actions += self._deliver(attempt, chunk, subtree, weight, values)
        return [
            *actions,
            *self._report_sums(attempt),
            *self._resend_averages(attempt, previous_table),
            *self._receive_deferred(),
        ]

    def _resend_averages(self, attempt: _Attempt, previous_table: OwnerTable) -> list[Action]:
        """Send averages to the coordinator if this worker must send them under the new table."""
        scribe = attempt.table.scribe
        if previous_table.scribe == scribe or scribe not in (None, self.me):
            return []
        numbers = [n for n in attempt.averages.senders if scribe == self.me or n in attempt.reducer]
        return [self._average_for_coordinator(attempt, number) for number in numbers]

    def begin(self, plan: StepPlan) -> list[Action]:
        """Begin a new attempt at a step, and drop the previous attempt.

        Raises:
            OutOfOrder: The plan refers to a table that has not arrived.
        """
        if plan.owners not in (0, self._table_number):
            raise OutOfOrder(f"StepPlan: expected table {self._table_number}, got {plan.owners}")
        key = (plan.step, plan.attempt)
        self._averages = {other: value for other, value in self._averages.items() if other >= key}
        averages = self._averages.setdefault(key, Averages(self._grid))
        reducer = Reducer[int](plan.microbatches, self._exchange, (), averages.part)
        self._attempt = attempt = _Attempt(
            {"term": plan.term, "step": plan.step, "attempt": plan.attempt}, plan.owners,
            self._table if plan.owners else self._star_table, plan.microbatches, averages,
            plan.uploads, reducer,
        )  # fmt: skip
        self._newest_id = (plan.term, *key)
        self._update_owned_chunks(attempt)
        return self._receive_deferred()

    def _update_owned_chunks(self, attempt: _Attempt) -> None:
        """Reduce the chunks that this worker owns now; drop partial sums of all others."""
        attempt.owned_chunks = attempt.table.chunks_of(self.me)
        dropped_chunks = attempt.reducer.set_pieces(attempt.owned_chunks)
        # A later table may return these chunks, whose sums must then arrive again.
        for numbers in attempt.arrived_chunks.values():
            numbers.difference_update(dropped_chunks)

    def drop(self) -> None:
        """Drop the current attempt; the worker loads a state from the coordinator instead."""
        self._attempt = None

    def extend_credit(self, credit: Credit) -> list[Action]:
        """Send delayed payloads that the coordinator accepts now."""
        attempt = self._attempt
        if attempt is None or not attempt.is_of_attempt(credit):
            return []
        attempt.credit = max(credit.uploads, attempt.credit)
        payloads = [
            action for number, _, action in attempt.delayed_payloads if number < attempt.credit
        ]
        attempt.delayed_payloads = [
            entry for entry in attempt.delayed_payloads if entry[0] >= attempt.credit
        ]
        return [*payloads]

    def cancel(self, message: Cancel) -> list[Action]:
        """Drop delayed payloads of subtrees that other workers have computed."""
        attempt = self._attempt
        if attempt is not None and attempt.is_of_attempt(message):
            subtrees = {Subtree(lo, hi) for lo, hi in message.subtrees}
            attempt.delayed_payloads = [
                entry for entry in attempt.delayed_payloads if entry[1] not in subtrees
            ]
        return []

    def set_digests(self, message: AverageDigests, digests: Body) -> list[Action]:
        """Record the digests of a durable step's averages; the commit follows.

        Raises:
            OutOfOrder: The number of digests is not the number of chunks.
        """
        if len(digests) != (expected_bytes := DIGEST_BYTES * self._grid.count):
            raise OutOfOrder(f"AverageDigests: expected {expected_bytes} bytes, got {len(digests)}")
        if self._attempt is not None and self._attempt.is_of_attempt(message):
            self._attempt.committed_digests = digests.tobytes()
        return []

    def commit(self, message: Commit) -> list[Action]:
        """Take a durable step once all of its averages have arrived.

        Raises:
            OutOfOrder: Averages or digests that the coordinator sends before a commit are missing.
        """
        attempt, key = self._attempt, (message.step, message.attempt)
        if message.scalars is None:  # the step is skipped
            self._drop_steps_until(message.step)
            return []
        if attempt is None or not attempt.is_of_attempt(message):
            return self._take_averages(key, self._averages.get(key))
        attempt.is_committed = True
        attempt.delayed_payloads.clear()
        if not attempt.owners:
            return self._take_averages(key, attempt.averages)
        if attempt.committed_digests is None:
            raise OutOfOrder(
                f"Commit of step {message.step}: expected its averages' digests first, got none"
            )
        return self._settle(attempt) or self._request_if_lost(attempt)

    def _take_averages(self, key: tuple[int, int], averages: Averages | None) -> list[Action]:
        if averages is None or not averages.is_complete:
            raise OutOfOrder(f"Commit of step {key[0]}: expected all of its averages first")
        self._drop_steps_until(key[0])
        return [AveragesReady(StepId(*key), averages.arrays)]

    def _drop_steps_until(self, step: int) -> None:
        """Drop all state of this step and earlier ones."""
        self._attempt = None
        self._averages = {at: averages for at, averages in self._averages.items() if at[0] > step}

    def request_overdue(self) -> list[Action]:
        """Request the missing averages of a committed step after a long time without arrivals."""
        attempt = self._attempt
        if attempt is None or not attempt.is_committed:
            return []
        return self._request_averages(attempt)

    # Sums and averages.

    def contribute(
        self, subtree: Subtree, block: int, weight: float, values: Array
    ) -> list[Action]:
        """Send each chunk of a block's sum over a subtree to its owner.

        `values` must not change until the step ends: a new owner may need them.
        """
        attempt = self._attempt
        if attempt is None or attempt.is_committed:
            return []
        if attempt.owners:
            attempt.sums[subtree, block] = (weight, values)
        actions: list[Action] = []
        for number in self._grid.of_block(block):
            actions += self._deliver(attempt, number, subtree, weight, values)
        return actions

    def _deliver(
        self, attempt: _Attempt, number: int, subtree: Subtree, weight: float, values: Array
    ) -> list[Action]:
        index, chunk = self._grid.chunk(number)
        block, owner = self._blocks[index], attempt.table.owner(number)
        part = values[block.chunk_slice(chunk)]
        if owner == self.me:
            return self._add_sum(attempt, number, (self.me, subtree, weight), part.copy())
        message_class = BlockGradientPayload if block.kind == "block" else NonBlockGradientPayload
        message = message_class(
            **attempt.id, owners=self._table_number if attempt.owners else 0, block=index,
            chunk=chunk, lo=subtree.lo, hi=subtree.hi, weight=weight,
        )  # fmt: skip
        body = pack(part, self._exchange.precision)
        if owner != COORDINATOR and self.me in attempt.table.members:
            return [ToPeer(owner, message, body)]
        action = Transmit(message, body)
        if owner == COORDINATOR and number >= attempt.credit:
            attempt.delayed_payloads.append((number, subtree, action))
            return []
        return [action]

    def receive(
        self, sender: str, message: GradientPayload | AveragedGradient, body: Body
    ) -> list[Action]:
        """Handle a sum or an average, from another worker or from the coordinator.

        Raises:
            OutOfOrder: The sender may not send this message.
        """
        if sender == COORDINATOR and isinstance(message, AveragedGradient):
            return self._average_from_coordinator(message, body)
        attempt = self._attempt
        message_id = (message.term, message.step, message.attempt)
        if message_id > self._newest_id or message.owners > self._table_number:
            return self._defer(sender, message, body)
        if attempt is None or message_id < self._newest_id:
            return []
        self.arrivals += 1
        if isinstance(message, GradientPayload):
            return self._receive_sum(attempt, sender, message, body)
        return self._receive_average(attempt, sender, message, body)

    def _average_from_coordinator(self, message: AveragedGradient, body: Body) -> list[Action]:
        """Handle an average from the coordinator, even if this worker computes no part of the step.

        Averages are stored by attempt: those of an abandoned attempt do not count for the next.
        """
        key, number = (message.step, message.attempt), self._number_of(message)
        averages = self._averages.setdefault(key, Averages(self._grid))
        averages.put(number, COORDINATOR, self._values(message, body))
        attempt = self._attempt
        if attempt is None or not attempt.owners or attempt.averages is not averages:
            return []
        self.arrivals += 1
        return self._settle(attempt)

    def _number_of(self, message: GradientPayload | AveragedGradient) -> int:
        return self._grid.number(message.block, message.chunk)

    def _values(self, message: GradientPayload | AveragedGradient, body: Body) -> Array:
        is_sum = isinstance(message, GradientPayload)
        codec = self._exchange.precision if is_sum else self._exchange.averages
        return unpack(body, codec, self._grid.elements(self._number_of(message)))

    def _defer(
        self, sender: str, message: GradientPayload | AveragedGradient, body: Body
    ) -> list[Action]:
        """Keep a message of an attempt or table that the coordinator has not announced yet."""
        if self._deferred_bytes + body.nbytes > limits.PEER_EARLY_BYTES:
            raise OutOfOrder(
                f"{sender!r}: expected at most {limits.PEER_EARLY_BYTES} bytes before their step, "
                "got more"
            )
        self._deferred_messages.append((sender, message, body))
        self._deferred_bytes += body.nbytes
        return []

    def _receive_deferred(self) -> list[Action]:
        """Handle messages that arrived before this attempt or table."""
        deferred, self._deferred_messages, self._deferred_bytes = self._deferred_messages, [], 0
        actions: list[Action] = []
        for sender, message, body in deferred:
            actions += self.receive(sender, message, body)
        return actions

    def _receive_sum(
        self, attempt: _Attempt, sender: str, message: GradientPayload, body: Body
    ) -> list[Action]:
        if (message.worker != "") != (sender == COORDINATOR):
            raise OutOfOrder(f"expected a sum of {sender!r}, got one of {message.worker!r}")
        if not is_subtree(message.subtree, attempt.microbatches):
            raise OutOfOrder(
                f"{message.subtree} is no subtree over {attempt.microbatches} microbatches"
            )
        number = self._number_of(message)
        if number not in attempt.reducer:
            return []  # this worker owned the chunk when the sum was sent
        contribution = (message.worker or sender, message.subtree, message.weight)
        return self._add_sum(attempt, number, contribution, self._values(message, body))

    def _add_sum(
        self,
        attempt: _Attempt,
        number: int,
        contribution: tuple[str, Subtree, float],
        values: Array,
    ) -> list[Action]:
        """Add a sum; `contribution` is its worker, subtree and weight."""
        worker, subtree, weight = contribution
        result = attempt.reducer.put(number, worker, subtree, weight, values)
        if isinstance(result, NonFinite):
            message = NonFiniteSum(
                **attempt.id, lo=result.subtree.lo, hi=result.subtree.hi, worker=result.worker,
                block=self._grid.chunk(number)[0], device="",
            )  # fmt: skip
            return [Transmit(message)]
        attempt.arrived_chunks.setdefault((worker, subtree), set()).add(number)
        reports = self._report_sums(attempt, (worker, subtree))
        if result is None:
            return reports
        return [
            *self._send_average(attempt, number, result.origin),
            *reports,
            *self._settle(attempt),
        ]

    def _report_sums(
        self, attempt: _Attempt, key: tuple[str, Subtree] | None = None
    ) -> list[Action]:
        """Report to the coordinator the subtrees whose sums of all owned chunks have arrived."""
        if not attempt.owned_chunks:
            return []
        actions: list[Action] = []
        for worker, subtree in [key] if key is not None else list(attempt.arrived_chunks):
            numbers = attempt.arrived_chunks[worker, subtree]
            is_complete = (
                len(numbers) >= len(attempt.owned_chunks) and attempt.owned_chunks <= numbers
            )
            if is_complete and (worker, subtree) not in attempt.reported_sums:
                attempt.reported_sums.add((worker, subtree))
                message = SumsArrived(
                    **attempt.id,
                    owners=self._table_number,
                    worker=worker,
                    lo=subtree.lo,
                    hi=subtree.hi,
                )
                actions.append(Transmit(message))
        return actions

    def _send_average(self, attempt: _Attempt, number: int, origin: Origin) -> list[Action]:
        """Send a new average to all members, and its digest to the coordinator."""
        values = attempt.averages.part(number)
        attempt.averages.senders[number] = self.me
        digest = attempt.digests[number] = chunk_digest(values)
        message, body = self._average_message(attempt, number)
        block, chunk = self._grid.chunk(number)
        report = ChunkReduced(
            **attempt.id, owners=self._table_number, block=block, chunk=chunk, digest=digest
        )
        actions: list[Action] = [
            ToPeer(peer, message, body) for peer in self._other_members(attempt)
        ]
        actions.append(Transmit(report, origin_document(origin)))
        if attempt.table.scribe in (None, self.me):
            actions.append(Transmit(message, body))
        return actions

    def _other_members(self, attempt: _Attempt) -> list[str]:
        """Return the other members, in a different order at each owner to spread the load."""
        members = attempt.table.members
        if self.me not in members:
            return []  # the current table has other members: the coordinator forwards the average
        own_index = members.index(self.me)
        return [*members[own_index + 1 :], *members[:own_index]]

    def _average_for_coordinator(self, attempt: _Attempt, number: int) -> Transmit:
        return Transmit(*self._average_message(attempt, number))

    def _average_message(
        self, attempt: _Attempt, number: int
    ) -> tuple[AveragedGradient, NDArray[Any]]:
        block, chunk = self._grid.chunk(number)
        is_block = self._blocks[block].kind == "block"
        message_class = AveragedBlockGradient if is_block else AveragedNonBlockGradient
        message = message_class(**attempt.id, owners=self._table_number, block=block, chunk=chunk)
        return message, pack(attempt.averages.part(number), self._exchange.averages)

    def _receive_average(
        self, attempt: _Attempt, sender: str, message: AveragedGradient, body: Body
    ) -> list[Action]:
        number = self._number_of(message)
        if sender != attempt.table.owner(number) and (number, sender) not in attempt.former_owners:
            raise OutOfOrder(
                f"expected the average of chunk {message.chunk} of block {message.block} from its "
                f"owner, got it from {sender!r}"
            )
        if number in attempt.averages.senders:
            return []
        values = self._values(message, body)
        attempt.averages.put(number, sender, values)
        attempt.digests[number] = chunk_digest(values)
        actions: list[Action] = []
        if attempt.table.scribe == self.me:
            actions = [self._average_for_coordinator(attempt, number)]
        return [*actions, *self._settle(attempt)]

    # The end of a step that workers average.

    def _settle(self, attempt: _Attempt) -> list[Action]:
        """Handle the arrival of the last average of an attempt.

        Before the commit, report it. After the commit, take the step, or reject the averages with
        a digest that is not the committed one.
        """
        if not attempt.averages.is_complete:
            return []
        key = (attempt.id["step"], attempt.id["attempt"])
        if not attempt.is_committed:
            return [LastAverage(*key)]
        mismatches = [
            n for n in range(self._grid.count) if not self._has_committed_digest(attempt, n)
        ]
        return (
            self._reject_averages(attempt, mismatches)
            if mismatches
            else self._take_averages(key, attempt.averages)
        )

    def _has_committed_digest(self, attempt: _Attempt, number: int) -> bool:
        assert attempt.committed_digests is not None, "a commit follows the digests"
        if number not in attempt.digests:
            attempt.digests[number] = chunk_digest(attempt.averages.part(number))
        return (
            attempt.digests[number]
            == attempt.committed_digests[DIGEST_BYTES * number :][:DIGEST_BYTES]
        )

    def _reject_averages(self, attempt: _Attempt, numbers: list[int]) -> list[Action]:
        """Report averages with wrong digests and request them; the step is not applied yet."""
        block, chunk = self._grid.chunk(numbers[0])
        message = AverageMismatch(
            **attempt.id, owners=self._table_number, block=block, chunk=chunk,
            owner=attempt.averages.senders[numbers[0]],
        )  # fmt: skip
        for number in numbers:
            del attempt.digests[number], attempt.averages.senders[number]
        return [Transmit(message), *self._request_averages(attempt)]

    def link_lost(self, peer: str) -> list[Action]:
        """Handle the loss of the link to a peer."""
        del peer
        attempt = self._attempt
        return (
            self._request_if_lost(attempt) if attempt is not None and attempt.is_committed else []
        )

    def _request_if_lost(self, attempt: _Attempt) -> list[Action]:
        """Request averages that may never arrive, because owners or members have changed."""
        is_excluded = self.me not in attempt.table.members
        return self._request_averages(attempt) if is_excluded or attempt.former_owners else []

    def _request_averages(self, attempt: _Attempt) -> list[Action]:
        if attempt.is_requested or attempt.averages.is_complete:
            return []
        attempt.is_requested = True
        return [Transmit(AveragesRequest(**attempt.id))]
