"""Workers that have the run's state: how one comes to it, and what they hear from then on.

A worker gets all of the state, or the steps that it has missed from the log, then what was
broadcast since the replica's state; no running worker is disturbed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from coordinator.members.session import MemberSession
from coordinator.run.actions import Replay
from coordinator.storage.log_index import LoggedStep
from coordinator.storage.run_storage import RunStorage
from protocol.base import limits
from protocol.exact.replica import Replica
from protocol.exact.update import Array
from protocol.spec.manifest import Manifest
from protocol.wire.connection import Encoded, encode
from protocol.wire.messages import (
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    Commit,
    Message,
    StateChunk,
)
from protocol.wire.transport import Channel

_MOST_STATE_PARTS: Final = 3
"""Parameters and two moments: the whole state is as long as the averages of so many steps."""


class Followers:
    """The workers that have the run's state, and the broadcasts that a joiner needs.

    Attributes:
        since: Everything broadcast for this step and later ones is kept for joiners.
        over: Whether the run is over: nobody is to get anything of it any more.

    Args:
        sessions: Members by name; others' names are passed over.
        since: Steps committed before the first broadcast.
    """

    def __init__(self, sessions: Mapping[str, MemberSession], since: int = 0) -> None:
        self.since = since
        self.over = False
        self._sessions = sessions
        self._names: set[str] = set()
        self._tail: deque[tuple[int, Encoded]] = deque()

    def discard(self, worker: str) -> None:
        """It hears no more."""
        self._names.discard(worker)

    def broadcast(self, message: Message, body: Array | None) -> None:
        """Send to all, and keep it for joiners."""
        encoded = encode(message, body)
        for name in sorted(self._names):
            session = self._sessions.get(name)
            if session is not None:
                session.channel.send(encoded)
        if isinstance(message, AveragedBlockGradient | AveragedNonBlockGradient | Commit):
            self._tail.append((message.step, encoded))

    def forget_before(self, step: int) -> None:
        """The replica has taken so many steps: joiners need only what came later."""
        self.since = max(self.since, step)
        while self._tail and self._tail[0][0] < self.since:
            self._tail.popleft()

    def join(self, session: MemberSession, step: int) -> None:
        """The worker has taken so many steps: send it what it has missed, then it hears all.

        `since` is not above that.
        """
        assert step >= self.since
        for broadcast_step, encoded in self._tail:
            if broadcast_step >= step:
                session.channel.send(encoded)
        self._names.add(session.name)

    def seed(
        self, session: MemberSession, run_id: str, manifest: Manifest, snapshot: Replica
    ) -> None:
        """Send the worker a whole state, which nobody changes any more; then it hears all."""
        pieces = [
            (part, chunk)
            for part in snapshot.parts()
            for chunk in range(manifest.blocks[part.block].chunks)
        ]
        for index, (part, chunk) in enumerate(pieces):
            piece = manifest.blocks[part.block].chunk_slice(chunk)
            message = StateChunk(
                run_id=run_id, kind=part.kind, block=part.block, chunk=chunk,
                step=snapshot.step, optimizer_step=snapshot.optimizer_step,
                last=index == len(pieces) - 1,
            )  # fmt: skip
            session.channel.send(encode(message, part.values[piece]))
        self.join(session, snapshot.step)

    async def replay(
        self,
        channel: Channel,
        storage: RunStorage,
        manifest: Manifest,
        missed: Replay,
        epoch: int,
    ) -> int | None:
        """Send a worker committed steps from the log, until what comes then is kept here.

        Args:
            channel: The worker's.
            storage: Has the log.
            manifest: Says how averages are cut into chunks.
            missed: From which step on, and from which state.
            epoch: The coordinator's; the messages carry it, whichever wrote the step.

        Returns:
            How many steps the worker has then, to `join` with; None if the log does not lead there,
            or the whole state is less to send.

        Raises:
            SamestepError: The log cannot be read.
        """
        step, known = missed.step, missed.state_digest
        missed_bytes = (self.since - step) * manifest.elements * 4
        if missed_bytes > max(limits.REPLAY_BYTES, _MOST_STATE_PARTS * manifest.elements * 4):
            return None
        while step < self.since and not (channel.closed or self.over):
            row = await storage.logged(step)
            if not row or known not in (None, row[0].record.state_before):
                return None
            known = None
            for logged in row:
                averages = await storage.averages(logged)
                if averages is None and logged.record.commit.scalars is not None:
                    return None
                if self.over:
                    return step  # the worker is in the next run already
                _send_step(channel, manifest, epoch, logged, averages)
                step += 1
        return step

    def clear(self) -> None:
        """The run is over: let go of everything kept."""
        self.over = True
        self._tail.clear()


def _send_step(
    channel: Channel,
    manifest: Manifest,
    epoch: int,
    logged: LoggedStep,
    averages: list[Array] | None,
) -> None:
    commit = logged.record.commit
    for number, values in enumerate(averages or ()):
        block = manifest.blocks[number]
        kind = AveragedBlockGradient if block.kind == "block" else AveragedNonBlockGradient
        for chunk in range(block.chunks):
            message = kind(
                epoch=epoch, step=commit.step, attempt=commit.attempt, block=number, chunk=chunk
            )
            channel.send(encode(message, values[block.chunk_slice(chunk)]))
    channel.send(encode(commit.model_copy(update={"epoch": epoch})))
