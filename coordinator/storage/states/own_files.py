"""What replicas have of their own between rounds, on disk, and what it is held against.

`replicas/own-STEP` holds that of all replicas at the start of a round, one after the other, each
behind its BLAKE3 digest. Nothing in the file is believed: the BLAKE3 of those digests, one after
the other, is `own_digest` in the commit that leads to the round, in the log and in the journal.
Where the replicas have nothing yet the file is empty, and that digest is `NOTHING_YET`.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from coordinator.disk.durable_file import storing
from coordinator.run.outputs.own_state import own_state_lengths
from coordinator.storage.directory.journal import newest_commit
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.states.checkpoint import checkpoint_steps
from protocol.base import limits
from protocol.base.errors import StorageDamaged
from protocol.base.regular_file import open_regular
from protocol.spec.manifest import Manifest

NOTHING_YET: Final = blake3().hexdigest()
DIGEST_BYTES: Final = 32
_OWN: Final = re.compile(r"own-(\d{1,18})")


def own_steps(path: Path) -> list[int]:
    """The rounds of which own states are there, ascending."""
    found = (_OWN.fullmatch(entry.name) for entry in path.glob("own-*"))
    return sorted(int(match[1]) for match in found if match is not None)


def own_digest(digests: Iterable[bytes]) -> str:
    """Of all replicas, from the digest of each in order."""
    return blake3(b"".join(digests)).hexdigest()


def read_digests(path: Path, own_bytes: int) -> list[bytes] | None:
    """The digest before each replica's own state; None where the file has another length.

    Raises:
        StorageFailed: It cannot be read, or is not there.
    """
    with storing("read", path), open_regular(path) as file:
        count, rest = divmod(path.stat().st_size, own_bytes + DIGEST_BYTES)
        found = []
        for replica in range(count):
            file.seek(replica * (own_bytes + DIGEST_BYTES))
            found.append(file.read(DIGEST_BYTES))
    return None if rest else found


def told_digests(
    path: Path, lengths: Sequence[int], told: str | None
) -> tuple[int, list[bytes]] | None:
    """How long each replica's own state is in a file, and the digest before each.

    Args:
        path: The file.
        lengths: What it can be (`own_state_lengths`).
        told: The digest that the commit of its round names.

    Returns:
        None where the file has not what is named.

    Raises:
        StorageFailed: It cannot be read, or is not there.
    """
    for own_bytes in lengths:
        digests = read_digests(path, own_bytes)
        if digests is not None and own_digest(digests) == told:
            return own_bytes, digests
    return None


def own_fault(path: Path, lengths: Sequence[int], told: str | None) -> str:
    """Why a round's own states are not those that its commit names, all bytes read; or nothing.

    Args as for `told_digests`.

    Raises:
        StorageFailed: They cannot be read.
    """
    if not path.exists():
        return "it is missing"
    if told is None:
        return "no commit tells what it holds"
    found_digests = told_digests(path, lengths, told)
    if found_digests is None:
        return "it is not what the commit of its round names"
    own_bytes, digests = found_digests
    for replica, digest in enumerate(digests):
        own = verified(path, replica * (own_bytes + DIGEST_BYTES) + DIGEST_BYTES, own_bytes)
        found = next(own)
        own.close()
        if found != digest:
            return f"what it holds of replica {replica} is not what was written"
    return ""


def check_own(
    directory: RunDirectory, run: StoredRun, manifest: Manifest, step: int, told: str | None
) -> None:
    """Where replicas have states of their own, those of the round to go on with are whole.

    Args:
        directory: The run's.
        run: The run.
        manifest: The run's.
        step: The round.
        told: What the commit before it names.

    Raises:
        StorageDamaged: They are not; says which checkpoints can be gone back to.
        StorageFailed: They cannot be read.
    """
    lengths = own_state_lengths(run.spec, manifest)
    if not lengths or not step:
        return
    path = directory.own_file(step)
    if reason := own_fault(path, lengths, told):
        remedy = "bring it back from a copy"
        if usable := _usable(directory, lengths, step):
            steps = ", ".join(map(str, usable))
            remedy += f", or go back to a checkpoint (--from-step N, N one of {steps})"
        raise StorageDamaged(str(path), "", f"{reason}; {remedy}")


def _usable(directory: RunDirectory, lengths: Sequence[int], but: int) -> list[int]:
    """Checkpoints whose own states are whole."""
    return [
        step
        for step in checkpoint_steps(directory.checkpoints)
        if step != but
        and (not step or not own_fault(directory.own_file(step), lengths, told(directory, step)))
    ]


def told(directory: RunDirectory, step: int) -> str | None:
    """What the journal says of the own states at the start of a round: it is synced before the
    checkpoint of that step is written.

    Raises:
        StorageFailed: It cannot be read.
    """
    record = newest_commit(directory.journal, step - 1)
    return record.own_digest if record is not None else None


def verified(path: Path, start: int, length: int) -> Generator[bytes]:
    """A part of a file: first its digest, then itself in pieces; whoever stops early closes it."""
    with storing("read", path), open_regular(path) as file:
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


def digest_of(pieces: Sequence[memoryview]) -> bytes:
    """Of one replica's own state, in pieces."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()
