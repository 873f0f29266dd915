"""A run can continue with more steps or another rate, but not with arbitrary changes."""

import json

import pytest
from typer.testing import CliRunner

from coordinator.audit.audit import audit
from coordinator.audit.report import report
from coordinator.cli import app
from coordinator.service.spec_change import SpecChange
from coordinator.storage.directory.journal_records import SpecChanged
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.file_digests import lock_directory
from protocol.base.errors import RunSpecError, UsageError
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.spec_changes import apply_changes
from tests.cluster import RUNS
from tests.durable_run import read_journal
from tests.live_service import live_service, run_undisturbed, scripted_spec

ADAM = {"name": "adam", "lr": 0.01, "weight_decay": 0.1, "ema": {"decay": 0.5}}


def spec_of(steps=10, **changes):
    return scripted_spec(steps=steps, optimizer=ADAM, checkpoint={"every": 4}, **changes)


async def finish_run(directory, spec):
    async with live_service(directory, 1) as live:
        run_id = live.service.submit(spec)
        live.start_worker("w0")
        await live.result(run_id)
        return directory / run_id


async def resume_with(directory, *changes, **options):
    async with live_service(directory.parent, 1) as live:
        assert live.service.resume(directory, changes=changes, **options) == directory.name
        live.start_worker("w0")
        return await live.result(directory.name)


async def test_run_extended_from_ten_to_twenty_steps_equals_a_run_of_twenty(tmp_path):
    reference = await run_undisturbed(tmp_path / "twenty", spec_of(20))
    run = await finish_run(tmp_path / "ten", spec_of(10))
    first = json.loads((run / "result.json").read_text())
    async with live_service(run.parent, 2) as live:  # as `coordinator resume RUN --set steps=20`
        assert await live.service.resume_by_name(run.name, None, ["steps=20"]) == run.name
        for name in ("w0", "w1"):
            live.start_worker(name)
        result = await live.result(run.name)
    assert result["weights_digest"] == reference["weights_digest"] != first["weights_digest"]
    assert result["losses"] == reference["losses"]
    journal = [entry.record for entry in read_journal(run / "journal.jsonl")]
    [change] = [record for record in journal if isinstance(record, SpecChanged)]
    assert (change.step, change.changes) == (10, ("steps: 10 -> 20",))
    assert change.before != change.spec_digest
    [set_aside] = (run / "set-aside").iterdir()
    assert json.loads((set_aside / "result.json").read_text()) == first
    audit_result = audit(run)
    assert audit_result.ok, audit_result.lines()
    assert any("changed after 10 steps: steps: 10 -> 20" in line for line in audit_result.lines())
    assert "steps: 10 -&gt; 20" in report(run)


async def test_new_rate_applies_from_its_step_and_passes_the_audit(tmp_path):
    checkpoint_section = {"checkpoint": {"every": 2, "keep_last": 9, "keep_log": True}}
    run = await finish_run(tmp_path, scripted_spec(steps=6, optimizer=ADAM, **checkpoint_section))
    changes = ("steps=12", "optimizer.lr=0.001", "optimizer.schedule=linear", "stop=null")
    await resume_with(run, *changes)
    assert audit(run).ok
    await resume_with(run, from_step=4)
    audit_result = audit(run)
    assert audit_result.ok, audit_result.lines()  # steps 4 and 5 now follow the newest spec
    stored_run = RunDirectory(run).read_run()
    assert stored_run is not None
    assert stored_run.spec.optimizer.lr == 0.001
    with pytest.raises(UsageError, match=r"the run has taken 12 steps.*has 12"):
        await resume_with(run, "evaluate_every=3")


async def test_crash_between_the_file_and_the_journal_is_repaired(tmp_path):
    run = await finish_run(tmp_path, spec_of(6))
    directory = RunDirectory(run)
    stored_run = directory.read_run()
    assert stored_run is not None
    change = SpecChange.of(directory, stored_run, ["steps=9"], None)
    assert change is not None
    lock = lock_directory(run)
    change.write(lock)
    lock.release()
    assert audit(run).ok is False, "run.json is ahead of the journal"
    result = await resume_with(run)
    assert result["steps"] == 9
    assert audit(run).ok


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("seed=4", "seed cannot change in a run that has begun: .* the order of samples"),
        ("batch.samples=4", "batch.samples cannot change .* which samples each step used"),
        ("optimizer.name=adamw", "optimizer.name cannot change .* the saved moments"),
        ("optimizer.betas=[0.5, 0.9]", "optimizer.betas cannot change"),
        ("optimizer.ema=null", "optimizer.ema.* cannot change"),
        ("threads=2", "threads cannot change .* the bits of every gradient"),
        ("scripted.blocks=2", "scripted.blocks cannot change .* computed with it"),
    ],
)
def test_keys_that_the_state_depends_on_cannot_change(change, text):
    with pytest.raises(UsageError, match=text):
        apply_changes(spec_of(), [change])


def test_every_sample_run_spec_may_change_its_length():
    for path in sorted(RUNS.glob("*.yaml")):
        spec = load_run_spec(path)
        key = "steps" if spec.epochs is None else "epochs"
        new, changes = apply_changes(spec, [f"{key}=77"])
        assert [each.partition(":")[0] for each in changes] == [key], path
        assert new == spec.model_copy(update={key: 77})
        assert apply_changes(spec, []) == (spec, ())


def test_schedule_can_change():
    linear = scripted_spec(
        optimizer={"schedule": "linear", "min_lr_ratio": 0.1, "warmup_steps": 2}, evaluate_every=2
    )
    assert apply_changes(linear, ["steps=4"]) == (linear, ())
    new, changes = apply_changes(linear, ["optimizer.schedule=constant"])
    assert new.optimizer.schedule == "constant"
    assert changes == (
        "optimizer.min_lr_ratio: 0.1 -> not set", 'optimizer.schedule: "linear" -> "constant"',
    )  # fmt: skip
    schedule_free = scripted_spec(optimizer={"name": "schedule-free"})
    with pytest.raises(UsageError, match="schedule-free weighs its average by the rates"):
        apply_changes(schedule_free, ["optimizer.lr=0.5"])
    with pytest.raises(RunSpecError, match=r"optimizer[.]lr"):
        apply_changes(linear, ["optimizer.lr=-1"])


async def test_fewer_steps_than_committed_and_other_runs_are_refused(tmp_path):
    run = await finish_run(tmp_path, spec_of(6))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and "lock" not in p.name}
    with pytest.raises(UsageError, match=r"has taken 6 steps, and the changed run spec has 5"):
        await resume_with(run, "steps=5")
    with pytest.raises(UsageError, match="seed cannot change"):
        await resume_with(run, "seed=5", "steps=9")
    changed_files = {p for p, content in before.items() if p.read_bytes() != content}
    assert {p.name for p in changed_files} <= {"term.json"}


def test_changed_spec_requires_the_directory_of_one_run(tmp_path):
    for arguments, text in (
        (["--resume", "--set", "steps=9"], "needs --out"),
        (["--resume", "--out", str(tmp_path), "--set", "steps=9"], "the directory of one run"),
    ):
        completed = CliRunner().invoke(app, arguments)
        assert text in str(completed.exception) + completed.output
