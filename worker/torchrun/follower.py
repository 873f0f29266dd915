"""The other ranks: each carries out the orders of rank 0 in sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from numpy.typing import NDArray

from backends.base.interface import BlockGradient, ComputesCoupledLoss, Loss, Program
from protocol.base.errors import DataError, RunFailed, describe_error
from protocol.exact.reduction.tree import Subtree
from protocol.spec.run_spec import RunSpec, restore_run_spec
from worker.shell.engine import BackendFactory, trainable_of
from worker.tasks.base.task import Task
from worker.torchrun.group import EMBEDDED, RankGroup, is_refusal, rebuild_batches

_Order = Mapping[str, Any]
_Arrays = Mapping[str, NDArray[Any]]
_Answered = Callable[[Any, _Order, _Arrays], Mapping[str, str]]


class Follower:
    """One rank other than 0.

    Args:
        group: The ranks.
        own: Creates this rank's backend and tasks.
    """

    def __init__(self, group: RankGroup, own: BackendFactory) -> None:
        self._group, self._own = group, own
        self._spec: RunSpec | None = None
        self._task: Task | None = None
        self._program: Program | None = None

    def follow(self) -> None:
        """Carry out orders until rank 0 sends the last one.

        Raises:
            DeviceError: Rank 0 is gone.
            SamestepError: This rank or another has failed where all must compute.
        """
        while True:
            order, arrays = self._group.hear()
            if order["do"] == "end":
                return
            with self._group.lockstep():
                self._do(order, arrays)

    def _do(self, order: _Order, arrays: _Arrays) -> None:
        answered = self._ANSWERED.get(order["do"])
        if answered is None:
            self._compute(order, arrays)
            return
        try:
            answer = answered(self, order, arrays)
        except Exception as error:
            if order["do"] == "compile" and not is_refusal(error):
                raise  # rank 0 waits for this one in a collective, not for an answer
            answer = {"error": describe_error(error)}
        self._group.send(0, answer)

    def _open(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del order, arrays
        return {"name": self._own.backend().info.name}

    def _build(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del arrays
        self._close()
        self._spec = restore_run_spec(json.dumps(order["spec"]).encode())
        self._task = self._own.task(self._spec)
        return {}

    def _compile(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        assert self._task is not None
        assert self._spec is not None
        example, *rest = rebuild_batches(order["weights"], arrays)
        others, evaluations = rest[: order["others"]], rest[order["others"] :]
        backend = self._own.backend()
        trainable = trainable_of(self._task, self._spec)
        self._program = backend.compile(trainable, example, others, evaluations)
        return {}

    def _numerics_profile(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del arrays
        traits = self._own.backend().numerics_profile(order["threads"])
        return {"numerics_profile": json.dumps(dict(traits))}

    def _keeps_subnormals(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del order, arrays
        return {"kept": "yes" if self._built().keeps_subnormals() else "no"}

    def _compute_microbatches(self, order: _Order, arrays: _Arrays) -> None:
        """Compute this rank's microbatches: their gradients, or embeddings."""
        batches = rebuild_batches(order["weights"], arrays)
        leaves = list(zip(batches, order["seeds"], strict=True))
        self._built().loss_scale = order["loss_scale"]
        compute = self._embed if order["do"] == "embed" else self._subtree
        results = []
        for lo, hi, kept in order["shares"][self._group.rank]:
            result = compute(leaves, Subtree(lo, hi))
            if kept:
                results.append(result)
        # Rank 0 reads these after its own share, which may need this rank's part of the base.
        for answer, sums in results:
            self._group.send(0, answer, sums)

    def _embed(self, leaves: list[Any], subtree: Subtree) -> tuple[dict[str, Any], dict[str, Any]]:
        (rows,) = self._coupled().embed(leaves[subtree.lo : subtree.hi])
        return {}, {EMBEDDED: rows}

    def _step_loss(self, order: _Order, arrays: _Arrays) -> None:
        with suppress(DataError):  # rank 0 has the same
            self._coupled().step_loss(arrays["rows"], order["seed"])

    def _coupled(self) -> ComputesCoupledLoss:
        program = self._built()
        assert isinstance(program, ComputesCoupledLoss), "torch on one device computes them"
        return program

    def _subtree(
        self, leaves: list[Any], subtree: Subtree
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        sums: dict[str, Any] = {}
        answer: dict[str, Any] = {}
        for item in self._built().gradients(leaves[subtree.lo : subtree.hi]):
            if isinstance(item, BlockGradient):
                sums[str(item.block)] = item.values
            elif isinstance(item, Loss):
                answer = {"loss": item.loss_sum, "weight": item.weight}
        program = self._built()
        if isinstance(program, ComputesCoupledLoss):
            for rows in program.take_embedded():
                sums[EMBEDDED] = rows
        return answer, sums

    def _compute(self, order: _Order, arrays: _Arrays) -> None:
        match order["do"]:
            case "gradients" | "embed":
                self._compute_microbatches(order, arrays)
            case "step_loss":
                self._step_loss(order, arrays)
            case "close":
                self._close()
            case "load":
                self._built().load([arrays[str(n)] for n in range(len(arrays))])
            case "evaluate":
                self._built().evaluate(rebuild_batches(order["weights"], arrays)[0])
            case "rows":
                self._built().rows(rebuild_batches(order["weights"], arrays)[0])
            case other:
                raise RunFailed(
                    f"expected an order that this release knows, got {other!r}: "
                    "start all ranks with the same release"
                )

    def _close(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None

    def _built(self) -> Program:
        assert self._program is not None, "rank 0 has it compiled first"
        return self._program

    _ANSWERED: Final[Mapping[str, _Answered]] = {
        "open": _open,
        "build": _build,
        "compile": _compile,
        "numerics_profile": _numerics_profile,
        "keeps_subnormals": _keeps_subnormals,
    }
    """Orders whose answer rank 0 waits for."""
