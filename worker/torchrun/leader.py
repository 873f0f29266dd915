"""Rank 0's side: a backend that computes with all ranks, and looks like one device."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import add
from typing import NamedTuple, Self

from backends.base.interface import (
    Array,
    Backend,
    Batch,
    BlockAdded,
    BlockGradient,
    Captured,
    ComputesCoupledLoss,
    DeviceInfo,
    GradientItem,
    Leaf,
    Loss,
    Program,
    StepLoss,
    Sums,
    Trainable,
)
from protocol.base.errors import RunFailed, SamestepError, text_of
from protocol.exact.embedding_rows import Rows
from protocol.exact.reduction.tree import Subtree
from protocol.exact.reduction.tree_sum import ADDITIONS, TreeSum
from protocol.spec.manifest import Block
from protocol.spec.run_spec import RunSpec
from worker.shell.engine import BackendFactory
from worker.tasks.base.task import Task
from worker.torchrun.group import EMBEDDED, Arrays, RankGroup, flatten_batches


class RankShare(NamedTuple):
    """A rank's part of a subtree; one that is not kept is computed only to keep ranks in step.

    Attributes:
        subtree: Over the leaves of the member's subtree, counted from 0.
        kept: Whether its sum counts.
    """

    subtree: Subtree
    kept: bool = True


def in_lockstep(leaves: int, ranks: int) -> list[list[RankShare]]:
    """Deal leaves to ranks in turn; a rank without one repeats the last, as all must compute."""
    rounds = -(-leaves // ranks)
    return [
        [
            RankShare(Subtree(min(leaf, leaves - 1), min(leaf, leaves - 1) + 1), leaf < leaves)
            for leaf in range(rank, rounds * ranks, ranks)
        ]
        for rank in range(ranks)
    ]


class GroupBackendFactory:
    """The `BackendFactory` of rank 0's engine, which stands for all ranks, and ends them.

    Attributes:
        is_busy: Whether the engine still computes at the end. It may then be between two messages
            to the other ranks, and the last order would be taken for one of those.

    Args:
        group: The ranks.
        own: Creates this rank's backend and tasks.
    """

    def __init__(self, group: RankGroup, own: BackendFactory) -> None:
        self.is_busy = False
        self._group, self._own = group, own
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        """Return the backend that computes on all ranks."""
        if self._backend is None:
            self._group.tell({"do": "open"})
            try:
                own = self._own.backend()
            finally:
                infos = answers(self._group)
            self._backend = GroupBackend(self._group, own, infos)
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        """Build the task on every rank."""
        self._group.tell({"do": "build", "spec": json.loads(spec.to_bytes())})
        try:
            return self._own.task(spec)
        finally:
            answers(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End the other ranks; a lost group is ended by the end of this process."""
        if self._group.loss:
            return
        if self.is_busy:
            reason = "it ended" if error is None else text_of(error)
            self._group.lose(f"{reason} (while its device still computed)")
        else:
            self._group.tell({"do": "end"})


def answers(group: RankGroup) -> list[dict[str, str]]:
    """Receive the answers of the other ranks to the last order.

    Raises:
        RunFailed: A rank failed.
    """
    replies = [group.receive(rank)[0] for rank in range(1, group.size)]
    for rank, each in enumerate(replies, 1):
        if "error" in each:
            raise RunFailed(f"rank {rank}: {each['error']}")
    return replies


