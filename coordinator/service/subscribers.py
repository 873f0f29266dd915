"""Broadcasts to workers that have the run's state, and transfers of state to workers that join.

A joining worker gets a checkpoint's state and the later steps from the log, or only the steps that
it missed; then the broadcasts since the replica's state. No running worker is disturbed. Only the
few chunks that are being sent are buffered for a joining worker: broadcasts stay in memory until
the replica has applied them, and a worker that has not read them by then gets them from the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from coordinator.members.session import MemberSession
from coordinator.run.outputs.actions import Replay
from coordinator.storage.log.log_index import LoggedStep
from coordinator.storage.run_storage import LogHold, RunStorage, max_replay_bytes
from coordinator.storage.states.checkpoint_state import CheckpointState
from protocol.exact.reduction.average import Array
from protocol.exact.reduction.codecs import pack
from protocol.spec.manifest import Manifest
from protocol.spec.sections.exchange import Codec
from protocol.wire.connection import EncodedMessage, encode
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

_FOR_JOINERS: Final = (AveragedBlockGradient, AveragedNonBlockGradient, Commit)
_IN_STEP: Final = (*_FOR_JOINERS, StepPlan, Assign, Cancel, EvalPlan)


class Subscribers:
    """The subscribed workers, and the broadcasts that a joiner needs.

    Attributes:
        since: The first step whose broadcasts are kept for joiners.
        is_over: Whether the run is over: nothing more is sent.

    Args:
        sessions: Members by name; other names are skipped.
        codec: The precision of averages.
        since: Number of steps committed before the first broadcast.
    """

    def __init__(self, sessions: Mapping[str, MemberSession], codec: Codec, since: int = 0) -> None:
        self.since = since
        self.is_over = False
        self._sessions = sessions
        self._codec = codec
        self._subscribed_names: set[str] = set()
        self._recent_frames: deque[tuple[int, EncodedMessage]] = deque()

    def unsubscribe(self, worker: str) -> None:
        """Send a worker no more broadcasts."""
        self._subscribed_names.discard(worker)

    def broadcast(
        self, message: Message, body: Array | None, served_by_peers: frozenset[str] = frozenset()
    ) -> None:
        """Send a message to all subscribers not in `served_by_peers`, and keep it for joiners."""
        frame = encode(message, None if body is None else pack(body, self._codec))
        for name in sorted(self._subscribed_names - served_by_peers):
            session = self._sessions.get(name)
            if session is not None:
                session.channel.send(frame)
        if isinstance(message, _FOR_JOINERS):
            self._recent_frames.append((message.step, frame))

    def resend_averages(self, session: MemberSession, step: int) -> bool:
        """Send the averages of a step again; return whether any were still in memory."""
        kept_frames = [
            frame
            for broadcast_step, frame in self._recent_frames
            if broadcast_step == step and not isinstance(frame.message, Commit)
        ]
        for frame in kept_frames:
            session.channel.send(frame)
        return bool(kept_frames)

    def drop_before(self, step: int) -> None:
        """Drop broadcasts of steps that the replica has applied."""
        self.since = max(self.since, step)
        while self._recent_frames and self._recent_frames[0][0] < self.since:
            self._recent_frames.popleft()

    def subscribe(self, session: MemberSession, step: int) -> None:
        """Subscribe a worker that has applied `step` steps (at least `since`); first send it the
        broadcasts of later steps."""
        assert step >= self.since
        for broadcast_step, frame in self._recent_frames:
            if broadcast_step >= step:
                session.channel.send(frame)
        self._subscribed_names.add(session.name)

    def find_slow_readers(self, step: int) -> list[str]:
        """Return the workers that still have data of earlier steps in their send queues."""
        return [
            name for name in sorted(self._subscribed_names) if self._next_step(name, step) < step
        ]

    def _next_step(self, worker: str, step: int) -> int:
        session = self._sessions.get(worker)
        queued_messages = session.channel.waiting_messages if session is not None else iter(())
        return next((m.step for m in queued_messages if isinstance(m, _FOR_JOINERS)), step)

    def detach(self, worker: str, step: int) -> int:
        """Unsubscribe a worker and clear its send queue.

        Returns:
            The first step that the worker needs again, with all later ones, from the log.
        """
        next_step = self._next_step(worker, step)
        self.unsubscribe(worker)
        if (session := self._sessions.get(worker)) is not None:
            session.channel.withdraw(_IN_STEP)
        return next_step

    def is_far_behind(self, step: int, newest_step: int, manifest: Manifest) -> bool:
        """Return whether the averages from `step` to `newest_step` are too large to send instead of
        the state (`max_replay_bytes`)."""
        return (newest_step - step) * manifest.elements * 4 > max_replay_bytes(manifest)

    async def send_state(
        self, channel: Channel, run_id: str, storage: RunStorage, checkpoint_state: CheckpointState
    ) -> None:
        """Send a whole state to a worker, as fast as the worker reads.

        Raises:
            SamestepError: The state cannot be read.
        """
        *_, last = checkpoint_state.pieces()
        async for piece, values in storage.stream_pieces(checkpoint_state):
            await channel.wait_for_room()
            if channel.closed or self.is_over:
                return
            message = StateChunk(
                run_id=run_id, kind=piece.kind, block=piece.block, chunk=piece.chunk,
                step=checkpoint_state.step, optimizer_step=checkpoint_state.optimizer_step,
                last=piece == last,
            )  # fmt: skip
            channel.send(encode(message, values))

    async def replay(
        self,
        channel: Channel,
        storage: RunStorage,
        manifest: Manifest,
        replay: Replay,
        term: int,
        *,
        hold: LogHold,
    ) -> int | None:
        """Send a worker committed steps from the log, as fast as the worker reads, up to the steps
        whose broadcasts are still in memory.

        Args:
            channel: Channel of the worker.
            storage: The files of the run, with the log.
            manifest: The run's manifest, with the kind of each block.
            replay: The first step, and the digest of the state before it.
            term: Term of the coordinator for the messages; the log may have steps of earlier terms.
            hold: The hold of the log for this worker; moved to each next step.

        Returns:
            The number of steps that the worker then has, for `subscribe`; None if the log does not
            lead there.

        Raises:
            SamestepError: The log cannot be read.
        """
        step, digest = replay.step, replay.state_digest
        while step < self.since and not (channel.closed or self.is_over):
            logged_steps = await storage.read_logged_steps(step)
            if not logged_steps or digest not in (None, logged_steps[0].record.state_before):
                return None
            digest = None
            for logged_step in logged_steps:
                if logged_step.record.commit.scalars is not None and not logged_step.has_averages:
                    return None
                await self._send_step(channel, storage, manifest, term, logged_step)
                step += 1
                hold.step = step
        return step

    async def _send_step(
        self,
        channel: Channel,
        storage: RunStorage,
        manifest: Manifest,
        term: int,
        logged_step: LoggedStep,
    ) -> None:
        """Send a logged step, unless the run ends: the worker may then be in the next run."""
        commit = logged_step.record.commit
        if commit.scalars is not None:
            step_id = {"term": term, "step": commit.step, "attempt": commit.attempt}
            async for block, chunk, values in storage.stream_chunks(logged_step):
                await channel.wait_for_room()
                if channel.closed or self.is_over:
                    return
                is_block = manifest.blocks[block].kind == "block"
                message_type = AveragedBlockGradient if is_block else AveragedNonBlockGradient
                message = message_type(**step_id, block=block, chunk=chunk)
                channel.send(encode(message, pack(values, self._codec)))
        if not self.is_over:
            channel.send(encode(commit.model_copy(update={"term": term})))

    def clear(self) -> None:
        """Drop all kept broadcasts: the run is over."""
        self.is_over = True
        self._recent_frames.clear()
