"""The journal: a hash chain that reveals any change, and lines that survive disk failures."""

import errno
import json
import os

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from coordinator.disk import append_file
from coordinator.disk.canonical_json import canonical_json
from coordinator.disk.durable_file import write_all
from coordinator.run.outputs.events import (
    Checkpointed,
    Committed,
    Evaluated,
    Halted,
    ManifestSettled,
    MemberInfo,
    OwnersChanged,
    Planned,
    ViewChanged,
)
from coordinator.storage.directory.journal import NO_HASH, Journal, verify_journal
from coordinator.storage.directory.journal_records import (
    RECORDS,
    CommandReceived,
    Ended,
    Fault,
    FileDigests,
    Resumed,
    RunStarted,
    SpecChanged,
    read_record,
    record_name,
)
from protocol.base.errors import RunFailed, StorageDamaged, StorageFailed
from tests.durable_run import read_journal, small_disk

D = "d" * 64
MEMBER = MemberInfo(name="w1", backend="cpu", device="cpu", signature="s" * 12)
EXAMPLES = [
    RunStarted.of("r-1", {"task": "regress", "seed": 3, "lr": 1e-3}, {"samestep": "0.1"}),
    ManifestSettled(manifest_digest=D, digests={"data": D}, train_samples=9, evaluation_parts=1),
    Checkpointed(
        term=1, step=0, optimizer_step=0, weights_digest=D, state_digest=D, directory="step-0"
    ),
    FileDigests(term=1, digests={"run.json": (D,), "terms.json": (None, D)}),
    ViewChanged(term=1, step=0, view=1, change="joined", worker="w1", members=(MEMBER,)),
    OwnersChanged(term=1, step=0, number=1, reason="sharded", owners={"w1": 0.5, "w2": 0.5}),
    Planned(term=1, step=0, attempt=0, view=1, microbatches=3, nodes={"w1": ((0, 2), (2, 3))}),
    Committed(
        term=1, step=0, attempt=0, optimizer_step=1, loss=float("inf"), norm=2.5, rate=1e-3,
        skipped=False,
        averages_digest=D, counted=({"w1": ((0, 2), (2, 3))},),
    ),
    Halted(term=1, step=1, attempt=0, reason="NaN", worker="w1", microbatches=(0, 2)),
    CommandReceived(term=1, step=1, command="continue", source="control port"),
    Fault(term=1, step=1, what="straggler", worker="w1", response="subtrees given to w2"),
    Resumed(term=2, step=1, optimizer_step=1, notes=("a torn tail was cut",)),
    SpecChanged(
        term=2, step=1, changes=("steps: 10 -> 20",), before=D, spec={"steps": 20}, spec_digest=D
    ),
    Evaluated(term=2, step=1, metrics={"accuracy": 0.5, "odd": float("nan")}),
    Ended(term=2, step=1, outcome="finished", reason="é \u2028 \U0001f600 </script>"),
]  # fmt: skip


def clock(start=1_700_000_000.0):
    time_s = [start]

    def tick():
        time_s[0] += 0.25
        return time_s[0]

    return tick


def write(path, batches):
    journal = Journal(path, clock=clock())
    for batch in batches:
        for record in batch:
            journal.append(record)
        journal.sync()
    journal.close()
    return path.read_bytes()


def in_batches(size=3):
    return [EXAMPLES[offset : offset + size] for offset in range(0, len(EXAMPLES), size)]


def records(path):
    return [entry.record for entry in read_journal(path)]


def test_every_record_kind_has_an_example_and_names_its_articles():
    assert {type(record) for record in EXAMPLES} == set(RECORDS)
    assert len({record_name(kind) for kind in RECORDS}) == len(RECORDS)
    for kind in RECORDS:
        assert set(kind.articles) <= {10, 12, 13, 15}
        assert kind.articles
        assert kind.purpose
    assert {article for kind in RECORDS for article in kind.articles} == {10, 12, 13, 15}


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record.kind)
def test_record_round_trip(record):
    assert read_record(record.model_dump(mode="json")) == record


def test_non_finite_values_are_null():
    [commit] = [each for each in EXAMPLES if isinstance(each, Committed)]
    assert commit.model_dump()["loss"] is None
    [evaluation] = [each for each in EXAMPLES if isinstance(each, Evaluated)]
    assert evaluation.model_dump()["metrics"] == {"accuracy": 0.5, "odd": None}


