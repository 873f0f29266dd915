"""The gradient log: what was committed is read back bit for bit, whatever happened to the rest."""

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
    append_step,
    averages,
    commit_of,
    log_step,
    record_of,
    small_disk,
)


def opened(directory, *, term=1, next_step=0, **how):
    return GradientLog(directory, RUN_ID, MANIFEST, term=term, next_step=next_step, **how)


def scan(directory, **how):
    return scan_log(directory, RUN_ID, MANIFEST, **how)


def steps(directory, step=0, **how):
    """The committed steps from this one on, and what else the look found."""
    scan_result = scan(directory, **how)
    return list(scan_result.index.following(step)), scan_result.cuts


def numbers(directory, step=0, **how):
    return [logged.step for logged in steps(directory, step, **how)[0]]


def contents(directory, step=0):
    """(term, step, attempt) and the averages' bytes of each committed step."""
    rows = []
    for logged in steps(directory, step)[0]:
        commit, arrays = logged.record.commit, read_averages(logged, BLOCKS)
        place = (commit.term, commit.step, commit.attempt)
        rows.append((place, None if arrays is None else [a.tobytes() for a in arrays]))
    return rows


def expected(*places):
    return [
        (place, [array.tobytes() for array in averages(place[1], place[2])]) for place in places
    ]


def written(directory, steps, **how):
    log = opened(directory, **how)
    for step in range(steps):
        log_step(log, step)
    log.close()
    return segment_files(directory)[-1]


def test_committed_steps_come_back_bit_for_bit(tmp_path):
    log = opened(tmp_path)
    for step in range(3):
        append_step(log, step)
        log.commit(record_of(step, step + 1, state_before=f"{step:064x}"))
    log.close()
    assert contents(tmp_path) == expected((1, 0, 0), (1, 1, 0), (1, 2, 0))
    records = [logged.record for logged in steps(tmp_path, 1)[0]]
    assert [record.commit for record in records] == [commit_of(1, 2), commit_of(2, 3)]
    assert [(r.optimizer_step, r.state_before) for r in records] == [
        (2, f"{1:064x}"),
        (3, f"{2:064x}"),
    ]


def test_every_bit_pattern_survives(tmp_path):
    log = opened(tmp_path)
    odd = [np.zeros(block.elements, np.float32) for block in BLOCKS]
    odd[0][:4] = np.array([0x7FC00001, 0xFF800000, 1, 0x80000000], np.uint32).view(np.float32)
    for index, values in enumerate(odd):
        log.append_chunk(ChunkId(1, 0, 0, index, 0), values)
    log.commit(record_of(0, 1))
    [(_, arrays)] = contents(tmp_path)
    assert arrays == [values.tobytes() for values in odd]


def test_a_block_of_many_chunks_is_put_together_whatever_their_order(tmp_path):
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
    [logged] = scan_log(tmp_path, RUN_ID, manifest).index.following(0)
    arrays = read_averages(logged, manifest.blocks)
    assert arrays is not None
    assert arrays[0].tobytes() == values.tobytes()


SIZES = [5, 70_000, 140_000, 163_840, 300_001]


@pytest.mark.parametrize("order", [1, -1])
def test_a_log_whose_writer_cut_blocks_otherwise_is_read_in_the_chunks_of_today(
    tmp_path, monkeypatch, order
):
    blocks = tuple(
        Block(name=str(n), kind="block", tensors=(TensorSpec(name=str(n), shape=(size,)),))
        for n, size in enumerate(SIZES)
    )
    manifest = Manifest(blocks=blocks, train_samples=10)
    values = [np.arange(block.elements, dtype=np.float32) + n for n, block in enumerate(blocks)]
    with monkeypatch.context() as earlier:
        earlier.setattr(limits, "SMALL_CHUNK_ELEMENTS", 2 * limits.SMALL_CHUNK_ELEMENTS)
        log = GradientLog(tmp_path, RUN_ID, manifest, term=1, next_step=0)
        chunks = [(n, chunk) for n, block in enumerate(blocks) for chunk in range(block.chunks)]
        for n, chunk in chunks[::order]:
            part = values[n][blocks[n].chunk_slice(chunk)]
            log.append_chunk(ChunkId(1, 0, 0, n, chunk), part)
        log.commit(record_of(0, 1))
    [logged] = scan_log(tmp_path, RUN_ID, manifest).index.following(0)
    read = list(read_chunks(logged, blocks))
    now = sorted((n, chunk) for n, block in enumerate(blocks) for chunk in range(block.chunks))
    assert sorted((n, chunk) for n, chunk, _ in read) == now != sorted(chunks)
    for n, chunk, part in read:
        assert part.tobytes() == values[n][blocks[n].chunk_slice(chunk)].tobytes()


