"""Rank 0: a backend that computes on all ranks and acts as one device."""

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
    CaptureResult,
    CoupledLossProgram,
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
from worker.torchrun.group import EMBEDDINGS, Arrays, RankGroup, flatten_batches


class RankShare(NamedTuple):
    """A microbatch of a subtree that a rank computes.

    Attributes:
        subtree: The microbatch as a leaf, numbered from 0 within the worker's subtree.
        is_counted: Whether the leaf's result is used; otherwise the rank computes the leaf only to
            stay in lockstep.
    """

    subtree: Subtree
    is_counted: bool = True


def lockstep_shares(leaves: int, ranks: int) -> list[list[RankShare]]:
    """Distribute leaves over ranks round-robin.

    In the last round, a rank without a leaf repeats the last leaf.
    """
    rounds = -(-leaves // ranks)
    return [
        [
            RankShare(Subtree(min(leaf, leaves - 1), min(leaf, leaves - 1) + 1), leaf < leaves)
            for leaf in range(rank, rounds * ranks, ranks)
        ]
        for rank in range(ranks)
    ]


class GroupBackendFactory:
    """The `BackendFactory` of rank 0's engine; it sends orders to all ranks, and ends them on exit.

    Attributes:
        is_busy: Whether the engine still computes on exit. The other ranks may then expect the
            next message of an order, and would mistake the order to end for that message.

    Args:
        group: The group of ranks.
        factory: Creates this rank's backend and tasks.
    """

    def __init__(self, group: RankGroup, factory: BackendFactory) -> None:
        self.is_busy = False
        self._group, self._factory = group, factory
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        """Return the backend that computes on all ranks."""
        if self._backend is None:
            self._group.send_order({"do": "open"})
            try:
                own_backend = self._factory.backend()
            finally:
                infos = receive_answers(self._group)
            self._backend = GroupBackend(self._group, own_backend, infos)
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        """Build the task on every rank."""
        self._group.send_order({"do": "build", "spec": json.loads(spec.to_bytes())})
        try:
            return self._factory.task(spec)
        finally:
            receive_answers(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _error_type: object, error: BaseException | None, _trace: object) -> None:
        """Send the other ranks the order to end, unless a rank is lost.

        Ranks of a lost group end with this process.
        """
        if self._group.loss_reason:
            return
        if self.is_busy:
            reason = "it ended" if error is None else text_of(error)
            self._group.abandon(f"{reason} (while its device still computed)")
        else:
            self._group.send_order({"do": "end"})


def receive_answers(group: RankGroup) -> list[dict[str, str]]:
    """Receive the other ranks' answers to the last order.

    Raises:
        RunFailed: A rank failed.
    """
    replies = [group.receive(rank)[0] for rank in range(1, group.size)]
    for rank, reply in enumerate(replies, 1):
        if "error" in reply:
            raise RunFailed(f"rank {rank}: {reply['error']}")
    return replies


class GroupBackend:
    """Implements `backends.base.interface.Backend` on all ranks."""

    def __init__(
        self, group: RankGroup, backend: Backend, infos: Sequence[Mapping[str, str]]
    ) -> None:
        self._group, self._own_backend = group, backend
        names = [backend.info.name, *(info["name"] for info in infos)]
        device_names = " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        self._info = replace(backend.info, name=f"{group.size} ranks sharded: {device_names}")

    @property
    def info(self) -> DeviceInfo:
        """Return a description of the ranks' devices, for the status."""
        return self._info

    def numerics_profile(self, threads: int) -> Mapping[str, str]:
        """Return the ranks' common numerics profile, with the number of ranks.

        Raises:
            RunFailed: A rank failed.
            SamestepError: The ranks have different profiles.
        """
        self._group.send_order({"do": "numerics_profile", "threads": threads})
        try:
            own_profile = dict(self._own_backend.numerics_profile(threads))
        finally:
            replies = receive_answers(self._group)
        for rank, reply in enumerate(replies, 1):
            profile = json.loads(reply["numerics_profile"])
            keys = own_profile.keys() | profile.keys()
            # Ranks may have different processors: the profile names the processor of rank 0.
            differences = sorted(
                k for k in keys - {"processor"} if own_profile.get(k) != profile.get(k)
            )
            if differences:
                raise SamestepError(
                    "expected ranks with one numerics profile, got different values of "
                    f"{', '.join(differences)} on rank {rank}: start that rank as a separate worker"
                )
        return {**own_profile, "ranks": f"{self._group.size} sharded"}

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        other_examples: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """Compile on every rank.

        Raises:
            SamestepError: The run's arithmetic is canonical, or a rank failed.
        """
        if trainable.arithmetic.is_canonical:
            raise SamestepError(
                "expected a run with torch's arithmetic, got canonical arithmetic, which ranks do "
                "not support; start a separate worker for each device: worker --backend vulkan"
            )
        batches = [example, *other_examples, *evaluations]
        weights, arrays = flatten_batches(batches)
        self._group.send_order(
            {"do": "compile", "weights": weights, "others": len(other_examples)}, arrays
        )
        try:
            with self._group.lockstep(may_refuse=True):
                program = self._own_backend.compile(trainable, example, other_examples, evaluations)
        finally:
            if not self._group.loss_reason:
                receive_answers(self._group)
        return GroupProgram(self._group, program, trainable.blocks)


class GroupProgram:
    """Implements `backends.base.interface.Program` on all ranks, for the engine's thread only."""

    parity = ""

    def __init__(self, group: RankGroup, program: Program, blocks: tuple[Block, ...]) -> None:
        self._group, self._own_program, self._blocks = group, program, blocks
        self.memory = program.memory
        self.loss_scale = 1.0
        self.ranks = group.size
        self._gradients: GroupGradients | None = None
        """The stream that is being computed, or that was abandoned before its end."""

    def load(self, parameters: list[Array]) -> None:
        """Load the parameters on every rank."""
        self._send_order("load", {str(n): values for n, values in enumerate(parameters)})
        with self._group.lockstep():
            self._own_program.load(parameters)

    def gradients(self, leaves: Sequence[Leaf]) -> GroupGradients:
        """Compute the gradients of a subtree's microbatches on all ranks."""
        shares = self._distribute("gradients", leaves)
        self._own_program.loss_scale = self.loss_scale
        self._gradients = GroupGradients(
            self._group, self._own_program, leaves, shares, len(self._blocks)
        )
        return self._gradients

    def _distribute(self, order_name: str, leaves: Sequence[Leaf]) -> list[list[RankShare]]:
        """Send an order with microbatches to all ranks; return the shares by rank."""
        shares = lockstep_shares(len(leaves), self._group.size)
        weights, arrays = flatten_batches([batch for batch, _ in leaves])
        order = {
            "weights": weights, "seeds": [seed for _, seed in leaves],
            "shares": [[[*s.subtree, s.is_counted] for s in rank_shares] for rank_shares in shares],
            "loss_scale": self.loss_scale,
        }  # fmt: skip
        self._send_order(order_name, arrays, **order)
        return shares

    def embed(self, leaves: Sequence[Leaf]) -> Generator[Rows, None, None]:
        """Yield the embeddings of each microbatch, after all ranks have computed theirs."""
        shares, program = self._distribute("embed", leaves), self._coupled_program()
        rows_by_leaf: dict[int, Rows] = {}
        for share in shares[0]:
            with self._group.lockstep():
                (rows,) = program.embed(leaves[share.subtree.lo : share.subtree.hi])
            rows_by_leaf.setdefault(share.subtree.lo, rows)
        for rank in range(1, self._group.size):
            for share in shares[rank]:
                if share.is_counted:
                    _, arrays = self._group.receive(rank)
                    rows_by_leaf[share.subtree.lo] = arrays[EMBEDDINGS]
        for leaf in range(len(leaves)):
            yield rows_by_leaf[leaf]

    def step_loss(self, rows: Rows, seed: int) -> StepLoss:
        """Compute the loss over a step on every rank, because it may need any part of the base."""
        self._send_order("step_loss", {"rows": rows}, seed=seed)
        with self._group.lockstep():
            return self._coupled_program().step_loss(rows, seed)

    def take_embeddings(self) -> list[Rows]:
        """See `backends.base.interface.CoupledLossProgram`."""
        return [] if self._gradients is None else self._gradients.take_embeddings()

    def _coupled_program(self) -> CoupledLossProgram:
        program = self._own_program
        assert isinstance(program, CoupledLossProgram), "torch programs compute coupled losses"
        return program

    def evaluate(self, batch: Batch) -> Sums:
        """Evaluate a batch on all ranks, because each has a part of the base."""
        weights, arrays = flatten_batches([batch])
        self._send_order("evaluate", arrays, weights=weights)
        with self._group.lockstep():
            return self._own_program.evaluate(batch)

    def capture_rows(self, batch: Batch) -> CaptureResult:
        """Capture a batch's rows on all ranks, because each has a part of the base."""
        weights, arrays = flatten_batches([batch])
        self._send_order("rows", arrays, weights=weights)
        with self._group.lockstep():
            return self._own_program.capture_rows(batch)

    def keeps_subnormals(self) -> bool:
        """Return whether all ranks keep subnormals."""
        self._send_order("keeps_subnormals", {})
        results = [reply["kept"] == "yes" for reply in receive_answers(self._group)]
        return self._own_program.keeps_subnormals() and all(results)

    def close(self) -> None:
        """Close the program on every rank."""
        if not self._group.loss_reason:
            self._send_order("close", {})
        self._own_program.close()

    def _send_order(self, order_name: str, arrays: Arrays, **order: object) -> None:
        self._finish_abandoned()
        self._group.send_order({"do": order_name, **order}, arrays)

    def _finish_abandoned(self) -> None:
        """Finish an abandoned subtree, since the other ranks compute it too."""
        gradients, self._gradients = self._gradients, None
        for _ in gradients or ():
            pass


class GroupGradients:
    """A `backends.base.interface.GradientStream` that yields sums once all ranks have computed.

    Ranks wait for each other, so each rank computes all its microbatches, even of an abandoned
    subtree.

    Args:
        group: The group of ranks.
        program: This rank's program.
        leaves: Microbatches of the whole subtree.
        shares: By rank, the microbatches that it computes.
        blocks: Number of blocks.
    """

    def __init__(
        self,
        group: RankGroup,
        program: Program,
        leaves: Sequence[Leaf],
        shares: Sequence[Sequence[RankShare]],
        blocks: int,
    ) -> None:
        self._group, self._own_program, self._leaves, self._shares = group, program, leaves, shares
        self._sums = [TreeSum[Array](len(leaves), ADDITIONS["float32"]) for _ in range(blocks)]
        self._losses, self._weights = (TreeSum[float](len(leaves), add) for _ in range(2))
        self._embeddings: dict[int, Rows] = {}
        self._is_closed = False
        self._items = self._compute()

    def __iter__(self) -> Iterator[GradientItem]:
        """Return the same iterator each time, so the program can finish an abandoned stream."""
        return self._items

    def _compute(self) -> Iterator[GradientItem]:
        for share in self._shares[0]:
            with self._group.lockstep():
                yield from self._compute_own_share(share)
        for rank in range(1, len(self._shares)):
            for share in self._shares[rank]:
                if share.is_counted:
                    self._receive_share(rank, share)
        if not self._is_closed:
            yield from self._totals()

    def _compute_own_share(self, share: RankShare) -> Iterator[GradientItem]:
        stream = self._own_program.gradients(self._leaves[share.subtree.lo : share.subtree.hi])
        for item in stream:
            if isinstance(item, BlockGradient):
                if share.is_counted:
                    self._sums[item.block].put(share.subtree, item.values)
                yield BlockAdded(item.block)
            elif isinstance(item, Loss) and share.is_counted:
                self._add_loss(share.subtree, item)
        if isinstance(self._own_program, CoupledLossProgram):
            for rows in self._own_program.take_embeddings():
                self._embeddings.setdefault(share.subtree.lo, rows)

    def take_embeddings(self) -> list[Rows]:
        """Return the embeddings of the microbatches in order, if the loss couples samples."""
        embeddings, self._embeddings = self._embeddings, {}
        return [rows for _, rows in sorted(embeddings.items())]

    def _receive_share(self, rank: int, share: RankShare) -> None:
        answer, arrays = self._group.receive(rank)
        if EMBEDDINGS in arrays:
            self._embeddings[share.subtree.lo] = arrays[EMBEDDINGS]
        for number, tree_sum in enumerate(self._sums):
            tree_sum.put(share.subtree, arrays[str(number)])
        self._add_loss(share.subtree, Loss(answer["loss"], answer["weight"]))

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
        """Do not yield the sums; the ranks still compute all microbatches of the subtree."""
        self._is_closed = True

    def _add_loss(self, subtree: Subtree, loss: Loss) -> None:
        self._losses.put(subtree, loss.loss_sum)
        self._weights.put(subtree, loss.weight)
