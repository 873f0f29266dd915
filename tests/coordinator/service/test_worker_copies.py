"""Copies that a worker keeps: by the same rules as those in a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from coordinator.service.worker_copies import SCRATCH, fetch_copy, give_copy
from coordinator.storage.copies import bring_back
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.recovery import recover
from protocol.base.errors import StorageDamaged, UsageError
from protocol.wire.connection import Received
from protocol.wire.messages import CopyPiece
from tests.coordinator.storage.test_copies import from_step, steps_of
from tests.durable_run import WrittenRun
from worker.shell.kept_copies import KeptCopies


class Worker:
    """Both ends without a network between them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._kept = KeptCopies(lambda: home)

    async def ask(self, question: Any, body: bytes | None = None) -> Received:
        given = None if body is None else np.frombuffer(body, np.uint8)
        message, answer = self._kept.answer(question, given)
        assert not getattr(message, "error", "")
        return Received(message, None if answer is None else np.frombuffer(answer, np.uint8))

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.home.glob("copies/*/*.tar"))


@pytest.fixture
def worker(tmp_path) -> Any:
    return Worker(tmp_path / "worker")


async def given(run: WrittenRun, worker: Any, keep: int = 3) -> bool:
    return await give_copy(worker, run.directory, run.replica.step, keep)


async def test_a_copy_is_given_once_and_brought_back(worker, tmp_path):
    run = WrittenRun(tmp_path / "run")
    steps_of(run, 3)
    assert await given(run, worker)
    assert not await given(run, worker)
    assert not (run.directory.path / SCRATCH).exists()
    brought = bring_back(await fetch_copy(worker, tmp_path / "scratch"), tmp_path / "again")
    assert brought.step == 3
    recovery = recover(RunDirectory(tmp_path / "again"))
    assert recovery is not None
    assert recovery.replica().state_digest() == run.replica.state_digest()


async def test_the_oldest_goes_first_and_what_was_taken_back_goes(worker, tmp_path):
    run = WrittenRun(tmp_path / "run")
    for _ in range(3):
        steps_of(run, 3)
        await given(run, worker, keep=2)
    assert worker.names() == ["after-0000000006", "after-0000000009"]
    from_step(run, 6)
    steps_of(run, 1)
    await given(run, worker, keep=2)
    assert worker.names() == ["after-0000000006", "after-0000000007"]
    assert (await fetch_copy(worker, tmp_path / "scratch")).name == "after-0000000007"


async def test_a_run_brought_back_elsewhere_has_the_worker(worker, tmp_path):
    run = WrittenRun(tmp_path / "run")
    steps_of(run, 3)
    await given(run, worker)
    bring_back(await fetch_copy(worker, tmp_path / "scratch"), tmp_path / "again")
    assert await give_copy(worker, RunDirectory(tmp_path / "again"), 3, 3)
    steps_of(run, 3)
    with pytest.raises(UsageError, match="brought back elsewhere"):
        await given(run, worker)


async def test_a_copy_that_was_changed_is_refused(worker, tmp_path):
    run = WrittenRun(tmp_path / "run")
    steps_of(run, 3)
    await given(run, worker)
    (archive,) = worker.home.glob("copies/*/*.tar")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    with pytest.raises(StorageDamaged, match="not what was given to it"):
        await fetch_copy(worker, tmp_path / "scratch")


async def test_an_archive_of_something_else_is_one_line(worker, tmp_path):
    """A worker may have anything under a copy's name, with the digest that fits."""
    content = b"no archive" * 100
    facts = CopyPiece(
        run_id="r", name="after-0000000003", offset=0, total=len(content), epoch=1, lines=1,
        digest=blake3(content).hexdigest(), head="0" * 64, branch=None,
    )  # fmt: skip
    await worker.ask(facts, content)
    await worker.ask(facts.model_copy(update={"name": "after-x"}), content)
    with pytest.raises(StorageDamaged, match="no copy of a run"):
        await fetch_copy(worker, tmp_path / "scratch")


async def test_no_copy_is_told(worker, tmp_path):
    with pytest.raises(UsageError, match="worker 'w2' keeps no copies"):
        await fetch_copy(worker, tmp_path / "scratch", "w2")


async def test_the_runs_that_a_worker_has_copies_of_are_named(worker, tmp_path):
    for at_s, run_id, step in ((3, "a", 3), (9, "b", 2), (6, "a", 12)):
        facts = CopyPiece(
            run_id=run_id, name=f"after-{step:010}", offset=0, total=1, epoch=1, lines=1,
            digest=blake3(b"x").hexdigest(), head="0" * 64, branch=None,
        )  # fmt: skip
        await worker.ask(facts, b"x")
        (kept,) = worker.home.glob(f"copies/{run_id}/{facts.name}.json")
        os.utime(kept, (at_s, at_s))
    choices = "newest first: --from w2:b (last step 2), --from w2:a (last step 12)"
    with pytest.raises(UsageError, match=re.escape(f"of 2 runs; name one, {choices}")):
        await fetch_copy(worker, tmp_path / "scratch", "w2")
    with pytest.raises(UsageError, match=re.escape(f"no copy of run 'c'; {choices}")):
        await fetch_copy(worker, tmp_path / "scratch", "w2", "c")
