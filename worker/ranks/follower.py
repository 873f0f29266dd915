"""The other ranks' side: they do what rank 0 tells, one order after the other, to its last."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from numpy.typing import NDArray

from backends.base.interface import BlockGradient, Loss, Program
from protocol.base.errors import RunFailed, in_words
from protocol.exact.tree import Node
from protocol.spec.run_spec import restore_run_spec
from worker.ranks.group import RankGroup, batches_together
from worker.shell.engine import Toolbox
from worker.tasks.base import Task

_Order = Mapping[str, Any]
_Arrays = Mapping[str, NDArray[Any]]
_Answered = Callable[[Any, _Order, _Arrays], Mapping[str, str]]


class Follower:
    """One rank.

    Args:
        group: The ranks.
        own: Its device and tasks.
    """

    def __init__(self, group: RankGroup, own: Toolbox) -> None:
        self._group, self._own = group, own
        self._task: Task | None = None
        self._program: Program | None = None

    def follow(self) -> None:
        """Until rank 0 tells of the end.

        Raises:
            DeviceError: Rank 0 is gone.
        """
        while True:
            order, arrays = self._group.hear()
            if order["do"] == "end":
                return
            answered = self._ANSWERED.get(order["do"])
            if answered is None:
                self._do(order, arrays)
            else:
                self._group.send(0, self._answer(answered, order, arrays))

    def _answer(self, work: _Answered, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        try:
            return work(self, order, arrays)
        except Exception as error:  # noqa: BLE001 -- rank 0 must hear of it
            return {"error": in_words(error)}

    def _open(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del order, arrays
        return {"name": self._own.backend().info.name}

    def _build(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del arrays
        self._close()
        self._task = self._own.task(restore_run_spec(json.dumps(order["spec"]).encode()))
        return {}

    def _compile(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        assert self._task is not None
        example, *rest = batches_together(order["weights"], arrays)
        others, evaluations = rest[: order["others"]], rest[order["others"] :]
        backend = self._own.backend()
        self._program = backend.compile(self._task.trainable, example, others, evaluations)
        return {}

    def _signature(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del arrays
        traits = self._own.backend().signature(order["threads"])
        return {"signature": json.dumps(dict(traits))}

    def _keeps_subnormals(self, order: _Order, arrays: _Arrays) -> Mapping[str, str]:
        del order, arrays
        return {"kept": "yes" if self._built().keeps_subnormals() else "no"}

    def _gradients(self, order: _Order, arrays: _Arrays) -> None:
        batches = batches_together(order["weights"], arrays)
        leaves = list(zip(batches, order["seeds"], strict=True))
        self._built().loss_scale = order["loss_scale"]
        found = []
        for lo, hi, kept in order["shares"][self._group.rank]:
            try:
                answer, sums = self._node(leaves, Node(lo, hi))
            except Exception as error:  # noqa: BLE001 -- rank 0 must hear of it
                answer, sums = {"error": in_words(error)}, {}
            if kept:
                found.append((answer, sums))
        # Rank 0 takes them once it has computed its own, for which it may need this one.
        for answer, sums in found:
            self._group.send(0, answer, sums)

    def _node(self, leaves: list[Any], node: Node) -> tuple[dict[str, Any], dict[str, Any]]:
        sums: dict[str, Any] = {}
        answer: dict[str, Any] = {}
        for item in self._built().gradients(leaves[node.lo : node.hi]):
            if isinstance(item, BlockGradient):
                sums[str(item.block)] = item.values
            elif isinstance(item, Loss):
                answer = {"loss": item.loss_sum, "weight": item.weight}
        return answer, sums

    def _do(self, order: _Order, arrays: _Arrays) -> None:
        match order["do"]:
            case "gradients":
                self._gradients(order, arrays)
            case "close":
                self._close()
            case "load":
                self._built().load([arrays[str(n)] for n in range(len(arrays))])
            case "evaluate":
                self._built().evaluate(batches_together(order["weights"], arrays)[0])
            case "rows":
                self._built().rows(batches_together(order["weights"], arrays)[0])
            case other:
                raise RunFailed(f"rank 0 told {other!r}, which this release does not know")

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
        "signature": _signature,
        "keeps_subnormals": _keeps_subnormals,
    }
    """What rank 0 waits for."""
