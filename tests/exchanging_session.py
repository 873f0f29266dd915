"""A worker's session together with its exchange of gradients, without links, threads or an
engine."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.wire.connection import Body
from protocol.wire.messages import ListenForPeers, Message, Peers
from worker.logic import actions as act
from worker.logic import events
from worker.logic.session import WorkerSession
from worker.peers.gradient_exchange import Action as ExchangeAction
from worker.peers.gradient_exchange import GradientExchange


class ExchangingSession(WorkerSession):
    """A session that passes actions to an exchange and receives the exchange's averages.

    What the exchange sends to the coordinator is among the actions that a call returns.
    """

    _exchange: GradientExchange

    def receive(self, message: Message, body: Body | None) -> list[act.Action]:
        return self._pass_to_exchange(super().receive(message, body))

    def result(self, event: events.Event) -> list[act.Action]:
        return self._pass_to_exchange(super().result(event))

    def _pass_to_exchange(self, actions: Sequence[act.Action]) -> list[act.Action]:
        remaining_actions: list[act.Action] = []
        for action in actions:
            match action:
                case act.ForwardToExchange(message) if isinstance(message, ListenForPeers | Peers):
                    remaining_actions.append(action)
                case act.ForwardToExchange(message, body):
                    exchange_actions = self._exchange.receive_from_coordinator(message, body)
                    remaining_actions += self._take_from_exchange(exchange_actions)
                case act.Contribute(subtree, block, weight, values):
                    sums = self._exchange.contribute(subtree, block, weight, values)
                    remaining_actions += self._take_from_exchange(sums)
                case act.AbandonAttempt():
                    self._exchange.drop()
                case act.Expect(blocks, exchange):
                    self._exchange = GradientExchange(self.name, blocks, exchange)
                    remaining_actions.append(action)
                case _:
                    remaining_actions.append(action)
        return remaining_actions

    def _take_from_exchange(self, actions: Sequence[ExchangeAction]) -> list[act.Action]:
        remaining_actions: list[act.Action] = []
        for action in actions:
            match action:
                case act.Transmit():
                    remaining_actions.append(action)
                case events.AveragesReady() as ready:
                    remaining_actions += self.result(ready)
        return remaining_actions
