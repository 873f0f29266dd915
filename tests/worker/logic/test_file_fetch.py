"""Which files are fetched in which order, with a coordinator and a disk that answer at random."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from blake3 import blake3

from protocol.base import limits
from protocol.base.errors import MessageError, OutOfOrder, StorageFailed
from protocol.spec.files.blob_list import BlobFile, BlobList, BlobSource
from protocol.spec.run_spec import parse_run_spec
from protocol.wire import messages as msg
from worker.logic import actions as act
from worker.logic import file_fetch as fet
from worker.logic.file_fetch import FileFetch

SPEC = parse_run_spec({
    "task": "causal-lm", "steps": 1, "model": {"source": "org/m"}, "data": {"train": "texts"},
})  # fmt: skip
CHUNK = limits.BODY_BYTES


def file(name: str, size: int) -> BlobFile:
    return BlobFile(name=name, size=size, digest=blake3(f"{name} {size}".encode()).hexdigest())


def listing_of(*files: BlobFile) -> BlobList:
    return BlobList(sources=(BlobSource(role="data", form="directory", files=files),))


def body(count: int) -> np.ndarray:
    return np.broadcast_to(np.zeros(1, np.uint8), (count,))


def started_fetch(listing: BlobList) -> FileFetch:
    document = listing.to_bytes()
    digest = blake3(document).hexdigest()
    fetch = FileFetch("run", SPEC, digest)
    (request,) = fetch.start()
    assert request == act.Transmit(msg.BlobRequest(run_id="run", digest=digest, offset=0))
    chunk = msg.BlobChunk(run_id="run", digest=digest, offset=0)
    assert fetch.chunk(chunk, np.frombuffer(document, np.uint8)) == [
        act.Locate(digest, SPEC, listing)
    ]
    return fetch


def progress_lines(actions: list[act.Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, act.PrintLine)]


def requests(actions: list[act.Action]) -> list[tuple[str, int]]:
    messages_sent = (action.message for action in actions if isinstance(action, act.Transmit))
    return [(one.digest, one.offset) for one in messages_sent if isinstance(one, msg.BlobRequest)]


def answer(digest: str, offset: int) -> msg.BlobChunk:
    return msg.BlobChunk(run_id="run", digest=digest, offset=offset)


class CoordinatorAndDisk:
    """A coordinator that answers in order, and a disk; either may be slow.

    Attributes:
        stored_bytes: Bytes written of each file.
        finished: Actions after the last file.
    """

    def __init__(self, files: list[BlobFile], rng: random.Random) -> None:
        self.size = {file.digest: file.size for file in files}
        self.stored_bytes = {file.digest: 0 for file in files}
        self.bytes_before = {
            each.digest: rng.randrange(each.size) if each.size > CHUNK and rng.random() < 0.5 else 0
            for each in files
        }
        self.damaged_digests = {
            d for d, size in self.bytes_before.items() if size and rng.random() < 0.5
        }
        self.network: deque[tuple[str, int]] = deque()
        self.disk: deque[fet.FileEvent] = deque()
        self.finished: list[act.Action] = []
        self._open_digest = ""
        self._unwritten_sizes: deque[int] = deque()
        self._rng = rng

    def do(self, actions: list[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Transmit():
                    assert isinstance(action.message, msg.BlobRequest)
                    self.network.append((action.message.digest, action.message.offset))
                case act.OpenPart():
                    self._open(action.file)
                case act.StoreChunk():
                    self._store(action)
                case act.Assemble():
                    self.finished.append(action)
                case act.PrintLine():
                    pass
                case _:
                    raise AssertionError(action)
        nbytes = [min(CHUNK, self.size[digest] - offset) for digest, offset in self.network]
        nbytes += self._unwritten_sizes
        assert len(nbytes) <= limits.UNANSWERED_BLOB_CHUNKS
        assert sum(nbytes) <= limits.UNANSWERED_BLOB_BYTES

    def _open(self, blob: BlobFile) -> None:
        if self._rng.random() < 0.2:
            self.stored_bytes[blob.digest] = blob.size
            self.disk.append(fet.BlobPresent(blob.digest))
            return
        self.stored_bytes[blob.digest] = self.bytes_before[blob.digest]
        self._open_digest = blob.digest
        self.disk.append(fet.PartOpened(blob.digest, self.stored_bytes[blob.digest]))

    def _store(self, action: act.StoreChunk) -> None:
        digest = action.file.digest
        assert action.file.size <= CHUNK or digest == self._open_digest
        assert self.stored_bytes[digest] == action.offset
        self.stored_bytes[digest] += len(action.values)
        self._unwritten_sizes.append(len(action.values))
        complete = self.stored_bytes[digest] == action.file.size
        if complete and digest in self.damaged_digests:
            self.damaged_digests.discard(digest)
            self.bytes_before[digest] = 0
            self.disk.append(fet.BlobDamaged(digest, was_resumed=True))
        else:
            self.disk.append(fet.ChunkStored(digest, complete))

    def advance(self, fetch: FileFetch) -> None:
        if self.network and (not self.disk or self._rng.random() < 0.5):
            digest, offset = self.network.popleft()
            values = body(min(CHUNK, self.size[digest] - offset))
            self.do(fetch.chunk(answer(digest, offset), values))
        else:
            event = self.disk.popleft()
            if isinstance(event, fet.ChunkStored | fet.BlobDamaged):
                self._unwritten_sizes.popleft()
            self.do(fetch.event(event))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_file_arrives_completely_despite_delays(first):
    for seed in range(first, first + 50):
        fetch_all(seed)


def fetch_all(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 7 * CHUNK + 5])
             for _ in range(rng.choice([1, 2, 8, 150]))]  # fmt: skip
    files = [file(f"{number}.txt", size) for number, size in enumerate(sizes)]
    fetch, simulation = started_fetch(listing_of(*files)), CoordinatorAndDisk(files, rng)
    simulation.do(fetch.event(fet.Located(tuple(files))))
    while not simulation.finished:
        simulation.advance(fetch)
    assert simulation.stored_bytes == simulation.size
    assert not simulation.network
    assert not simulation.disk


def test_present_files_are_not_fetched():
    listing = listing_of(file("a", 1))
    fetch = started_fetch(listing)
    (action,) = fetch.event(fet.Located(()))
    assert isinstance(action, act.Assemble)
    renamed_spec = SPEC.model_copy(update={"name": "placed"})
    actions = fetch.event(fet.Assembled(renamed_spec, {"/inputs/data": "texts"}))
    assert progress_lines(actions) == ["run run: building the task 'causal-lm'"]
    assert actions[-1] == act.Build(
        "run", renamed_spec, keep_state=False, inputs=action.list_digest
    )
    assert fetch.with_source_names("cannot read '/inputs/data/a'") == "cannot read 'texts/a'"


def test_progress_of_fetching_is_reported():
    large_file = file("large", 10 * CHUNK)
    fetch = started_fetch(listing_of(large_file))
    actions = fetch.event(fet.Located((large_file,)))
    assert progress_lines(actions) == ["run run: fetching 42 MB of data from the coordinator"]
    pending = requests(fetch.event(fet.PartOpened(large_file.digest, 0)))
    lines = []
    while pending:
        actions = fetch.chunk(answer(*pending.pop(0)), body(CHUNK))
        lines += progress_lines(actions)
        pending += requests(actions)
        store_action = next(a for a in actions if isinstance(a, act.StoreChunk))
        complete = store_action.offset + CHUNK == large_file.size
        pending += requests(fetch.event(fet.ChunkStored(large_file.digest, complete)))
    assert lines == [
        "fetched 13 MB of 42 MB", "fetched 21 MB of 42 MB", "fetched 34 MB of 42 MB",
        "fetched 42 MB of 42 MB",
    ]  # fmt: skip


def test_progress_of_a_damaged_file_is_reported_again():
    large_file = file("large", 10 * CHUNK)
    fetch = started_fetch(listing_of(large_file))
    fetch.event(fet.Located((large_file,)))
    pending = requests(fetch.event(fet.PartOpened(large_file.digest, 8 * CHUNK)))
    lines = []
    for _ in range(2):  # the rest of the file
        actions = fetch.chunk(answer(*pending.pop(0)), body(CHUNK))
        lines += progress_lines(actions)
        pending += requests(actions)
    fetch.event(fet.ChunkStored(large_file.digest, is_complete=False))
    fetch.event(fet.BlobDamaged(large_file.digest, was_resumed=True))
    pending = requests(fetch.event(fet.PartOpened(large_file.digest, 0)))
    for _ in range(3):
        lines += progress_lines(fetch.chunk(answer(*pending.pop(0)), body(CHUNK)))
        fetch.event(fet.ChunkStored(large_file.digest, is_complete=False))
    assert lines == ["fetched 38 MB of 42 MB", "fetched 42 MB of 42 MB", "fetched 13 MB of 42 MB"]


def single_file_fetch(size: int = 10) -> tuple[FileFetch, BlobFile]:
    one = file("a.txt", size)
    fetch = started_fetch(listing_of(one))
    assert requests(fetch.event(fet.Located((one,)))) == [(one.digest, 0)]
    return fetch, one


def unready(actions: list[act.Action]) -> msg.Unready:
    assert act.DropFiles() in actions
    (message,) = [a.message for a in actions if isinstance(a, act.Transmit)]
    assert isinstance(message, msg.Unready)
    return message


@pytest.mark.parametrize("count", [9, 11, 0])
def test_chunk_of_another_length_means_a_changed_file(count):
    fetch, one = single_file_fetch()
    refusal = unready(fetch.chunk(answer(one.digest, 0), body(count)))
    assert refusal.exit_code == 2
    assert refusal.reason == (
        "the data file 'a.txt' of 'texts' has changed at the coordinator since the run was "
        "submitted; restore it, or submit a new run"
    )
    # Data that arrives after the refusal is ignored.
    assert fetch.chunk(answer(one.digest, 0), body(10)) == []
    assert fetch.event(fet.ChunkStored(one.digest, is_complete=True)) == []


def test_other_digest_means_a_changed_file():
    fetch, one = single_file_fetch()
    fetch.chunk(answer(one.digest, 0), body(10))
    refusal = unready(fetch.event(fet.BlobDamaged(one.digest, was_resumed=False)))
    assert "has changed at the coordinator" in refusal.reason


def test_disk_error_is_reported_in_one_line():
    fetch, one = single_file_fetch()
    fetch.chunk(answer(one.digest, 0), body(10))
    full = StorageFailed("write", "/cache", "no space left")
    refusal = unready(fetch.event(fet.FilesFailed(full)))
    assert (refusal.reason, refusal.exit_code) == ("cannot write '/cache': no space left", 1)


def test_unrequested_chunks_end_the_connection():
    fetch, one = single_file_fetch()
    for digest, offset in ((one.digest, 1), ("f" * 64, 0)):
        with pytest.raises(OutOfOrder, match="in the order"):
            single_file_fetch()[0].chunk(answer(digest, offset), body(10))
    fetch.chunk(answer(one.digest, 0), body(10))
    with pytest.raises(OutOfOrder, match="not requested"):
        fetch.chunk(answer(one.digest, 0), body(10))


def fetch_list(document: bytes, digest: str | None = None) -> None:
    list_digest = digest or blake3(document).hexdigest()
    fetch = FileFetch("run", SPEC, list_digest)
    fetch.chunk(answer(list_digest, 0), np.frombuffer(document, np.uint8))


def test_list_with_another_digest_ends_the_connection():
    valid_list = listing_of(file("a", 1)).to_bytes()
    fetch_list(valid_list)
    with pytest.raises(MessageError, match="got another"):
        fetch_list(valid_list, "0" * 64)
    with pytest.raises(MessageError, match="invalid file name"):
        fetch_list(valid_list.replace(b'"a"', b'"../../a"'))
    with pytest.raises(MessageError, match="got one with a tokenizer"):
        fetch_list(valid_list.replace(b'"data"', b'"tokenizer"'))


STUDENT_SPEC = parse_run_spec({
    "task": "distil", "steps": 1, "model": {"config": {"model_type": "llama"}},
    "data": {"train": "logits"},
})  # fmt: skip


def started_deferred_fetch(*files: BlobFile) -> tuple[FileFetch, BlobList, str]:
    """Return a fetch of a student's files while its task is built; files of logits are deferred."""
    listing = listing_of(*files)
    document = listing.to_bytes()
    digest = blake3(document).hexdigest()
    fetch = FileFetch("run", STUDENT_SPEC, digest)
    fetch.start()
    deferred = frozenset(file.digest for file in files if file.name.endswith(".parquet"))
    assert fetch.chunk(answer(digest, 0), np.frombuffer(document, np.uint8)) == [
        act.Locate(digest, STUDENT_SPEC, listing, deferred)
    ]
    assert fetch.event(fet.Located(())) == [act.Assemble(digest, STUDENT_SPEC, listing, deferred)]
    built = fetch.event(fet.Assembled(STUDENT_SPEC, {}))
    assert isinstance(built[-1], act.Build)
    return fetch, listing, digest