def test_chunks_of_other_attempts_and_of_the_step_in_flight_do_not_count(tmp_path):
    log = opened(tmp_path)
    append_step(log, 0, attempt=0)
    log_step(log, 0, attempt=1)
    append_step(log, 1)
    log.close()
    assert contents(tmp_path) == expected((1, 0, 1))


def test_a_skipped_step_has_no_averages(tmp_path):
    log = opened(tmp_path)
    log_step(log, 0)
    log.commit(record_of(1, 1, skip=True))
    log.commit(record_of(2, 1, skip=True))
    log.close()
    assert [arrays for _, arrays in contents(tmp_path)][1:] == [None, None]


def test_a_step_is_not_committed_without_all_of_its_gradients(tmp_path):
    log = opened(tmp_path)
    log.append_chunk(ChunkId(1, 0, 0, 0, 0), averages(0)[0])
    with pytest.raises(AssertionError):
        log.commit(record_of(0, 1))


def test_mode_checkpoint_keeps_commits_alone(tmp_path):
    path = written(tmp_path, 3, mode="checkpoint")
    assert [(place, arrays) for place, arrays in contents(tmp_path)] == [
        ((1, step, 0), None) for step in range(3)
    ]
    assert path.stat().st_size < 3_000


def test_commits_that_are_done_again_stay_known_over_restarts_and_checkpoints(tmp_path):
    written(tmp_path, 4, mode="checkpoint")
    for term in (2, 3):
        redo = [step.record for step in steps(tmp_path, repair=True)[0]]
        assert [record.commit.step for record in redo] == [0, 1, 2, 3]
        log = opened(tmp_path, term=term, mode="checkpoint", redo=redo)
    log_step(log, 0, term=3)
    log_step(log, 1, term=3)
    log.roll()
    log.cut(2)
    log.close()
    assert [place for place, _ in contents(tmp_path, 2)] == [(1, 2, 0), (1, 3, 0)]


def test_what_a_killed_coordinator_wrote_is_synced_before_it_counts(tmp_path, monkeypatch):
    path = written(tmp_path, 2)
    synced = []
    sync = os.fsync

    def noting(fd):
        synced.append(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    scan(tmp_path)
    assert synced == []
    scan(tmp_path, repair=True)
    assert path.stat().st_ino in synced


def test_one_that_has_lost_the_directory_does_not_repair_its_segment(tmp_path, monkeypatch):
    lock = DirectoryLock.acquire(tmp_path)
    log = opened(tmp_path / "log", term=lock.term, guard=lock.check)
    append_step(log, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", _refuses)
        with pytest.raises(StorageFailed):
            log.commit(record_of(0, 1))
    # The commit can be read, so who takes over goes on from there.
    (tmp_path / "lock").unlink()
    DirectoryLock.acquire(tmp_path)
    assert numbers(tmp_path / "log", repair=True) == [0]
    with pytest.raises(RunFailed):
        append_step(log, 0, attempt=1)
    assert numbers(tmp_path / "log") == [0]


def _refuses(fd):
    raise OSError(errno.EIO, f"no file {fd}")


class Naive:
    """What a log should hold, as a dictionary."""

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
    log, naive, base = opened(directory), Naive(), 0
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
                append_step(log, step, term=term, attempt=attempt)
                naive.attempt += 1
            case "roll":
                log.roll()
            case "cut":
                base = data.draw(st.integers(base, step))
                log.cut(base)
            case "crash" | "torn":
                log.close()
                if event == "torn":
                    with log.segment.open("ab") as file:
                        file.write(data.draw(st.binary(max_size=60)))
                assert numbers(directory, base, repair=True) == list(range(base, step))
                naive.term, naive.attempt = naive.term + 1, 0
                log = opened(directory, term=naive.term, next_step=step)
    log.close()
    wanted = [naive.committed[step] for step in range(base, naive.next_step)]
    rows = contents(directory, base)
    assert len(rows) == len(wanted)
    for place, row in zip(wanted, rows, strict=True):
        assert row[1] is None if place is None else [row] == expected(place)


# Damage.


def test_a_tail_torn_at_any_byte_of_the_last_step_is_cut(tmp_path):
    path = written(tmp_path / "log", 3)
    whole = path.read_bytes()
    ends = [logged.end for logged in steps(tmp_path / "log")[0]]
    assert ends[-1] == len(whole)
    for length in range(ends[-2], len(whole)):
        path.write_bytes(whole[:length])
        logged_steps, cuts = steps(tmp_path / "log", repair=True)
        assert [s.step for s in logged_steps] == [0, 1], length
        assert bool(cuts) == (path.stat().st_size < length)
        # Cut once, it is whole: the next start finds nothing to do, and the log goes on.
        assert scan(tmp_path / "log").cuts == ()
    log = opened(tmp_path / "log", term=2, next_step=2)
    log_step(log, 2, term=2)
    assert contents(tmp_path / "log") == expected((1, 0, 0), (1, 1, 0), (2, 2, 0))


@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"S"])
def test_a_tail_of_blocks_that_were_never_written_is_cut(tmp_path, filler):
    path = written(tmp_path, 2)
    with path.open("ab") as file:
        file.write(filler * 5000)
    assert [str(cut) for cut in scan(tmp_path, repair=True).cuts] == [
        f"{path.name}: 5000 bytes cut at byte {path.stat().st_size}: the last record is incomplete"
    ]
    assert contents(tmp_path) == expected((1, 0, 0), (1, 1, 0))


