"""What a worker keeps for coordinators: whole and verified, or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from protocol.wire.messages import CopiesHeld, CopyDone, CopyList, CopyPiece, CopyRead, CopyRemove
from worker.shell.kept_copies import KeptCopies

CONTENT = bytes(range(256)) * 3
NAME = "after-0000000007"


def piece(offset: int, **changes: Any) -> CopyPiece:
    facts = {
        "run_id": "run-1", "name": NAME, "offset": offset, "total": len(CONTENT), "epoch": 1,
        "digest": blake3(CONTENT).hexdigest(), "lines": 9, "head": "a" * 64, "branch": None,
    }  # fmt: skip
    return CopyPiece.model_validate(facts | changes)


def write(kept: KeptCopies, message: CopyPiece, content: bytes) -> str:
    answer, _ = kept.answer(message, np.frombuffer(content, np.uint8))
    assert isinstance(answer, CopyDone)
    return answer.error


def listed(kept: KeptCopies, run_id: str | None = None) -> list[str]:
    answer, body = kept.answer(CopyList(run_id=run_id), None)
    assert isinstance(answer, CopiesHeld)
    assert body is not None
    return [each["name"] for each in json.loads(body)]


@pytest.fixture
def kept(tmp_path: Path) -> KeptCopies:
    return KeptCopies(lambda: tmp_path)


def test_a_copy_comes_in_pieces_and_is_given_back(kept, tmp_path):
    assert listed(kept) == []
    assert write(kept, piece(0), CONTENT[:500]) == ""
    assert listed(kept) == [], "it is not whole yet"
    assert write(kept, piece(500), CONTENT[500:]) == ""
    later = KeptCopies(lambda: tmp_path)  # the worker was started anew
    assert listed(later, "run-1") == [NAME]
    assert listed(later, "run-2") == []
    answer, body = later.answer(CopyRead(run_id="run-1", name=NAME, offset=500), None)
    assert answer == piece(500)
    assert body == CONTENT[500:]
    later.answer(CopyRemove(run_id="run-1", name=NAME), None)
    assert listed(later) == []
    answer, _ = later.answer(CopyRead(run_id="run-1", name=NAME, offset=0), None)
    assert isinstance(answer, CopyDone)
    assert "no such copy is kept here" in answer.error


def test_what_is_not_what_was_sent_is_no_copy(kept):
    assert write(kept, piece(0), CONTENT[:500]) == ""
    assert "another digest" in write(kept, piece(500), bytes(len(CONTENT) - 500))
    assert listed(kept) == []


def test_a_piece_that_follows_nothing_is_refused(kept):
    write(kept, piece(0), CONTENT[:500])
    assert "other bytes come next" in write(kept, piece(400), CONTENT[400:])
    assert "other bytes come next" in write(kept, piece(500, digest="b" * 64), CONTENT[500:])
    assert write(kept, piece(0), CONTENT) == "", "one that was cut short begins anew"
    assert listed(kept) == [NAME]


def test_a_disk_that_refuses_is_told(tmp_path):
    (tmp_path / "copies").write_text("a file")
    assert write(KeptCopies(lambda: tmp_path), piece(0), CONTENT) != ""


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", ""])
def test_a_name_that_leads_elsewhere_is_no_message(name):
    with pytest.raises(ValueError, match="run_id"):
        piece(0, run_id=name)
