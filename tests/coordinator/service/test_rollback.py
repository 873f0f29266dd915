"""Rollback to a checkpoint: the run continues with the same bits, later files are set aside, and
the journal records it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.audit.audit import audit
from coordinator.cli import app
from coordinator.storage import rollback
from coordinator.storage.copies import restore_copy
from coordinator.storage.directory.journal_records import Resumed
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.file_digests import lock_directory
from coordinator.storage.log.log_index import segment_files
from coordinator.storage.recovery import recover
from coordinator.storage.rollback import roll_back
from coordinator.storage.states.checkpoint import checkpoint_steps, write_checkpoint
from protocol.base.errors import UsageError
from tests.durable_run import MANIFEST, RUN_ID, WrittenRun, read_journal
from tests.live_service import live_service, scripted_spec

SPEC = scripted_spec(steps=20, checkpoint={"every": 5, "keep_last": 3})


async def finish_run(directory):
    async with live_service(directory, 1) as live:
        run_id = live.service.submit(SPEC)
        live.start_worker("w0")
        return run_id, await live.result(run_id)


async def resume_and_finish(directory, **options):
    async with live_service(directory.parent, 1) as live:
        assert live.service.resume(directory, **options) == directory.name
        live.start_worker("w0")
        return await live.result(directory.name)


async def test_finished_run_rolls_back_and_reaches_the_same_end(tmp_path):
    run_id, reference = await finish_run(tmp_path)
    directory = RunDirectory(tmp_path / run_id)
    result = await resume_and_finish(directory.path, from_step=10)
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]
    report = audit(directory.path)
    assert report.ok, report.lines()
    resumptions = [
        e.record for e in read_journal(directory.journal) if isinstance(e.record, Resumed)
    ]
    assert [record.step for record in resumptions] == [10]
    assert "--from-step" in resumptions[0].notes[-1]
    [set_aside] = directory.set_aside.iterdir()
    assert json.loads((set_aside / "result.json").read_text()) == reference
    assert checkpoint_steps(set_aside / "checkpoints") == [15, 20]
    assert "set-aside" in "\n".join(report.lines())


async def test_run_with_unusable_copies_is_refused(tmp_path):
    (tmp_path / "file").write_text("no directory")
    async with live_service(tmp_path / "runs", 1) as live:
        for copy_directory in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
            spec = scripted_spec(checkpoint={"copies": [str(copy_directory)]})
            with pytest.raises(UsageError, match="expected a directory") as error:
                live.service.submit(spec)
            assert "copy" not in str(error.value)
        spec = scripted_spec(checkpoint={"copies": ["tower"]})
        with pytest.raises(UsageError, match="with a / in it, got 'tower'; copies on workers"):
            live.service.submit(spec)
        assert not live.events_named("run_accepted")


async def test_copies_of_rolled_back_steps_are_removed_at_once(tmp_path):
    copies, runs = tmp_path / "copies", tmp_path / "runs"
    run = {"every": 5, "keep_last": 3, "copies": [str(copies)]}
    async with live_service(runs, 1) as live:
        run_id = live.service.submit(scripted_spec(steps=20, checkpoint=run))
        live.start_worker("w0")
        await live.result(run_id)
    assert "after-0000000020" in [path.name for path in (copies / run_id).iterdir()]
    async with live_service(runs, 1) as live:
        live.service.resume(runs / run_id, from_step=10)
        execution = live.service.current
        assert execution is not None
        assert execution._copying is not None
        await execution._copying
        moved_copies = copies.rename(tmp_path / "aside")
        copies.write_text("a file")
        for _ in range(2):
            await execution._copy(10, str(copies), None)
        copies.unlink()
        moved_copies.rename(copies)
        for _ in range(2):
            await execution._copy(10, str(copies), None)
        [copy_failure] = live.events_named("copy_failed")  # once at the start, once at the end
        assert copy_failure["error"].startswith("checkpoint.copies: expected a directory at ")
        assert len(live.events_named("copied_again")) == 1
        await execution._copy(10, "tower", None)  # of a run that an earlier release began
        assert (
            "copies on workers are no longer supported"
            in live.events_named("copy_failed")[-1]["error"]
        )
    assert max(path.name for path in (copies / run_id).iterdir()) == "after-0000000010"
    restored_run = tmp_path / "elsewhere" / run_id
    assert restore_copy(copies, restored_run).step == 10
    result = await resume_and_finish(runs / run_id)
    assert (await resume_and_finish(restored_run))["weights_digest"] == result["weights_digest"]
    assert audit(restored_run).ok


async def test_missing_checkpoint_is_refused_with_a_list(tmp_path):
    run_id, reference = await finish_run(tmp_path)
    directory = RunDirectory(tmp_path / run_id)
    async with live_service(tmp_path, 1) as live:
        with pytest.raises(UsageError, match="': 10, 15, 20") as error:
            live.service.resume(directory.path, from_step=7)
    assert "\n" not in str(error.value)
    assert directory.read_result() == reference
    assert not directory.set_aside.exists()


class KilledError(BaseException):
    """An error that no code handles."""


@pytest.mark.parametrize("moves", [0, 1, 2, 4])
async def test_crash_during_a_rollback_leaves_a_resumable_run(tmp_path, monkeypatch, moves):
    run_id, reference = await finish_run(tmp_path)
    directory = RunDirectory(tmp_path / run_id)
    move_count, move = 0, rollback._move

    def crash_after_moves(*arguments):
        nonlocal move_count
        move_count += 1
        if move_count > moves:
            raise KilledError
        move(*arguments)

    lock = lock_directory(directory.path)
    with monkeypatch.context() as patch:
        patch.setattr(rollback, "_move", crash_after_moves)
        with pytest.raises(KilledError):
            roll_back(directory, 10, lock.term)
    lock.release()
    if moves:
        result = await resume_and_finish(directory.path)
        assert result["weights_digest"] == reference["weights_digest"]
    result = await resume_and_finish(directory.path, from_step=10)
    assert result["weights_digest"] == reference["weights_digest"]


def test_segment_beyond_the_checkpoint_is_truncated_and_set_aside(tmp_path):
    run = WrittenRun(tmp_path / "run")
    for _ in range(3):
        run.step()
    write_checkpoint(
        run.directory.checkpoints, MANIFEST, run.replica, run_id=RUN_ID, term=1, losses=run.losses
    )
    state_digest = run.replica.state_digest()
    for _ in range(2):
        run.step()
    run.log.close()
    [segment] = segment_files(run.directory.log)
    content = segment.read_bytes()
    roll_back(run.directory, 3, 2)
    assert (run.directory.set_aside / "term-000002" / "log" / segment.name).read_bytes() == content
    recovery = recover(run.directory)
    assert recovery is not None
    assert (recovery.step, recovery.index.last_step, recovery.notes) == (3, 2, ())
    assert recovery.load_replica().state_digest() == state_digest
    # The rest of the segment would count again if only the newer segment were set aside.
    run.term, run.replica = 2, recovery.load_replica()
    run.log = run.open_log()
    run.step()
    run.log.close()
    roll_back(run.directory, 0, 3)
    recovery = recover(run.directory)
    assert recovery is not None
    assert (recovery.step, recovery.index.last_step) == (0, None)


@pytest.mark.parametrize(
    ("resume", "has_out", "text"),
    [(False, "here", "needs --resume"), (True, None, "--out"), (True, "here", "found no run.json")],
)
def test_rollback_command_requires_the_directory_of_a_run(tmp_path, resume, has_out, text):
    arguments = ["--from-step", "3", "--expect-workers", "1", *(["--resume"] if resume else [])]
    arguments += ["--out", str(tmp_path)] if has_out else []
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, UsageError)
    assert text in str(error)