def test_records_of_an_older_release_are_read():
    [commit] = [each for each in EXAMPLES if isinstance(each, Committed)]
    older_commit = commit.model_dump(mode="json") | {"norm": None, "weights_before": None}
    del older_commit["rate"]
    older_commit["epoch"] = older_commit.pop("term")
    assert read_record(older_commit) == commit.model_copy(update={"norm": None, "rate": None})
    with pytest.raises(ValidationError):
        read_record(older_commit | {"weights_before": D})
    with pytest.raises(ValidationError):
        read_record(older_commit | {"term": 1})
    fault = next(each for each in EXAMPLES if isinstance(each, Fault))
    older_fault = fault.model_dump(mode="json") | {"what": "worker_comes_and_goes"}
    assert read_record(older_fault) == fault.model_copy(update={"what": "worker_comes_and_goes"})


def test_records_are_read_as_they_were_written(tmp_path):
    content = write(tmp_path / "j", in_batches())
    assert records(tmp_path / "j") == EXAMPLES
    assert content.isascii()
    assert content.count(b"\n") == len(EXAMPLES)


def test_hash_chain_is_that_of_the_documentation(tmp_path):
    """The reference here implements only the docstring of the module."""
    content = write(tmp_path / "j", in_batches())
    previous = NO_HASH
    for number, line in enumerate(content.decode().splitlines(), 1):
        document = json.loads(line)
        assert document["previous"] == previous
        assert document["number"] == number
        assert document["batch"] == (number - 1) // 3 * 3 + 1
        previous = document.pop("hash")
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        assert blake3(text.encode()).hexdigest() == previous
    verified = verify_journal(tmp_path / "j")
    assert (verified.head, verified.bad_line) == (previous, None)
    assert verified.entries[0].time == "2023-11-14T22:13:20.250+00:00"


def test_journal_is_continued_after_a_restart(tmp_path):
    path = tmp_path / "j"
    for record in EXAMPLES:
        journal = Journal(path)
        assert journal.cut_bytes == 0
        head = journal.append(record)
        assert journal.head == head
        journal.sync()
        journal.close()
    assert records(path) == EXAMPLES
    assert Journal(path).head == head


def test_end_of_a_long_journal_is_found_without_a_full_read(tmp_path, monkeypatch):
    path = tmp_path / "j"
    write(path, [EXAMPLES] * 30)
    monkeypatch.setattr("coordinator.storage.directory.journal._TAIL_BYTES", 64)
    journal = Journal(path)
    assert (journal.line_count, journal.cut_bytes) == (30 * len(EXAMPLES), 0)
    assert journal.head == verify_journal(path).head


# Changes.


def test_flipped_byte_anywhere_is_found_and_its_line_named(tmp_path):
    path = tmp_path / "j"
    content = write(path, in_batches()[:2])
    line = 1
    for offset, byte in enumerate(content):
        for mask in (1,) if offset % 7 else (0x20, 0x80, byte ^ 10, byte ^ 13):
            if not mask:
                continue
            path.write_bytes(content[:offset] + bytes([byte ^ mask]) + content[offset + 1 :])
            verified = verify_journal(path)
            assert verified.bad_line == line, (offset, mask, verified.reason)
            assert [entry.record for entry in verified.entries] == EXAMPLES[: line - 1]
        line += byte == 10


@pytest.mark.parametrize(
    ("old", "new"), [(b"\\u00e9", b"\\u00E9"), (b'":', b'": '), (b'"term":2', b'"term":2.0')]
)
def test_equivalent_line_in_other_bytes_is_found(tmp_path, old, new):
    path = tmp_path / "j"
    lines = write(path, in_batches()).splitlines(keepends=True)
    assert old in lines[-1]
    lines[-1] = lines[-1].replace(old, new)
    path.write_bytes(b"".join(lines))
    assert verify_journal(path).bad_line == len(lines)


@pytest.mark.parametrize("line", range(1, len(EXAMPLES)))
def test_line_changed_with_its_hash_makes_the_next_line_bad(tmp_path, line):
    path = tmp_path / "j"
    lines = write(path, in_batches()).splitlines(keepends=True)
    document = json.loads(lines[line - 1])
    document["time"] = "1999"
    del document["hash"]
    document["hash"] = blake3(canonical_json(document)).hexdigest()
    lines[line - 1] = canonical_json(document) + b"\n"
    path.write_bytes(b"".join(lines))
    assert verify_journal(path).bad_line == line + 1


