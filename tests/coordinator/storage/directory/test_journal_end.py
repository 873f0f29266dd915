"""The journal end that a restart reads, compared with a full read of the journal."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.audit.history import read_history
from coordinator.run.outputs.events import Checkpointed, Committed, ManifestSettled
from coordinator.storage.directory import journal as journal_module
from coordinator.storage.directory.journal import Journal, JournalEnd, read_end
from coordinator.storage.directory.journal_records import Fault, Resumed, RunStarted
from tests.durable_run import read_journal

D = "d" * 64
BEGIN = [
    RunStarted.of("r-1", {"task": "regress"}, {"samestep": "0.1"}),
    ManifestSettled(manifest_digest=D, digests={"data": D}, train_samples=9, evaluation_parts=1),
]


def commit_record(step, term=1):
    return Committed(
        term=term, step=step, attempt=0, optimizer_step=step + 1, loss=0.1,
        skipped=False, averages_digest=D, counted=({"w1": ((0, 2),)},),
    )  # fmt: skip


def checkpoint_record(step):
    return Checkpointed(
        term=1, step=step, optimizer_step=step, weights_digest=D, state_digest=D, directory="c"
    )


def resume_record(step):
    return Resumed(term=2, step=step, optimizer_step=step, notes=())


def write(path, records):
    journal = Journal(path)
    for record in records:
        journal.append(record)
    journal.sync()
    journal.close()


def read_naively(path, checkpoint_step):
    """Read the whole journal in order."""
    history = read_history(read_journal(path))
    assert history.faults == []
    return JournalEnd(
        has_run=history.start is not None,
        has_manifest=history.manifest is not None,
        commits=len(history.commits),
        has_checkpoint=checkpoint_step in history.checkpoints,
    )


@st.composite
def histories(draw):
    """Draw steps, checkpoints after their commits, and restarts that roll back some steps."""
    records = BEGIN[: draw(st.integers(0, 2))]
    if len(records) < 2:
        return records, 0
    records.append(checkpoint_record(0))
    step = checkpoint_step = 0
    for event_kind in draw(
        st.lists(st.sampled_from(["commit", "save", "note", "rollback"]), max_size=40)
    ):
        if event_kind == "commit":
            records.append(commit_record(step))
            step += 1
        elif event_kind == "save":
            checkpoint_step = step
            if draw(st.booleans()):
                records.append(checkpoint_record(step))
        elif event_kind == "note":
            records.append(Fault(term=1, step=step, what="straggler", response="none"))
        else:
            step = draw(st.integers(checkpoint_step, step))
            records.append(resume_record(step))
    return records, checkpoint_step


@given(history=histories(), window=st.sampled_from([1, 7, 64, 1 << 16]))
def test_end_equals_the_whole_journal(tmp_path_factory, history, window):
    records, checkpoint_step = history
    path = tmp_path_factory.mktemp("journal") / "j"
    write(path, records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "_WINDOW_BYTES", window)
        assert read_end(path, checkpoint_step) == read_naively(path, checkpoint_step)


def test_long_journal_is_not_read_beyond_its_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "j"
    early_commits = [commit_record(step) for step in range(500)]
    write(path, [*BEGIN, *early_commits, checkpoint_record(500), commit_record(500)])
    lines_read = []
    lines_backwards = journal_module._lines_backwards

    def count_lines_read(path):
        for line in lines_backwards(path):
            lines_read.append(line)
            yield line

    monkeypatch.setattr(journal_module, "_lines_backwards", count_lines_read)
    end = JournalEnd(has_run=True, has_manifest=True, commits=501, has_checkpoint=True)
    assert read_end(path, 500) == end
    assert read_end(path, 501) == replace(end, has_checkpoint=False)
    assert len(lines_read) < 10


def test_missing_journal_is_empty(tmp_path):
    empty_end = JournalEnd(has_run=False, has_manifest=False, commits=0, has_checkpoint=False)
    assert read_end(tmp_path / "j", 0) == empty_end


def test_damaged_lines_are_ignored(tmp_path):
    path = tmp_path / "j"
    write(path, [*BEGIN, checkpoint_record(0), commit_record(0), commit_record(1)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], b"[1]\n", b"{\n", b'{"record": 3}\n', lines[-1]]))
    assert read_end(path, 0).commits == 2
