"""A worker's session and its exchange of gradients as one, without links, threads or an engine."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.wire.connection import Body
from protocol.wire.messages import ListenForPeers, Message, Peers
from worker.logic import actions as act
from worker.logic import events
from worker.logic.session import WorkerSession
from worker.peers.share import Action as ExchangeAction
from worker.peers.share import GradientExchange


class ExchangingSession(WorkerSession):
    """Returns what its exchange sends to the coordinator; the session gets what it averages."""

    _exchanging: GradientExchange

    def receive(self, message: Message, body: Body | None) -> list[act.Action]:
        return self._played(super().receive(message, body))

    def result(self, event: events.Event) -> list[act.Action]:
        return self._played(super().result(event))

    def _played(self, actions: Sequence[act.Action]) -> list[act.Action]:
        played: list[act.Action] = []
        for action in actions:
            match action:
                case act.ForwardToExchange(message) if isinstance(message, ListenForPeers | Peers):
                    played.append(action)
                case act.ForwardToExchange(message, body):
                    exchange_actions = self._exchanging.receive_from_coordinator(message, body)
                    played += self._decided(exchange_actions)
                case act.Contribute(subtree, block, weight, values):
                    sums = self._exchanging.contribute(subtree, block, weight, values)
                    played += self._decided(sums)
                case act.AbandonAttempt():
                    self._exchanging.drop()
                case act.Expect(blocks, exchange):
                    self._exchanging = GradientExchange(self.name, blocks, exchange)
                    played.append(action)
                case _:
                    played.append(action)
        return played

    def _decided(self, actions: Sequence[ExchangeAction]) -> list[act.Action]:
        played: list[act.Action] = []
        for action in actions:
            match action:
                case act.Transmit():
                    played.append(action)
                case events.AveragesReady() as ready:
                    played += self.result(ready)
        return played
