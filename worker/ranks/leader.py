"""Rank 0's side: a backend that computes with all ranks, and looks like one device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import add

from backends.base.interface import (
    Array,
    Backend,
    Batch,
    BlockAdded,
    BlockGradient,
    Captured,
    DeviceInfo,
    Leaf,
    Loss,
    NodeItem,
    Program,
    Sums,
    Trainable,
)
from protocol.base.errors import RunFailed, SamestepError
from protocol.exact.tree import Node
from protocol.exact.tree_sum import ADDITIONS, TreeSum
from protocol.spec.manifest import Block
from protocol.spec.run_spec import RunSpec
from worker.ranks.group import RankGroup, batches_apart
from worker.ranks.shares import RankShare, in_lockstep, in_parallel
from worker.shell.engine import Toolbox
from worker.tasks.base import Task


class LeadingToolbox:
    """What the engine of rank 0 is given: see `worker.shell.engine.Toolbox`.

    Args:
        group: The ranks.
        own: This rank's device and tasks.
        sharded: Whether the base lies across the ranks.
    """

    def __init__(self, group: RankGroup, own: Toolbox, *, sharded: bool) -> None:
        self._group, self._own, self._sharded = group, own, sharded
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        """All ranks' devices as one."""
        if self._backend is None:
            self._group.tell({"do": "open"})
            own = self._own.backend()
            infos = answers(self._group)
            self._backend = GroupBackend(self._group, own, infos, sharded=self._sharded)
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        """Every rank builds it."""
        self._group.tell({"do": "build", "spec": json.loads(spec.to_bytes())})
        try:
            return self._own.task(spec)
        finally:
            answers(self._group)

    def end(self) -> None:
        """The others end too."""
        self._group.tell({"do": "end"})


def answers(group: RankGroup) -> list[dict[str, str]]:
    """What each of the others says to the last order.

    Raises:
        RunFailed: One could not do it.
    """
    found = [group.receive(rank)[0] for rank in range(1, group.size)]
    for rank, each in enumerate(found, 1):
        if "error" in each:
            raise RunFailed(f"rank {rank}: {each['error']}")
    return found


class GroupBackend:
    """See `backends.base.interface.Backend`."""

    def __init__(
        self, group: RankGroup, own: Backend, infos: Sequence[Mapping[str, str]], *, sharded: bool
    ) -> None:
        self._group, self._own, self._sharded = group, own, sharded
        names = [own.info.name, *(each["name"] for each in infos)]
        how = "sharded" if sharded else "in parallel"
        shown = " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        self._info = replace(own.info, name=f"{group.size} ranks {how}: {shown}")

    @property
    def info(self) -> DeviceInfo:
        """Its ranks, as the status shows them."""
        return self._info

    def signature(self, threads: int) -> Mapping[str, str]:
        """Each rank's, which must be alike; of a sharded base the group's own."""
        self._group.tell({"do": "signature", "threads": threads})
        own = dict(self._own.signature(threads))
        for rank, each in enumerate(answers(self._group), 1):
            theirs = json.loads(each["signature"])
            unlike = sorted(k for k in own.keys() | theirs.keys() if own.get(k) != theirs.get(k))
            if unlike and unlike != ["processor"]:
                raise SamestepError(
                    f"expected ranks of one numeric signature, got another {unlike[0]} on rank "
                    f"{rank}: start those as a worker of their own"
                )
        return {**own, "ranks": f"{self._group.size} sharded"} if self._sharded else own

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        others: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """On every rank.

        Raises:
            SamestepError: The run's arithmetic is canonical, or a rank cannot.
        """
        if trainable.arithmetic.is_canonical:
            raise SamestepError(
                "the run's arithmetic is canonical, and ranks of a group compute by torch's; start "
                "a worker of its own for each device: worker --backend vulkan"
            )
        batches = [example, *others, *evaluations]
        weights, arrays = batches_apart(batches)
        self._group.tell({"do": "compile", "weights": weights, "others": len(others)}, arrays)
        try:
            own = self._own.compile(trainable, example, others, evaluations)
        finally:
            answers(self._group)
        return GroupProgram(self._group, own, trainable.blocks, sharded=self._sharded)


