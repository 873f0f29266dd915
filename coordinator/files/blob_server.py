"""Answers workers that ask for a run's files, chunk by chunk, from disk.

Reading and encoding happen in threads; chunks wait in the line that halts and heartbeats overtake.
A worker has few chunks on their way at a time, so that none can make the coordinator hold much.
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
from protocol.base.errors import OutOfPlace
from protocol.spec.file_digest import lasting_identity, open_file_digest, open_plain
from protocol.wire.connection import Encoded, encode
from protocol.wire.messages import BlobChunk, BlobRequest
from protocol.wire.transport import Channel

log = structlog.get_logger("coordinator")

_UNREAD_BYTES: Final = (
    limits.UNANSWERED_BLOB_BYTES
    + limits.UNANSWERED_BLOB_CHUNKS * limits.HEADER_BYTES
    + limits.RUN_SPEC_BYTES
)
"""What may wait for a worker that keeps to its share, its StartRun and heartbeats included."""


class _Wanted(NamedTuple):
    message: BlobRequest
    blob: Blob
    nbytes: int


class BlobServer:
    """Serves the blobs of one run, and nothing else; a run may have none."""

    def __init__(self, run_id: str, index: BlobIndex | None) -> None:
        self._run_id = run_id
        self._blobs = index.blobs if index is not None else {}
        self._seen: dict[str, tuple[tuple[int, ...], bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[Channel, deque[_Wanted]] = {}

    def request(self, channel: Channel, message: BlobRequest) -> None:
        """A worker asks for a chunk: send it, after those that it has asked for before.

        Raises:
            OutOfPlace: It is no chunk of the run's blobs, or too many are on their way.
        """
        if message.run_id != self._run_id:
            return  # of the run before: its end crossed the request
        blob = self._blobs.get(message.digest)
        if blob is None:
            raise OutOfPlace(f"BlobRequest: {message.digest[:12]} is no blob of this run")
        if message.offset > max(blob.size - 1, 0):
            raise OutOfPlace(
                f"BlobRequest: expected an offset in {blob.size} bytes, got {message.offset}"
            )
        wanted = _Wanted(message, blob, min(limits.BODY_BYTES, blob.size - message.offset))
        waiting = self._waiting.get(channel, deque())
        unread = channel.queued_bytes + sum(each.nbytes for each in waiting)
        if len(waiting) >= limits.UNANSWERED_BLOB_CHUNKS or unread + wanted.nbytes > _UNREAD_BYTES:
            raise OutOfPlace("BlobRequest: too many chunks asked for at once")
        waiting.append(wanted)
        if channel not in self._waiting:
            self._waiting[channel] = waiting
            task = asyncio.get_running_loop().create_task(self._serve(channel))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def serves(self, channel: Channel) -> bool:
        """Whether chunks that were asked for are still to be sent there."""
        return channel in self._waiting

    async def _serve(self, channel: Channel) -> None:
        waiting = self._waiting[channel]
        try:
            while waiting and not channel.closed:
                channel.send(await asyncio.to_thread(self._chunk, *waiting[0]))
                waiting.popleft()
        finally:
            del self._waiting[channel]

    def _chunk(self, message: BlobRequest, blob: Blob, nbytes: int) -> Encoded:
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
        """Of the very file that was hashed, or of one that has its digest; else nothing.

        Whoever can write a data directory could put a link to a secret in a file's place.
        """
        if isinstance(blob.content, bytes):
            return blob.content[offset : offset + count]
        with open_plain(blob.content) as file:
            present = lasting_identity(os.fstat(file.fileno()), time.time_ns())
            known, fits = self._seen.get(digest, (blob.identity, True))
            if not present or known != present:
                fits = open_file_digest(file) == (blob.size, digest)
                self._seen[digest] = present, fits
            return _read(file, offset, count) if fits else b""


def _read(file: io.FileIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    pieces, left = [], count
    while left and (piece := file.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