class GroupBackend:
    """See `backends.base.interface.Backend`."""

    def __init__(self, group: RankGroup, own: Backend, infos: Sequence[Mapping[str, str]]) -> None:
        self._group, self._own = group, own
        names = [own.info.name, *(each["name"] for each in infos)]
        device_names = " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        self._info = replace(own.info, name=f"{group.size} ranks sharded: {device_names}")

    @property
    def info(self) -> DeviceInfo:
        """The ranks' devices, as shown in the status."""
        return self._info

    def numerics_profile(self, threads: int) -> Mapping[str, str]:
        """The ranks' common numerics profile, with their number."""
        self._group.tell({"do": "numerics_profile", "threads": threads})
        try:
            own = dict(self._own.numerics_profile(threads))
        finally:
            profiles = answers(self._group)
        for rank, each in enumerate(profiles, 1):
            theirs = json.loads(each["numerics_profile"])
            unlike = sorted(k for k in own.keys() | theirs.keys() if own.get(k) != theirs.get(k))
            if unlike and unlike != ["processor"]:
                raise SamestepError(
                    f"expected ranks with one numerics profile, got another {unlike[0]} on rank "
                    f"{rank}: start those as a separate worker"
                )
        return {**own, "ranks": f"{self._group.size} sharded"}

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        others: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """Compile on every rank.

        Raises:
            SamestepError: The run's arithmetic is canonical, or a rank failed.
        """
        if trainable.arithmetic.is_canonical:
            raise SamestepError(
                "the run's arithmetic is canonical, and ranks of a group compute by torch's; start "
                "a separate worker for each device: worker --backend vulkan"
            )
        batches = [example, *others, *evaluations]
        weights, arrays = flatten_batches(batches)
        self._group.tell({"do": "compile", "weights": weights, "others": len(others)}, arrays)
        try:
            with self._group.lockstep(may_refuse=True):
                own = self._own.compile(trainable, example, others, evaluations)
        finally:
            if not self._group.loss:
                answers(self._group)
        return GroupProgram(self._group, own, trainable.blocks)


class GroupProgram:
    """Implements `Program` on all ranks; used in the engine's thread only."""

    parity = ""

    def __init__(self, group: RankGroup, own: Program, blocks: tuple[Block, ...]) -> None:
        self._group, self._own, self._blocks = group, own, blocks
        self.memory = own.memory
        self.loss_scale = 1.0
        self.ranks = group.size
        self._subtree: GroupGradients | None = None
        """The gradients in progress, or abandoned before their end."""

    def load(self, parameters: list[Array]) -> None:
        """Load the parameters on every rank."""
        self._tell("load", {str(n): values for n, values in enumerate(parameters)})
        with self._group.lockstep():
            self._own.load(parameters)

    def gradients(self, leaves: Sequence[Leaf]) -> GroupGradients:
        """The subtree's microbatches, shared out."""
        shares = self._share_out("gradients", leaves)
        self._own.loss_scale = self.loss_scale
        self._subtree = GroupGradients(self._group, self._own, leaves, shares, len(self._blocks))
        return self._subtree

    def _share_out(self, what: str, leaves: Sequence[Leaf]) -> list[list[RankShare]]:
        """Send microbatches to all ranks, and return what each has to compute of them."""
        shares = in_lockstep(len(leaves), self._group.size)
        weights, arrays = flatten_batches([batch for batch, _ in leaves])
        order = {
            "weights": weights, "seeds": [seed for _, seed in leaves],
            "shares": [[[*share.subtree, share.kept] for share in each] for each in shares],
            "loss_scale": self.loss_scale,
        }  # fmt: skip
        self._tell(what, arrays, **order)
        return shares

    def embed(self, leaves: Sequence[Leaf]) -> Generator[Rows, None, None]:
        """See `backends.base.interface.ComputesCoupledLoss`; nothing is yielded before all ranks
        have computed their microbatches."""
        shares, own = self._share_out("embed", leaves), self._coupled()
        found: dict[int, Rows] = {}
        for share in shares[0]:
            with self._group.lockstep():
                (rows,) = own.embed(leaves[share.subtree.lo : share.subtree.hi])
            found.setdefault(share.subtree.lo, rows)
        for rank in range(1, self._group.size):
            for share in shares[rank]:
                if share.kept:
                    _, arrays = self._group.receive(rank)
                    found[share.subtree.lo] = arrays[EMBEDDED]
        for leaf in range(len(leaves)):
            yield found[leaf]

    def step_loss(self, rows: Rows, seed: int) -> StepLoss:
        """See `backends.base.interface.ComputesCoupledLoss`; by every rank, since the loss may read
        a part of the base that is not this rank's."""
        self._tell("step_loss", {"rows": rows}, seed=seed)
        with self._group.lockstep():
            return self._coupled().step_loss(rows, seed)

    def take_embedded(self) -> list[Rows]:
        """See `backends.base.interface.ComputesCoupledLoss`."""
        return [] if self._subtree is None else self._subtree.take_embedded()

    def _coupled(self) -> ComputesCoupledLoss:
        assert isinstance(self._own, ComputesCoupledLoss), "torch on one device computes them"
        return self._own

    def evaluate(self, batch: Batch) -> Sums:
        """Evaluate on all ranks: each has a part of the base."""
        weights, arrays = flatten_batches([batch])
        self._tell("evaluate", arrays, weights=weights)
        with self._group.lockstep():
            return self._own.evaluate(batch)

    def rows(self, batch: Batch) -> Captured:
        """Capture on all ranks: each has a part of the base."""
        weights, arrays = flatten_batches([batch])
        self._tell("rows", arrays, weights=weights)
        with self._group.lockstep():
            return self._own.rows(batch)

    def keeps_subnormals(self) -> bool:
        """Whether all ranks keep subnormals."""
        self._tell("keeps_subnormals", {})
        alike = [each["kept"] == "yes" for each in answers(self._group)]
        return self._own.keeps_subnormals() and all(alike)

    def close(self) -> None:
        """On every rank."""
        if not self._group.loss:
            self._tell("close", {})
        self._own.close()

    def _tell(self, what: str, arrays: Arrays, **order: object) -> None:
        self._finish_pending()
        self._group.tell({"do": what, **order}, arrays)

    def _finish_pending(self) -> None:
        """Of a subtree that was abandoned."""
        subtree, self._subtree = self._subtree, None
        for _ in subtree or ():
            pass


