"""A worker's end of a connection, which sends the frames of an honest worker, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from backends.base.interface import Array
from protocol.wire.connection import Connection, Phase, encode
from protocol.wire.messages import (
    Assign,
    BlockGradientPayload,
    Commit,
    EndRun,
    EvalPlan,
    EvalResult,
    Goodbye,
    Message,
    Ready,
    StartRun,
    StateChunk,
    StateRequest,
    StepApplied,
    StepPlan,
    SubtreeLoss,
)
from tests.message_samples import join_buffers
from worker.logic.events import Built

WAIT = b""
"""Yielded when the worker must receive more before it can send."""


class Member:
    """A connection whose handshake is complete.

    Args:
        built: The engine's result of building the run.
        initial: The run's initial parameters.
        digest_after: Returns the digest of the correct state after a number of steps, or None while
            it is unknown.
    """

    def __init__(
        self, built: Built, initial: Sequence[Array], digest_after: Callable[[int], str | None]
    ) -> None:
        self.connection = Connection("worker")
        self.connection.phase, self.connection.blocks = Phase.OPEN, built.manifest.blocks
        self._built = built
        self._initial = initial
        self._digest_after = digest_after
        self._received: deque[Message] = deque()

    def receive(self, data: bytes) -> None:
        """Receive bytes from the coordinator."""
        self._received.extend(received.message for received in self.connection.receive_data(data))

    def frames(self) -> Iterator[bytes]:
        """Yield the worker's frames up to the end of the run or connection, and `WAIT` between
        them."""
        while True:
            while not self._received:
                yield WAIT
            match message := self._received.popleft():
                case StartRun():
                    yield self._ready(message)
                case StateRequest():
                    yield from self._state(message)
                case StepPlan() | Assign():
                    yield from self._gradients(message)
                case StateChunk() if message.last:
                    yield from self._report_state(message.step)
                case Commit():
                    yield from self._report_state(message.step + 1)
                case EvalPlan():
                    yield from self._results(message)
                case EndRun() | Goodbye():
                    return

    def _ready(self, start: StartRun) -> bytes:
        built = self._built
        message = Ready(
            run_id=start.run_id, backend=built.backend, device=built.device,
            initial_digest=built.initial_digest, step=built.step, state_digest=built.state_digest,
            signature=built.numerics_profile, signature_text=built.numerics_text,
        )  # fmt: skip
        return join_buffers(encode(message, built.manifest.to_bytes()))

    def _state(self, request: StateRequest) -> Iterator[bytes]:
        for block, values in enumerate(self._initial):
            chunk = StateChunk(
                run_id=request.run_id, kind="parameters", block=block, chunk=0, step=0,
                optimizer_step=0, last=block == len(self._initial) - 1,
            )  # fmt: skip
            yield join_buffers(encode(chunk, values))

    def _gradients(self, plan: StepPlan | Assign) -> Iterator[bytes]:
        blocks = self._built.manifest.blocks
        step_id = {"term": plan.term, "step": plan.step, "attempt": plan.attempt}
        for lo, hi in plan.subtrees:
            subtree: dict[str, Any] = {**step_id, "lo": lo, "hi": hi, "weight": float(hi - lo)}
            for number, block in reversed([*enumerate(blocks)]):
                payload = BlockGradientPayload(**subtree, block=number, chunk=0)
                yield join_buffers(encode(payload, np.zeros(block.elements, np.float32)))
            yield join_buffers(
                encode(SubtreeLoss(**subtree, loss_sum=1.0, sums=b"", elapsed_ms=1.0))
            )

    def _report_state(self, step: int) -> Iterator[bytes]:
        while (digest := self._digest_after(step)) is None:
            if any(isinstance(message, Commit) for message in self._received):
                return  # a step from the log: the digest of a later state is requested as well
            yield WAIT
        yield join_buffers(encode(StepApplied(term=1, step=step, state_digest=digest)))

    def _results(self, plan: EvalPlan) -> Iterator[bytes]:
        for part in range(plan.lo, plan.hi):
            sums = {"samples": 1.0, "parts": 1.0}
            result = EvalResult(term=plan.term, step=plan.step, part=part, sums=sums)
            yield join_buffers(encode(result))
