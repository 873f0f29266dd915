"""Per-replica state on disk: between rounds, and inner checkpoints within one.

In `replicas/` of the run's directory:

    own-STEP            the states of all replicas at the start of round STEP, in order, each after
                        its BLAKE3 digest; written and synced before the commit that leads to the
                        round
    boundary-K          the inner checkpoint of replica K in the round in progress; not synced: it
                        saves work but decides no bit, so a restart does not need it

Nothing in an `own` file is trusted: the BLAKE3 of its digests must equal `own_digest` in the commit
that leads to the round, in log and journal. Before the first round there is no per-replica state,
and the digest is `EMPTY_DIGEST`. Files of the last rounds and of every checkpoint are kept, since a
restart may roll back to them.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from blake3 import blake3

from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    make_below,
    replace_file,
    storage_errors,
)
from coordinator.run.outputs.side_outputs import Bytes, replica_state_sizes
from coordinator.storage.directory.journal import newest_commit
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.states.checkpoint import checkpoint_steps
from protocol.base import limits
from protocol.base.errors import StorageDamaged, StorageFailed
from protocol.base.regular_file import open_regular
from protocol.spec.manifest import Manifest
from protocol.wire.messages import InnerCheckpointChunk, InnerStateRequest

EMPTY_DIGEST: Final = blake3().hexdigest()
DIGEST_BYTES: Final = 32
_STATE_FILE_NAME: Final = re.compile(r"own-(\d{1,18})")
ROUNDS_KEPT: Final = 4
"""Number of newest rounds whose state is always kept: a checkpoint may be in progress."""


@dataclass(frozen=True, slots=True)
class _InnerCheckpoint:
    """The complete inner checkpoint in a replica's file."""

    position: tuple[int, int, int]
    """Round, attempt, inner steps."""
    digest: bytes


