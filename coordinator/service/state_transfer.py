"""How a worker gets the run's state: all of it, or the steps that it has missed."""

from __future__ import annotations

from typing import Final

from coordinator.run.actions import Replay
from coordinator.service.followers import Followers
from coordinator.storage.log_index import LoggedStep
from coordinator.storage.run_storage import RunStorage
from protocol.base import limits
from protocol.exact.replica import Replica
from protocol.exact.update import Array
from protocol.spec.manifest import Manifest
from protocol.wire.connection import encode
from protocol.wire.messages import AveragedBlockGradient, AveragedNonBlockGradient, StateChunk
from protocol.wire.transport import Channel

_MOST_STATE_PARTS: Final = 3
"""Parameters and two moments: the whole state is as long as the averages of so many steps."""


def send_state(channel: Channel, run_id: str, manifest: Manifest, snapshot: Replica) -> None:
    """Send a whole state.

    Args:
        channel: The worker's.
        run_id: The run's.
        manifest: Says how the state is cut into chunks.
        snapshot: The state; nobody changes it any more.
    """
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
        channel.send(encode(message, part.values[piece]))


async def send_missed(
    channel: Channel,
    storage: RunStorage,
    manifest: Manifest,
    missed: Replay,
    *,
    epoch: int,
    followers: Followers,
) -> int | None:
    """Send committed steps from the log, until what comes then is kept in memory.

    Args:
        channel: The worker's.
        storage: Has the log.
        manifest: Says how averages are cut into chunks.
        missed: From which step on, and from which state.
        epoch: The coordinator's; the messages carry it, whichever wrote the step.
        followers: Know from which step on broadcasts are kept.

    Returns:
        How many steps the worker has then; None if the log does not lead there, or the whole
        state is less to send.

    Raises:
        SamestepError: The log cannot be read.
    """
    step, known = missed.step, missed.state_digest
    missed_bytes = (followers.since - step) * manifest.elements * 4
    if missed_bytes > max(limits.REPLAY_BYTES, _MOST_STATE_PARTS * manifest.elements * 4):
        return None
    while step < followers.since and not (channel.closed or followers.over):
        row = await storage.logged(step)
        if not row or known not in (None, row[0].record.state_before):
            return None
        known = None
        for logged in row:
            averages = await storage.averages(logged)
            if averages is None and logged.record.commit.scalars is not None:
                return None
            if followers.over:
                return step  # the worker is in the next run already
            _send_step(channel, manifest, epoch, logged, averages)
            step += 1
    return step


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
