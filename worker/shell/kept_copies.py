"""Copies of checkpoints that this worker keeps for coordinators, in its own state directory.

    copies/RUN-ID/NAME.tar     an archive, whole and verified: its bytes had the digest beside it
    copies/RUN-ID/NAME.json    the digest, and which history of the run the copy knows
    copies/RUN-ID/NAME.part    being written

What is in an archive, and which copies go, is the coordinator's matter: here they are bytes with a
digest, which is computed again as they are given back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from blake3 import blake3
from pydantic import ValidationError

from protocol.base import limits
from protocol.base.errors import SamestepError, StorageDamaged, StorageFailed
from protocol.base.fields import cut_text
from protocol.wire.connection import Body
from protocol.wire.messages import (
    CopiesHeld,
    CopyAnswer,
    CopyDone,
    CopyList,
    CopyPiece,
    CopyQuestion,
    CopyRead,
    CopyRemove,
)

Answer = tuple[CopyAnswer, bytes | None]
_PLACE: Final = {"offset"}
"""Is of a piece, and not of the copy."""


class KeptCopies:
    """Answers a coordinator's questions; one thread at a time.

    Args:
        home: Gives the state directory.
    """

    def __init__(self, home: Callable[[], Path]) -> None:
        self._home = home
        self._hasher = blake3()
        self._writing: CopyPiece | None = None

    def answer(self, question: CopyQuestion, body: Body | None) -> Answer:
        """Do what is asked; an error of this machine's goes back as an answer."""
        try:
            match question:
                case CopyList():
                    return CopiesHeld(), json.dumps(self._listed(question.run_id)).encode()
                case CopyPiece():
                    assert body is not None
                    self._write(question, body)
                case CopyRead():
                    return self._read(question)
                case CopyRemove():
                    self._remove(self._path(question.run_id, question.name))
        except (SamestepError, OSError) as error:
            return CopyDone(error=cut_text(str(error) or "it failed")), None
        return CopyDone(error=""), None

    def _path(self, run_id: str, name: str) -> Path:
        return self._home() / "copies" / run_id / f"{name}.tar"

    def _listed(self, run_id: str | None) -> list[dict[str, Any]]:
        found = sorted((self._home() / "copies").glob(f"{run_id or '*'}/*.json"))
        there = [path for path in found if path.with_suffix(".tar").exists()]
        held = [_facts(path) for path in sorted(there, key=_age)]
        return [facts.model_dump() for facts in held if facts is not None]

    def _write(self, piece: CopyPiece, body: Body) -> None:
        """Take the next bytes; the last ones make it whole.

        Raises:
            StorageFailed: The disk refuses, or it is not the piece that comes next.
            StorageDamaged: What came has another digest.
        """
        path = self._path(piece.run_id, piece.name)
        part = path.with_suffix(".part")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with part.open("ab" if piece.offset else "wb") as file:
            follows = self._writing is not None and _same(self._writing, piece)
            if piece.offset and not (follows and file.tell() == piece.offset):
                raise StorageFailed("go on with", str(part), "other bytes come next")
            if not piece.offset:
                self._hasher = blake3()
            self._writing = piece
            file.write(body.data)
            self._hasher.update(body.data)
            if file.tell() < piece.total:
                return
            file.flush()
            os.fsync(file.fileno())
        self._writing = None
        if self._hasher.hexdigest() != piece.digest:
            part.unlink()
            raise StorageDamaged(str(part), "", "the bytes have another digest")
        self._keep(part, path, piece)

    def _keep(self, part: Path, path: Path, piece: CopyPiece) -> None:
        """A crash leaves the old one, or the archive without its facts: that is no copy."""
        facts = path.with_suffix(".json")
        facts.unlink(missing_ok=True)
        part.replace(path)
        _sync(path.parent)
        new = facts.with_suffix(".facts")
        with new.open("wb") as file:
            file.write(piece.model_copy(update={"offset": 0}).model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        new.replace(facts)
        _sync(path.parent)

    def _read(self, question: CopyRead) -> Answer:
        path = self._path(question.run_id, question.name)
        facts = _facts(path.with_suffix(".json"))
        if facts is None:
            raise StorageFailed("read", str(path), "no such copy is kept here")
        with path.open("rb") as file:
            file.seek(question.offset)
            content = file.read(limits.BODY_BYTES)
        return facts.model_copy(update={"offset": question.offset}), content

    def _remove(self, path: Path) -> None:
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _same(one: CopyPiece, other: CopyPiece) -> bool:
    return one.model_dump(exclude=_PLACE) == other.model_dump(exclude=_PLACE)


def _facts(path: Path) -> CopyPiece | None:
    try:
        return CopyPiece.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
