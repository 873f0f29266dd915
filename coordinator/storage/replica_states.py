"""The states of single replicas on disk: their own between rounds, and boundaries within one.

In `replicas/` of the run's directory:

    own-STEP            of all replicas at the start of that round, one after the other, each
                        behind its BLAKE3 digest; written and synced before the commit that leads
                        there, so a restart finds it
    boundary-K          where replica K is in the round in progress: not synced, for a boundary
                        saves work and decides no bit; a restart does without

Of the first kind those are kept that a restart may go back to: of the last rounds, and of every
checkpoint.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from blake3 import blake3

from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    make_directory,
    replace_file,
    storing,
)
from coordinator.run.kept import Bytes
from coordinator.storage.checkpoint import checkpoint_steps
from coordinator.storage.run_directory import RunDirectory
from protocol.base import limits
from protocol.base.errors import StorageDamaged
from protocol.wire.messages import Boundary, StretchRequest

LATEST: Final = 4
"""Rounds of which own states are kept in any case: a checkpoint may still be being written."""
_DIGEST_BYTES: Final = 32
_OWN: Final = re.compile(r"own-(\d{1,18})")


@dataclass(frozen=True, slots=True)
class _At:
    """Which boundary a replica's file holds, once it is whole."""

    place: tuple[int, int, int]
    """Round, attempt, inner steps."""
    digest: bytes


class ReplicaStates:
    """Of one run; its methods run in one thread.

    Args:
        directory: The run's.
        own_bytes: Length of a replica's own state; 0 if they have none.
        every: A checkpoint is made after so many rounds; 0: none but the first and last.
        guard: Raises if the directory is not this coordinator's any more.
    """

    def __init__(
        self, directory: RunDirectory, own_bytes: int, every: int, guard: Callable[[], None]
    ) -> None:
        self._path = directory.replicas
        self._checkpoints = directory.checkpoints
        self._own_bytes = own_bytes
        self._every = every
        self._guard = guard
        self._whole: dict[int, _At] = {}
        self._hashing: dict[int, Any] = {}
        for left in self._path.glob("boundary-*"):
            left.unlink(missing_ok=True)

    def keep_own(self, step: int, content: Sequence[Bytes]) -> None:
        """Make the replicas' own states at the start of a round durable.

        Args:
            step: The round.
            content: Of all replicas, in order; empty after a round that was skipped: what they had
                stays theirs.

        Raises:
            StorageFailed: The disk refuses.
            RunFailed: The directory has another coordinator now.
        """
        if not self._own_bytes:
            return
        self._guard()
        with storing("make", self._path):
            make_directory(self._path)
        replace_file(self._path / f"own-{step}", self._sealed(step, content))
        self._whole.clear()
        self._prune(step)

    def _sealed(self, step: int, content: Sequence[Bytes]) -> Iterator[memoryview]:
        if not content:
            yield from self._as_before(step - 1)
            return
        joined: list[memoryview] = []
        for piece in content:
            joined.append(piece.data)
            if sum(map(len, joined)) == self._own_bytes:
                yield memoryview(_digest(joined))
                yield from joined
                joined = []
        assert not joined, "the round has all of every replica"

    def _as_before(self, step: int) -> Iterator[memoryview]:
        path = self._path / f"own-{step}"
        if step == 0:
            return
        with path.open("rb") as file:
            while piece := file.read(limits.BODY_BYTES):
                yield memoryview(piece)

    def _prune(self, step: int) -> None:
        saved = set(checkpoint_steps(self._checkpoints))
        newest = max(saved, default=0)
        for there in own_steps(self._path):
            due = self._every > 0 and there > newest and there % self._every == 0
            if there <= step - LATEST and there not in saved and not due:
                (self._path / f"own-{there}").unlink(missing_ok=True)

    def write_boundary(self, message: Boundary, content: Bytes) -> None:
        """Take a piece of a boundary, in order; what is whole takes the place of the one before.

        Raises:
            StorageFailed: The disk refuses.
        """
        replica, inner = message.replica, message.inner
        path = self._path / f"boundary-{replica}"
        with storing("write", path):
            self._path.mkdir(exist_ok=True)
            temporary = path.with_name(f"{path.name}-{inner}{TEMPORARY_SUFFIX}")
            with temporary.open("ab" if message.chunk else "wb") as file:
                file.write(content.data)
            hasher = self._hashing[replica] if message.chunk else blake3()
            self._hashing[replica] = hasher
            hasher.update(content.data)
            if not message.last:
                return
            known, place = self._whole.get(replica), (message.step, message.attempt, inner)
            if known is not None and known.place >= place:
                temporary.unlink()
                return
            digest = hasher.digest()
            temporary.replace(path)
            self._whole[replica] = _At(place, digest)

    def answer(self, request: StretchRequest) -> tuple[int, Iterator[bytes]]:
        """What going on with a stretch takes.

        Returns:
            After how many inner steps the newest boundary is (0: there is none); and in pieces the
            replica's own state, if it was asked for, then the boundary. What they are read from
            stays as it is, also where a newer one takes its place.

        Raises:
            StorageFailed: The disk refuses.
            StorageDamaged: An own state is not whole.
        """
        pieces: list[Iterator[bytes]] = []
        replica, place = request.replica, (request.step, request.attempt)
        if request.own:
            pieces.append(self._own_of(request.step, replica))
        inner, at = 0, self._whole.get(replica)
        if at is not None and at.place[:2] == place:
            path = self._path / f"boundary-{replica}"
            boundary = _verified(path, 0, path.stat().st_size)
            if next(boundary) == at.digest:
                pieces.append(boundary)
                inner = at.place[2]
            else:  # it is done without
                boundary.close()
        return inner, itertools.chain.from_iterable(pieces)

    def _own_of(self, step: int, replica: int) -> Iterator[bytes]:
        path = self._path / f"own-{step}"
        start = replica * (self._own_bytes + _DIGEST_BYTES) + _DIGEST_BYTES
        with storing("read", path), path.open("rb") as file:
            if not path.stat().st_size:  # every round so far was skipped
                return _zeros(self._own_bytes)
            file.seek(start - _DIGEST_BYTES)
            digest = file.read(_DIGEST_BYTES)
        own = _verified(path, start, self._own_bytes)
        if next(own) != digest:
            own.close()
            reason = "it is not what was written; go back to a checkpoint (--from-step N)"
            raise StorageDamaged(str(path), f"replica {replica}", reason)
        return own


def _zeros(length: int) -> Iterator[bytes]:
    for at in range(0, length, limits.BODY_BYTES):
        yield bytes(min(limits.BODY_BYTES, length - at))


def _verified(path: Path, start: int, length: int) -> Generator[bytes]:
    """A part of a file: first its digest, then itself in pieces; whoever stops early closes it."""
    with storing("read", path), path.open("rb") as file:
        hasher = blake3()
        for piece in _pieces(file, start, length):
            hasher.update(piece)
        yield hasher.digest()
        yield from _pieces(file, start, length)


def _pieces(file: BinaryIO, start: int, length: int) -> Iterator[bytes]:
    file.seek(start)
    while length and (piece := file.read(min(limits.BODY_BYTES, length))):
        length -= len(piece)
        yield piece


def _digest(pieces: Sequence[memoryview]) -> bytes:
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def own_steps(path: Path) -> list[int]:
    """The rounds of which own states are there, ascending."""
    found = (_OWN.fullmatch(entry.name) for entry in path.glob("own-*"))
    return sorted(int(match[1]) for match in found if match is not None)
