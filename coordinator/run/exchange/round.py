"""One attempt at one step: payloads in, averaged blocks out.

Pure: no clock, socket, file or randomness. Arrival order cannot change a bit of what comes out:
each chunk of each block has its own sum along the tree, float addition is commutative, and the
tree fixes what is added to what. So nodes may come twice, from several workers, or as parts of
nodes that come later; what is covered already changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import add
from typing import Final

import numpy as np

from coordinator.run.exchange.double_check import Differing, DoubleCheck
from coordinator.run.exchange.sliced import SlicedSums, WrongAverage
from coordinator.run.exchange.summary import Summary, summary_of
from coordinator.run.outputs.actions import Broadcast, Send, Summarise
from coordinator.run.outputs.kept import Bytes, Kept
from protocol.base import limits
from protocol.base.errors import OutOfPlace
from protocol.exact.codecs import packed
from protocol.exact.digest import averages_digest
from protocol.exact.slice_merge import Infinite, Origin, SliceMerge
from protocol.exact.tree import Node, cover, is_node, root
from protocol.exact.tree_sum import TreeSum
from protocol.exact.update import Array, global_norm, is_finite
from protocol.exact.upload_order import UploadOrder
from protocol.spec.manifest import Block
from protocol.spec.replicas_spec import Codecs
from protocol.wire.messages import (
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    CapturedRows,
    GradientPayload,
    Message,
    NodeLoss,
    NonFiniteNode,
    SliceAverage,
    SliceDone,
    SliceSum,
    SumNotFinite,
    SumsArrived,
)
from protocol.wire.peers import OwnerTable

_FLOAT32: Final = Codecs()
_MOST_COUNTED_NODES: Final = 16_384
"""In a commit's record; there are more only where very many were given out twice."""


Allocate = Callable[[int], Array]


def new_array(elements: int) -> Array:
    """For averages, where nobody reads them in their place."""
    return np.empty(elements, np.float32)


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A payload, a loss (`block` is None) or a sum (`worker` is None) has NaN or infinity."""

    worker: str | None
    block: str | None
    node: Node
    stretches: bool = False
    device: str = ""
    """Of the worker's host, if that is several devices."""

    def __str__(self) -> str:
        if self.stretches:
            what = "loss" if self.block is None else f"difference in block {self.block!r}"
            whose = "" if self.worker is None else f", from worker {self.worker!r}"
            which = f"of replica {self.node.lo}" if self.node.leaves == 1 else "of all replicas"
            return f"non-finite {what} {which}{whose}"
        what = "loss" if self.block is None else f"gradient in block {self.block!r}"
        whose = (
            "when summed over workers, each of which sent finite ones"
            if self.worker is None
            else f"from worker {self.worker!r}"
            + (f", device {self.device!r}" if self.device else "")
        )
        return f"non-finite {what}, microbatches {self.node}, {whose}"


@dataclass(slots=True)
class Share:
    """What one worker was given in this round, and what of it is still to come from it.

    Attributes:
        nodes: All that it was given.
        owed: By node, a bit for each chunk of each block and one for the loss. A worker that
            sends a node's loss and withholds a chunk still owes the node: its lease goes on. With
            owners of slices there is a bit for each of them instead.
        dropped: Those that it need not compute or send any more.
        uploads: How many chunks of a node it may send, in the order in which they are.
        local: Whether it is on the coordinator's machine, and shares no link with anyone.
    """

    nodes: list[Node] = field(default_factory=list)
    owed: dict[Node, int] = field(default_factory=dict)
    dropped: set[Node] = field(default_factory=set)
    uploads: int = 0
    local: bool = False

    def pending(self, due: int) -> tuple[Node, ...]:
        """Nodes of which anything is still to come that is due by now, as bits of `owed`."""
        return tuple(node for node, bits in self.owed.items() if bits & due)

    def came(self, node: Node, bit: int) -> None:
        """A part of a node is there."""
        left = self.owed.get(node, 0) & ~(1 << bit)
        if left:
            self.owed[node] = left
        else:
            self.owed.pop(node, None)

    @property
    def microbatches(self) -> int:
        return sum(node.leaves for node in self.nodes)


