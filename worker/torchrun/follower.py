"""Ranks other than 0, which execute the orders of rank 0 in sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from numpy.typing import NDArray

from backends.base.interface import BlockGradient, CoupledLossProgram, Loss, Program
from protocol.base.errors import DataError, RunFailed, describe_error
from protocol.exact.reduction.tree import Subtree
from protocol.spec.run_spec import RunSpec, restore_run_spec
from worker.shell.engine import BackendFactory, trainable_of
from worker.tasks.base.task import Task
from worker.torchrun.group import EMBEDDINGS, RankGroup, is_refusal, rebuild_batches

_Order = Mapping[str, Any]
_Arrays = Mapping[str, NDArray[Any]]
_AnsweringHandler = Callable[[Any, _Order, _Arrays], Mapping[str, str]]


class Follower:
    """A rank other than 0.

    Args:
        group: The group of ranks.
        factory: Creates this rank's backend and tasks.
    """

    def __init__(self, group: RankGroup, factory: BackendFactory) -> None:
        self._group, self._factory = group, factory
        self._spec: RunSpec | None = None
        self._task: Task | None = None
        self._program: Program | None = None

    def follow(self) -> None:
        """Execute orders until rank 0 sends the order to end.

        Raises:
            DeviceError: Rank 0 is lost.
            SamestepError: This rank or another failed while all ranks had to compute.
        """
        while True:
            order, arrays = self._group.receive_order()
            if order["do"] == "end":
                return
            with self._group.lockstep():
                self._execute(order, arrays)

    def _execute(self, order: _Order, arrays: _Arrays) -> None:
        handler = self._ANSWERING_HANDLERS.get(order["do"])
        if handler is None:
            self._compute(order, arrays)
            return
        try:
            answer = handler(self, order, arrays)
        except Exception as error:
            if order["do"] == "compile" and not is_refusal(error):
                raise  # rank 0 waits for this rank in a collective, not for an answer
            answer = {"error": describe_error(error)}
        self._group.send(0, answer)

    def _open(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del order, arrays
        return {"name": self._factory.backend().info.name}

    def _build(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del arrays
        self._close()
        self._spec = restore_run_spec(json.dumps(order["spec"]).encode())
        self._task = self._factory.task(self._spec)
        return {}

    def _compile(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        assert self._task is not None
        assert self._spec is not None
        example, *other_batches = rebuild_batches(order["weights"], arrays)
        examples, evaluations = other_batches[: order["others"]], other_batches[order["others"] :]
        backend = self._factory.backend()
        trainable = trainable_of(self._task, self._spec)
        self._program = backend.compile(trainable, example, examples, evaluations)
        return {}

    def _numerics_profile(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del arrays
        profile = self._factory.backend().numerics_profile(order["threads"])
        return {"numerics_profile": json.dumps(dict(profile))}

    def _keeps_subnormals(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del order, arrays
        return {"kept": "yes" if self._compiled_program().keeps_subnormals() else "no"}

    def _compute_microbatches(self, order: _Order, arrays: _Arrays) -> None:
        """Compute the gradients or embeddings of this rank's microbatches."""
        batches = rebuild_batches(order["weights"], arrays)
        leaves = list(zip(batches, order["seeds"], strict=True))
        self._compiled_program().loss_scale = order["loss_scale"]
        compute = self._embed if order["do"] == "embed" else self._compute_subtree
        results = []
        for lo, hi, is_counted in order["shares"][self._group.rank]:
            result = compute(leaves, Subtree(lo, hi))
            if is_counted:
                results.append(result)
        # Rank 0 receives results after its own share, which may need this rank's part of the base.
        for answer, result_arrays in results:
            self._group.send(0, answer, result_arrays)

    def _embed(self, leaves: list[Any], subtree: Subtree) -> tuple[dict[str, Any], dict[str, Any]]:
        (rows,) = self._coupled_program().embed(leaves[subtree.lo : subtree.hi])
        return {}, {EMBEDDINGS: rows}

    def _step_loss(self, order: _Order, arrays: _Arrays) -> None:
        with suppress(DataError):  # rank 0 raises the same error
            self._coupled_program().step_loss(arrays["rows"], order["seed"])

    def _coupled_program(self) -> CoupledLossProgram:
        program = self._compiled_program()
        assert isinstance(program, CoupledLossProgram), "torch programs compute coupled losses"
        return program

    def _compute_subtree(
        self, leaves: list[Any], subtree: Subtree
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        sums: dict[str, Any] = {}
        answer: dict[str, Any] = {}
        for item in self._compiled_program().gradients(leaves[subtree.lo : subtree.hi]):
            if isinstance(item, BlockGradient):
                sums[str(item.block)] = item.values
            elif isinstance(item, Loss):
                answer = {"loss": item.loss_sum, "weight": item.weight}
        program = self._compiled_program()
        if isinstance(program, CoupledLossProgram):
            for rows in program.take_embeddings():
                sums[EMBEDDINGS] = rows
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
                self._compiled_program().load([arrays[str(n)] for n in range(len(arrays))])
            case "evaluate":
                self._compiled_program().evaluate(rebuild_batches(order["weights"], arrays)[0])
            case "rows":
                self._compiled_program().capture_rows(rebuild_batches(order["weights"], arrays)[0])
            case order_name:
                raise RunFailed(
                    f"expected an order that this release knows, got {order_name!r}: "
                    "start all ranks with the same release"
                )

    def _close(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None

    def _compiled_program(self) -> Program:
        assert self._program is not None, "rank 0 sends the order to compile first"
        return self._program

    _ANSWERING_HANDLERS: Final[Mapping[str, _AnsweringHandler]] = {
        "open": _open,
        "build": _build,
        "compile": _compile,
        "numerics_profile": _numerics_profile,
        "keeps_subnormals": _keeps_subnormals,
    }
    """Handlers of the orders that rank 0 awaits an answer to."""