@pytest.mark.parametrize("change", ["remove", "double", "swap", "blank"])
def test_reordered_lines_are_found(tmp_path, change):
    path = tmp_path / "j"
    lines = write(path, in_batches()).splitlines(keepends=True)
    match change:
        case "remove":
            del lines[4]
        case "double":
            lines.insert(5, lines[4])
        case "swap":
            lines[4], lines[5] = lines[5], lines[4]
        case "blank":
            lines.insert(4, b"\n")
    path.write_bytes(b"".join(lines))
    assert verify_journal(path).bad_line == (6 if change == "double" else 5)


def test_unknown_record_kind_is_named(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.append(EXAMPLES[0].model_copy(update={"kind": "odd"}))
    journal.sync()
    assert verify_journal(tmp_path / "j").bad_line == 1


# Crashes.


def test_tail_torn_at_any_byte_of_the_last_batch_is_cut(tmp_path):
    path = tmp_path / "j"
    content = write(path, in_batches(2))
    intact_bytes = len(b"".join(content.splitlines(keepends=True)[:-2]))
    for length in range(intact_bytes, len(content)):
        path.write_bytes(content[:length])
        journal = Journal(path)
        assert journal.cut_bytes == length - path.stat().st_size
        journal.append(EXAMPLES[3])
        journal.sync()
        journal.close()
        intact_lines = content[:length].count(b"\n")
        assert records(path) == [*EXAMPLES[:intact_lines], EXAMPLES[3]]


def test_damage_within_the_last_batch_is_cut_and_before_it_is_refused(tmp_path):
    """Pages of one write may reach the disk in any order; a sync returns after all of them."""
    path = tmp_path / "j"
    content = write(path, in_batches())
    lines = content.splitlines(keepends=True)
    start = 0
    for number, line in enumerate(lines, 1):
        for offset in range(start, start + len(line), 29):
            path.write_bytes(content[:offset] + b"\0" + content[offset + 1 :])
            if number > len(lines) - len(in_batches()[-1]):
                journal = Journal(path)
                assert journal.line_count == number - 1
                journal.close()
            else:
                with pytest.raises(StorageDamaged, match=f"line {number}"):
                    Journal(path)
        start += len(line)


def test_journal_without_a_complete_line_starts_over(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"batch":1,')
    journal = Journal(path)
    assert (journal.cut_bytes, journal.head, journal.line_count) == (11, NO_HASH, 0)
    journal.append(EXAMPLES[0])
    journal.sync()
    assert records(path) == EXAMPLES[:1]


# Disks that refuse.


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["append", "sync", "fail", "half", "reopen"]), max_size=30))
def test_any_history_reads_back_like_a_list(tmp_path_factory, history):
    path = tmp_path_factory.mktemp("j") / "j"
    journal = Journal(path)
    durable, pending = [], []

    def fail(_fd, _buffers):
        raise OSError(errno.ENOSPC, "no room")

    def half(fd, buffers):
        write_all(fd, [buffers[0][: buffers[0].nbytes // 2]])
        fail(fd, buffers)

    for number, event in enumerate(history):
        match event:
            case "append":
                record = EXAMPLES[number % len(EXAMPLES)]
                journal.append(record)
                pending.append(record)
            case "sync":
                journal.sync()
                durable += pending
                pending = []
            case "fail" | "half":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(append_file, "write_all", fail if event == "fail" else half)
                    if pending:
                        with pytest.raises(StorageFailed):
                            journal.sync()
                    else:
                        journal.sync()
            case "reopen":
                journal.close()
                journal = Journal(path)
                # A write that failed halfway may have written complete lines.
                entries = records(path)
                assert entries[: len(durable)] == durable
                assert entries[len(durable) :] == pending[: len(entries) - len(durable)]
                durable, pending = entries, []
    journal.sync()
    assert records(path) == durable + pending


def test_full_disk_loses_no_line(tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk:
        journal = Journal(disk / "j")
        accepted = []
        while True:
            journal.append(EXAMPLES[5])
            accepted.append(EXAMPLES[5])
            try:
                journal.sync()
            except StorageFailed:
                break
        journal.append(EXAMPLES[6])
        with pytest.raises(StorageFailed, match="make room"):
            journal.sync()
        enlarge_disk(disk)
        journal.sync()
        assert records(disk / "j") == [*accepted, EXAMPLES[6]]


def enlarge_disk(disk):
    assert os.system(f"mount -o remount,size=256k {disk}") == 0


def test_replaced_coordinator_writes_nothing(tmp_path):
    def guard():
        raise RunFailed("replaced")

    journal = Journal(tmp_path / "j", guard=guard)
    journal.append(EXAMPLES[0])
    with pytest.raises(RunFailed):
        journal.sync()
    assert (tmp_path / "j").read_bytes() == b""
