"""Answers workers that ask for a run's files, chunk by chunk, from disk.

Reading and encoding happen in threads; chunks wait in the line that halts and heartbeats overtake.
A worker has few chunks on their way at a time, so that none can make the coordinator hold much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Final

import structlog

from coordinator.blob_index import Blob, BlobIndex
from protocol import limits
from protocol.connection import Encoded, encode
from protocol.errors import OutOfPlace
from protocol.messages import BlobChunk, BlobRequest
from protocol.transport import Channel

log = structlog.get_logger("coordinator")

_UNREAD_BYTES: Final = (
    limits.UNANSWERED_BLOB_CHUNKS * (limits.BODY_BYTES + limits.HEADER_BYTES)
    + limits.RUN_SPEC_BYTES
)
"""What may wait for a worker that keeps to its share, its StartRun and heartbeats included."""


class BlobServer:
    """Serves the blobs of one run, and nothing else."""

    def __init__(self, run_id: str, index: BlobIndex) -> None:
        self._run_id = run_id
        self._index = index
        self._waiting: dict[Channel, deque[BlobRequest]] = {}

    def request(self, channel: Channel, message: BlobRequest) -> Coroutine[None, None, None] | None:
        """A worker asks for a chunk; gives the work to be spawned, if none is under way for it.

        Raises:
            OutOfPlace: It is no chunk of the run's blobs, or too many are on their way.
        """
        blob = self._index.blobs.get(message.digest)
        if blob is None:
            raise OutOfPlace(f"BlobRequest: {message.digest[:12]} is no blob of this run")
        if message.offset > max(blob.size - 1, 0):
            raise OutOfPlace(
                f"BlobRequest: expected an offset in {blob.size} bytes, got {message.offset}"
            )
        waiting = self._waiting.get(channel)
        unread = len(waiting or ()) * limits.BODY_BYTES + channel.queued_bytes
        if unread + limits.BODY_BYTES > _UNREAD_BYTES:
            raise OutOfPlace(
                f"BlobRequest: more than {limits.UNANSWERED_BLOB_CHUNKS} chunks asked for at once"
            )
        if waiting is not None:
            waiting.append(message)
            return None
        self._waiting[channel] = deque((message,))
        return self._serve(channel)

    async def _serve(self, channel: Channel) -> None:
        waiting = self._waiting[channel]
        try:
            while waiting and not channel.closed:
                message = waiting[0]
                blob = self._index.blobs[message.digest]
                channel.send(await asyncio.to_thread(self._chunk, message, blob))
                waiting.popleft()
        finally:
            del self._waiting[channel]

    def _chunk(self, message: BlobRequest, blob: Blob) -> Encoded:
        wanted = min(limits.BODY_BYTES, blob.size - message.offset)
        body = b""
        try:
            body = _read(blob, message.offset, wanted)
        except OSError as error:
            log.warning("blob_unreadable", path=str(blob.content), reason=error.strerror)
        if len(body) < wanted:
            log.warning("blob_changed", path=str(blob.content), digest=message.digest)
        chunk = BlobChunk(run_id=self._run_id, digest=message.digest, offset=message.offset)
        return encode(chunk, body)


def _read(blob: Blob, offset: int, count: int) -> bytes:
    if not isinstance(blob.content, Path):
        return blob.content[offset : offset + count]
    with blob.content.open("rb") as file:
        file.seek(offset)
        return file.read(count)
