"""Workers that have the run's state: how one comes to it, and what they hear from then on.

A worker gets the state of a checkpoint and the steps since from the log, or only the steps that it
has missed, then what was broadcast since the replica's state; no running worker is disturbed.
Nothing is held in memory for it but the few chunks that are on their way: what is broadcast is
there anyway until the replica has it, and who has not read it by then gets it from the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from coordinator.members.session import MemberSession
from coordinator.run.outputs.actions import Replay
from coordinator.storage.log.log_index import LoggedStep
from coordinator.storage.run_storage import RunStorage
from coordinator.storage.states.saved_state import SavedState
from protocol.base import limits
from protocol.exact.codecs import packed
from protocol.exact.update import Array
from protocol.spec.manifest import Manifest
from protocol.spec.replicas_spec import Codec
from protocol.wire.connection import Encoded, encode
from protocol.wire.messages import (
    Assign,
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    Cancel,
    Commit,
    EvalPlan,
    Message,
    StateChunk,
    StepPlan,
)
from protocol.wire.transport import Channel

_MOST_STATE_PARTS: Final = 3
"""Parameters and two moments: the whole state is as long as the averages of so many steps."""


_KEPT: Final = (AveragedBlockGradient, AveragedNonBlockGradient, Commit)
_IN_STEP: Final = (*_KEPT, StepPlan, Assign, Cancel, EvalPlan)


class Followers:
    """The workers that have the run's state, and the broadcasts that a joiner needs.

    Attributes:
        since: Everything broadcast for this step and later ones is kept for joiners.
        over: Whether the run is over: nobody is to get anything of it any more.

    Args:
        sessions: Members by name; others' names are passed over.
        codec: What averages are rounded to, and travel as.
        since: Steps committed before the first broadcast.
    """

    def __init__(self, sessions: Mapping[str, MemberSession], codec: Codec, since: int = 0) -> None:
        self.since = since
        self.over = False
        self._sessions = sessions
        self._codec = codec
        self._names: set[str] = set()
        self._tail: deque[tuple[int, Encoded]] = deque()

    def discard(self, worker: str) -> None:
        """It hears no more."""
        self._names.discard(worker)

    def broadcast(
        self, message: Message, body: Array | None, had_by: frozenset[str] = frozenset()
    ) -> None:
        """Send to all that do not have it from others, and keep it for joiners."""
        encoded = encode(message, None if body is None else packed(body, self._codec))
        for name in sorted(self._names - had_by):
            session = self._sessions.get(name)
            if session is not None:
                session.channel.send(encoded)
        if isinstance(message, _KEPT):
            self._tail.append((message.step, encoded))

    def send_again(self, session: MemberSession, step: int) -> bool:
        """Send what this step averaged; whether that is here still."""
        kept = [
            encoded
            for broadcast_step, encoded in self._tail
            if broadcast_step == step and not isinstance(encoded.message, Commit)
        ]
        for encoded in kept:
            session.channel.send(encoded)
        return bool(kept)

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

    def behind(self, step: int) -> list[str]:
        """Who has not yet been sent all that was broadcast before this step."""
        return [name for name in sorted(self._names) if self._next_step(name, step) < step]

    def _next_step(self, worker: str, step: int) -> int:
        session = self._sessions.get(worker)
        waiting = session.channel.waiting if session is not None else iter(())
        return next((m.step for m in waiting if isinstance(m, _KEPT)), step)

    def detach(self, worker: str, step: int) -> int:
        """What waits for the worker of this step and of those before it is kept for it no longer.

        Returns:
            The step from which on it is to get everything again, from the log.
        """
        next_step = self._next_step(worker, step)
        self.discard(worker)
        if (session := self._sessions.get(worker)) is not None:
            session.channel.withdraw(_IN_STEP)
        return next_step

    def is_far(self, step: int, now: int, manifest: Manifest) -> bool:
        """Whether the averages of all steps since then are more to send than the state is."""
        missed_bytes = (now - step) * manifest.elements * 4
        return missed_bytes > max(limits.REPLAY_BYTES, _MOST_STATE_PARTS * manifest.elements * 4)

    async def send_state(
        self, channel: Channel, run_id: str, storage: RunStorage, saved: SavedState
    ) -> None:
        """Send a worker a whole state, as fast as it reads.

        Raises:
            SamestepError: The state cannot be read.
        """
        *_, last = saved.pieces()
        async for piece, values in storage.pieces(saved):
            await channel.room()
            if channel.closed or self.over:
                return
            message = StateChunk(
                run_id=run_id, kind=piece.kind, block=piece.block, chunk=piece.chunk,
                step=saved.step, optimizer_step=saved.optimizer_step,
                last=piece == last,
            )  # fmt: skip
            channel.send(encode(message, values))

    async def replay(
        self,
        channel: Channel,
        storage: RunStorage,
        manifest: Manifest,
        missed: Replay,
        epoch: int,
    ) -> int | None:
        """Send a worker committed steps from the log, as fast as it reads, until what comes then is
        kept here.

        Args:
            channel: The worker's.
            storage: Has the log.
            manifest: Says which block is of which kind.
            missed: From which step on, and from which state.
            epoch: The coordinator's; the messages carry it, whichever wrote the step.

        Returns:
            How many steps the worker has then, to `join` with; None if the log does not lead there.

        Raises:
            SamestepError: The log cannot be read.
        """
        step, known = missed.step, missed.state_digest
        while step < self.since and not (channel.closed or self.over):
            row = await storage.logged(step)
            if not row or known not in (None, row[0].record.state_before):
                return None
            known = None
            for logged in row:
                if logged.record.commit.scalars is not None and not logged.has_averages:
                    return None
                await self._send_step(channel, storage, manifest, epoch, logged)
                step += 1
        return step

    async def _send_step(
        self,
        channel: Channel,
        storage: RunStorage,
        manifest: Manifest,
        epoch: int,
        logged: LoggedStep,
    ) -> None:
        """Nothing of it once the run is over: the worker may be in the next one already."""
        commit = logged.record.commit
        if commit.scalars is not None:
            place = {"epoch": epoch, "step": commit.step, "attempt": commit.attempt}
            async for block, chunk, values in storage.chunks(logged):
                await channel.room()
                if channel.closed or self.over:
                    return
                is_block = manifest.blocks[block].kind == "block"
                kind = AveragedBlockGradient if is_block else AveragedNonBlockGradient
                message = kind(**place, block=block, chunk=chunk)
                channel.send(encode(message, packed(values, self._codec)))
        if not self.over:
            channel.send(encode(commit.model_copy(update={"epoch": epoch})))

    def clear(self) -> None:
        """The run is over: let go of everything kept."""
        self.over = True
        self._tail.clear()
