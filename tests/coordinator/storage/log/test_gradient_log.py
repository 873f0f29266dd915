"""The gradient log: committed steps are read back bit for bit after any failure."""

import errno
import os
import shutil
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.disk import append_file
from coordinator.disk.directory_lock import DirectoryLock
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.log.log_index import read_averages, read_chunks, segment_files
from coordinator.storage.log.log_reader import scan_log
from coordinator.storage.log.log_records import ChunkId, SegmentHeader, read_commit, read_header
from protocol.base import limits
from protocol.base.errors import Mismatch, RunFailed, StorageDamaged, StorageFailed
from protocol.spec.manifest import Block, Manifest, TensorSpec
from tests.durable_run import (
    BLOCKS,
    MANIFEST,
    RUN_ID,
    append_averages,
    averages,
    commit_of,
    log_step,
    record_of,
    small_disk,
)


def open_log(directory, *, term=1, next_step=0, **options):
    return GradientLog(directory, RUN_ID, MANIFEST, term=term, next_step=next_step, **options)


def scan(directory, **options):
    return scan_log(directory, RUN_ID, MANIFEST, **options)


def steps(directory, step=0, **options):
    """Return the committed steps from `step` on, and the truncations of the scan."""
    scan_result = scan(directory, **options)
    return list(scan_result.index.steps_from(step)), scan_result.torn_tails


def step_numbers(directory, step=0, **options):
    return [logged_step.step for logged_step in steps(directory, step, **options)[0]]


def contents(directory, step=0):
    """Return (term, step, attempt) and the bytes of the averages of each committed step."""
    rows = []
    for logged_step in steps(directory, step)[0]:
        commit, arrays = logged_step.record.commit, read_averages(logged_step, BLOCKS)
        step_id = (commit.term, commit.step, commit.attempt)
        rows.append((step_id, None if arrays is None else [a.tobytes() for a in arrays]))
    return rows


def expected(*step_ids):
    return [
        (step_id, [array.tobytes() for array in averages(step_id[1], step_id[2])])
        for step_id in step_ids
    ]


def write_log(directory, steps, **options):
    log = open_log(directory, **options)
    for step in range(steps):
        log_step(log, step)
    log.close()
    return segment_files(directory)[-1]


def test_committed_steps_round_trip_bit_for_bit(tmp_path):
    log = open_log(tmp_path)
    for step in range(3):
        append_averages(log, step)
        log.commit(record_of(step, step + 1, state_before=f"{step:064x}"))
    log.close()
    assert contents(tmp_path) == expected((1, 0, 0), (1, 1, 0), (1, 2, 0))
    records = [logged_step.record for logged_step in steps(tmp_path, 1)[0]]
    assert [record.commit for record in records] == [commit_of(1, 2), commit_of(2, 3)]
    assert [(r.optimizer_step, r.state_before) for r in records] == [
        (2, f"{1:064x}"),
        (3, f"{2:064x}"),
    ]


def test_every_bit_pattern_survives(tmp_path):
    log = open_log(tmp_path)
    special_values = [np.zeros(block.elements, np.float32) for block in BLOCKS]
    special_values[0][:4] = np.array([0x7FC00001, 0xFF800000, 1, 0x80000000], np.uint32).view(
        np.float32
    )
    for index, values in enumerate(special_values):
        log.append_chunk(ChunkId(1, 0, 0, index, 0), values)
    log.commit(record_of(0, 1))
    [(_, arrays)] = contents(tmp_path)
    assert arrays == [values.tobytes() for values in special_values]


def test_block_of_many_chunks_is_assembled_in_any_order(tmp_path):
    shape = (limits.CHUNK_ELEMENTS * 2 + 5,)
    manifest = Manifest(
        blocks=(Block(name="b", kind="block", tensors=(TensorSpec(name="b", shape=shape),)),),
        train_samples=10,
    )
    block = manifest.blocks[0]
    values = np.arange(block.elements, dtype=np.float32)
    log = GradientLog(tmp_path, RUN_ID, manifest, term=1, next_step=0)
    for chunk in (2, 0, 3, 1):
        log.append_chunk(ChunkId(1, 0, 0, 0, chunk), values[block.chunk_slice(chunk)])
    log.commit(record_of(0, 1))
    [logged_step] = scan_log(tmp_path, RUN_ID, manifest).index.steps_from(0)
    arrays = read_averages(logged_step, manifest.blocks)
    assert arrays is not None
    assert arrays[0].tobytes() == values.tobytes()