class Round:
    """Collects one attempt at a step.

    Attributes:
        place: Epoch, step and attempt, as messages carry them.
        averages: One flat array per block; complete in the end.
        shares: Nodes by worker, for workers that have not left.
        begun: Whether nodes were given to anyone.
        double_check: Compares what comes twice.
        doubled: A node that is to be computed by two workers to the end, and these.
        tainted: Whether something in it may stem from weights that nobody has compared.
        inner: Where each worker is in a stretch: replica, and inner steps taken of it.
        stretches: Whether a leaf is a whole stretch of a replica: too much work to wait for others
            at a worker that may be lost.
        kept: What the microbatches give beside gradients; None where the run keeps nothing.
        sliced: What members average among themselves; None where they send all to the coordinator.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        microbatches: int,
        epoch: int,
        step: int,
        attempt: int,
        *,
        kept: Kept | None = None,
        exchange: Codecs = _FLOAT32,
        stretches: bool = False,
        owners: tuple[int, OwnerTable] | None = None,
        allocate: Allocate = new_array,
    ) -> None:
        self.microbatches = microbatches
        self._exchange = exchange
        self.stretches = stretches
        self.place = {"epoch": epoch, "step": step, "attempt": attempt}
        self.shares: dict[str, Share] = {}
        self.tainted = False
        self.kept = kept
        self.double_check = DoubleCheck()
        self.doubled: tuple[str, str, Node] | None = None
        self.averages = [allocate(block.elements) for block in blocks]
        self.inner: dict[str, tuple[int, int]] = {}
        self.begun = False
        self._order = UploadOrder(blocks)
        self._given_nodes = 0
        self._given_again = False
        self._due: dict[int, int] = {}
        self._summed = 0
        self._delivered: set[str] = set()
        self._blocks = blocks
        self._chunks = [
            [SliceMerge(microbatches, exchange) for _ in range(block.chunks)] for block in blocks
        ]
        self._open_chunks = [block.chunks for block in blocks]
        self._first_bit = [0, *itertools.accumulate(self._open_chunks)]
        self._unsummarised: list[int] = []
        self._summarising: set[int] = set()
        self._square_sums: dict[int, float] = {}
        self._digests: dict[int, str] = {}
        self._weights: TreeSum[float] = TreeSum(microbatches, add)
        self._losses: TreeSum[float] = TreeSum(microbatches, add)
        self._loss_origins: TreeSum[Origin] = TreeSum(microbatches, add)
        self._ways: set[Origin] = set()
        self.sliced: SlicedSums | None = None
        if owners is not None:
            self.sliced = SlicedSums(blocks, microbatches, *owners, self.averages)
            self._ways = self.sliced.ways
        self._loss_bit = self._first_bit[-1] if owners is None else len(owners[1].members)

    def plan(self, nodes: int) -> list[str]:
        """So many more nodes are about to be given to workers.

        Returns:
            Which of those that have nodes already may send more.
        """
        self._given_again = self._given_nodes > 0
        self._given_nodes += nodes
        return self._raise(self._order.chunks)

    def uploads(self, worker: str) -> int:
        """How many chunks of a node the worker may send."""
        return self.shares[worker].uploads

    def raise_uploads(self) -> list[str]:
        """More may be sent once a quarter of what may come at once is there.

        Returns:
            By whom.
        """
        if self.sliced is not None:
            return []  # sums wait at their owners, a part of all at each
        while self._summed < self._order.chunks and self._is_summed(self._summed):
            self._summed += 1
        return self._raise(4)

    def _raise(self, parts: int) -> list[str]:
        """Who may now send more, by one of so many parts of what may come of it at once."""
        raised = []
        within = self._within_memory()
        last = self._slowest(share for share in self.shares.values() if not share.local)
        for worker, share in self.shares.items():
            own = self._slowest([share])
            now = min(within, self._ahead(share, min(last, own)))
            more = now - share.uploads
            if more > 0 and more * parts >= now - own:
                share.uploads = now
                raised.append(worker)
        return sorted(raised)

    def _within_memory(self) -> int:
        """So many that the sums of all nodes, none merged, are within the limit from there on."""
        if self.stretches:
            return self._order.chunks
        limit_bytes = max(limits.PARTIAL_SUMS_BYTES, self._order.total_bytes // 2)
        return self._order.end(self._summed, limit_bytes // max(self._given_nodes, 1))

    def _ahead(self, share: Share, last: int) -> int:
        """How far ahead of the last one: flows that share a link do not get equal parts of it, and
        a sum waits for the last of them, with the other direction idle.

        Nobody waits for a node that another computes instead: then all may send what they have.
        """
        if share.local or self._given_again or self.stretches:
            return self._order.chunks
        most = last + limits.UPLOAD_AHEAD_CHUNKS
        return max(self._order.end(last, limits.UPLOAD_AHEAD_BYTES), min(most, self._order.chunks))

    def _slowest(self, shares: Iterable[Share]) -> int:
        """Of the nodes of which a part has come, the smallest part, in chunks; 0: there is none."""
        chunks, mask = self._order.chunks, (1 << self._first_bit[-1]) - 1
        owed = (bits & mask for share in shares for bits in share.owed.values())
        came = (chunks - bits.bit_count() for bits in owed)
        return min((count for count in came if 0 < count < chunks), default=0)

    def _is_summed(self, position: int) -> bool:
        block, chunk = self._order.chunk(position)
        return self._chunks[block][chunk].done

    def due(self, share: Share) -> int:
        """What a worker may have sent of a node, as bits of what it owes."""
        if self.sliced is not None or share.uploads >= self._order.chunks:
            return -1
        if share.uploads not in self._due:  # leases ask for it ten times a second, of each worker
            allowed = (self._order.chunk(position) for position in range(share.uploads))
            chunks = sum(1 << (self._first_bit[block] + chunk) for block, chunk in allowed)
            self._due[share.uploads] = chunks | 1 << self._first_bit[-1]
        return self._due[share.uploads]

    def pending(self, worker: str) -> tuple[Node, ...]:
        """The worker's nodes of which anything is to come that it may send."""
        share = self.shares.get(worker)
        return share.pending(self.due(share)) if share is not None else ()

    def assign(self, worker: str, nodes: tuple[Node, ...], *, local: bool = False) -> None:
        """These nodes are now the worker's to compute; see `Share.local`."""
        self.begun = True
        share = self.shares.setdefault(worker, Share(local=local))
        share.nodes.extend(nodes)
        loss = 1 << self._loss_bit
        everything = loss | (loss - 1 if self.sliced is None else self.sliced.owed_to)
        share.owed.update(dict.fromkeys(nodes, everything))
        share.dropped.difference_update(nodes)
        first = min(self._within_memory(), self._ahead(share, 0))
        share.uploads = max(share.uploads, first)

    def payload(
        self, worker: str, message: GradientPayload, values: Array
    ) -> Broadcast | NonFinite | Differing | None:
        """Take a chunk of a node's gradient sum; `values` belongs to the round from then on.

        Returns:
            The average to send to all, where this completes the chunk; or what is wrong.

        Raises:
            OutOfPlace: No such node, or not this worker's.
        """
        share = self._check_place(worker, message.node)
        if self.sliced is not None:
            raise OutOfPlace("a payload for the coordinator, in a step whose slices have owners")
        # Sent is sent, even if it is not needed: the worker's lease is about what it still owes.
        share.came(message.node, self._first_bit[message.block] + message.chunk)
        name = self._blocks[message.block].name
        part, what = (message.block, message.chunk), f"gradients in block {name!r}"
        # Before anything is added to the values, and also for what is dropped below as known.
        differing = self.double_check.answer(worker, message.node, part, values, what)
        if differing is not None:  # a value that is not finite says which of the two is wrong
            return differing if is_finite(values) else self._fault(worker, name, message.node)
        chunk = self._chunks[message.block][message.chunk]
        if chunk.covers(message.node):
            return None
        out = self.averages[message.block][self._blocks[message.block].chunk_slice(message.chunk)]
        found = chunk.put(worker, message.node, message.weight, values, out)
        if isinstance(found, Infinite):
            return self._fault(found.worker, name, found.node)
        self._delivered.add(worker)
        return self._averaged(message.block, message.chunk) if found else None

    def captured(self, worker: str, message: CapturedRows, content: Bytes) -> Differing | None:
        """Take a piece of what a microbatch gives to be kept.

        Raises:
            OutOfPlace: No such piece, its node is not this worker's, or nothing is kept.
        """
        self._check_place(worker, message.node)
        if self.kept is None:
            raise OutOfPlace("CapturedRows in a run that captures nothing")
        self.kept.put(message, content)
        self._delivered.add(worker)
        part = (0, message.microbatch, message.chunk)
        what = "states of its own" if self.stretches else "logits"
        return self.double_check.answer(worker, message.node, part, content, what)

    def stretch(self, worker: str, replica: int, inner: int) -> None:
        """The worker has taken so many inner steps of a replica.

        Raises:
            OutOfPlace: There is no such replica, or it is not this worker's.
        """
        self._check_place(worker, Node(replica, replica + 1))
        self.inner[worker] = (replica, inner)

    def boundary(self, worker: str, replica: int) -> None:
        """Others may go on from what the worker has sent: should its weights turn out to be
        others than the run's, nothing that has come counts.

        Raises:
            OutOfPlace: There is no such replica, or it is not this worker's.
        """
        self._check_place(worker, Node(replica, replica + 1))
        self._delivered.add(worker)

    # Slices that have owners among the workers.

    def slice_sum(self, worker: str, message: SliceSum, values: Array) -> list[Send]:
        """A worker without links to the owners sends a slice of a node's sum: pass it on.

        Raises:
            OutOfPlace: No such node, or not this worker's; or it is another's sum.
        """
        self._check_place(worker, message.node)
        sliced = self._sliced(message)
        if message.worker != worker:
            raise OutOfPlace(f"SliceSum: expected one of {worker!r}, got one of {message.worker!r}")
        if message.owners > sliced.number:
            raise OutOfPlace(f"SliceSum: expected table {sliced.number}, got {message.owners}")
        self._delivered.add(worker)
        passed = message.model_copy(update={"owners": sliced.number})
        body = packed(values, self._exchange.precision)
        return [Send(sliced.owner(message.slice), passed, body)]

    def sums_arrived(self, owner: str, message: SumsArrived) -> None:
        """All of a worker's node that goes to this owner is there.

        Raises:
            OutOfPlace: There are no owners, or no such node.
        """
        sliced = self._sliced(message)
        if not is_node(message.node, self.microbatches):
            raise OutOfPlace(f"SumsArrived: {message.node} is no node of this step")
        if sliced.arrived(owner, message):
            self._delivered.add(message.worker)
            share = self.shares.get(message.worker)
            if share is not None:
                share.came(message.node, sliced.bits[owner])

    def slice_done(
        self, owner: str, message: SliceDone, origin: Origin
    ) -> list[Broadcast] | WrongAverage:
        """An owner has averaged a slice, and this is its digest."""
        found = self._sliced(message).told(owner, message, origin)
        return found if isinstance(found, WrongAverage) else self._whole(found)

    def slice_average(
        self, sender: str, message: SliceAverage, values: Array
    ) -> list[Broadcast] | WrongAverage:
        """The values of a slice's average."""
        found = self._sliced(message).came(sender, message, values)
        return found if isinstance(found, WrongAverage) else self._whole(found)

    def _whole(self, blocks: list[int]) -> list[Broadcast]:
        """All slices of these blocks are there: they go to the log, and to who has no links."""
        return [self._averaged(b, c) for b in blocks for c in range(self._blocks[b].chunks)]

    def not_finite(self, owner: str, message: SumNotFinite) -> NonFinite:
        """An owner has found NaN or infinity."""
        sliced = self._sliced(message)
        if owner not in sliced.bits:
            raise OutOfPlace(f"SumNotFinite of {owner!r}, which owns nothing")
        return NonFinite(message.worker, sliced.block_of(message.slice), message.node)

    def reown(self, number: int, table: OwnerTable) -> None:
        """Slices have other owners from now on: workers owe those what they have sent to others."""
        assert self.sliced is not None
        gaining = self.sliced.reown(number, table)
        anew = sum(1 << self.sliced.bits[name] for name in gaining)
        owing = self.sliced.owed_to | 1 << self._loss_bit
        for share in self.shares.values():
            share.owed = {
                node: bits
                for node in dict.fromkeys([*share.owed, *share.nodes])
                if node not in share.dropped and (bits := share.owed.get(node, 0) & owing | anew)
            }

    def _sliced(self, message: Message) -> SlicedSums:
        if self.sliced is None:
            raise OutOfPlace(f"{type(message).__name__} in a step whose slices have no owners")
        return self.sliced

    def node_loss(self, worker: str, message: NodeLoss) -> NonFinite | Differing | bool:
        """Take a node's loss sum.

        Returns:
            Whether it was not there yet; or what is wrong.

        Raises:
            OutOfPlace: No such node, or not this worker's; or what is kept of it has not come.
        """
        share = self._check_place(worker, message.node)
        if self.kept is not None and not self.kept.has(message.node):
            raise OutOfPlace(f"the loss of node {message.node} came before all of its logits")
        share.came(message.node, self._loss_bit)
        if message.sums:
            sums = np.frombuffer(message.sums, np.uint8)
            check = self.double_check
            differing = check.answer(worker, message.node, (-1,), sums, "gradients")
            if differing is not None:
                return differing
        if self._losses.covers(message.node):
            return False
        if not math.isfinite(message.loss_sum):
            return self._fault(worker, None, message.node)
        self._weights.put(message.node, message.weight)
        self._losses.put(message.node, message.loss_sum)
        self._loss_origins.put(message.node, ((worker, message.node),))
        total = self._losses.total
        if total is not None and not math.isfinite(total):
            return self._fault(None, None, root(self.microbatches))
        return True

    def non_finite(self, worker: str, message: NonFiniteNode) -> NonFinite:
        """A host says which of its devices computed what is not finite.

        Raises:
            OutOfPlace: It is in no node of this worker's, or there is no such block.
        """
        share, node = self.shares.get(worker), message.node
        mine = () if share is None else share.nodes
        if not is_node(node, self.microbatches) or not any(own.covers(node) for own in mine):
            raise OutOfPlace(f"node {node} was not given to worker {worker!r} in this step")
        if message.block is None:
            return replace(self._fault(worker, None, node), device=message.device)
        if message.block >= len(self._blocks):
            raise OutOfPlace(f"NonFiniteNode: there is no block {message.block}")
        fault = self._fault(worker, self._blocks[message.block].name, node)
        return replace(fault, device=message.device)

    @property
    def complete(self) -> bool:
        """Whether every block is averaged and summarised, every loss is there, and what is doubled
        is compared."""
        there = not any(self._open_chunks) and self._losses.total is not None
        return there and not self._summarising and not self._awaits_double()

    @property
    def loss(self) -> float:
        """Mean loss over the step; the round is complete."""
        total, weight = self._losses.total, self._weights.total
        assert total is not None
        assert weight is not None
        return total / weight if weight else 0.0

    @property
    def gradient_norm(self) -> float:
        """Euclidean norm of all averages; the round is complete."""
        assert self.complete
        self._summarise()
        return global_norm(self._square_sums[block] for block in range(len(self._blocks)))

    def averages_digest(self) -> str:
        """BLAKE3 over the hex digests of the blocks, in block order; the round is complete."""
        assert self.complete
        self._summarise()
        return averages_digest(self._digests[block] for block in range(len(self._blocks)))

    @property
    def counted(self) -> tuple[dict[str, tuple[Node, ...]], ...] | None:
        """Whose nodes make up the sums, as a commit's record tells it; the round is complete."""
        ways = sorted({*self._ways, self._loss_origins.total or ()})
        if sum(map(len, ways)) > _MOST_COUNTED_NODES:
            return None
        return tuple(
            {worker: tuple(node for by, node in way if by == worker) for worker in dict(way)}
            for way in ways
        )

    def unfinished(self, worker: str) -> tuple[Node, ...]:
        """The worker's microbatches of which anything is missing, as nodes."""
        share = self.shares.get(worker)
        if share is None:
            return ()
        missing = {leaf for node in share.owed for leaf in self._missing(node)}
        return cover(sorted(missing), self.microbatches)

    def computing(self) -> list[str]:
        """Workers that have not told the loss of a node that they owe: they compute it."""
        loss = 1 << self._loss_bit
        return [n for n, share in self.shares.items() if any(b & loss for b in share.owed.values())]

    def unassigned(self, ignoring: Collection[str] = ()) -> tuple[Node, ...]:
        """Missing microbatches that no worker owes, or only workers that are to be ignored."""
        taken = {
            leaf
            for worker, share in self.shares.items()
            if worker not in ignoring
            for node in share.owed
            for leaf in range(node.lo, node.hi)
        }
        everything = root(self.microbatches)
        missing = {leaf for leaf in self._missing(everything) if leaf not in taken}
        return cover(sorted(missing), self.microbatches)

    def lose(self, worker: str, *, proven: bool) -> None:
        """The worker has left; what it delivered is kept.

        Args:
            worker: Its name.
            proven: Whether its weights are known to be the run's.
        """
        # Were its weights others than the run's, so may be what it delivered, and a sum cannot be
        # taken apart again: then the step starts anew. What went to others, it may have sent.
        sent = worker in self._delivered or (self.sliced is not None and worker in self.shares)
        self.shares.pop(worker, None)
        self.tainted = self.tainted or (not proven and sent)

    def disown(self, worker: str, *, proven: bool) -> None:
        """The worker is late: what it owes is unassigned again, but may still come."""
        share = self.shares.get(worker)
        if share is not None:
            share.owed.clear()
            share.dropped.update(share.nodes)
        self.tainted = self.tainted or (not proven and worker in self._delivered)

    def surplus(self) -> dict[str, tuple[Node, ...]]:
        """Pending nodes that are there already, since others have computed them too.

        They are not pending any more after that.
        """
        surplus: dict[str, tuple[Node, ...]] = {}
        # The sums have a doubled node after its first answer; the second is wanted to compare.
        kept = self.doubled[-1] if self.doubled and self._awaits_double() else None
        for worker, share in self.shares.items():
            there = tuple(n for n in share.owed if n != kept and not self._missing(n))
            if there:
                surplus[worker] = there
                for node in there:
                    del share.owed[node]
                share.dropped.update(there)
        return surplus

    def forgo_double(self, late: Collection[str]) -> bool:
        """Nobody waits for these, neither for an answer to compare; whether one is given up."""
        given_up = self.doubled is not None and any(worker in late for worker in self.doubled[:2])
        if given_up:
            self.doubled = None
        return given_up

    def _awaits_double(self) -> bool:
        """Whether two workers are still to give their answers to the node that both compute."""
        if self.doubled is None:
            return False
        *workers, node = self.doubled
        shares = [self.shares[worker] for worker in workers if worker in self.shares]
        return len(shares) == len(workers) and any(node in share.owed for share in shares)

    def _missing(self, node: Node) -> set[int]:
        """Microbatches of which anything is in no sum yet: a node is given out whole."""
        missing = set(self._losses.missing(node))
        if self.sliced is not None:
            return missing | self.sliced.missing(node)
        # Block 0 first: its sums come last, and mostly say enough for a thousand others.
        for chunk in itertools.chain.from_iterable(self._chunks):
            if len(missing) == node.leaves:
                break
            if not chunk.covers(node):
                missing.update(chunk.missing(node))
        return missing

    def _summarise(self) -> None:
        """Norm and digest of the blocks that are complete, a few at most.

        Left to the end of the round, so that averages go out to all before it.
        """
        for number in self._unsummarised:
            found = summary_of(self._blocks[number], self.averages[number])
            self._square_sums[number], self._digests[number] = found
        self._unsummarised.clear()

    @property
    def summarises(self) -> bool:
        """Whether that is what it waits for, maybe beside others."""
        return bool(self._summarising)

    def summarise(self) -> list[Summarise]:
        """What takes long is for another thread, many blocks at once: `summarised` follows."""
        elements = sum(self._blocks[number].elements for number in self._unsummarised)
        if elements * 4 <= limits.SUMMARISED_AT_ONCE_BYTES:
            return []
        numbers, self._unsummarised = self._unsummarised, []
        self._summarising.update(numbers)
        averages = {number: (self._blocks[number], self.averages[number]) for number in numbers}
        return [Summarise(self.place["step"], self.place["attempt"], averages)]

    def summarised(self, summaries: Mapping[int, Summary]) -> None:
        """Norms and digests of some blocks are there."""
        for number, found in summaries.items():
            self._summarising.discard(number)
            self._square_sums[number], self._digests[number] = found

    def _check_place(self, worker: str, node: Node) -> Share:
        if not is_node(node, self.microbatches):
            raise OutOfPlace(f"{node} is no node of a tree over {self.microbatches} microbatches")
        share = self.shares.get(worker)
        if share is None or node not in share.nodes:
            raise OutOfPlace(f"node {node} was not given to worker {worker!r} in this step")
        return share

    def _fault(self, worker: str | None, block: str | None, node: Node) -> NonFinite:
        return NonFinite(worker, block, node, self.stretches)

    def _averaged(self, block: int, number: int) -> Broadcast:
        if self.sliced is None:
            self._ways.add(self._chunks[block][number].origin)
        self._open_chunks[block] -= 1
        if not self._open_chunks[block]:
            self._unsummarised.append(block)
        is_block = self._blocks[block].kind == "block"
        kind = AveragedBlockGradient if is_block else AveragedNonBlockGradient
        values = self.averages[block][self._blocks[block].chunk_slice(number)]
        had_by = frozenset(self.sliced.table.members) if self.sliced is not None else frozenset()
        return Broadcast(kind(**self.place, block=block, chunk=number), values, had_by)