class ReplicaStates:
    """The per-replica state of one run. All methods must be called in one thread.

    Args:
        directory: Directory of the run.
        state_lengths: The possible sizes of a replica's state (`replica_state_sizes`); empty if
            there is no such state.
        every: Number of rounds between checkpoints; 0: only the first and the last checkpoint.
        guard: Raises if this coordinator does not own the directory any more.
        step: The round with which the run continues.
        own_digest: Digest of the state at the start of that round, as in the preceding commit.
    """

    def __init__(
        self,
        directory: RunDirectory,
        state_lengths: Sequence[int],
        every: int,
        guard: Callable[[], None],
        *,
        step: int = 0,
        own_digest: str = EMPTY_DIGEST,
    ) -> None:
        self._directory = directory
        self._round_digests = {step: own_digest}
        self._path = directory.replicas
        self._exists = self._path.is_dir()
        self._checkpoints = directory.checkpoints
        self._state_lengths = state_lengths
        self._state_bytes = next(iter(state_lengths), 0)
        self._every = every
        self._guard = guard
        self._complete: dict[int, _InnerCheckpoint] = {}
        self._hashing: dict[int, Any] = {}
        for leftover in self._path.glob("boundary-*"):
            leftover.unlink(missing_ok=True)

    def save_round(self, step: int, content: Sequence[Bytes]) -> str | None:
        """Make the per-replica state at the start of a round durable.

        Args:
            step: The round.
            content: States of all replicas, in order; empty after a skipped round.

        Returns:
            The digest of the state, for the commit; None without per-replica state.

        Raises:
            StorageFailed: A write failed.
            RunFailed: Another coordinator owns the directory now.
        """
        if not self._state_bytes:
            return None
        self._guard()
        self._make_directory()
        digests: list[bytes] = []
        replace_file(
            self._directory.replica_state_file(step), self._with_digests(step, content, digests)
        )
        self._round_digests = {
            other: digest
            for other, digest in self._round_digests.items()
            if other > step - ROUNDS_KEPT
        }
        self._round_digests[step] = (
            combined_digest(digests) if content else self._round_digests[step - 1]
        )
        self._complete.clear()
        self._prune(step)
        return self._round_digests[step]

    def _make_directory(self) -> None:
        """Create the directory once: if it vanishes later, it must be restored."""
        if not self._exists:
            with storage_errors("make", self._path):
                make_below(self._path.parent, self._path)
            self._exists = True

    def _with_digests(
        self, step: int, content: Sequence[Bytes], digests: list[bytes]
    ) -> Iterator[memoryview]:
        if not content:
            yield from self._previous_content(step - 1)
            return
        pieces: list[memoryview] = []
        for piece in content:
            pieces.append(piece.data)
            if sum(map(len, pieces)) == self._state_bytes:
                digests.append(state_digest_of(pieces))
                yield memoryview(digests[-1])
                yield from pieces
                pieces = []
        assert not pieces, "the round has the whole state of every replica"

    def _previous_content(self, step: int) -> Iterator[memoryview]:
        path = self._directory.replica_state_file(step)
        if step == 0:
            return
        with open_regular(path) as file:
            while piece := file.read(limits.BODY_BYTES):
                yield memoryview(piece)

    def _prune(self, step: int) -> None:
        saved_steps = set(checkpoint_steps(self._checkpoints))
        newest = max(saved_steps, default=0)
        for round_ in replica_state_steps(self._path):
            is_due = self._every > 0 and round_ > newest and round_ % self._every == 0
            if round_ <= step - ROUNDS_KEPT and round_ not in saved_steps and not is_due:
                self._directory.replica_state_file(round_).unlink(missing_ok=True)

    def write_inner_checkpoint(self, message: InnerCheckpointChunk, content: Bytes) -> None:
        """Write the next piece of an inner checkpoint; a complete checkpoint replaces the earlier
        one.

        Raises:
            StorageFailed: A write failed.
            RunFailed: Another coordinator owns the directory now.
        """
        self._guard()
        replica, inner = message.replica, message.inner
        path = self._path / f"boundary-{replica}"
        with storage_errors("write", path):
            self._make_directory()
            temporary = path.with_name(f"{path.name}-{inner}{TEMPORARY_SUFFIX}")
            with temporary.open("ab" if message.chunk else "wb") as file:
                file.write(content.data)
            hasher = self._hashing[replica] if message.chunk else blake3()
            self._hashing[replica] = hasher
            hasher.update(content.data)
            if not message.last:
                return
            complete = self._complete.get(replica)
            position = (message.step, message.attempt, inner)
            if complete is not None and complete.position >= position:
                temporary.unlink()
                return
            digest = hasher.digest()
            temporary.replace(path)
            self._complete[replica] = _InnerCheckpoint(position, digest)

    def read_inner_state(self, request: InnerStateRequest) -> tuple[int, Iterator[bytes]]:
        """Return the state from which a worker continues an inner phase.

        Returns:
            The inner step of the newest inner checkpoint (0: there is none); and, in pieces, the
            per-replica state if requested, then the inner checkpoint. The pieces stay the same even
            if a newer checkpoint replaces the file.

        Raises:
            StorageFailed: A read failed.
            StorageDamaged: The per-replica state is damaged.
        """
        pieces: list[Iterator[bytes]] = []
        replica, attempt = request.replica, (request.step, request.attempt)
        if request.own:
            pieces.append(self._state_of(request.step, replica))
        inner, newest = 0, self._complete.get(replica)
        if newest is not None and newest.position[:2] == attempt:
            checkpoint = self._inner_checkpoint_of(replica, newest.digest)
            if checkpoint is not None:
                pieces.append(checkpoint)
                inner = newest.position[2]
        return inner, itertools.chain.from_iterable(pieces)

    def _inner_checkpoint_of(self, replica: int, digest: bytes) -> Iterator[bytes] | None:
        """Open an inner checkpoint; None if it is damaged or missing: the phase then restarts.

        Another coordinator that has taken over the directory may have removed the file.
        """
        path = self._path / f"boundary-{replica}"
        with contextlib.suppress(StorageFailed):
            with storage_errors("read", path):
                length = path.stat().st_size
            checkpoint = read_with_digest(path, 0, length)
            if next(checkpoint) == digest:
                return checkpoint
            checkpoint.close()
        return None

    def _state_of(self, step: int, replica: int) -> Iterator[bytes]:
        path, recorded_digest = (
            self._directory.replica_state_file(step),
            self._round_digests.get(step),
        )
        matching = (
            None
            if recorded_digest is None
            else matching_digests(path, self._state_lengths, recorded_digest)
        )
        if matching is not None:
            state_bytes, digests = matching
            if not digests:  # every round was skipped
                return _zeros(self._state_bytes)
            start = replica * (state_bytes + DIGEST_BYTES) + DIGEST_BYTES
            content = read_with_digest(path, start, state_bytes)
            if next(content) == digests[replica]:
                # Missed updates come last; older releases did not count them.
                return itertools.chain(content, _zeros(self._state_bytes - state_bytes))
            content.close()
        reason = "it does not match its digest; roll back to a checkpoint (--from-step N)"
        raise StorageDamaged(str(path), f"replica {replica}", reason)


def _zeros(length: int) -> Iterator[bytes]:
    for offset in range(0, length, limits.BODY_BYTES):
        yield bytes(min(limits.BODY_BYTES, length - offset))


def replica_state_steps(path: Path) -> list[int]:
    """Return the rounds whose per-replica state is on disk, ascending."""
    matches = (_STATE_FILE_NAME.fullmatch(entry.name) for entry in path.glob("own-*"))
    return sorted(int(match[1]) for match in matches if match is not None)


