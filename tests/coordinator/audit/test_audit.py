"""The audit accepts a sound run, and detects and names each way of tampering."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from coordinator.audit.audit import audit
from coordinator.audit.coverage import cover_samples
from coordinator.audit.history import read_history
from coordinator.cli import app
from coordinator.disk.artifacts import write_model
from coordinator.run.outputs.events import Committed, Evaluated, Planned, Record
from coordinator.run.outputs.restart import AdmissionRecord, EmbeddingsRecord
from coordinator.storage.directory.journal import Entry, Journal
from coordinator.storage.directory.journal_records import Ended, Resumed
from coordinator.storage.log.log_index import segment_files
from coordinator.storage.states.checkpoint import checkpoint_path, find_checkpoint, write_metrics
from protocol.base.errors import UsageError
from protocol.exact.reduction.tree import root
from protocol.exact.samples import SampleOrder
from protocol.spec.sections.tasks import BatchSpec
from tests.durable_run import (
    MANIFEST,
    RUN_ID,
    SPEC,
    WrittenRun,
    initial_replica,
    read_journal,
    written_run,
)


def failed_checks(path):
    return [finding for finding in audit(path).findings if not finding.ok]


def failed_check_names(path):
    """Return the names of the checks that failed."""
    return {finding.check for finding in failed_checks(path)}


def rewrite_journal(path, change):
    """Rewrite the journal with changed records and matching hashes, as a careful forger would."""
    entries = list(read_journal(path / "journal.jsonl"))
    (path / "journal.jsonl").unlink()
    journal = Journal(path / "journal.jsonl")
    for entry in entries:
        for record in change(entry.record):
            journal.append(record)
    journal.sync()
    result = json.loads((path / "result.json").read_text())
    change_result(path, journal_head=journal.head if result["journal_head"] else None)


def change_result(path, **values):
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**result, **values}))


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory):
    return written_run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(sound_run, tmp_path):
    return shutil.copytree(sound_run, tmp_path / "run")


def test_sound_run_passes_the_audit(run):
    result = audit(run)
    assert result.ok, result.lines()
    text = "\n".join(result.lines())
    for epoch in range(3):
        assert f"epoch {epoch}: 10 of 10 samples covered exactly once" in text
    assert "9 of 9 steps replayed from the log, every digest compared" in text
    assert "result.json names the journal's last line" in text
    assert result.lines()[-1].endswith("sound")


def test_progress_is_reported_and_shown_only_at_a_terminal(run):
    reports = []
    audit(run, lambda progress, total: reports.append((progress, total)))
    assert reports == [(step, 9) for step in range(1, 10)]
    result = CliRunner().invoke(app, ["audit", str(run)])
    assert result.exit_code == 0
    assert result.output.splitlines() == audit(run).lines()


def test_audit_changes_no_file(run):
    def snapshot():
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = snapshot()
    audit(run)
    assert snapshot() == before


def test_skipped_steps_cover_their_samples(tmp_path):
    path = written_run(tmp_path / "run", skip=(1, 5))
    result = audit(path)
    assert result.ok, result.lines()
    text = "\n".join(result.lines())
    assert "epoch 0: 10 of 10 samples covered exactly once, 4 of them in steps that" in text
    assert "epoch 1: 10 of 10 samples covered exactly once, 2 of them in steps that" in text


def test_without_gradients_only_checkpoint_states_are_proved(tmp_path):
    path = written_run(tmp_path / "run", mode="checkpoint")
    result = audit(path)
    assert result.ok, result.lines()
    assert "0 of 9 steps replayed" in "\n".join(result.lines())


def test_a_gap_in_the_log_is_bridged_by_a_checkpoint(run):
    segment_files(run / "log")[1].unlink()
    result = audit(run)
    assert result.ok, result.lines()
    assert "6 of 9 steps replayed" in "\n".join(result.lines())


@pytest.mark.parametrize("log", ["kept", "gone"])
def test_a_run_without_a_checkpoint_is_not_sound(run, log):
    """`--resume` refuses such a run: the steps of the log have no initial state."""
    shutil.rmtree(run / "checkpoints")
    if log == "gone":
        shutil.rmtree(run / "log")
    assert "checkpoints" in failed_check_names(run)
    findings = "\n".join(audit(run).lines())
    assert "expected an intact checkpoint in" in findings
    assert not findings.endswith("sound")


def test_a_log_that_begins_at_a_missing_checkpoint_is_not_sound(run):
    """Such steps cannot be replayed: the run would return to the previous checkpoint."""
    for segment in segment_files(run / "log")[:2]:
        segment.unlink()
    for step in (6, 9):
        shutil.rmtree(checkpoint_path(run / "checkpoints", step))
    findings = "\n".join(audit(run).lines())
    assert (
        "the log has steps up to 8, but no checkpoint before them: the newest, of step 3"
        in findings
    )


def test_run_in_progress_is_audited_to_its_last_step(tmp_path):
    run = WrittenRun(tmp_path / "run")
    for _ in range(4):
        run.step()
    result = audit(tmp_path / "run")
    assert result.ok, result.lines()
    assert "the run has not ended" in "\n".join(result.lines())


@pytest.mark.parametrize("mode", ["full", "checkpoint"])
def test_a_run_with_crashes_is_sound(tmp_path, mode):
    run = WrittenRun(tmp_path / "run", mode=mode)
    while run.replica.step < SPEC.steps:
        run.step()
        if run.replica.step % 3 == 0:
            run.checkpoint()
        if run.term < 4 and run.replica.step % 2 == 0:
            recovery = run.crash_and_resume()
            if mode == "checkpoint" and recovery.redo:
                run.step()
    path = run.finish()
    result = audit(path)
    assert result.ok, result.lines()
    assert "resumed 3 times" in "\n".join(result.lines())


def test_commit_found_only_in_the_log_is_accepted_after_a_crash(tmp_path):
    run = WrittenRun(tmp_path / "run")
    run.step()
    run.step(journal=False)
    assert audit(tmp_path / "run").ok
    # A crash leaves at most one such commit.
    run.step(journal=False)
    assert "log has 2 commits that the journal lacks" in str(failed_checks(tmp_path / "run")[0])


# Tampering.


def test_flipped_byte_in_the_journal_is_detected_and_its_line_named(run):
    path = run / "journal.jsonl"
    content = path.read_bytes()
    line = 1
    for offset, byte in enumerate(content):
        if offset % 199 == 0:
            path.write_bytes(content[:offset] + bytes([byte ^ 2]) + content[offset + 1 :])
            [finding] = [f for f in failed_checks(run) if f.check == "journal"]
            assert f"line {line} is bad" in finding.text
        line += byte == 10


def test_truncated_journal_is_found(run):
    path = run / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert "the end was cut off" in str([f for f in failed_checks(run) if f.check == "head"])


def test_journal_that_continues_after_its_end_is_found(run):
    journal = Journal(run / "journal.jsonl")
    journal.append(Resumed(term=9, step=9, optimizer_step=9))
    journal.sync()
    assert "continues after" in str([f for f in failed_checks(run) if f.check == "head"])


def test_a_missing_result_is_found(run):
    (run / "result.json").unlink()
    assert failed_check_names(run) == {"head"}


@pytest.mark.parametrize(
    ("field", "value"), [("steps", 8), ("weights_digest", "0" * 64), ("losses", [])]
)
def test_contradicting_result_is_found(run, field, value):
    change_result(run, **{field: value})
    assert failed_check_names(run) == {"result"}


@pytest.mark.parametrize("name", ["run.json", "manifest.json", "terms.json", "files.json"])
def test_changed_small_file_is_found(tmp_path, name):
    run = WrittenRun(tmp_path / "run")
    run.directory.write_admission_record(
        AdmissionRecord(signature="a" * 64, initial_digest="b" * 64)
    )
    run.directory.files_file.write_text('{"list": "", "files": {}}')
    run.record_files()
    run.step()
    run.finish()
    assert audit(tmp_path / "run").ok
    path = tmp_path / "run" / name
    content = path.read_bytes()
    path.write_bytes(content + b" ")
    assert "files" in failed_check_names(tmp_path / "run")
    path.unlink()
    if name != "run.json":  # without it there is no run to audit
        assert "files" in failed_check_names(tmp_path / "run")
    path.write_bytes(content)
    assert audit(tmp_path / "run").ok


def test_term_below_the_known_term_is_found(run):
    (run / "term.json").unlink()
    assert failed_check_names(run) == {"files"}


def test_changed_metric_of_a_result_or_checkpoint_is_found(run):
    change_result(run, eval={"accuracy": 0.76})
    assert failed_check_names(run) == {"result"}
    change_result(run, eval={"accuracy": 0.75})
    assert audit(run).ok
    write_metrics(run / "checkpoints", 9, state_of(run, 9), {"accuracy": 0.75})
    assert audit(run).ok
    write_metrics(run / "checkpoints", 9, state_of(run, 9), {"accuracy": 0.76})
    assert failed_check_names(run) == {"checkpoints"}


def state_of(run, step):
    return find_checkpoint(run / "checkpoints", step, RUN_ID, MANIFEST).info.state_digest


def test_foreign_files_are_named(run):
    (run / "notes.txt").touch()
    result = audit(run)
    assert result.ok
    assert "not checked: notes.txt" in "\n".join(result.lines())


def test_crash_between_a_checkpoint_and_its_journal_line_is_no_damage(tmp_path):
    run = WrittenRun(tmp_path / "run")
    for _ in range(3):
        run.step()
    lines = run.directory.journal.read_bytes()
    run.checkpoint()
    run.log.remove_segments(3)
    run.journal.close()
    run.directory.journal.write_bytes(lines)
    result = audit(tmp_path / "run")
    assert result.ok, result.lines()
    assert "the coordinator ended before writing one" in "\n".join(result.lines())


def test_replay_is_claimed_only_after_a_replay(tmp_path):
    sound_run = "\n".join(audit(written_run(tmp_path / "replayed", steps=5)).lines())
    assert "reached by replay" in sound_run
    path = written_run(tmp_path / "run", mode="checkpoint")
    assert "are those of the last checkpoint" in "\n".join(audit(path).lines())


def test_replaced_model_is_found(run):
    write_model(run, MANIFEST, initial_replica())
    assert failed_check_names(run) == {"result"}
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"odd")
    assert failed_check_names(run) == {"result"}


def test_another_run_spec_or_manifest_is_found(run):
    document = json.loads((run / "run.json").read_text())
    document["spec"]["seed"] = 4
    (run / "run.json").write_text(json.dumps(document))
    assert "inputs" in failed_check_names(run)
    (run / "manifest.json").write_bytes(
        MANIFEST.model_copy(update={"digests": {"data": "c" * 64}}).to_bytes()
    )
    assert "manifest.json differs from" in str(failed_checks(run))


@pytest.mark.parametrize("name", ["optimizer.safetensors", "adapter/adapter_model.safetensors"])
def test_a_damaged_checkpoint_is_found(run, name):
    path = checkpoint_path(run / "checkpoints", 3) / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert failed_check_names(run) == {"checkpoints"}


def test_damaged_gradients_are_found_with_file_and_position(run):
    path = segment_files(run / "log")[1]
    content = bytearray(path.read_bytes())
    content[600] ^= 1
    path.write_bytes(content)
    [finding] = [f for f in failed_checks(run) if f.check == "digests" and path.name in f.text]
    assert "at byte" in finding.text


def forge_commit(**changes):
    def forge(record):
        if isinstance(record, Committed) and record.step == 4:
            return [record.model_copy(update=changes)]
        return [record]

    return forge


def forge_metrics(record):
    if isinstance(record, Evaluated):
        return [record.model_copy(update={"state_digest": "1" * 64})]
    return [record]


def forge_end(record):
    if isinstance(record, Ended):
        return [record.model_copy(update={"state_digest": "1" * 64})]
    return [record]


@pytest.mark.parametrize(
    ("forge", "check"),
    [
        (forge_commit(loss=0.001), "digests"),
        (forge_commit(norm=0.001), "digests"),
        (forge_commit(rate=0.0), "digests"),
        (forge_commit(state_before="1" * 64), "digests"),
        (forge_end, "digests"),
        (forge_metrics, "digests"),
    ],
    ids=["loss", "norm", "rate", "state", "end", "metrics"],
)
def test_forged_record_with_matching_hashes_is_found(run, forge, check):
    rewrite_journal(run, forge)
    assert check in failed_check_names(run)


def without_plan(record):
    return [] if isinstance(record, Planned) and record.step == 4 else [record]


def plan_with_hole(record):
    if isinstance(record, Planned) and record.step == 4:
        return [record.model_copy(update={"nodes": {"a": ((0, 1),)}})]
    return [record]


def plan_of_no_subtree(record):
    if isinstance(record, Planned) and record.step == 4:
        return [record.model_copy(update={"nodes": {"a": ((0, 3),)}})]
    return [record]


def counted_twice(record):
    if isinstance(record, Committed) and record.step == 4:
        subtrees = {"a": ((0, 1), (1, 2)), "b": ((1, 2),)}
        return [record.model_copy(update={"counted": (subtrees,)})]
    return [record]


def counted_for_another_worker(record):
    if isinstance(record, Committed) and record.step == 4:
        return [record.model_copy(update={"counted": ({"stranger": ((0, 2),)},)})]
    return [record]


def embedded_by_unassigned_worker(record):
    """The run has no embeddings, so no worker was assigned any."""
    if not isinstance(record, Committed) or record.step != 4:
        return [record]
    rows = EmbeddingsRecord(digest="0" * 64, of={"ann": ((0, 2),)})
    return [record.model_copy(update={"embedded": rows})]


def embedded_in_part(record):
    if not isinstance(record, Committed) or record.step != 4:
        return [record]
    rows = EmbeddingsRecord(digest="0" * 64, of={"ann": ((0, 1),)})
    return [record.model_copy(update={"embedded": rows})]


def without_last_commit(record):
    return [] if isinstance(record, Committed) and record.step == 8 else [record]


def commit_twice(record):
    return [record, record] if isinstance(record, Committed) and record.step == 4 else [record]


@pytest.mark.parametrize(
    ("forge", "text"),
    [
        (without_plan, "committed without a plan"),
        (plan_with_hole, "microbatches 1 were not assigned"),
        (plan_of_no_subtree, "is not a subtree over 2"),
        (counted_twice, "do not contain every microbatch exactly once"),
        (
            counted_for_another_worker,
            "subtree [0,2) of 'stranger' is counted, but was not assigned to it",
        ),
        (
            embedded_by_unassigned_worker,
            "embeddings: subtree [0,2) of 'ann' is counted, but was not assigned",
        ),
        (embedded_in_part, "do not contain every microbatch exactly once"),
        (without_last_commit, "result.json says steps 9, the journal 8"),
        (commit_twice, "expected the commit of step 5, got that of 4"),
    ],
)
def test_history_must_cover_every_sample_once(run, forge, text):
    rewrite_journal(run, forge)
    assert text in str(failed_checks(run))


def test_a_directory_without_a_run_is_reported(tmp_path):
    with pytest.raises(UsageError, match="found no run"):
        audit(tmp_path)


# Coverage against a naive count.


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_coverage_equals_a_naive_count(data):
    samples = data.draw(st.integers(1, 13))
    batch = BatchSpec(samples=data.draw(st.integers(1, 6)), microbatch=1)
    spec = SPEC.model_copy(update={"batch": batch, "seed": data.draw(st.integers(0, 99))})
    order = SampleOrder(spec.seed, samples, batch)
    entries: list[Record] = []
    skips: list[bool] = []
    term = 1
    for _ in range(data.draw(st.integers(0, 14))):
        step = len(skips)
        event = data.draw(st.sampled_from(["step", "step", "step", "skip", "resume", "retry"]))
        if event == "resume":
            term += 1
            restart_step = data.draw(st.integers(0, step))
            del skips[restart_step:]
            entries.append(Resumed(term=term, step=restart_step, optimizer_step=0))
            continue
        count = order.microbatch_count(step)
        plan = Planned(
            term=term, step=step, attempt=0, view=1, microbatches=count,
            nodes={"a": (tuple(root(count)),)},
        )  # fmt: skip
        entries.append(plan)
        if event == "retry":
            continue
        entries.append(
            Committed(
                term=term, step=step, attempt=0, optimizer_step=0, loss=0.0,
                skipped=event == "skip", averages_digest="0" * 64,
            )
        )  # fmt: skip
        skips.append(event == "skip")
    numbered = [Entry(n, "", record, "") for n, record in enumerate(entries, 1)]
    coverage = cover_samples(read_history(numbered), spec, samples)
    assert coverage.faults == ()
    naive = []
    for first in range(0, len(skips), order.steps_per_epoch):
        steps = range(first, min(first + order.steps_per_epoch, len(skips)))
        visits = [(step, s) for step in steps for part in order.microbatches(step) for s in part]
        visited_once = sum(
            1 for sample in range(samples) if [s for _, s in visits].count(sample) == 1
        )
        naive.append((visited_once, samples, sum(1 for step, _ in visits if skips[step])))
    assert list(coverage.epochs) == naive
    assert all(covered_samples == samples for covered_samples, _, _ in coverage.epochs[:-1])