SIZES = [5, 70_000, 140_000, 163_840, 300_001]


@pytest.mark.parametrize("order", [1, -1])
def test_log_with_other_chunk_sizes_is_read_in_current_chunks(tmp_path, monkeypatch, order):
    blocks = tuple(
        Block(name=str(n), kind="block", tensors=(TensorSpec(name=str(n), shape=(size,)),))
        for n, size in enumerate(SIZES)
    )
    manifest = Manifest(blocks=blocks, train_samples=10)
    values = [np.arange(block.elements, dtype=np.float32) + n for n, block in enumerate(blocks)]
    with monkeypatch.context() as patch:
        patch.setattr(limits, "SMALL_CHUNK_ELEMENTS", 2 * limits.SMALL_CHUNK_ELEMENTS)
        log = GradientLog(tmp_path, RUN_ID, manifest, term=1, next_step=0)
        chunks = [(n, chunk) for n, block in enumerate(blocks) for chunk in range(block.chunks)]
        for n, chunk in chunks[::order]:
            part = values[n][blocks[n].chunk_slice(chunk)]
            log.append_chunk(ChunkId(1, 0, 0, n, chunk), part)
        log.commit(record_of(0, 1))
    [logged_step] = scan_log(tmp_path, RUN_ID, manifest).index.steps_from(0)
    chunks_read = list(read_chunks(logged_step, blocks))
    current_chunks = sorted(
        (n, chunk) for n, block in enumerate(blocks) for chunk in range(block.chunks)
    )
    assert sorted((n, chunk) for n, chunk, _ in chunks_read) == current_chunks != sorted(chunks)
    for n, chunk, part in chunks_read:
        assert part.tobytes() == values[n][blocks[n].chunk_slice(chunk)].tobytes()


def test_uncommitted_chunks_are_ignored(tmp_path):
    log = open_log(tmp_path)
    append_averages(log, 0, attempt=0)
    log_step(log, 0, attempt=1)
    append_averages(log, 1)
    log.close()
    assert contents(tmp_path) == expected((1, 0, 1))


def test_skipped_step_has_no_averages(tmp_path):
    log = open_log(tmp_path)
    log_step(log, 0)
    log.commit(record_of(1, 1, skip=True))
    log.commit(record_of(2, 1, skip=True))
    log.close()
    assert [arrays for _, arrays in contents(tmp_path)][1:] == [None, None]


def test_step_is_not_committed_without_all_of_its_gradients(tmp_path):
    log = open_log(tmp_path)
    log.append_chunk(ChunkId(1, 0, 0, 0, 0), averages(0)[0])
    with pytest.raises(AssertionError):
        log.commit(record_of(0, 1))


def test_checkpoint_mode_keeps_only_commits(tmp_path):
    path = write_log(tmp_path, 3, mode="checkpoint")
    assert [(step_id, arrays) for step_id, arrays in contents(tmp_path)] == [
        ((1, step, 0), None) for step in range(3)
    ]
    assert path.stat().st_size < 3_000


def test_repeated_commits_remain_after_restarts_and_checkpoints(tmp_path):
    write_log(tmp_path, 4, mode="checkpoint")
    for term in (2, 3):
        redo = [step.record for step in steps(tmp_path, repair=True)[0]]
        assert [record.commit.step for record in redo] == [0, 1, 2, 3]
        log = open_log(tmp_path, term=term, mode="checkpoint", redo=redo)
    log_step(log, 0, term=3)
    log_step(log, 1, term=3)
    log.roll()
    log.remove_segments(2)
    log.close()
    assert [step_id for step_id, _ in contents(tmp_path, 2)] == [(1, 2, 0), (1, 3, 0)]