class GroupProgram:
    """See `backends.base.interface.Program`; called by the engine's thread alone."""

    parity = ""

    def __init__(
        self, group: RankGroup, own: Program, blocks: tuple[Block, ...], *, sharded: bool
    ) -> None:
        self._group, self._own, self._blocks, self._sharded = group, own, blocks, sharded
        self.memory = own.memory
        self.loss_scale = 1.0
        self.ranks = group.size
        self._node: GroupNode | None = None
        """The one in work, or abandoned before its end."""

    def load(self, parameters: list[Array]) -> None:
        """Every rank gets them."""
        self._tell("load", {str(n): values for n, values in enumerate(parameters)})
        self._own.load(parameters)

    def gradients(self, leaves: Sequence[Leaf]) -> GroupNode:
        """The node's microbatches, shared out."""
        self._drop_what_is_under_way()
        share_out = in_lockstep if self._sharded else in_parallel
        shares = share_out(len(leaves), self._group.size)
        weights, arrays = batches_apart([batch for batch, _ in leaves])
        order = {
            "weights": weights, "seeds": [seed for _, seed in leaves],
            "shares": [[[*share.node, share.kept] for share in each] for each in shares],
            "loss_scale": self.loss_scale,
        }  # fmt: skip
        self._tell("gradients", arrays, **order)
        self._own.loss_scale = self.loss_scale
        self._node = GroupNode(
            self._group, self._own, leaves, shares, len(self._blocks), finishes=self._sharded
        )
        return self._node

    def evaluate(self, batch: Batch) -> Sums:
        """By this rank; where the base is sharded, all have to compute it."""
        if self._sharded:
            weights, arrays = batches_apart([batch])
            self._tell("evaluate", arrays, weights=weights)
        return self._own.evaluate(batch)

    def rows(self, batch: Batch) -> Captured:
        """Likewise."""
        if self._sharded:
            weights, arrays = batches_apart([batch])
            self._tell("rows", arrays, weights=weights)
        return self._own.rows(batch)

    def keeps_subnormals(self) -> bool:
        """Of all ranks."""
        self._tell("keeps_subnormals", {})
        alike = [each["kept"] == "yes" for each in answers(self._group)]
        return self._own.keeps_subnormals() and all(alike)

    def close(self) -> None:
        """On every rank."""
        self._tell("close", {})
        self._own.close()

    def _tell(self, what: str, arrays: Mapping[str, Array], **order: object) -> None:
        self._drop_what_is_under_way()
        self._group.tell({"do": what, **order}, arrays)

    def _drop_what_is_under_way(self) -> None:
        """Of a node that was abandoned."""
        node, self._node = self._node, None
        for _ in node or ():
            pass


class GroupNode:
    """See `backends.base.interface.NodeGradients`: whole blocks once all ranks have computed.

    Args:
        group: The ranks.
        own: This rank's program.
        leaves: Of the whole node.
        shares: Of each rank.
        blocks: How many there are.
        finishes: Whether ranks wait for one another, so that each computes its shares to the end
            even when the node is not wanted any more.
    """

    def __init__(
        self,
        group: RankGroup,
        own: Program,
        leaves: Sequence[Leaf],
        shares: Sequence[Sequence[RankShare]],
        blocks: int,
        *,
        finishes: bool,
    ) -> None:
        self._group, self._own, self._leaves, self._shares = group, own, leaves, shares
        self._sums = [TreeSum[Array](len(leaves), ADDITIONS["float32"]) for _ in range(blocks)]
        self._losses, self._weights = (TreeSum[float](len(leaves), add) for _ in range(2))
        self._finishes = finishes
        self._closed = False
        self._items = self._computed()

    def __iter__(self) -> Iterator[NodeItem]:
        """The same each time: what is abandoned half-way is gone on with by the program."""
        return self._items

    def _computed(self) -> Iterator[NodeItem]:
        for share in self._shares[0]:
            yield from self._own_share(share)
        for rank in range(1, len(self._shares)):
            for share in self._shares[rank]:
                if share.kept:
                    self._receive(rank, share)
        if not self._closed:
            yield from self._totals()

    def _own_share(self, share: RankShare) -> Iterator[NodeItem]:
        stream = self._own.gradients(self._leaves[share.node.lo : share.node.hi])
        for item in stream:
            if self._closed and not self._finishes:
                stream.close()
                return
            if isinstance(item, BlockGradient):
                if share.kept:
                    self._sums[item.block].put(share.node, item.values)
                yield BlockAdded(item.block)
            elif isinstance(item, Loss) and share.kept:
                self._add_loss(share.node, item)

    def _receive(self, rank: int, share: RankShare) -> None:
        order, arrays = self._group.receive(rank)
        if "error" in order:
            raise RunFailed(f"rank {rank}: {order['error']}")
        for number, total in enumerate(self._sums):
            total.put(share.node, arrays[str(number)])
        self._add_loss(share.node, Loss(order["loss"], order["weight"]))

    def _totals(self) -> Iterator[NodeItem]:
        for number in reversed(range(len(self._sums))):
            values = self._sums[number].total
            assert values is not None, "the shares cover the node"
            yield BlockGradient(number, values)
        loss_sum, weight = self._losses.total, self._weights.total
        assert loss_sum is not None
        assert weight is not None
        yield Loss(loss_sum, weight)

    def close(self) -> None:
        """Nobody takes more; what the ranks have begun they finish."""
        self._closed = True

    def _add_loss(self, node: Node, loss: Loss) -> None:
        self._losses.put(node, loss.loss_sum)
        self._weights.put(node, loss.weight)
