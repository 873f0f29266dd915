"""A worker's connection, session and replica, with a device whose actions complete immediately."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.base.interface import Array, Loss
from protocol.base.errors import RemoteProtocolError
from protocol.exact.replica import Replica
from protocol.spec.run_spec import RunSpec
from protocol.wire.connection import Phase, encode
from protocol.wire.messages import Welcome
from tests.exchanging_session import ExchangingSession
from tests.fuzz.handshakes import connect_until
from tests.message_samples import EXAMPLES, join_buffers
from worker.logic import actions as act
from worker.logic import events


class PureWorker:
    """A worker on one connection.

    Attributes:
        is_open: Whether the connection is open.

    Args:
        built: The engine's result of building the run, which is always the same.
        spec: The run spec.
        initial: The run's initial parameters.
    """

    def __init__(self, built: events.Built, spec: RunSpec, initial: Sequence[Array]) -> None:
        self.is_open = True
        self._built = built
        self._initial = initial
        self._connection = connect_until("worker", Phase.OPEN)
        self._connection.blocks = None
        self._replica = Replica(built.manifest.blocks, spec.optimizer)
        self._session = ExchangingSession()
        self._outbox = bytearray()
        welcome = EXAMPLES[Welcome]
        assert isinstance(welcome, Welcome)
        self._session.welcome(welcome)

    def feed(self, data: bytes) -> bytes:
        """Deliver the coordinator's bytes; return the worker's answers."""
        try:
            for message, body in self._connection.receive_data(data):
                if self.is_open:
                    self._perform(self._session.receive(message, body))
        except RemoteProtocolError:
            self.is_open = False
        output = bytes(self._outbox)
        self._outbox.clear()
        return output

    def _perform(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            for event in self._execute(action):
                self._perform(self._session.result(event))

    def _execute(self, action: act.Action) -> list[events.Event]:
        match action:
            case act.Transmit():
                if self.is_open:
                    encoded = encode(action.message, action.body)
                    self._outbox += join_buffers(self._connection.send(encoded))
            case act.Leave():
                self.is_open = False
            case act.Expect():
                self._connection.blocks = action.blocks
            case act.Build():
                return self._build(action)
            case act.Compute():
                return self._compute(action)
            case act.Apply():
                return self._apply(action)
            case act.LoadChunk():
                self._load(action)
            case act.Restore():
                self._replica.set_counters(action.step, action.optimizer_step)
                return [events.Applied(action.step, self._replica.state_digest())]
            case act.Evaluate():
                sums = {"samples": 1.0, "parts": 1.0}
                return [events.PartEvaluated(action.step, action.part, sums)]
            case act.CopyState():
                replica = self._replica
                return [events.StateCopied(replica.parts(), replica.step, replica.optimizer_step)]
        return []

    def _build(self, action: act.Build) -> list[events.Event]:
        self._replica.load_parameters(self._initial)
        built = self._built
        return [
            events.Built(
                run_id=action.run_id, manifest=built.manifest, initial_digest=built.initial_digest,
                step=built.step, state_digest=built.state_digest,
                numerics_profile=built.numerics_profile, numerics_text=built.numerics_text,
                backend=built.backend, device=built.device,
            )
        ]  # fmt: skip

    def _compute(self, action: act.Compute) -> list[events.Event]:
        weight = float(action.subtree.leaves)
        blocks = [*enumerate(self._built.manifest.blocks)]
        sums: list[events.Event] = [
            events.BlockSum(
                action.step_id, action.subtree, number, np.zeros(block.elements, np.float32), weight
            )
            for number, block in reversed(blocks)
        ]
        return [*sums, events.SubtreeDone(action.step_id, action.subtree, Loss(1.0, weight), 1.0)]

    def _apply(self, action: act.Apply) -> list[events.Event]:
        if action.scalars is None:
            self._replica.skip()
        else:
            self._replica.apply(action.averages, action.scalars)
        return [events.Applied(self._replica.step, self._replica.state_digest())]

    def _load(self, action: act.LoadChunk) -> None:
        self._replica.load_piece(action.kind, action.block, action.chunk, action.values)