def test_writes_of_a_killed_coordinator_are_synced_before_they_count(tmp_path, monkeypatch):
    path = write_log(tmp_path, 2)
    synced_paths = []
    sync = os.fsync

    def record_sync(fd):
        synced_paths.append(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(os, "fsync", record_sync)
    scan(tmp_path)
    assert synced_paths == []
    scan(tmp_path, repair=True)
    assert path.stat().st_ino in synced_paths


def test_replaced_coordinator_does_not_repair_its_segment(tmp_path, monkeypatch):
    lock = DirectoryLock.acquire(tmp_path)
    log = open_log(tmp_path / "log", term=lock.term, guard=lock.check)
    append_averages(log, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", _raise_io_error)
        with pytest.raises(StorageFailed):
            log.commit(record_of(0, 1))
    # The commit can be read, so a new coordinator continues from it.
    (tmp_path / "lock").unlink()
    DirectoryLock.acquire(tmp_path)
    assert step_numbers(tmp_path / "log", repair=True) == [0]
    with pytest.raises(RunFailed):
        append_averages(log, 0, attempt=1)
    assert step_numbers(tmp_path / "log") == [0]


def _raise_io_error(fd):
    raise OSError(errno.EIO, f"no file {fd}")


class NaiveLog:
    """The expected content of a log, as a dictionary."""

    def __init__(self):
        self.committed = {}
        self.term = 1
        self.attempt = 0

    @property
    def next_step(self):
        return len(self.committed)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from(["step", "step", "step", "retry", "roll", "cut", "crash", "torn", "skip"]),
        max_size=25,
    ),
    st.data(),
)
def test_any_history_reads_back_like_a_dictionary(tmp_path_factory, history, data):
    directory = tmp_path_factory.mktemp("log")
    log, naive, base = open_log(directory), NaiveLog(), 0
    for event in history:
        step = naive.next_step
        term, attempt = naive.term, naive.attempt
        match event:
            case "step":
                log_step(log, step, term=term, attempt=attempt)
                naive.committed[step] = (naive.term, step, naive.attempt)
                naive.attempt = 0
            case "skip":
                log.commit(record_of(step, step, skip=True, term=term, attempt=attempt))
                naive.committed[step] = None
                naive.attempt = 0
            case "retry":
                append_averages(log, step, term=term, attempt=attempt)
                naive.attempt += 1
            case "roll":
                log.roll()
            case "cut":
                base = data.draw(st.integers(base, step))
                log.remove_segments(base)
            case "crash" | "torn":
                log.close()
                if event == "torn":
                    with log.segment.open("ab") as file:
                        file.write(data.draw(st.binary(max_size=60)))
                assert step_numbers(directory, base, repair=True) == list(range(base, step))
                naive.term, naive.attempt = naive.term + 1, 0
                log = open_log(directory, term=naive.term, next_step=step)
    log.close()
    reference = [naive.committed[step] for step in range(base, naive.next_step)]
    rows = contents(directory, base)
    assert len(rows) == len(reference)
    for step_id, row in zip(reference, rows, strict=True):
        assert row[1] is None if step_id is None else [row] == expected(step_id)


# Damage.


def test_tail_torn_at_any_byte_of_the_last_step_is_cut(tmp_path):
    path = write_log(tmp_path / "log", 3)
    content = path.read_bytes()
    step_ends = [logged_step.end for logged_step in steps(tmp_path / "log")[0]]
    assert step_ends[-1] == len(content)
    for length in range(step_ends[-2], len(content)):
        path.write_bytes(content[:length])
        logged_steps, cuts = steps(tmp_path / "log", repair=True)
        assert [s.step for s in logged_steps] == [0, 1], length
        assert bool(cuts) == (path.stat().st_size < length)
        # After one truncation the log is intact: the next start changes nothing.
        assert scan(tmp_path / "log").torn_tails == ()
    log = open_log(tmp_path / "log", term=2, next_step=2)
    log_step(log, 2, term=2)
    assert contents(tmp_path / "log") == expected((1, 0, 0), (1, 1, 0), (2, 2, 0))


@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"S"])
def test_tail_of_unwritten_disk_blocks_is_cut(tmp_path, filler):
    path = write_log(tmp_path, 2)
    with path.open("ab") as file:
        file.write(filler * 5000)
    assert [str(truncation) for truncation in scan(tmp_path, repair=True).torn_tails] == [
        f"{path.name}: 5000 bytes cut at byte {path.stat().st_size}: the last record is incomplete"
    ]
    assert contents(tmp_path) == expected((1, 0, 0), (1, 1, 0))


