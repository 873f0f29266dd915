"""The states of single replicas on disk: their own between rounds, and boundaries within one.

In `replicas/` of the run's directory:

    own-STEP            of all replicas at the start of that round (`own_files`); written and
                        synced before the commit that leads there and names its digest
    boundary-K          where replica K is in the round in progress: not synced, for a boundary
                        saves work and decides no bit; a restart does without

Of the first kind those are kept that a restart may go back to: of the last rounds, and of every
checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    make_below,
    replace_file,
    storing,
)
from coordinator.run.outputs.kept import Bytes
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.states.checkpoint import checkpoint_steps
from coordinator.storage.states.own_files import (
    DIGEST_BYTES,
    NOTHING_YET,
    digest_of,
    own_digest,
    own_steps,
    told_digests,
    verified,
)
from protocol.base import limits
from protocol.base.errors import StorageDamaged, StorageFailed
from protocol.base.regular_file import open_regular
from protocol.wire.messages import Boundary, StretchRequest

LATEST: Final = 4
"""Rounds of which own states are kept in any case: a checkpoint may still be being written."""


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
        own_lengths: Of a replica's own state (`own_state_lengths`); empty if they have none.
        every: A checkpoint is made after so many rounds; 0: none but the first and last.
        guard: Raises if the directory is not this coordinator's any more.
        step: The round that the run goes on with.
        told: The digest of the own states at its start, as the commit before it names it.
    """

    def __init__(
        self,
        directory: RunDirectory,
        own_lengths: Sequence[int],
        every: int,
        guard: Callable[[], None],
        *,
        step: int = 0,
        told: str = NOTHING_YET,
    ) -> None:
        self._directory = directory
        self._told = {step: told}
        self._path = directory.replicas
        self._made = self._path.is_dir()
        self._checkpoints = directory.checkpoints
        self._own_lengths = own_lengths
        self._own_bytes = next(iter(own_lengths), 0)
        self._every = every
        self._guard = guard
        self._whole: dict[int, _At] = {}
        self._hashing: dict[int, Any] = {}
        for left in self._path.glob("boundary-*"):
            left.unlink(missing_ok=True)

    def keep_own(self, step: int, content: Sequence[Bytes]) -> str | None:
        """Make the replicas' own states at the start of a round durable.

        Args:
            step: The round.
            content: Of all replicas, in order; empty after a round that was skipped: what they had
                stays theirs.

        Returns:
            Their digest, for the commit to name; None where replicas have no own states.

        Raises:
            StorageFailed: The disk refuses.
            RunFailed: The directory has another coordinator now.
        """
        if not self._own_bytes:
            return None
        self._guard()
        self._make()
        digests: list[bytes] = []
        replace_file(self._directory.own_file(step), self._sealed(step, content, digests))
        self._told = {known: told for known, told in self._told.items() if known > step - LATEST}
        self._told[step] = own_digest(digests) if content else self._told[step - 1]
        self._whole.clear()
        self._prune(step)
        return self._told[step]

    def _make(self) -> None:
        """Once: a directory that has vanished since is to be brought back."""
        if not self._made:
            with storing("make", self._path):
                make_below(self._path.parent, self._path)
            self._made = True

    def _sealed(
        self, step: int, content: Sequence[Bytes], digests: list[bytes]
    ) -> Iterator[memoryview]:
        if not content:
            yield from self._as_before(step - 1)
            return
        joined: list[memoryview] = []
        for piece in content:
            joined.append(piece.data)
            if sum(map(len, joined)) == self._own_bytes:
                digests.append(digest_of(joined))
                yield memoryview(digests[-1])
                yield from joined
                joined = []
        assert not joined, "the round has all of every replica"

    def _as_before(self, step: int) -> Iterator[memoryview]:
        path = self._directory.own_file(step)
        if step == 0:
            return
        with open_regular(path) as file:
            while piece := file.read(limits.BODY_BYTES):
                yield memoryview(piece)

    def _prune(self, step: int) -> None:
        saved = set(checkpoint_steps(self._checkpoints))
        newest = max(saved, default=0)
        for there in own_steps(self._path):
            due = self._every > 0 and there > newest and there % self._every == 0
            if there <= step - LATEST and there not in saved and not due:
                self._directory.own_file(there).unlink(missing_ok=True)

    def write_boundary(self, message: Boundary, content: Bytes) -> None:
        """Take a piece of a boundary, in order; what is whole takes the place of the one before.

        Raises:
            StorageFailed: The disk refuses.
            RunFailed: The directory has another coordinator now.
        """
        self._guard()
        replica, inner = message.replica, message.inner
        path = self._path / f"boundary-{replica}"
        with storing("write", path):
            self._make()
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
            boundary = self._boundary_of(replica, at.digest)
            if boundary is not None:
                pieces.append(boundary)
                inner = at.place[2]
        return inner, itertools.chain.from_iterable(pieces)

    def _boundary_of(self, replica: int, digest: bytes) -> Iterator[bytes] | None:
        """None where it is not what was written, or gone: it is done without.

        A coordinator that takes the directory over removes those of the one before, which may not
        know of it yet.
        """
        path = self._path / f"boundary-{replica}"
        with contextlib.suppress(StorageFailed):
            with storing("read", path):
                length = path.stat().st_size
            boundary = verified(path, 0, length)
            if next(boundary) == digest:
                return boundary
            boundary.close()
        return None

    def _own_of(self, step: int, replica: int) -> Iterator[bytes]:
        path, told = self._directory.own_file(step), self._told.get(step)
        found = None if told is None else told_digests(path, self._own_lengths, told)
        if found is not None:
            own_bytes, digests = found
            if not digests:  # every round so far was skipped
                return _zeros(self._own_bytes)
            start = replica * (own_bytes + DIGEST_BYTES) + DIGEST_BYTES
            own = verified(path, start, own_bytes)
            if next(own) == digests[replica]:
                # What an older release has not counted comes last, and is nothing missed.
                return itertools.chain(own, _zeros(self._own_bytes - own_bytes))
            own.close()
        reason = "it is not what was written; go back to a checkpoint (--from-step N)"
        raise StorageDamaged(str(path), f"replica {replica}", reason)


def _zeros(length: int) -> Iterator[bytes]:
    for at in range(0, length, limits.BODY_BYTES):
        yield bytes(min(limits.BODY_BYTES, length - at))
