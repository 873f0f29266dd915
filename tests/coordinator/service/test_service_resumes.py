"""A service that restarts continues the unfinished runs."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.audit.audit import audit
from coordinator.audit.report import report
from coordinator.cli import app
from coordinator.disk.directory_lock import stored_term
from coordinator.service.run_instance import unfinished_runs
from coordinator.service.service import Service, Settings
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.log.log_index import segment_files, segment_term
from coordinator.storage.states import checkpoint
from coordinator.storage.states.checkpoint import checkpoint_path, checkpoint_steps
from protocol.base.errors import ExitCode, Mismatch, StorageDamaged, UsageError
from protocol.exact.replica import Replica
from tests.durable_run import WrittenRun
from tests.live_service import LiveService, live_service, run_undisturbed, scripted_spec

ROOT = Path(__file__).parents[3]
SPEC = scripted_spec(steps=30, checkpoint={"every": 10})


async def interrupt_run(directory, *specs):
    """Start a service and stop it during its first run; return the ids of its runs."""
    async with live_service(directory, 1) as live:
        ids = [live.service.submit(spec) for spec in specs]
        live.start_worker("w0")
        await live.wait_for("committed", step=12)
    assert not live.events_named("internal_error")  # pending work ends before files are closed
    return ids


async def test_unfinished_runs_continue_in_their_order(tmp_path):
    second = scripted_spec(steps=5, seed=8)
    reference = await run_undisturbed(tmp_path / "alone", SPEC)
    ids = await interrupt_run(tmp_path / "runs", SPEC, second)
    async with live_service(tmp_path / "runs", 1) as live:
        paths = unfinished_runs(tmp_path / "runs")
        assert [path.name for path in paths] == ids
        assert [live.service.resume(path) for path in paths] == ids
        live.start_worker("w0")
        result = await live.result(ids[0])
        assert result["weights_digest"] == reference["weights_digest"]
        assert result["losses"] == reference["losses"]
        assert (await live.result(ids[1]))["steps"] == 5
    assert unfinished_runs(tmp_path / "runs") == []
    assert all(audit(tmp_path / "runs" / run_id).ok for run_id in ids)


@pytest.mark.parametrize("drained", [False, True])
async def test_run_with_state_digests_of_format_1_continues(tmp_path, monkeypatch, drained):
    reference = await run_undisturbed(tmp_path / "alone", SPEC)
    runs = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(Replica, "state_digest", Replica.initial_digest)
        patch.setattr(checkpoint, "FORMAT", 1)
        if drained:  # the newest state is that of a checkpoint
            async with live_service(runs, 1) as live:
                run_id = live.service.submit(SPEC)
                live.start_worker("w0")
                await live.wait_for("committed", step=12)
                live.service.drain()
                await live.wait_for("run_ended")
        else:
            [run_id] = await interrupt_run(runs, SPEC)
    async with live_service(runs, 1) as live:
        live.service.resume(runs / run_id)
        live.start_worker("w0")
        result = await live.result(run_id)
    assert result["weights_digest"] == reference["weights_digest"]
    report = audit(runs / run_id)
    assert report.ok, report.lines()


async def test_workers_of_a_drained_run_join_the_next_service(tmp_path):
    runs = tmp_path / "runs"
    async with live_service(runs, 1) as first:
        run_id = first.service.submit(SPEC)
        first.start_worker("w0")
        await first.wait_for("committed", step=12)
        first.service.drain()
        assert (await first.wait_for("run_ended"))["outcome"] == "drained"
        port = first.port
        await first.service.stop()
        second = LiveService(runs, 1)
        second.service = Service(Settings(("127.0.0.1", port), 1, runs, once=False))
        second.service.event_sinks.append(second)
        await second.service.start()
        try:
            assert second.service.resume(runs / run_id) == run_id
            assert (await second.result(run_id))["steps"] == 30
            await second.wait_for("worker_connected", worker="w0")
        finally:
            await second.service.stop()
        # No work remains.
        assert await first.workers["w0"] == ExitCode.OK


async def test_pace_excludes_the_wait_for_workers_after_a_restart(tmp_path):
    (run_id,) = await interrupt_run(tmp_path, SPEC)
    async with live_service(tmp_path, 1) as live:
        live.service.resume(tmp_path / run_id)
        execution = live.service.current
        assert execution is not None
        assert execution.started_s is None
        live.start_worker("w0")
        await live.wait_for("committed")
        assert execution.started_s is not None
        assert execution.started_step >= 12
        await live.result(run_id)


def test_oldest_run_is_first_if_file_times_are_equal(tmp_path):
    """File systems may have millisecond timestamps; runs may be accepted within one millisecond."""
    names = [f"run-{number}" for number in range(9)]
    for name in names:
        directory = RunDirectory(tmp_path / name)
        directory.begin(name, SPEC)
        os.utime(directory.run_file, ns=(0, 0))
    assert [path.name for path in unfinished_runs(tmp_path)] == names


def test_run_without_a_submission_time_uses_its_file_s_time(tmp_path):
    for number, name in enumerate(("younger", "older")):
        directory = RunDirectory(tmp_path / name)
        directory.begin(name, SPEC)
        document = json.loads(directory.run_file.read_text())
        del document["accepted_ns"]
        directory.run_file.write_text(json.dumps(document))
        os.utime(directory.run_file, (10 - number, 10 - number))
    damaged = RunDirectory(tmp_path / "damaged").run_file
    damaged.parent.mkdir()
    damaged.write_text("{")
    names = [path.name for path in unfinished_runs(tmp_path)]
    assert names == ["older", "younger", "damaged"]


async def test_finished_run_is_not_resumed(tmp_path):
    async with live_service(tmp_path, 1) as live:
        run_id = live.service.submit(SPEC)
        live.start_worker("w0")
        await live.result(run_id)
        assert live.service.resume(tmp_path / run_id) is None
        with pytest.raises(UsageError, match="holds a run already"):
            live.service.submit(SPEC, tmp_path / run_id)


async def test_other_run_spec_is_refused_and_the_lock_released(tmp_path):
    (run_id,) = await interrupt_run(tmp_path, SPEC)
    async with live_service(tmp_path, 1) as live:
        with pytest.raises(Mismatch, match="of another run spec"):
            live.service.resume(tmp_path / run_id, scripted_spec(steps=31))
        with pytest.raises(UsageError) as error_info:
            live.service.submit(scripted_spec(steps=31), tmp_path / run_id)
        text = f"holds a run already, {run_id!r} of another run spec: choose another directory"
        assert text in str(error_info.value)
        assert "(--resume)" not in str(error_info.value)
        with pytest.raises(UsageError, match=r"already: continue it \(--resume\)"):
            live.service.submit(SPEC, tmp_path / run_id)
        assert live.service.resume(tmp_path / run_id, SPEC) == run_id


async def test_directory_in_use_is_refused(tmp_path):
    async with live_service(tmp_path, 1) as first:
        first.service.submit(SPEC)
        second = live_service(tmp_path, 1)
        with pytest.raises(UsageError, match="in use by another coordinator"):
            await second.__aenter__()


async def test_run_with_a_missing_manifest_is_not_started_again(tmp_path):
    (run_id,) = await interrupt_run(tmp_path, SPEC)
    (tmp_path / run_id / "manifest.json").unlink()
    async with live_service(tmp_path, 1) as live:
        with pytest.raises(StorageDamaged, match="is damaged: it is missing"):
            live.service.resume(tmp_path / run_id)


@pytest.mark.parametrize("name", ["run.json", "manifest.json", "terms.json"])
async def test_flipped_bit_in_a_read_file_is_refused_by_name(tmp_path, name):
    """A spec with another learning rate, for example, would lead to another digest."""
    (run_id,) = await interrupt_run(tmp_path, SPEC)
    path = tmp_path / run_id / name
    content = path.read_bytes()
    offset = content.index(b"1")
    path.write_bytes(content[:offset] + b"3" + content[offset + 1 :])
    async with live_service(tmp_path, 1) as live:
        with pytest.raises(StorageDamaged, match="restore it from a copy") as error:
            live.service.resume(tmp_path / run_id)
        assert error.value.path == str(path)
        path.write_bytes(content)
        assert live.service.resume(tmp_path / run_id) == run_id


async def test_run_without_its_spec_file_is_reported(tmp_path):
    (run_id,) = await interrupt_run(tmp_path, SPEC)
    (tmp_path / "no-run" / "log").mkdir(parents=True)
    (tmp_path / run_id / "run.json").unlink()
    assert [path.name for path in unfinished_runs(tmp_path)] == [run_id]
    async with live_service(tmp_path, 1) as live:
        with pytest.raises(StorageDamaged, match=r"run\.json.* is missing"):
            live.service.resume(tmp_path / run_id)


def test_command_does_not_wait_for_a_run_without_its_spec_file(tmp_path):
    """As a directory of runs, the directory of this run would be empty."""
    WrittenRun(tmp_path / "run").directory.run_file.unlink()
    arguments = ["--resume", "--out", str(tmp_path / "run"), "--bind", "127.0.0.1:0"]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, StorageDamaged)
    assert "it is missing" in str(error)


async def test_invalid_result_does_not_finish_a_run(tmp_path):
    (run_id,) = await interrupt_run(tmp_path, SPEC)
    (tmp_path / run_id / "result.json").write_text('{"outcome": "drainee"}')
    async with live_service(tmp_path, 1) as live:
        with pytest.raises(StorageDamaged, match="outcome"):
            live.service.resume(tmp_path / run_id)


async def test_run_without_its_term_file_loses_no_step(tmp_path):
    reference = await run_undisturbed(tmp_path / "alone", SPEC)
    (run_id,) = await interrupt_run(tmp_path / "runs", SPEC)
    for path in (tmp_path / "runs").rglob("term.json"):
        path.unlink()
    async with live_service(tmp_path / "runs", 1) as live:
        live.service.resume(tmp_path / "runs" / run_id)
        live.start_worker("w0")
        result = await live.result(run_id)
    assert result["weights_digest"] == reference["weights_digest"]
    report = audit(tmp_path / "runs" / run_id)
    assert report.ok, report.lines()


async def test_run_of_an_older_release_continues_with_the_same_bits(tmp_path):
    """The run stopped after step 14; that release called terms epochs and had no file digests."""
    reference = await run_undisturbed(tmp_path / "alone", SPEC)
    [older_run] = (ROOT / "tests" / "older_release").iterdir()
    run = shutil.copytree(older_run, tmp_path / "runs" / older_run.name)
    before = audit(run)
    assert before.ok, before.lines()
    assert "epoch.json has term 1" in "\n".join(before.lines())
    assert "0.56332" in report(run)
    async with live_service(tmp_path / "runs", 1) as live:
        live.service.resume(run)
        live.start_worker("w0")
        result = await live.result(older_run.name)
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]
    after = audit(run)
    assert after.ok, after.lines()
    assert "coordinator of term 2" in report(run)
    assert stored_term(run) == 2
    assert not (run / "epoch.json").exists()
    assert [segment_term(segment) for segment in segment_files(run / "log")] == [2]


async def test_unusable_later_checkpoint_is_set_aside(tmp_path):
    """Otherwise such a checkpoint would be used once it can be read again."""
    (run_id,) = await interrupt_run(tmp_path, SPEC)
    root = tmp_path / run_id / "checkpoints"
    unreadable = checkpoint_path(root, 900)
    shutil.copytree(checkpoint_path(root, checkpoint_steps(root)[-1]), unreadable)
    async with live_service(tmp_path, 1) as live:
        live.service.resume(tmp_path / run_id)
        assert not unreadable.exists()
        live.start_worker("w0")
        assert (await live.result(run_id))["steps"] == 30
    assert audit(tmp_path / run_id).ok


@pytest.mark.parametrize("share_left", [0.0, 0.3])
async def test_truncated_journal_is_not_continued(tmp_path, share_left):
    (run_id,) = await interrupt_run(tmp_path, SPEC)
    journal = tmp_path / run_id / "journal.jsonl"
    os.truncate(journal, round(journal.stat().st_size * share_left))
    async with live_service(tmp_path, 1) as live:
        with pytest.raises(StorageDamaged, match=r"journal\.jsonl.*restore it from a copy"):
            live.service.resume(tmp_path / run_id)