class GroupGradients:
    """See `backends.base.interface.GradientStream`: whole blocks once all ranks have computed.

    Ranks wait for one another, so each computes its shares even if the subtree is no longer wanted.

    Args:
        group: The ranks.
        own: This rank's program.
        leaves: Of the whole subtree.
        shares: Of each rank.
        blocks: How many there are.
    """

    def __init__(
        self,
        group: RankGroup,
        own: Program,
        leaves: Sequence[Leaf],
        shares: Sequence[Sequence[RankShare]],
        blocks: int,
    ) -> None:
        self._group, self._own, self._leaves, self._shares = group, own, leaves, shares
        self._sums = [TreeSum[Array](len(leaves), ADDITIONS["float32"]) for _ in range(blocks)]
        self._losses, self._weights = (TreeSum[float](len(leaves), add) for _ in range(2))
        self._embedded: dict[int, Rows] = {}
        self._closed = False
        self._items = self._computed()

    def __iter__(self) -> Iterator[GradientItem]:
        """The same each time: what is abandoned half-way is gone on with by the program."""
        return self._items

    def _computed(self) -> Iterator[GradientItem]:
        for share in self._shares[0]:
            with self._group.lockstep():
                yield from self._own_share(share)
        for rank in range(1, len(self._shares)):
            for share in self._shares[rank]:
                if share.kept:
                    self._receive(rank, share)
        if not self._closed:
            yield from self._totals()

    def _own_share(self, share: RankShare) -> Iterator[GradientItem]:
        stream = self._own.gradients(self._leaves[share.subtree.lo : share.subtree.hi])
        for item in stream:
            if isinstance(item, BlockGradient):
                if share.kept:
                    self._sums[item.block].put(share.subtree, item.values)
                yield BlockAdded(item.block)
            elif isinstance(item, Loss) and share.kept:
                self._add_loss(share.subtree, item)
        if isinstance(self._own, ComputesCoupledLoss):
            for rows in self._own.take_embedded():
                self._embedded.setdefault(share.subtree.lo, rows)

    def take_embedded(self) -> list[Rows]:
        """Return the rows of the microbatches, in their order, if the loss couples them."""
        embedded, self._embedded = self._embedded, {}
        return [rows for _, rows in sorted(embedded.items())]

    def _receive(self, rank: int, share: RankShare) -> None:
        order, arrays = self._group.receive(rank)
        if EMBEDDED in arrays:
            self._embedded[share.subtree.lo] = arrays[EMBEDDED]
        for number, total in enumerate(self._sums):
            total.put(share.subtree, arrays[str(number)])
        self._add_loss(share.subtree, Loss(order["loss"], order["weight"]))

    def _totals(self) -> Iterator[GradientItem]:
        for number in reversed(range(len(self._sums))):
            values = self._sums[number].total
            assert values is not None, "the shares cover the subtree"
            yield BlockGradient(number, values)
        loss_sum, weight = self._losses.total, self._weights.total
        assert loss_sum is not None
        assert weight is not None
        yield Loss(loss_sum, weight)

    def close(self) -> None:
        """Stop yielding results; the ranks finish what they have begun."""
        self._closed = True

    def _add_loss(self, subtree: Subtree, loss: Loss) -> None:
        self._losses.put(subtree, loss.loss_sum)
        self._weights.put(subtree, loss.weight)
