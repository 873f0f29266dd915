"""A disk that is full, read-only or missing halts the run; after a repair, the run continues."""

import asyncio
import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from coordinator.audit.audit import audit
from coordinator.disk.durable_file import TEMPORARY_SUFFIX
from coordinator.run.inputs import ContinueRun
from coordinator.run.run import RunPhase
from coordinator.storage import run_storage
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.states.checkpoint import write_checkpoint
from protocol.base.errors import StorageFailed, UsageError
from tests.durable_run import small_disk
from tests.live_service import (
    PATIENCE_S,
    ScriptedFactory,
    live_service,
    run_undisturbed,
    scripted_spec,
)

SPEC = scripted_spec(
    steps=6,
    scripted={"blocks": 3, "block_bytes": 8192, "samples": 64},
    checkpoint={"every": 2, "keep_last": 1},
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return asyncio.run(run_undisturbed(tmp_path_factory.mktemp("reference"), SPEC))


def directory_of(live, run_id):
    return live.service.settings.directory / run_id


async def halt_or_end(live, halts):
    """Wait for one more halt or the end of the run; return whether it halted."""
    async with asyncio.timeout(PATIENCE_S):
        while len(live.events_named("halted")) <= halts and not live.events_named("run_ended"):
            live.changed.clear()
            await live.changed.wait()
    return len(live.events_named("halted")) > halts


def continue_run(live):
    live.service.current.execute_command(ContinueRun())


def fill(disk, free_bytes):
    """Fill the disk up to `free_bytes` of free space, or slightly less."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        with contextlib.suppress(OSError):
            while True:
                filler.write(bytes(1 << 16))
        with contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        filler.truncate(max(0, filler.tell() - free_bytes))


@pytest.mark.parametrize("free_kib", [8, 24, 40, 56, 72, 88, 104, 120, 136, 152, 168])
async def test_full_disk_halts_the_run_until_there_is_space(
    tmp_path, reference, free_kib, monkeypatch
):
    """The more space is free, the later is the first write that fails."""
    monkeypatch.setattr(
        run_storage, "check_disk_space", lambda *_: None
    )  # as if the disk filled up later
    with small_disk(tmp_path / "disk", 4096) as disk:
        async with live_service(disk / "runs", 1) as live:
            run_id = live.service.submit(SPEC)
            fill(disk, free_kib * 1024)
            live.start_worker("w0")
            halts = 0
            while await halt_or_end(live, halts):
                halts += 1
                assert halts <= 20
                reason = live.events_named("halted")[-1]["reason"]
                assert "No space left" in reason
                assert "make room, then continue" in reason
                assert str(directory_of(live, run_id)) in reason
                fill(disk, 1 << 20)
                continue_run(live)
            run_end = live.events_named("run_ended")[-1]
            if run_end["outcome"] == "failed":
                # There was no space even for the manifest or the first state: nothing was lost.
                assert "No space left" in run_end["reason"]
                assert not live.events_named("committed")
                return
            assert live.service.finished is not None
            result = dict(live.service.finished.result)
        assert halts
        assert result["weights_digest"] == reference["weights_digest"]
        assert result["losses"] == reference["losses"]
        assert audit(directory_of(live, run_id)).ok


async def test_submission_to_a_full_disk_is_refused(tmp_path):
    with small_disk(tmp_path / "disk", 4096) as disk:
        async with live_service(disk / "runs", 1) as live:
            fill(disk, 0)
            with pytest.raises((StorageFailed, UsageError), match="No space left"):
                live.service.submit(SPEC)
            (disk / "filler").unlink()
            live.start_worker("w0")
            assert (await live.result(live.service.submit(SPEC)))["steps"] == 6


async def test_unwritable_result_waits_for_the_operator(tmp_path, reference):
    async with live_service(tmp_path / "runs", 1) as live:
        run_id = live.service.submit(SPEC)
        directory = directory_of(live, run_id)
        obstacle = directory / ("result.json" + TEMPORARY_SUFFIX)
        obstacle.mkdir()
        live.start_worker("w0")
        for halts in range(2):  # still unwritable: it halts again
            assert await halt_or_end(live, halts)
            reason = live.events_named("halted")[-1]["reason"]
            assert "all steps are committed, but the result could not be written" in reason
            if halts:
                obstacle.rmdir()
            continue_run(live)
        result = await live.result(run_id)
    assert result["weights_digest"] == reference["weights_digest"]
    assert audit(directory).ok


async def run_through_failure(live, run_id, break_disk, repair_disk, expected):
    """Break the disk after the second step, repair it after two halts, and let the run finish."""
    live.start_worker("w0")
    await live.wait_for("committed", step=1)
    break_disk()
    assert await halt_or_end(live, 0)
    reason = live.events_named("halted")[-1]["reason"]
    assert expected in reason, reason
    assert live.service.current.run.phase is RunPhase.HALTED
    # Not fixed yet: it halts again at each attempt.
    continue_run(live)
    assert await halt_or_end(live, 1)
    repair_disk()
    return await finish_run(live, run_id)


async def finish_run(live, run_id):
    """Let the run finish; an earlier failure may halt it again."""
    halts = len(live.events_named("halted"))
    continue_run(live)
    while await halt_or_end(live, halts):
        halts = len(live.events_named("halted"))
        continue_run(live)
    return await live.result(run_id)


LONG = scripted_spec(
    steps=100,
    scripted={"blocks": 3, "block_bytes": 8192, "samples": 64},
    checkpoint={"every": 50, "keep_last": 1},
)


@pytest.fixture(scope="module")
def long_reference(tmp_path_factory):
    return asyncio.run(run_undisturbed(tmp_path_factory.mktemp("reference"), LONG))


async def test_read_only_disk_halts_the_run(tmp_path, long_reference, monkeypatch):
    """The writes are made to fail: a disk with open files cannot be remounted on request."""

    def refuse(*_arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def break_disk():
        for name in ("writev", "fdatasync", "fsync"):
            monkeypatch.setattr(os, name, refuse)

    async with live_service(tmp_path / "runs", 1) as live:
        run_id = live.service.submit(LONG)
        result = await run_through_failure(
            live, run_id, break_disk, monkeypatch.undo, "mount it writable"
        )
    assert result["weights_digest"] == long_reference["weights_digest"]
    assert audit(directory_of(live, run_id)).ok


async def test_missing_directory_halts_the_run_until_it_is_restored(tmp_path, long_reference):
    runs, moved = tmp_path / "runs", tmp_path / "away"
    async with live_service(runs, 1) as live:
        run_id = live.service.submit(LONG)
        result = await run_through_failure(
            live, run_id, lambda: runs.rename(moved), lambda: moved.rename(runs),
            "restore what is missing",
        )  # fmt: skip
    assert result["weights_digest"] == long_reference["weights_digest"]
    assert audit(directory_of(live, run_id)).ok


async def test_vanished_directory_is_not_recreated(tmp_path, long_reference, monkeypatch):
    """A new directory, even one for the next checkpoint, would prevent moving the old one back."""
    runs, moved = tmp_path / "runs", tmp_path / "away"
    away_event = threading.Event()

    def move_directory_first(root, manifest, replica, **options):
        if replica.step and not away_event.is_set():
            runs.rename(moved)
            away_event.set()
        return write_checkpoint(root, manifest, replica, **options)

    monkeypatch.setattr(run_storage, "write_checkpoint", move_directory_first)
    async with live_service(runs, 1) as live:
        run_id = live.service.submit(LONG)
        live.start_worker("w0")
        assert await halt_or_end(live, 0)
        assert away_event.is_set()
        assert "restore what is missing" in live.events_named("halted")[-1]["reason"]
        assert not runs.exists()
        moved.rename(runs)
        result = await finish_run(live, run_id)
    assert result["weights_digest"] == long_reference["weights_digest"]
    assert audit(directory_of(live, run_id)).ok


async def test_vanished_checkpoints_are_not_recreated(tmp_path, long_reference):
    """Only the checkpoints vanish; the other files of the run stay writable."""
    async with live_service(tmp_path / "runs", 1) as live:
        run_id = live.service.submit(LONG)
        checkpoints, moved = directory_of(live, run_id) / "checkpoints", tmp_path / "away"
        live.start_worker("w0")
        await live.wait_for("checkpoint", step=0)
        checkpoints.rename(moved)
        assert await halt_or_end(live, 0)
        reason = live.events_named("halted")[-1]["reason"]
        assert f"'{checkpoints}': No such file or directory; restore what is missing" in reason
        assert not checkpoints.exists()
        moved.rename(checkpoints)
        result = await finish_run(live, run_id)
    assert result["weights_digest"] == long_reference["weights_digest"]
    assert audit(directory_of(live, run_id)).ok


async def test_export_without_permission_waits_for_the_operator(tmp_path, monkeypatch):
    mkdir = Path.mkdir
    refused_paths: list[Path] = []

    def refuse(path, *arguments, **options):
        if path.name == "model" and path.parent.name == run_id:
            refused_paths.append(path)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        mkdir(path, *arguments, **options)

    async with live_service(tmp_path / "runs", 1) as live:
        run_id = live.service.submit(SPEC)
        monkeypatch.setattr(Path, "mkdir", refuse)
        live.start_worker("w0")
        assert await halt_or_end(live, 0)
        reason = live.events_named("halted")[-1]["reason"]
        assert (
            f"'{refused_paths[0]}': Permission denied; give this user read and write permission"
            in reason
        )
        monkeypatch.undo()
        continue_run(live)
        await live.result(run_id)


async def test_coordinator_that_lost_its_directory_stops_committing(tmp_path):
    """Another coordinator has raised the term, which voids later commits of the old coordinator."""
    async with live_service(tmp_path / "runs", 1) as live:
        run_id = live.service.submit(LONG)
        live.start_worker("w0")
        await live.wait_for("committed", step=1)
        (directory_of(live, run_id) / "term.json").write_text('{"term": 99}')
        run_end = await live.wait_for("run_ended")
        assert run_end["outcome"] == "failed"
        assert "has another coordinator now, of term 99" in run_end["reason"]
        # It must not dismiss its workers when it ends: the other coordinator needs them.
        assert live.service.finished is not None
        assert live.service.finished.is_superseded
        assert not (directory_of(live, run_id) / "result.json").exists()


async def test_joiner_is_admitted_after_a_disk_failure(tmp_path, monkeypatch):
    """While a worker joins, a log without averages must store them; here the disk fails at that."""
    spec = LONG.model_copy(update={"log": "checkpoint"})
    roll = GradientLog.roll

    def refuse(log, *_arguments):
        raise StorageFailed("make", str(log.segment), "no room; make room, then continue")

    async with live_service(tmp_path / "runs", 1) as live:
        run_id = live.service.submit(spec)
        live.start_worker("w0", backend_factory=ScriptedFactory(5))
        await live.wait_for("committed", step=1)
        monkeypatch.setattr(GradientLog, "roll", refuse)
        live.start_worker("w1")
        assert await halt_or_end(live, 0)
        assert "make room" in live.events_named("halted")[-1]["reason"]
        monkeypatch.setattr(GradientLog, "roll", roll)
        halts = 0
        while await halt_or_end(live, halts):  # an earlier attempt may be refused only now
            halts = len(live.events_named("halted"))
            continue_run(live)
        await live.wait_for("worker_joined", worker="w1")
        result = await live.result(run_id)
    assert result["steps"] == 100