def test_flipped_bit_before_the_newest_step_is_refused_with_its_offset(tmp_path):
    path = write_log(tmp_path, 3)
    content = path.read_bytes()
    newest = steps(tmp_path)[0][1].end
    for offset in range(0, newest, 2):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
        # The first scan skips gradients; a reader of them gets the error.
        with pytest.raises(StorageDamaged, match=path.name) as error:
            contents(tmp_path)
        step_id = int(error.value.location.removeprefix("byte "))
        assert step_id <= offset < step_id + 600


def test_flipped_bit_in_the_newest_step_drops_that_step(tmp_path):
    """An unfinished sync may leave the commit without the data that it commits."""
    path = write_log(tmp_path, 3)
    content = path.read_bytes()
    for offset in range(steps(tmp_path)[0][1].end, len(content)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
        logged_steps, cuts = steps(tmp_path)
        assert [s.step for s in logged_steps] == [0, 1]
        assert len(cuts) == 1


def test_damage_before_the_last_segment_is_refused(tmp_path):
    log = open_log(tmp_path)
    log_step(log, 0)
    log_step(log, 1)
    first = log.segment
    log.roll()
    log_step(log, 2)
    log.close()
    os.truncate(first, first.stat().st_size - 1)
    with pytest.raises(StorageDamaged, match=first.name):
        scan(tmp_path)


def test_log_of_another_run_or_manifest_is_refused(tmp_path):
    write_log(tmp_path, 1)
    with pytest.raises(Mismatch, match="made-up-1"):
        scan_log(tmp_path, "other", MANIFEST)
    with pytest.raises(Mismatch, match="manifest"):
        scan_log(tmp_path, RUN_ID, MANIFEST.model_copy(update={"train_samples": 11}))


def test_incomplete_segment_is_removed(tmp_path):
    path = write_log(tmp_path, 1)
    leftover = path.with_name("term-000002-step-0000000001.log.part")
    leftover.write_bytes(b"half")
    assert step_numbers(tmp_path, repair=True) == [0]
    assert not leftover.exists()


# Who may write.


def test_writes_of_a_replaced_coordinator_do_not_count(tmp_path):
    old_log = open_log(tmp_path)
    log_step(old_log, 0)
    new_log = open_log(tmp_path, term=2, next_step=1)
    log_step(old_log, 1, attempt=7)
    log_step(old_log, 2)
    log_step(new_log, 1, term=2)
    append_averages(old_log, 3)
    assert contents(tmp_path) == expected((1, 0, 0), (2, 1, 0))


def test_replaced_coordinator_announces_no_commit(tmp_path):
    lock = DirectoryLock.acquire(tmp_path)
    log = open_log(tmp_path / "log", term=lock.term, guard=lock.check)
    log_step(log, 0)
    # The lock cannot be taken while it is held: simulate another machine's view of the directory.
    (tmp_path / "lock").unlink()
    DirectoryLock.acquire(tmp_path)
    with pytest.raises(RunFailed, match="another coordinator"):
        log_step(log, 1)
    assert log.next_step == 1


def test_commit_returns_after_all_of_it_is_synced(tmp_path, monkeypatch):
    """A disk that forgets unsynced data still has every committed step."""
    synced_content = {}
    real = os.fdatasync

    def sync(fd):
        real(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        synced_content[path.name] = path.read_bytes()

    log = open_log(tmp_path / "log")
    monkeypatch.setattr(os, "fdatasync", sync)
    for step in range(4):
        log_step(log, step)
        if step == 1:
            log.roll()
        forgetful = tmp_path / f"forgetful-{step}"
        forgetful.mkdir()
        for name, content in synced_content.items():
            (forgetful / name).write_bytes(content)
        assert contents(forgetful) == expected(*((1, s, 0) for s in range(step + 1)))


# Segments.


def test_only_segments_before_a_checkpoint_are_removed(tmp_path):
    log = open_log(tmp_path)
    for step in range(6):
        log_step(log, step)
        if step % 2:
            log.roll()
    assert [path.name[-8:] for path in segment_files(tmp_path)] == [
        "0000.log",
        "0002.log",
        "0004.log",
        "0006.log",
    ]
    assert [path.name[-8:] for path in log.remove_segments(5)] == ["0000.log", "0002.log"]
    assert log.remove_segments(5) == []
    assert contents(tmp_path, 4) == expected((1, 4, 0), (1, 5, 0))
    log_step(log, 6)
    assert log.remove_segments(1_000)
    assert segment_files(tmp_path) == [log.segment]


def test_rolling_within_a_step_moves_its_chunks(tmp_path):
    log = open_log(tmp_path)
    log_step(log, 0)
    log.append_chunk(ChunkId(1, 1, 0, 0, 0), averages(1)[0])
    log.roll()
    log.remove_segments(1)
    log.append_chunk(ChunkId(1, 1, 0, 1, 0), averages(1)[1])
    log.commit(record_of(1, 2))
    assert contents(tmp_path, 1) == expected((1, 1, 0))


# The index.


def index_of(directory):
    return [(s.step, s.record, s.chunks, s.end) for s in steps(directory)[0]]


def test_maintained_index_equals_the_scanned_index(tmp_path):
    log = open_log(tmp_path)
    for step in range(4):
        log_step(log, step)
        if step == 1:
            log.roll()
        if step == 2:
            append_averages(log, 3, attempt=3)  # uncommitted chunks, which take space
    indexed = [(s.step, s.record, s.chunks, s.end) for s in log.index.steps_from(0)]
    assert indexed == index_of(tmp_path)
    log.close()
    new_log = open_log(tmp_path, term=2, next_step=3, index=scan(tmp_path).index)
    assert [s.step for s in new_log.index.steps_from(0)] == [0, 1, 2]  # step 3 is void
    log_step(new_log, 3, term=2)
    new_log.roll()
    new_log.remove_segments(3)
    assert [s.record.commit.term for s in new_log.index.steps_from(3)] == [2]
    assert list(new_log.index.steps_from(0)) == []


class ReadCounter:
    """Counts the reads of all files and the bytes that they return."""

    def __init__(self, monkeypatch):
        self.calls = self.bytes = 0
        self.real = os.pread
        monkeypatch.setattr(os, "pread", self)

    def __call__(self, fd, length, offset):
        content = self.real(fd, length, offset)
        self.calls, self.bytes = self.calls + 1, self.bytes + len(content)
        return content


def test_missed_steps_are_read_independently_of_log_length(tmp_path, monkeypatch):
    costs = []
    for length in (10, 400):
        log = open_log(tmp_path / str(length))
        for step in range(length):
            log_step(log, step)
            if step % 50 == 49:
                log.roll()
        with monkeypatch.context() as patch:
            read_counter = ReadCounter(patch)
            missed_steps = list(log.index.steps_from(length - 3))
        assert len(missed_steps) == 3
        costs.append((read_counter.calls, read_counter.bytes // 16))  # step numbers grow in digits
        log.close()
    assert costs[0][0] == costs[1][0]
    assert abs(costs[0][1] - costs[1][1]) < 4


# Disks that refuse.


class FailingCall:
    """Makes the n-th call of one system call fail once; `half` writes half of the data first."""

    def __init__(self, monkeypatch, call, number, *, half):
        self.calls_left, self.half = number, half
        self.real = getattr(os, call)
        monkeypatch.setattr(os, call, self)

    def __call__(self, fd, *arguments):
        self.calls_left -= 1
        if self.calls_left:
            return self.real(fd, *arguments)
        if self.half:
            os.write(fd, bytes(arguments[0][-1])[: arguments[0][-1].nbytes // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("call", "number"),
    [(call, n) for call, calls in (("writev", 12), ("fdatasync", 3)) for n in range(1, calls + 1)],
)
def test_failed_system_call_is_retried(tmp_path, monkeypatch, call, number):
    log = open_log(tmp_path)
    FailingCall(monkeypatch, call, number, half=call == "writev")
    failures = []

    def retry(operation):
        try:
            return operation()
        except StorageFailed as error:
            failures.append(str(error))
            return operation()

    for step in range(3):
        for block, values in enumerate(averages(step)):
            step_id = ChunkId(1, step, 0, block, 0)
            retry(lambda step_id=step_id, values=values: log.append_chunk(step_id, values))
        retry(lambda step=step: log.commit(record_of(step, step + 1)))
        retry(log.roll)
    log.close()
    monkeypatch.undo()
    assert len(failures) == 1
    assert "No space left on device; make room, then continue" in failures[0]
    assert contents(tmp_path) == expected((1, 0, 0), (1, 1, 0), (1, 2, 0))
    assert scan(tmp_path).torn_tails == ()


def test_commit_with_failed_sync_disappears_with_the_next_attempt(tmp_path, monkeypatch):
    log = open_log(tmp_path)
    append_averages(log, 0)
    with monkeypatch.context() as patch:
        FailingCall(patch, "fdatasync", 1, half=False)
        with pytest.raises(StorageFailed):
            log.commit(record_of(0, 1))
    # If the process ended here, a restart would find the step committed.
    assert contents(tmp_path) == expected((1, 0, 0))
    log.append_chunk(ChunkId(1, 0, 1, 0, 0), averages(0, 1)[0])
    assert contents(tmp_path) == []
    log.append_chunk(ChunkId(1, 0, 1, 1, 0), averages(0, 1)[1])
    log.commit(record_of(0, 1, attempt=1))
    assert contents(tmp_path) == expected((1, 0, 1))


def test_full_disk_damages_nothing_and_the_log_continues_with_space(tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk:
        ballast = disk / "ballast"
        log = open_log(disk / "log")
        log_step(log, 0)
        ballast.write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
        step, refused_count = 1, 0
        while step < 60:
            try:
                log_step(log, step)
                step += 1
            except StorageFailed:
                refused_count += 1
                assert contents(disk / "log") == expected(*((1, s, 0) for s in range(step)))
                with pytest.raises(StorageFailed):
                    log.roll()
                ballast.unlink(missing_ok=True)
                log_step(log, step)
                step += 1
        log.close()
        assert refused_count
        assert contents(disk / "log") == expected(*((1, s, 0) for s in range(60)))


def test_log_continues_after_its_directory_was_missing(tmp_path):
    log = open_log(tmp_path / "log")
    log_step(log, 0)
    (tmp_path / "log").rename(tmp_path / "away")
    append_averages(log, 1)
    with pytest.raises(StorageFailed, match="restore what is missing"):
        log.commit(record_of(1, 2))
    with pytest.raises(StorageFailed):
        log.commit(record_of(1, 2))
    # It may return as a copy, with other inodes.
    shutil.copytree(tmp_path / "away", tmp_path / "log")
    log.commit(record_of(1, 2))
    assert contents(tmp_path / "log") == expected((1, 0, 0), (1, 1, 0))


def test_log_that_returns_shorter_than_synced_is_not_written(tmp_path):
    log = open_log(tmp_path / "log")
    log_step(log, 0)
    (tmp_path / "log").rename(tmp_path / "away")
    with pytest.raises(StorageFailed):
        log_step(log, 1)
    shutil.copytree(tmp_path / "away", tmp_path / "log")
    os.truncate(log.segment, 40)
    with pytest.raises(StorageFailed, match="resume the run"):
        log.commit(record_of(1, 2))


def test_read_only_disk_is_reported_with_its_remedy(tmp_path, monkeypatch):
    log = open_log(tmp_path)

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(append_file, "write_all", refuse)
    with pytest.raises(StorageFailed, match="mount it writable"):
        log_step(log, 0)


def test_records_with_the_older_key_epoch_are_read():
    commit = record_of(0, 1, term=3)
    older_commit = {**commit.model_dump(), "commit": with_epoch(commit.commit.model_dump())}
    header = SegmentHeader(
        run_id=RUN_ID, manifest_digest="0" * 64, term=4, base_step=0, mode="full", redo=(commit,)
    )
    older_header = with_epoch(header.model_dump()) | {"redo": (older_commit,)}
    assert read_commit(msgpack.packb(older_commit)) == commit
    assert read_header(msgpack.packb(older_header)) == header
    assert read_commit(msgpack.packb({"commit": 1})) is None
    assert read_header(msgpack.packb([])) is None


def with_epoch(fields):
    return {"epoch" if key == "term" else key: value for key, value in fields.items()}