def test_deferred_file_is_fetched_when_needed():
    files = [file("capture.json", 10), *(file(f"{n}.parquet", 20) for n in range(3))]
    fetch, listing, digest = started_deferred_fetch(*files)
    pending_action = act.Evaluate(0, 1)
    remaining = frozenset(file.digest for file in files[1:] if file.name != "1.parquet")
    located = act.Locate(digest, STUDENT_SPEC, listing, remaining)
    assert fetch.request(("1.parquet",), pending_action) == [located]
    assert fetch.request(("0.parquet",), None) == []  # one request at a time
    actions = fetch.event(fet.Located((files[2],)))
    assert requests(actions) == [(files[2].digest, 0)]
    fetch.chunk(answer(files[2].digest, 0), body(20))
    assert fetch.event(fet.ChunkStored(files[2].digest, is_complete=True)) == [
        act.Assemble(digest, STUDENT_SPEC, listing, remaining)
    ]
    after = fetch.event(fet.Assembled(STUDENT_SPEC, {}))
    last = frozenset({files[3].digest})
    assert after == [pending_action, act.Locate(digest, STUDENT_SPEC, listing, last)]
    fetch.event(fet.Located(()))  # it existed locally
    assert fetch.event(fet.Assembled(STUDENT_SPEC, {})) == []
    assert fetch.request(("0.parquet", "1.parquet"), pending_action) == [pending_action]