def test_a_flipped_bit_before_the_newest_step_is_refused_with_its_place(tmp_path):
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    newest = steps(tmp_path)[0][1].end
    for at in range(0, newest, 2):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        # The first look passes over gradients; whoever reads them is told.
        with pytest.raises(StorageDamaged, match=path.name) as raised:
            contents(tmp_path)
        place = int(raised.value.location.removeprefix("byte "))
        assert place <= at < place + 600


def test_a_flipped_bit_in_the_newest_step_takes_that_step_back(tmp_path):
    """A sync that had not ended may leave the commit and not what it commits."""
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    for at in range(steps(tmp_path)[0][1].end, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        logged_steps, cuts = steps(tmp_path)
        assert [s.step for s in logged_steps] == [0, 1]
        assert len(cuts) == 1


def test_damage_is_refused_in_a_segment_that_others_follow(tmp_path):
    log = opened(tmp_path)
    log_step(log, 0)
    log_step(log, 1)
    first = log.segment
    log.roll()
    log_step(log, 2)
    log.close()
    os.truncate(first, first.stat().st_size - 1)
    with pytest.raises(StorageDamaged, match=first.name):
        scan(tmp_path)


def test_a_log_of_another_run_or_manifest_is_refused(tmp_path):
    written(tmp_path, 1)
    with pytest.raises(Mismatch, match="made-up-1"):
        scan_log(tmp_path, "other", MANIFEST)
    with pytest.raises(Mismatch, match="manifest"):
        scan_log(tmp_path, RUN_ID, MANIFEST.model_copy(update={"train_samples": 11}))


def test_a_half_made_segment_is_cleared_away(tmp_path):
    path = written(tmp_path, 1)
    leftover = path.with_name("term-000002-step-0000000001.log.part")
    leftover.write_bytes(b"half")
    assert numbers(tmp_path, repair=True) == [0]
    assert not leftover.exists()


# Who may write.


def test_what_a_replaced_coordinator_still_writes_does_not_count(tmp_path):
    stale = opened(tmp_path)
    log_step(stale, 0)
    fresh = opened(tmp_path, term=2, next_step=1)
    log_step(stale, 1, attempt=7)
    log_step(stale, 2)
    log_step(fresh, 1, term=2)
    append_step(stale, 3)
    assert contents(tmp_path) == expected((1, 0, 0), (2, 1, 0))


def test_a_replaced_coordinator_learns_it_before_it_tells_anyone(tmp_path):
    lock = DirectoryLock.acquire(tmp_path)
    log = opened(tmp_path / "log", term=lock.term, guard=lock.check)
    log_step(log, 0)
    # The lock cannot be taken while it is held: another machine's view of the same directory.
    (tmp_path / "lock").unlink()
    DirectoryLock.acquire(tmp_path)
    with pytest.raises(RunFailed, match="another coordinator"):
        log_step(log, 1)
    assert log.next_step == 1


def test_a_commit_returns_only_when_all_of_it_is_synced(tmp_path, monkeypatch):
    """A disk that forgets what was not synced still has every step that was committed."""
    synced = {}
    real = os.fdatasync

    def sync(fd):
        real(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        synced[path.name] = path.read_bytes()

    log = opened(tmp_path / "log")
    monkeypatch.setattr(os, "fdatasync", sync)
    for step in range(4):
        log_step(log, step)
        if step == 1:
            log.roll()
        forgetful = tmp_path / f"forgetful-{step}"
        forgetful.mkdir()
        for name, content in synced.items():
            (forgetful / name).write_bytes(content)
        assert contents(forgetful) == expected(*((1, s, 0) for s in range(step + 1)))


# Segments.


def test_segments_before_a_checkpoint_can_go_and_the_rest_stays(tmp_path):
    log = opened(tmp_path)
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
    assert [path.name[-8:] for path in log.cut(5)] == ["0000.log", "0002.log"]
    assert log.cut(5) == []
    assert contents(tmp_path, 4) == expected((1, 4, 0), (1, 5, 0))
    log_step(log, 6)
    assert log.cut(1_000)
    assert segment_files(tmp_path) == [log.segment]


def test_rolling_in_the_middle_of_a_step_takes_its_chunks_along(tmp_path):
    log = opened(tmp_path)
    log_step(log, 0)
    log.append_chunk(ChunkId(1, 1, 0, 0, 0), averages(1)[0])
    log.roll()
    log.cut(1)
    log.append_chunk(ChunkId(1, 1, 0, 1, 0), averages(1)[1])
    log.commit(record_of(1, 2))
    assert contents(tmp_path, 1) == expected((1, 1, 0))


# The index.


def index_of(directory):
    return [(s.step, s.record, s.chunks, s.end) for s in steps(directory)[0]]


def test_the_index_that_a_log_keeps_up_is_the_one_that_opening_it_finds(tmp_path):
    log = opened(tmp_path)
    for step in range(4):
        log_step(log, step)
        if step == 1:
            log.roll()
        if step == 2:
            append_step(log, 3, attempt=3)  # of no account, but it takes room
    indexed = [(s.step, s.record, s.chunks, s.end) for s in log.index.following(0)]
    assert indexed == index_of(tmp_path)
    log.close()
    fresh = opened(tmp_path, term=2, next_step=3, index=scan(tmp_path).index)
    assert [s.step for s in fresh.index.following(0)] == [0, 1, 2]  # step 3 is void
    log_step(fresh, 3, term=2)
    fresh.roll()
    fresh.cut(3)
    assert [s.record.commit.term for s in fresh.index.following(3)] == [2]
    assert list(fresh.index.following(0)) == []


class Reads:
    """How often, and how much, is read of any file."""

    def __init__(self, monkeypatch):
        self.calls = self.bytes = 0
        self.real = os.pread
        monkeypatch.setattr(os, "pread", self)

    def __call__(self, fd, length, offset):
        content = self.real(fd, length, offset)
        self.calls, self.bytes = self.calls + 1, self.bytes + len(content)
        return content


def test_what_was_missed_is_read_whatever_the_length_of_the_log(tmp_path, monkeypatch):
    costs = []
    for length in (10, 400):
        log = opened(tmp_path / str(length))
        for step in range(length):
            log_step(log, step)
            if step % 50 == 49:
                log.roll()
        with monkeypatch.context() as patch:
            reads = Reads(patch)
            missed = list(log.index.following(length - 3))
        assert len(missed) == 3
        costs.append((reads.calls, reads.bytes // 16))  # numbers have more digits later on
        log.close()
    assert costs[0][0] == costs[1][0]
    assert abs(costs[0][1] - costs[1][1]) < 4


# Disks that refuse.


class Faults:
    """The n-th call of one system call fails once, having done half of its work if it can."""

    def __init__(self, monkeypatch, call, number, *, half):
        self.left, self.half = number, half
        self.real = getattr(os, call)
        monkeypatch.setattr(os, call, self)

    def __call__(self, fd, *arguments):
        self.left -= 1
        if self.left:
            return self.real(fd, *arguments)
        if self.half:
            os.write(fd, bytes(arguments[0][-1])[: arguments[0][-1].nbytes // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("call", "number"),
    [(call, n) for call, calls in (("writev", 12), ("fdatasync", 3)) for n in range(1, calls + 1)],
)
def test_any_call_of_the_system_may_fail_and_be_made_again(tmp_path, monkeypatch, call, number):
    log = opened(tmp_path)
    Faults(monkeypatch, call, number, half=call == "writev")
    failures = []

    def insist(work):
        try:
            return work()
        except StorageFailed as error:
            failures.append(str(error))
            return work()

    for step in range(3):
        for block, values in enumerate(averages(step)):
            place = ChunkId(1, step, 0, block, 0)
            insist(lambda place=place, values=values: log.append_chunk(place, values))
        insist(lambda step=step: log.commit(record_of(step, step + 1)))
        insist(log.roll)
    log.close()
    monkeypatch.undo()
    assert len(failures) == 1
    assert "No space left on device; make room, then continue" in failures[0]
    assert contents(tmp_path) == expected((1, 0, 0), (1, 1, 0), (1, 2, 0))
    assert scan(tmp_path).cuts == ()


def test_a_commit_whose_sync_failed_is_gone_once_another_attempt_begins(tmp_path, monkeypatch):
    log = opened(tmp_path)
    append_step(log, 0)
    with monkeypatch.context() as patch:
        Faults(patch, "fdatasync", 1, half=False)
        with pytest.raises(StorageFailed):
            log.commit(record_of(0, 1))
    # Should the process die here, the step counts: all of it is there, and nobody was told.
    assert contents(tmp_path) == expected((1, 0, 0))
    log.append_chunk(ChunkId(1, 0, 1, 0, 0), averages(0, 1)[0])
    assert contents(tmp_path) == []
    log.append_chunk(ChunkId(1, 0, 1, 1, 0), averages(0, 1)[1])
    log.commit(record_of(0, 1, attempt=1))
    assert contents(tmp_path) == expected((1, 0, 1))


def test_a_full_disk_damages_nothing_and_the_log_continues_when_there_is_room(tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk:
        ballast = disk / "ballast"
        log = opened(disk / "log")
        log_step(log, 0)
        ballast.write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
        step, refused = 1, 0
        while step < 60:
            try:
                log_step(log, step)
                step += 1
            except StorageFailed:
                refused += 1
                assert contents(disk / "log") == expected(*((1, s, 0) for s in range(step)))
                with pytest.raises(StorageFailed):
                    log.roll()
                ballast.unlink(missing_ok=True)
                log_step(log, step)
                step += 1
        log.close()
        assert refused
        assert contents(disk / "log") == expected(*((1, s, 0) for s in range(60)))


def test_a_directory_that_vanishes_halts_and_continues_when_it_is_back(tmp_path):
    log = opened(tmp_path / "log")
    log_step(log, 0)
    (tmp_path / "log").rename(tmp_path / "away")
    append_step(log, 1)
    with pytest.raises(StorageFailed, match="restore what is missing"):
        log.commit(record_of(1, 2))
    with pytest.raises(StorageFailed):
        log.commit(record_of(1, 2))
    # It may come back as a copy, with other inodes.
    shutil.copytree(tmp_path / "away", tmp_path / "log")
    log.commit(record_of(1, 2))
    assert contents(tmp_path / "log") == expected((1, 0, 0), (1, 1, 0))


def test_a_log_that_comes_back_shorter_than_what_was_synced_is_not_written(tmp_path):
    log = opened(tmp_path / "log")
    log_step(log, 0)
    (tmp_path / "log").rename(tmp_path / "away")
    with pytest.raises(StorageFailed):
        log_step(log, 1)
    shutil.copytree(tmp_path / "away", tmp_path / "log")
    os.truncate(log.segment, 40)
    with pytest.raises(StorageFailed, match="resume the run"):
        log.commit(record_of(1, 2))


def test_a_read_only_disk_is_reported_with_its_remedy(tmp_path, monkeypatch):
    log = opened(tmp_path)

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(append_file, "write_all", refuse)
    with pytest.raises(StorageFailed, match="mount it writable"):
        log_step(log, 0)


def test_records_of_an_older_release_name_the_term_an_epoch():
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
