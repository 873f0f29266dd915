"""Sends workers the run's files, chunk by chunk, from disk.

Reading and encoding happen in threads; chunks wait in a queue that halts and heartbeats overtake.
Each worker has few chunks in flight, which bounds the coordinator's memory.
"""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections import deque
from typing import Final, NamedTuple

import structlog

from coordinator.files.blob_index import Blob, BlobIndex
from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.spec.files.file_digest import lasting_identity, open_file_digest, open_plain
from protocol.wire.connection import EncodedMessage, encode
from protocol.wire.messages import BlobChunk, BlobRequest
from protocol.wire.transport import Channel

log = structlog.get_logger("coordinator")

_UNREAD_BYTES: Final = (
    limits.UNANSWERED_BLOB_BYTES
    + limits.UNANSWERED_BLOB_CHUNKS * limits.HEADER_BYTES
    + limits.RUN_SPEC_BYTES
)
"""The most bytes in the send queue of a worker that keeps its limits, including StartRun and
heartbeats."""


class _Request(NamedTuple):
    message: BlobRequest
    blob: Blob
    nbytes: int


class BlobServer:
    """Serves the blobs of one run; a run may have none."""

    def __init__(self, run_id: str, index: BlobIndex | None) -> None:
        self._run_id = run_id
        self._blobs = index.blobs if index is not None else {}
        self._checked_files: dict[str, tuple[tuple[int, ...], bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[Channel, deque[_Request]] = {}

    def request(self, channel: Channel, message: BlobRequest) -> None:
        """Send a worker a chunk, after the chunks that it has requested before.

        Raises:
            OutOfOrder: The run's blobs have no such chunk, or too many are in flight.
        """
        if message.run_id != self._run_id:
            return  # a request for the previous run, which ended meanwhile
        blob = self._blobs.get(message.digest)
        if blob is None:
            raise OutOfOrder(f"BlobRequest: {message.digest[:12]} is not a blob of this run")
        if message.offset > max(blob.size - 1, 0):
            raise OutOfOrder(
                f"BlobRequest: expected an offset in {blob.size} bytes, got {message.offset}"
            )
        request = _Request(message, blob, min(limits.BODY_BYTES, blob.size - message.offset))
        chunk_queue = self._waiting.get(channel, deque())
        unread_bytes = channel.queued_bytes + sum(chunk.nbytes for chunk in chunk_queue)
        if (
            len(chunk_queue) >= limits.UNANSWERED_BLOB_CHUNKS
            or unread_bytes + request.nbytes > _UNREAD_BYTES
        ):
            raise OutOfOrder("BlobRequest: too many chunks requested at once")
        chunk_queue.append(request)
        if channel not in self._waiting:
            self._waiting[channel] = chunk_queue
            task = asyncio.get_running_loop().create_task(self._serve(channel))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def has_requests(self, channel: Channel) -> bool:
        """Return whether requested chunks wait for this connection."""
        return channel in self._waiting

    async def _serve(self, channel: Channel) -> None:
        chunk_queue = self._waiting[channel]
        try:
            while chunk_queue and not channel.closed:
                channel.send(await asyncio.to_thread(self._chunk, *chunk_queue[0]))
                chunk_queue.popleft()
        finally:
            del self._waiting[channel]

    def _chunk(self, message: BlobRequest, blob: Blob, nbytes: int) -> EncodedMessage:
        body = b""
        try:
            body = self._content(message.digest, blob, message.offset, nbytes)
        except OSError as error:
            log.warning("blob_unreadable", path=str(blob.content), reason=error.strerror)
        if len(body) < nbytes:
            log.warning("blob_changed", path=str(blob.content), digest=message.digest)
        chunk = BlobChunk(run_id=self._run_id, digest=message.digest, offset=message.offset)
        return encode(chunk, body)

    def _content(self, digest: str, blob: Blob, offset: int, count: int) -> bytes:
        """Read from the file that was hashed, or from a file with the same digest; else return
        nothing.

        Anyone who can write to a data directory could replace a file by a link to a secret.
        """
        if isinstance(blob.content, bytes):
            return blob.content[offset : offset + count]
        with open_plain(blob.content) as file:
            identity = lasting_identity(os.fstat(file.fileno()), time.time_ns())
            checked_identity, is_valid = self._checked_files.get(digest, (blob.identity, True))
            if not identity or checked_identity != identity:
                is_valid = open_file_digest(file) == (blob.size, digest)
                self._checked_files[digest] = identity, is_valid
            return _read(file, offset, count) if is_valid else b""


def _read(file: io.FileIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    pieces, remaining = [], count
    while remaining and (piece := file.read(remaining)):
        pieces.append(piece)
        remaining -= len(piece)
    return b"".join(pieces)