def combined_digest(digests: Iterable[bytes]) -> str:
    """Return the digest of all replicas' state, from the digest of each in order."""
    return blake3(b"".join(digests)).hexdigest()


def read_state_digests(path: Path, state_bytes: int) -> list[bytes] | None:
    """Return the digest before each replica's state; None if the file has another size.

    Raises:
        StorageFailed: The file cannot be read, or is missing.
    """
    with storage_errors("read", path), open_regular(path) as file:
        count, rest = divmod(path.stat().st_size, state_bytes + DIGEST_BYTES)
        digests = []
        for replica in range(count):
            file.seek(replica * (state_bytes + DIGEST_BYTES))
            digests.append(file.read(DIGEST_BYTES))
    return None if rest else digests


def matching_digests(
    path: Path, lengths: Sequence[int], recorded_digest: str | None
) -> tuple[int, list[bytes]] | None:
    """Return the size of each replica's state in a file, and the digest before each.

    Args:
        path: The file.
        lengths: The possible sizes (`replica_state_sizes`).
        recorded_digest: The digest in the commit of its round.

    Returns:
        None if the file does not have this digest.

    Raises:
        StorageFailed: The file cannot be read, or is missing.
    """
    for state_bytes in lengths:
        digests = read_state_digests(path, state_bytes)
        if digests is not None and combined_digest(digests) == recorded_digest:
            return state_bytes, digests
    return None


def state_fault(path: Path, lengths: Sequence[int], recorded_digest: str | None) -> str:
    """Return why a round's per-replica state does not match its commit's digest; empty if it does.

    All bytes are read. The arguments are those of `matching_digests`.

    Raises:
        StorageFailed: The state cannot be read.
    """
    if not path.exists():
        return "it is missing"
    if recorded_digest is None:
        return "no commit has its digest"
    found_digests = matching_digests(path, lengths, recorded_digest)
    if found_digests is None:
        return "it differs from the digest in the commit of its round"
    state_bytes, digests = found_digests
    for replica, digest in enumerate(digests):
        content = read_with_digest(
            path, replica * (state_bytes + DIGEST_BYTES) + DIGEST_BYTES, state_bytes
        )
        state = next(content)
        content.close()
        if state != digest:
            return f"the state of replica {replica} does not match its digest"
    return ""


def check_replica_states(
    directory: RunDirectory,
    run: StoredRun,
    manifest: Manifest,
    step: int,
    recorded_digest: str | None,
) -> None:
    """Check the per-replica state of the round with which the run continues, if it has such state.

    Args:
        directory: Directory of the run.
        run: The run.
        manifest: The run's manifest.
        step: The round.
        recorded_digest: The digest in the commit before the round.

    Raises:
        StorageDamaged: The state is damaged. The message lists the checkpoints to which the run can
            be rolled back.
        StorageFailed: The state cannot be read.
    """
    lengths = replica_state_sizes(run.spec, manifest)
    if not lengths or not step:
        return
    path = directory.replica_state_file(step)
    if reason := state_fault(path, lengths, recorded_digest):
        remedy = "restore it from a copy"
        if usable_steps := _usable_checkpoints(directory, lengths, step):
            steps = ", ".join(map(str, usable_steps))
            remedy += f", or roll back to a checkpoint (--from-step N, N one of {steps})"
        raise StorageDamaged(str(path), "", f"{reason}; {remedy}")


def _usable_checkpoints(
    directory: RunDirectory, lengths: Sequence[int], damaged_step: int
) -> list[int]:
    """Return the other checkpoints whose per-replica state is intact."""
    return [
        step
        for step in checkpoint_steps(directory.checkpoints)
        if step != damaged_step
        and (
            not step
            or not state_fault(
                directory.replica_state_file(step), lengths, recorded_digest(directory, step)
            )
        )
    ]


def recorded_digest(directory: RunDirectory, step: int) -> str | None:
    """Return the digest in the journal of the per-replica state at the start of a round.

    The journal is synced before the checkpoint of that step is written.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    record = newest_commit(directory.journal, step - 1)
    return record.own_digest if record is not None else None


def read_with_digest(path: Path, start: int, length: int) -> Generator[bytes]:
    """Yield the digest of a part of a file, then the part in pieces; close it to stop early."""
    with storage_errors("read", path), open_regular(path) as file:
        hasher = blake3()
        for piece in _pieces(file, start, length):
            hasher.update(piece)
        yield hasher.digest()
        yield from _pieces(file, start, length)


def _pieces(file: BinaryIO, start: int, length: int) -> Generator[bytes]:
    file.seek(start)
    while length and (piece := file.read(min(limits.BODY_BYTES, length))):
        length -= len(piece)
        yield piece


def state_digest_of(pieces: Sequence[memoryview]) -> bytes:
    """Return the digest of one replica's state, in pieces."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()
