"""One attempt at one step: payloads in, averaged blocks out.

Pure: no clock, socket, file or randomness. Arrival order cannot change a bit of the averages:
each chunk of each block has its own sum along the tree, float addition is commutative, and the
tree fixes both operands of each addition. So a subtree may arrive twice, from several workers, or
as part of a larger subtree that arrives later; a sum that already covers the subtree stays as is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Final, NamedTuple

import numpy as np

from coordinator.run.exchange.double_check import DoubleCheck, ResultMismatch
from coordinator.run.exchange.embeddings import JoinedEmbeddings
from coordinator.run.exchange.peer_sums import PeerSums, WrongAverage
from coordinator.run.outputs.actions import Broadcast, Send, Summarize
from coordinator.run.outputs.side_outputs import Bytes, SideOutputs
from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.exact.digest import averages_digest, block_digest
from protocol.exact.embedding_rows import are_finite
from protocol.exact.parameter_groups import ClippedGroups
from protocol.exact.reduction.average import Array, is_finite, square_sum
from protocol.exact.reduction.chunk_grid import ChunkGrid
from protocol.exact.reduction.codecs import pack
from protocol.exact.reduction.reducer import NonFinite, Origin, Reducer
from protocol.exact.reduction.tree import Subtree, cover, is_subtree, root
from protocol.exact.reduction.tree_sum import TreeSum
from protocol.exact.update import GradientNorms
from protocol.spec.manifest import Block, EmbeddingLayout
from protocol.spec.sections.exchange import Codecs
from protocol.spec.sections.optimizer import OptimizerSpec
from protocol.wire.messages import (
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    CapturedRows,
    ChunkReduced,
    GradientPayload,
    SubtreeLoss,
    SumsArrived,
)
from protocol.wire.peers import COORDINATOR, OwnerTable

_FLOAT32: Final = Codecs()
_MOST_COUNTED_SUBTREES: Final = 16_384
"""Limit for a commit record; exceeded only if very many subtrees were assigned twice."""


Allocate = Callable[[int], Array]
"""Returns a flat float32 array of the given number of elements."""


def new_array(elements: int) -> Array:
    """Allocate an average that no worker reads from shared memory."""
    return np.empty(elements, np.float32)


class Summary(NamedTuple):
    """Norm and digest of a block's averaged gradients, for the commit.

    Attributes:
        square_sum: `protocol.exact.reduction.average.square_sum` of the gradients.
        digest: `protocol.exact.digest.block_digest` of the gradients.
        group_square_sums: `ClippedGroups.square_sums` of the gradients.
    """

    square_sum: float
    digest: str
    group_square_sums: tuple[float, ...] = ()


_NO_GROUPS: Final = ClippedGroups(OptimizerSpec(name="sgd"))


def summarize_block(block: Block, average: Array, clipped: ClippedGroups = _NO_GROUPS) -> Summary:
    """Compute the summary of a block: about one second per gigabyte."""
    group_square_sums = clipped.square_sums(block, average) if block.is_trained else ()
    return Summary(square_sum(average), block_digest(block, average), group_square_sums)


@dataclass(slots=True)
class Share:
    """The work of one worker in this round, and its outstanding results.

    Attributes:
        subtrees: All subtrees assigned to the worker.
        outstanding_bits: Results that the worker has yet to send, by subtree: a bit for each chunk
            that the coordinator averages, one for the loss, and one for each worker that averages.
            A worker that has sent the loss but not a chunk still owes the subtree, so its lease
            continues.
        dropped: Subtrees that the worker need not compute or send any more.
        uploads: How many chunks of a subtree the worker may send, counted from the first.
        is_local: Whether the worker is on the coordinator's machine and so shares no network link.
    """

    subtrees: list[Subtree] = field(default_factory=list)
    outstanding_bits: dict[Subtree, int] = field(default_factory=dict)
    dropped: set[Subtree] = field(default_factory=set)
    uploads: int = 0
    is_local: bool = False

    def pending(self, due: int) -> tuple[Subtree, ...]:
        """Return the subtrees with outstanding results among the bits `due`."""
        return tuple(subtree for subtree, bits in self.outstanding_bits.items() if bits & due)

    def clear_bit(self, subtree: Subtree, bit: int) -> None:
        """Clear the bit of a result that has arrived."""
        outstanding = self.outstanding_bits.get(subtree, 0) & ~(1 << bit)
        if outstanding:
            self.outstanding_bits[subtree] = outstanding
        else:
            self.outstanding_bits.pop(subtree, None)

    @property
    def microbatches(self) -> int:
        return sum(subtree.leaves for subtree in self.subtrees)


class Round:
    """Collects one attempt at a step.

    Attributes:
        step_id: Term, step and attempt, as messages carry them.
        averages: One flat float32 array per block, filled as chunks are averaged.
        shares: The share of each worker that has not left.
        has_begun: Whether any subtree was assigned.
        double_check: Compares results of subtrees that two workers computed.
        double_assignment: Two workers, and the subtree that both must finish.
        is_tainted: Whether a sum may include gradients at weights whose digest was never compared.
        inner_progress: For each worker in an inner phase: replica, and number of inner steps taken.
        has_inner_phases: Whether a leaf is a whole inner phase of a replica. Such a worker may send
            all its chunks at once: too much work is lost with a worker that still holds some back.
        side_outputs: Outputs of microbatches other than gradients; None without any.
        embedding_layout: Layout of the embeddings that this round collects; None for a round of
            gradients. A round of embeddings has no blocks.
        embeddings: Embeddings that the previous round collected, read by this round's loss.
        peers: The chunks that workers average; none in a star.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        microbatches: int,
        term: int,
        step: int,
        attempt: int,
        *,
        side_outputs: SideOutputs | None = None,
        exchange: Codecs = _FLOAT32,
        has_inner_phases: bool = False,
        embedding_layout: EmbeddingLayout | None = None,
        embeddings: JoinedEmbeddings | None = None,
        numbered_table: tuple[int, OwnerTable] | None = None,
        allocate: Allocate = new_array,
        clipped: ClippedGroups = _NO_GROUPS,
    ) -> None:
        self.microbatches = microbatches
        self._clipped = clipped
        self._exchange = exchange
        self.has_inner_phases = has_inner_phases
        self.step_id = {"term": term, "step": step, "attempt": attempt}
        self.shares: dict[str, Share] = {}
        self.is_tainted = False
        self.side_outputs = side_outputs
        self.embedding_layout = embedding_layout
        self.embeddings = embeddings
        self.double_check = DoubleCheck()
        self.double_assignment: tuple[str, str, Subtree] | None = None
        self.averages = [allocate(block.elements) for block in blocks]
        self.inner_progress: dict[str, tuple[int, int]] = {}
        self.has_begun = False
        self._grid = ChunkGrid(blocks)
        self._assigned_subtrees = 0
        self._is_reassigned = False
        self._summed_chunks = 0
        # The gradients depend on all embeddings, also on those of workers that have since left.
        self._delivered = set[str]() if embeddings is None else set(embeddings.delivered)
        self._blocks = blocks
        self._average_of = _averages_by_chunk(blocks, self.averages, self._grid)
        numbered_table = numbered_table or (0, OwnerTable.star(self._grid.count))
        self._coordinator_chunks = numbered_table[1].chunks_of(COORDINATOR)
        # Block 0 first: its sums arrive last, so they usually show the missing subtrees.
        first = sorted(self._coordinator_chunks, reverse=True)
        self._reducer = Reducer(microbatches, exchange, first, self._average_of)
        self.peers = PeerSums(self._grid, microbatches, numbered_table, self._average_of)
        self._outstanding_counts = [block.chunks for block in blocks]
        self._loss_bit = self._grid.count
        self._subtree_bits = self._all_bits()
        self._unsummarized: list[int] = []
        self._summarizing: set[int] = set()
        self._summaries: dict[int, Summary] = {}
        self._weights: TreeSum[float] = TreeSum(microbatches, add)
        self._losses: TreeSum[float] = TreeSum(microbatches, add)
        self._loss_origins: TreeSum[Origin] = TreeSum(microbatches, add)
        self._origins: set[Origin] = set()

    def expect_subtrees(self, subtrees: int) -> list[str]:
        """Expect this many more subtrees, which are about to be assigned.

        Returns:
            The workers with subtrees that may now send more chunks.
        """
        self._is_reassigned = self._assigned_subtrees > 0
        self._assigned_subtrees += subtrees
        return self._extend_windows(self._grid.count)

    def uploads(self, worker: str) -> int:
        """Return how many chunks of a subtree the worker may send."""
        return self.shares[worker].uploads

    def raise_uploads(self) -> list[str]:
        """Raise upload limits once a quarter of the permitted chunks has arrived.

        Returns:
            The workers that may now send more.
        """
        return self._extend_windows(4) if self._coordinator_chunks else []

    def _extend_windows(self, parts: int) -> list[str]:
        """Raise limits that can grow by at least 1 / `parts` of the window; return the workers."""
        raised_workers: list[str] = []
        self._count_summed_chunks()
        memory_limit = self._memory_limit()
        # With many workers most may already send everything: skip them cheaply.
        waiting_shares = [
            (worker, share) for worker, share in self.shares.items() if share.uploads < memory_limit
        ]
        if not waiting_shares:
            return raised_workers
        slowest = self._fewest_arrived(
            share for share in self.shares.values() if not share.is_local
        )
        for worker, share in waiting_shares:
            arrived = self._fewest_arrived([share])
            new_limit = min(memory_limit, self._window_end(share, min(slowest, arrived)))
            added_uploads = new_limit - share.uploads
            if added_uploads > 0 and added_uploads * parts >= new_limit - arrived:
                share.uploads = new_limit
                raised_workers.append(worker)
        return sorted(raised_workers)

    def _count_summed_chunks(self) -> None:
        while self._summed_chunks < self._grid.count and self._is_summed(self._summed_chunks):
            self._summed_chunks += 1

    def _memory_limit(self) -> int:
        """Return the upload limit at which all subtree sums fit the memory limit, unmerged."""
        if self.has_inner_phases:
            return self._grid.count
        limit_bytes = max(limits.PARTIAL_SUMS_BYTES, self._grid.total_bytes // 2)
        return self._grid.end(self._summed_chunks, limit_bytes // max(self._assigned_subtrees, 1))

    def _window_end(self, share: Share, start: int) -> int:
        """Return the end of the window of chunks that a worker may send, which begins at `start`.

        Flows that share a link do not get equal parts of it. A sum waits for the slowest flow,
        while the other direction of the link is idle. So the window limits how far a worker is
        ahead of the slowest one. Local workers, reassigned subtrees and inner phases have no limit.
        """
        if share.is_local or self._is_reassigned or self.has_inner_phases:
            return self._grid.count
        most_uploads = start + limits.UPLOAD_AHEAD_CHUNKS
        return max(
            self._grid.end(start, limits.UPLOAD_AHEAD_BYTES), min(most_uploads, self._grid.count)
        )

    def _fewest_arrived(self, shares: Iterable[Share]) -> int:
        """Return the fewest chunks that have arrived of any subtree that has begun to arrive, and
        at least the number of finished sums."""
        count, mask = self._grid.count, (1 << self._loss_bit) - 1
        others = count - len(self._coordinator_chunks)
        bits_left = (bits & mask for share in shares for bits in share.outstanding_bits.values())
        arrived_bits = (count - bits.bit_count() for bits in bits_left)
        return max(
            self._summed_chunks, min((n for n in arrived_bits if others < n < count), default=0)
        )

    def _is_summed(self, number: int) -> bool:
        return number not in self._reducer or self._reducer.is_done(number)

    def due_results(self, share: Share) -> int:
        """Return the results that a worker may send, as bits of `Share.outstanding_bits`."""
        return (1 << share.uploads) - 1 | -1 << self._loss_bit

    def pending(self, worker: str) -> tuple[Subtree, ...]:
        """Return the worker's subtrees with results that it may send and has not sent."""
        share = self.shares.get(worker)
        return share.pending(self.due_results(share)) if share is not None else ()

    def assign(self, worker: str, subtrees: tuple[Subtree, ...], *, is_local: bool = False) -> None:
        """Assign subtrees to a worker; `is_local` is that of `Share`."""
        self.has_begun = True
        share = self.shares.setdefault(worker, Share(is_local=is_local))
        share.subtrees.extend(subtrees)
        share.outstanding_bits.update(dict.fromkeys(subtrees, self._subtree_bits))
        share.dropped.difference_update(subtrees)
        self._count_summed_chunks()
        first_limit = min(self._memory_limit(), self._window_end(share, self._summed_chunks))
        share.uploads = max(share.uploads, first_limit)

    def _all_bits(self) -> int:
        """Return all bits of a subtree; see `Share.outstanding_bits`."""
        chunks = sum(1 << number for number in self._coordinator_chunks)
        return chunks | 1 << self._loss_bit | self.peers.owner_bits << self._loss_bit + 1

    def take_payload(
        self, worker: str, message: GradientPayload, values: Array
    ) -> Send | Broadcast | NonFinite | ResultMismatch | None:
        """Take a chunk of a subtree's gradient sum; the round takes ownership of `values`.

        Returns:
            The average to broadcast if this completes the chunk; the sum to forward if another
            worker averages it; or the fault.

        Raises:
            OutOfOrder: There is no such subtree or table, or the subtree is another worker's.
        """
        share = self._check_assigned(worker, message.subtree)
        if message.owners > self.peers.table_number:
            raise OutOfOrder(
                f"{type(message).__name__}: expected table {self.peers.table_number}, "
                f"got {message.owners}"
            )
        number = self._grid.number(message.block, message.chunk)
        owner = self.peers.table.owner(number)
        if owner != COORDINATOR:
            self._delivered.add(worker)
            forwarded = message.model_copy(
                update={"owners": self.peers.table_number, "worker": worker}
            )
            return Send(owner, forwarded, pack(values, self._exchange.precision))
        # Counts as sent even if it is not needed: the lease covers what the worker still owes.
        share.clear_bit(message.subtree, number)
        name = self._blocks[message.block].name
        part, description = (message.block, message.chunk), f"gradients in block {name!r}"
        # Before anything is added to the values; also for values that are dropped below.
        differing = self.double_check.compare_result(
            worker, message.subtree, part, values, description
        )
        if differing is not None:  # a non-finite value shows which of the two is wrong
            finite = is_finite(values)
            return differing if finite else NonFinite(message.subtree, worker, message.block)
        if number not in self._reducer or self._reducer.covers(number, message.subtree):
            return None
        result = self._reducer.put(number, worker, message.subtree, message.weight, values)
        if isinstance(result, NonFinite):
            return replace(result, block=message.block)
        self._delivered.add(worker)
        if result is None:
            return None
        self._origins.add(result.origin)
        return self._broadcast_average(number)

    def take_side_output(
        self, worker: str, message: CapturedRows, content: Bytes
    ) -> NonFinite | ResultMismatch | None:
        """Take a piece of a microbatch's side outputs.

        Returns:
            A fault: a non-finite embedding, or one that differs from another worker's.

        Raises:
            OutOfOrder: There is no such piece, the subtree is another worker's, or the run has no
                side outputs.
        """
        self._check_assigned(worker, message.subtree)
        if self.side_outputs is None:
            raise OutOfOrder("CapturedRows in a run that captures nothing")
        self.side_outputs.put(message, content)
        self._delivered.add(worker)
        leaf = Subtree(message.microbatch, message.microbatch + 1)
        if self.embedding_layout and self.side_outputs.has_subtree(leaf):
            # Also for a second copy: its NaN shows which of the two is wrong.
            rows = self.side_outputs.join_with_copy(leaf.lo, message.chunk, content)
            if not are_finite(self.embedding_layout, rows):
                return NonFinite(leaf, worker, is_embedding=True)
        part = (0, message.microbatch, message.chunk)
        row_kind = "embeddings" if self.embedding_layout else "logits"
        row_kind = "per-replica state" if self.has_inner_phases else row_kind
        return self.double_check.compare_result(worker, message.subtree, part, content, row_kind)

    def note_inner_step(self, worker: str, replica: int, inner: int) -> None:
        """Note how many inner steps of a replica a worker has taken.

        Raises:
            OutOfOrder: There is no such replica, or it is another worker's.
        """
        self._check_assigned(worker, Subtree(replica, replica + 1))
        self.inner_progress[worker] = (replica, inner)

    def note_inner_checkpoint(self, worker: str, replica: int) -> None:
        """Note that other workers may continue from this worker's inner checkpoint.

        If this worker leaves before its weights are known to be the run's, the step restarts.

        Raises:
            OutOfOrder: There is no such replica, or it is not this worker's.
        """
        self._check_assigned(worker, Subtree(replica, replica + 1))
        self._delivered.add(worker)

    # Chunks that workers average.

    def note_arrival(self, owner: str, message: SumsArrived) -> None:
        """Note that an owner has received all its chunks of a worker's subtree.

        Raises:
            OutOfOrder: There is no such subtree.
        """
        if not is_subtree(message.subtree, self.microbatches):
            raise OutOfOrder(f"SumsArrived: {message.subtree} is not a subtree of this step")
        if self.peers.take_arrival(owner, message):
            self._delivered.add(message.worker)
            share = self.shares.get(message.worker)
            if share is not None:
                share.clear_bit(message.subtree, self._loss_bit + 1 + self.peers.bits[owner])

    def take_peer_average(
        self, sender: str, message: ChunkReduced | AveragedGradient, body: Origin | Array
    ) -> Broadcast | WrongAverage | None:
        """Take the values of a worker's average, or its origin and digest.

        Returns:
            The average, for the log and for workers without links; or the fault.
        """
        result: int | WrongAverage | None
        if isinstance(message, ChunkReduced):
            assert isinstance(body, tuple)
            result = self.peers.take_digest(sender, message, body)
        else:
            assert isinstance(body, np.ndarray)
            result = self.peers.take_average(sender, message, body)
        return self._broadcast_average(result) if isinstance(result, int) else result

    def switch_table(self, number: int, table: OwnerTable) -> None:
        """Switch to a new table: workers send the new owners the sums that earlier owners got."""
        gaining_workers, chunks_taken_over = self.peers.switch_table(number, table)
        self._coordinator_chunks |= chunks_taken_over
        self._reducer.set_pieces(self._coordinator_chunks)
        self._subtree_bits = self._all_bits()
        first = self._loss_bit + 1
        resend = sum(1 << chunk for chunk in chunks_taken_over)
        resend |= sum(1 << first + self.peers.bits[name] for name in gaining_workers)
        for share in self.shares.values():
            share.outstanding_bits = {
                subtree: bits
                for subtree in dict.fromkeys([*share.outstanding_bits, *share.subtrees])
                if subtree not in share.dropped
                and (bits := share.outstanding_bits.get(subtree, 0) & self._subtree_bits | resend)
            }

    def take_loss(self, worker: str, message: SubtreeLoss) -> NonFinite | ResultMismatch | bool:
        """Take a subtree's loss sum.

        Returns:
            Whether the loss was missing; or the fault.

        Raises:
            OutOfOrder: There is no such subtree, the subtree is another worker's, or its side
                outputs have not arrived.
        """
        share = self._check_assigned(worker, message.subtree)
        if self.side_outputs is not None and not self.side_outputs.has_subtree(message.subtree):
            raise OutOfOrder(
                f"the loss of subtree {message.subtree} came before all of its side outputs"
            )
        share.clear_bit(message.subtree, self._loss_bit)
        if (differing := self._compare_embeddings(worker, message)) is not None:
            return differing
        if message.sums:
            sums = np.frombuffer(message.sums, np.uint8)
            check = self.double_check
            differing = check.compare_result(worker, message.subtree, (-1,), sums, "gradients")
            if differing is not None:
                return differing
        if self._losses.covers(message.subtree):
            return False
        if not math.isfinite(message.loss_sum):
            return NonFinite(message.subtree, worker)
        self._weights.put(message.subtree, message.weight)
        self._losses.put(message.subtree, message.loss_sum)
        self._loss_origins.put(message.subtree, ((worker, message.subtree),))
        total = self._losses.total
        if total is not None and not math.isfinite(total):
            return NonFinite(root(self.microbatches))
        return True

    def _compare_embeddings(self, worker: str, message: SubtreeLoss) -> ResultMismatch | None:
        """Return the fault in embeddings that were recomputed for their gradients."""
        if message.unlike and self.embeddings is None:
            raise OutOfOrder("SubtreeLoss: differing embeddings in a step without embeddings")
        if self.embeddings is None:
            return None
        profile = self.double_check.profile_of(worker, message.subtree)
        return self.embeddings.compare(worker, profile, message)

    def join_embeddings(self) -> JoinedEmbeddings:
        """Join all embeddings of the step; this round of embeddings must be complete."""
        assert self.is_complete
        assert self.side_outputs is not None
        origin = self._loss_origins.total or ()
        profiles = {name: self.double_check.profile_of(name, part) for name, part in origin}
        delivered = frozenset(self._delivered)
        return JoinedEmbeddings.join(self.side_outputs.content, origin, profiles, delivered)

    def check_non_finite(self, sender: str, fault: NonFinite) -> NonFinite:
        """Check a worker's report about its own subtree, or about a sum that it owns.

        Raises:
            OutOfOrder: The subtree is not the worker's, the worker owns no chunk, or there is no
                such block.
        """
        if fault.worker == sender:
            share, subtree = self.shares.get(sender), fault.subtree
            subtrees = () if share is None else share.subtrees
            if not is_subtree(subtree, self.microbatches) or not any(
                subtree_share.covers(subtree) for subtree_share in subtrees
            ):
                raise OutOfOrder(
                    f"subtree {subtree} was not assigned to worker {sender!r} in this step"
                )
        elif sender not in self.peers.bits:
            raise OutOfOrder(f"NonFiniteSum of worker {sender!r}, which owns no chunk")
        if fault.block is not None and fault.block >= len(self._blocks):
            raise OutOfOrder(f"NonFiniteSum: there is no block {fault.block}")
        return fault

    @property
    def is_complete(self) -> bool:
        """Whether all blocks are averaged and summarized, all losses known, double checks done."""
        has_all = not any(self._outstanding_counts) and self._losses.total is not None
        return has_all and not self._summarizing and not self._awaits_double()

    @property
    def loss(self) -> float:
        """Mean loss over the step; valid once the round is complete."""
        total, weight = self._losses.total, self._weights.total
        assert total is not None
        assert weight is not None
        return total / weight if weight else 0.0

    @property
    def gradient_norms(self) -> GradientNorms:
        """Euclidean norms of the averaged gradients; valid once the round is complete."""
        assert self.is_complete
        self._summarize()
        trained_summaries = (
            self._summaries[number] for number, block in enumerate(self._blocks) if block.is_trained
        )
        return self._clipped.norms(
            (summary.square_sum, summary.group_square_sums) for summary in trained_summaries
        )

    def averages_digest(self) -> str:
        """Return the BLAKE3 over the hex digests of the blocks, in block order; the round must be
        complete."""
        assert self.is_complete
        self._summarize()
        return averages_digest(self._summaries[block].digest for block in range(len(self._blocks)))

    @property
    def counted(self) -> tuple[dict[str, tuple[Subtree, ...]], ...] | None:
        """Workers and subtrees that make up the sums, as a commit records them; valid once the
        round is complete."""
        origins = sorted({*self._origins, *self.peers.origins, self._loss_origins.total or ()})
        if sum(map(len, origins)) > _MOST_COUNTED_SUBTREES:
            return None
        return tuple(
            {
                worker: tuple(subtree for by, subtree in origin if by == worker)
                for worker in dict(origin)
            }
            for origin in origins
        )

    def unfinished(self, worker: str) -> tuple[Subtree, ...]:
        """Return the worker's microbatches with missing results, as subtrees."""
        share = self.shares.get(worker)
        if share is None:
            return ()
        missing = {
            leaf for subtree in share.outstanding_bits for leaf in self._missing_leaves(subtree)
        }
        return cover(sorted(missing), self.microbatches)

    def computing_workers(self) -> list[str]:
        """Return the workers that still compute: a loss of theirs is outstanding."""
        loss = 1 << self._loss_bit
        return [
            worker
            for worker, share in self.shares.items()
            if any(bits & loss for bits in share.outstanding_bits.values())
        ]

    def unassigned_subtrees(self, ignoring: Collection[str] = ()) -> tuple[Subtree, ...]:
        """Return the missing microbatches that no worker owes, as subtrees; workers in `ignoring`
        do not count."""
        assigned_leaves = {
            leaf
            for worker, share in self.shares.items()
            if worker not in ignoring
            for subtree in share.outstanding_bits
            for leaf in range(subtree.lo, subtree.hi)
        }
        everything = root(self.microbatches)
        missing = {leaf for leaf in self._missing_leaves(everything) if leaf not in assigned_leaves}
        return cover(sorted(missing), self.microbatches)

    def lose(self, worker: str, *, is_proven: bool) -> None:
        """Remove a worker that has left; its gradients stay in the sums.

        If it has sent some and its weights are not proven, the step must start over (`is_tainted`).

        Args:
            worker: The worker's name.
            is_proven: Whether the worker's weights are known to be the run's.
        """
        # A worker whose weights were not the run's may have sent wrong sums, also directly to other
        # workers. They cannot be subtracted again, so the step restarts.
        may_have_sent = self.peers.table.has_peers and worker in self.shares
        has_sent = worker in self._delivered or may_have_sent
        self.shares.pop(worker, None)
        self.is_tainted = self.is_tainted or (not is_proven and has_sent)

    def disown(self, worker: str, *, is_proven: bool) -> None:
        """Release a late worker's results, so that others can compute them; they may still
        arrive."""
        share = self.shares.get(worker)
        if share is not None:
            share.outstanding_bits.clear()
            share.dropped.update(share.subtrees)
        self.is_tainted = self.is_tainted or (not is_proven and worker in self._delivered)

    def take_surplus(self) -> dict[str, tuple[Subtree, ...]]:
        """Remove and return pending subtrees that other workers have completed, by worker."""
        surplus: dict[str, tuple[Subtree, ...]] = {}
        # Sums cover a doubled subtree after its first answer; the second is needed to compare.
        double = (
            self.double_assignment[-1] if self.double_assignment and self._awaits_double() else None
        )
        for worker, share in self.shares.items():
            covered = tuple(
                subtree
                for subtree in share.outstanding_bits
                if subtree != double and not self._missing_leaves(subtree)
            )
            if covered:
                surplus[worker] = covered
                for subtree in covered:
                    del share.outstanding_bits[subtree]
                share.dropped.update(covered)
        return surplus

    def forgo_double(self, late: Collection[str]) -> bool:
        """Stop waiting for late workers' double answers; return whether one was dropped."""
        is_late = self.double_assignment is not None and any(
            worker in late for worker in self.double_assignment[:2]
        )
        if is_late:
            self.double_assignment = None
        return is_late

    def _awaits_double(self) -> bool:
        """Return whether the second answer to the doubled subtree is outstanding."""
        if self.double_assignment is None:
            return False
        *workers, subtree = self.double_assignment
        shares = [self.shares[worker] for worker in workers if worker in self.shares]
        return len(shares) == len(workers) and any(
            subtree in share.outstanding_bits for share in shares
        )

    def _missing_leaves(self, subtree: Subtree) -> set[int]:
        """Return the microbatches whose results are missing in some sum."""
        missing = set(self._losses.missing(subtree)) | self.peers.missing_microbatches(subtree)
        return self._reducer.missing(subtree, missing)

    def _summarize(self) -> None:
        """Compute norm and digest of completed blocks, after all averages were broadcast."""
        for number in self._unsummarized:
            summary = summarize_block(self._blocks[number], self.averages[number], self._clipped)
            self._summaries[number] = summary
        self._unsummarized.clear()

    @property
    def is_summarizing(self) -> bool:
        """Whether summaries are being computed in another thread."""
        return bool(self._summarizing)

    def summarize(self) -> list[Summarize]:
        """Return an action that summarizes large blocks in a thread; `take_summaries` follows."""
        elements = sum(self._blocks[number].elements for number in self._unsummarized)
        if elements * 4 <= limits.EVENT_LOOP_REDUCE_BYTES:
            return []
        numbers, self._unsummarized = self._unsummarized, []
        self._summarizing.update(numbers)
        averages = {number: (self._blocks[number], self.averages[number]) for number in numbers}
        return [Summarize(self.step_id["step"], self.step_id["attempt"], averages)]

    def take_summaries(self, summaries: Mapping[int, Summary]) -> None:
        """Take norms and digests of blocks from the thread."""
        for number, summary in summaries.items():
            self._summarizing.discard(number)
            self._summaries[number] = summary

    def _check_assigned(self, worker: str, subtree: Subtree) -> Share:
        if not is_subtree(subtree, self.microbatches):
            raise OutOfOrder(
                f"{subtree} is not a subtree of a tree over {self.microbatches} microbatches"
            )
        share = self.shares.get(worker)
        if share is None or subtree not in share.subtrees:
            raise OutOfOrder(
                f"subtree {subtree} was not assigned to worker {worker!r} in this step"
            )
        return share

    def _broadcast_average(self, number: int) -> Broadcast:
        """Broadcast an averaged chunk to everyone who does not receive it from its owner."""
        block, chunk = self._grid.chunk(number)
        self._outstanding_counts[block] -= 1
        if not self._outstanding_counts[block]:
            self._unsummarized.append(block)
        is_block = self._blocks[block].kind == "block"
        message_type = AveragedBlockGradient if is_block else AveragedNonBlockGradient
        is_own = number in self._reducer
        served_by_peers = frozenset[str]() if is_own else frozenset(self.peers.table.members)
        message = message_type(**self.step_id, block=block, chunk=chunk)
        return Broadcast(message, self._average_of(number), served_by_peers)


def _averages_by_chunk(
    blocks: tuple[Block, ...], averages: Sequence[Array], grid: ChunkGrid
) -> Callable[[int], Array]:
    """Return a function that returns the array of a chunk's average, given the chunk's number.

    Not a method: if the reducer referred to the round, only the garbage collector would free the
    round, whose averages are as large as the model.
    """

    def average_of(number: int) -> Array:
        block, chunk = grid.chunk(number)
        return averages[block][blocks[block].chunk_slice(chunk)]

    return average_of