def test_awaited_files_come_before_prefetched_ones():
    files = [file(f"{n}.parquet", 20) for n in range(3)]
    fetch, listing, digest = started_deferred_fetch(file("capture.json", 10), *files)
    fetch.request(("0.parquet",), None)
    fetch.request(("1.parquet",), None)
    fetch.request(("2.parquet",), act.Evaluate(0, 0))
    fetch.event(fet.Located(()))
    remaining = frozenset({files[1].digest})
    assert fetch.event(fet.Assembled(STUDENT_SPEC, {})) == [
        act.Locate(digest, STUDENT_SPEC, listing, remaining)
    ]


def test_file_changed_at_the_coordinator_ends_this_worker():
    files = [file("capture.json", 10), file("0.parquet", 20)]
    fetch, _, _ = started_deferred_fetch(*files)
    fetch.request(("0.parquet",), act.Evaluate(0, 0))
    fetch.event(fet.Located((files[1],)))
    actions = fetch.chunk(answer(files[1].digest, 0), body(3))
    (leave,) = [action for action in actions if isinstance(action, act.Leave)]
    assert leave.is_failure
    assert "has changed at the coordinator" in leave.reason
    assert fetch.request(("0.parquet",), None) == []


def test_deferred_files_may_share_names_with_other_roles():
    """Every capture begins with 00000.parquet."""
    document = STUDENT_SPEC.model_dump(mode="json") | {
        "data": {"train": "logits", "validation": "others"}
    }
    student = parse_run_spec(document)
    deferred_file, other = file("0.parquet", 20), file("0.parquet", 30)
    listing = BlobList(
        sources=(
            BlobSource(role="data", form="directory", files=(deferred_file,)),
            BlobSource(role="validation", form="directory", files=(other,)),
        )
    )
    list_bytes = listing.to_bytes()
    digest = blake3(list_bytes).hexdigest()
    fetch = FileFetch("run", student, digest)
    fetch.start()
    fetch.chunk(answer(digest, 0), np.frombuffer(list_bytes, np.uint8))
    fetch.event(fet.Located(()))
    fetch.event(fet.Assembled(student, {}))
    located = act.Locate(digest, student, listing, frozenset())
    assert fetch.request(("0.parquet",), act.Evaluate(0, 0)) == [located]


def test_fetched_file_requested_again_ends_this_worker():
    """Otherwise the worker would fetch the file forever."""
    fetch, _, _ = started_deferred_fetch(file("capture.json", 10), file("0.parquet", 20))
    pending_action = act.Evaluate(0, 0)
    fetch.request(("0.parquet",), pending_action)
    fetch.event(fet.Located(()))
    assert fetch.event(fet.Assembled(STUDENT_SPEC, {})) == [pending_action]
    assert fetch.request(("0.parquet",), pending_action) == [
        pending_action
    ]  # requested before the fetch ended
    (leave,) = [
        each
        for each in fetch.request(("0.parquet",), pending_action)
        if isinstance(each, act.Leave)
    ]
    assert "'0.parquet' was fetched, but the task does not find it" in leave.reason
