"""Copies of checkpoints that a worker keeps: given to it piece by piece, and had back from it.

A copy is an archive of the directory that `coordinator.storage.copies` makes. It is made here
first, beside the run, and given away from there; so the same rules say which copies are the run's.
"""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Final

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

from coordinator.disk.durable_file import TEMPORARY_SUFFIX, storing
from coordinator.members.questions import Questions
from coordinator.storage.copies import (
    Held,
    check_rivals,
    choice,
    copy_checkpoint,
    copy_name,
    held_in,
    is_copy_name,
    is_current,
    newest_of,
    step_of,
    superfluous,
)
from coordinator.storage.directory.journal import Entry, verify_journal
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.base import limits
from protocol.base.errors import StorageDamaged, Unreachable, UsageError
from protocol.wire.messages import CopiesHeld, CopyList, CopyPiece, CopyRead, CopyRemove

SCRATCH: Final = "copy-for-a-worker" + TEMPORARY_SUFFIX
"""In a run's directory, while a copy is given away: a restart clears it."""
_LISTED: Final = TypeAdapter(list[CopyPiece])


async def give_copy(worker: Questions, directory: RunDirectory, step: int, keep: int) -> bool:
    """Have a worker keep a checkpoint's copy, and remove what it need not keep any more.

    Args:
        worker: It.
        directory: The run's; its coordinator may go on meanwhile, but keeps this checkpoint.
        step: The checkpoint's.
        keep: So many copies are left.

    Returns:
        Whether it was given; False if the worker has it.

    Raises:
        SamestepError: Nothing came of it.
    """
    run = directory.read_run()
    assert run is not None
    held = [_held(piece) for piece in await _listed(worker, run.run_id)]
    told: Sequence[Entry] = (await asyncio.to_thread(verify_journal, directory.journal)).entries
    check_rivals(held, told, "the worker")
    known = next((copy for copy in held if copy.name == copy_name(step)), None)
    made = known is None or not is_current(known, told)
    if made:
        scratch = directory.path / SCRATCH
        try:
            copy = await asyncio.to_thread(_prepare, directory, step, scratch)
            told = await _give(worker, run.run_id, copy, scratch / "archive")
        finally:
            await asyncio.to_thread(rmtree, scratch, ignore_errors=True)
    for each in superfluous([copy for copy in held if copy is not known], told, keep):
        await worker.ask(CopyRemove(run_id=run.run_id, name=each))
    return made


def _prepare(directory: RunDirectory, step: int, scratch: Path) -> Path:
    """The copy as a directory."""
    rmtree(scratch, ignore_errors=True)
    copy_checkpoint(directory, step, scratch, 1)
    (copy,) = scratch.glob("*/*")
    return copy


async def _give(worker: Questions, run_id: str, copy: Path, archive: Path) -> tuple[Entry, ...]:
    """Piece by piece; the lines of the journal in it."""
    digest = await asyncio.to_thread(_pack, copy, archive)
    facts = await asyncio.to_thread(held_in, copy)
    total, offset = await asyncio.to_thread(os.path.getsize, archive), 0
    with archive.open("rb") as file:
        while offset < total:
            content = await asyncio.to_thread(file.read, limits.BODY_BYTES)
            piece = CopyPiece(
                run_id=run_id, name=copy.name, offset=offset, total=total, digest=digest,
                epoch=facts.epoch, lines=facts.lines, head=facts.head, branch=facts.branch or None,
            )  # fmt: skip
            await worker.ask(piece, content)
            offset += len(content)
    return (await asyncio.to_thread(verify_journal, RunDirectory(copy).journal)).entries


def _pack(copy: Path, archive: Path) -> str:
    """Gives its digest."""
    with storing("pack a copy in", archive), tarfile.open(archive, "w") as packed:
        packed.add(copy, copy.name)
    hasher = blake3()
    hasher.update_mmap(archive)
    return hasher.hexdigest()


async def fetch_copy(
    worker: Questions, to: Path, name: str = "", run_id: str | None = None
) -> Path:
    """The newest copy of one run that a worker keeps, unpacked below a directory.

    Args:
        worker: It.
        to: The directory.
        name: The worker's.
        run_id: Which run; None for the only one.

    Raises:
        UsageError: It keeps none, or those of several runs and none was named.
        StorageDamaged: It is not what was given to it.
        Unreachable: It has left.
        StorageFailed: The disk refuses.
    """
    found = _newest_of_run(await _listed(worker, None), name, run_id)
    archive = to / "archive"
    await _receive(worker, found, archive)
    with storing("unpack a copy in", to):
        await asyncio.to_thread(_unpack, archive, to / found.run_id)
    return to / found.run_id / found.name


def _newest_of_run(listed: Sequence[CopyPiece], name: str, run_id: str | None) -> CopyPiece:
    runs: dict[str, CopyPiece] = {}
    for piece in listed:  # the newest last
        before = runs.pop(piece.run_id, piece)
        newest = newest_of([_held(before), _held(piece)]).name
        runs[piece.run_id] = piece if piece.name == newest else before
    if run_id is None and len(runs) == 1:
        return next(iter(runs.values()))
    if run_id in runs:
        return runs[run_id]
    choices = ", ".join(
        choice(f"{name}:{run}", step_of(newest.name)) for run, newest in reversed(runs.items())
    )
    there = f"newest first: {choices}" if runs else "it keeps none"
    if run_id is not None:
        raise UsageError(f"--from: worker {name!r} has no copy of run {run_id!r}; {there}")
    if not runs:
        raise UsageError(f"--from: worker {name!r} keeps no copies")
    raise UsageError(f"--from: worker {name!r} has copies of {len(runs)} runs; name one, {there}")


async def _receive(worker: Questions, found: CopyPiece, archive: Path) -> None:
    hasher, offset = blake3(), 0
    with storing("write a copy to", archive):
        archive.parent.mkdir(parents=True, exist_ok=True)
        file = archive.open("wb")
    with file:
        while offset < found.total:
            question = CopyRead(run_id=found.run_id, name=found.name, offset=offset)
            _, body = await worker.ask(question)
            content = b"" if body is None else body.tobytes()
            if not content:
                break
            with storing("write a copy to", archive):
                await asyncio.to_thread(file.write, content)
            hasher.update(content)
            offset += len(content)
    if hasher.hexdigest() != found.digest:
        reason = "the worker's copy is not what was given to it; take another"
        raise StorageDamaged(found.name, "", reason)


def _unpack(archive: Path, to: Path) -> None:
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(to, filter="data")
    except tarfile.TarError as error:
        raise StorageDamaged(archive.name, "", f"no copy of a run: {error}") from None
    archive.unlink()


async def _listed(worker: Questions, run_id: str | None) -> Sequence[CopyPiece]:
    message, body = await worker.ask(CopyList(run_id=run_id))
    try:
        if isinstance(message, CopiesHeld) and body is not None:
            listed = _LISTED.validate_json(body.tobytes())
            return [piece for piece in listed if is_copy_name(piece.name)]
    except ValidationError:
        pass
    raise Unreachable("the worker did not say which copies it keeps")


def _held(piece: CopyPiece) -> Held:
    return Held(piece.name, piece.epoch, piece.lines, piece.head, piece.branch or "")
