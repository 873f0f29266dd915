"""What is fetched and in which order, against a coordinator and a disk that answer at random."""

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


def begun(listing: BlobList) -> FileFetch:
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


def told(actions: list[act.Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, act.Tell)]


def requests(actions: list[act.Action]) -> list[tuple[str, int]]:
    sent = (action.message for action in actions if isinstance(action, act.Transmit))
    return [(one.digest, one.offset) for one in sent if isinstance(one, msg.BlobRequest)]


def answer(digest: str, offset: int) -> msg.BlobChunk:
    return msg.BlobChunk(run_id="run", digest=digest, offset=offset)


class World:
    """A coordinator that answers in order, and a disk; either may be slow.

    Attributes:
        stored: Bytes written of each file.
        finished: What came after the last file.
    """

    def __init__(self, files: list[BlobFile], rng: random.Random) -> None:
        self.size = {each.digest: each.size for each in files}
        self.stored = {each.digest: 0 for each in files}
        self.before = {
            each.digest: rng.randrange(each.size) if each.size > CHUNK and rng.random() < 0.5 else 0
            for each in files
        }
        self.spoilt = {d for d, have in self.before.items() if have and rng.random() < 0.5}
        self.network: deque[tuple[str, int]] = deque()
        self.disk: deque[fet.FileEvent] = deque()
        self.finished: list[act.Action] = []
        self._opened = ""
        self._unwritten: deque[int] = deque()
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
                case act.Tell():
                    pass
                case _:
                    raise AssertionError(action)
        nbytes = [min(CHUNK, self.size[digest] - offset) for digest, offset in self.network]
        nbytes += self._unwritten
        assert len(nbytes) <= limits.UNANSWERED_BLOB_CHUNKS
        assert sum(nbytes) <= limits.UNANSWERED_BLOB_BYTES

    def _open(self, opened: BlobFile) -> None:
        if self._rng.random() < 0.2:
            self.stored[opened.digest] = opened.size
            self.disk.append(fet.BlobPresent(opened.digest))
            return
        self.stored[opened.digest] = self.before[opened.digest]
        self._opened = opened.digest
        self.disk.append(fet.PartOpened(opened.digest, self.stored[opened.digest]))

    def _store(self, action: act.StoreChunk) -> None:
        digest = action.file.digest
        assert action.file.size <= CHUNK or digest == self._opened
        assert self.stored[digest] == action.offset
        self.stored[digest] += len(action.values)
        self._unwritten.append(len(action.values))
        complete = self.stored[digest] == action.file.size
        if complete and digest in self.spoilt:
            self.spoilt.discard(digest)
            self.before[digest] = 0
            self.disk.append(fet.BlobDamaged(digest, was_resumed=True))
        else:
            self.disk.append(fet.ChunkStored(digest, complete))

    def turn(self, fetch: FileFetch) -> None:
        if self.network and (not self.disk or self._rng.random() < 0.5):
            digest, offset = self.network.popleft()
            values = body(min(CHUNK, self.size[digest] - offset))
            self.do(fetch.chunk(answer(digest, offset), values))
        else:
            event = self.disk.popleft()
            if isinstance(event, fet.ChunkStored | fet.BlobDamaged):
                self._unwritten.popleft()
            self.do(fetch.event(event))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_file_comes_whole_whatever_is_slow(first):
    for seed in range(first, first + 50):
        fetch_all(seed)


def fetch_all(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 7 * CHUNK + 5])
             for _ in range(rng.choice([1, 2, 8, 150]))]  # fmt: skip
    files = [file(f"{number}.txt", size) for number, size in enumerate(sizes)]
    fetch, world = begun(listing_of(*files)), World(files, rng)
    world.do(fetch.event(fet.Located(tuple(files))))
    while not world.finished:
        world.turn(fetch)
    assert world.stored == world.size
    assert not world.network
    assert not world.disk


def test_nothing_is_fetched_where_nothing_is_missing():
    listing = listing_of(file("a", 1))
    fetch = begun(listing)
    (action,) = fetch.event(fet.Located(()))
    assert isinstance(action, act.Assemble)
    placed = SPEC.model_copy(update={"name": "placed"})
    actions = fetch.event(fet.Assembled(placed, {"/inputs/data": "texts"}))
    assert told(actions) == ["run run: building the task 'causal-lm'"]
    assert actions[-1] == act.Build("run", placed, keep_state=False, inputs=action.list_digest)
    assert fetch.with_source_names("cannot read '/inputs/data/a'") == "cannot read 'texts/a'"


def test_a_person_is_told_what_is_fetched_and_how_far_it_is():
    large = file("large", 10 * CHUNK)
    fetch = begun(listing_of(large))
    actions = fetch.event(fet.Located((large,)))
    assert told(actions) == ["run run: fetching 42 MB of data from the coordinator"]
    pending = requests(fetch.event(fet.PartOpened(large.digest, 0)))
    lines = []
    while pending:
        actions = fetch.chunk(answer(*pending.pop(0)), body(CHUNK))
        lines += told(actions)
        pending += requests(actions)
        stored = next(a for a in actions if isinstance(a, act.StoreChunk))
        complete = stored.offset + CHUNK == large.size
        pending += requests(fetch.event(fet.ChunkStored(large.digest, complete)))
    assert lines == [
        "fetched 13 MB of 42 MB", "fetched 21 MB of 42 MB", "fetched 34 MB of 42 MB",
        "fetched 42 MB of 42 MB",
    ]  # fmt: skip


def fetching_one(size: int = 10) -> tuple[FileFetch, BlobFile]:
    one = file("a.txt", size)
    fetch = begun(listing_of(one))
    assert requests(fetch.event(fet.Located((one,)))) == [(one.digest, 0)]
    return fetch, one


def unready(actions: list[act.Action]) -> msg.Unready:
    assert act.DropFiles() in actions
    (message,) = [a.message for a in actions if isinstance(a, act.Transmit)]
    assert isinstance(message, msg.Unready)
    return message


@pytest.mark.parametrize("count", [9, 11, 0])
def test_a_chunk_of_another_length_is_a_file_that_has_changed(count):
    fetch, one = fetching_one()
    answered = unready(fetch.chunk(answer(one.digest, 0), body(count)))
    assert answered.exit_code == 2
    assert answered.reason == (
        "the data file 'a.txt' of 'texts' has changed at the coordinator since the run was "
        "submitted; restore it, or submit a new run"
    )
    # What is on its way still is nobody's.
    assert fetch.chunk(answer(one.digest, 0), body(10)) == []
    assert fetch.event(fet.ChunkStored(one.digest, is_complete=True)) == []


def test_another_digest_is_a_file_that_has_changed():
    fetch, one = fetching_one()
    fetch.chunk(answer(one.digest, 0), body(10))
    answered = unready(fetch.event(fet.BlobDamaged(one.digest, was_resumed=False)))
    assert "has changed at the coordinator" in answered.reason


def test_a_disk_that_refuses_is_reported_in_one_line():
    fetch, one = fetching_one()
    fetch.chunk(answer(one.digest, 0), body(10))
    full = StorageFailed("write", "/cache", "no space left")
    answered = unready(fetch.event(fet.FilesFailed(full)))
    assert (answered.reason, answered.exit_code) == ("cannot write '/cache': no space left", 1)


def test_chunks_that_were_not_asked_for_end_the_connection():
    fetch, one = fetching_one()
    for digest, offset in ((one.digest, 1), ("f" * 64, 0)):
        with pytest.raises(OutOfOrder, match="in the order"):
            fetching_one()[0].chunk(answer(digest, offset), body(10))
    fetch.chunk(answer(one.digest, 0), body(10))
    with pytest.raises(OutOfOrder, match="not requested"):
        fetch.chunk(answer(one.digest, 0), body(10))


def list_answered(document: bytes, digest: str | None = None) -> None:
    named = digest or blake3(document).hexdigest()
    fetch = FileFetch("run", SPEC, named)
    fetch.chunk(answer(named, 0), np.frombuffer(document, np.uint8))


def test_a_list_that_is_not_the_one_that_was_named_ends_the_connection():
    good = listing_of(file("a", 1)).to_bytes()
    list_answered(good)
    with pytest.raises(MessageError, match="got another"):
        list_answered(good, "0" * 64)
    with pytest.raises(MessageError, match="invalid file name"):
        list_answered(good.replace(b'"a"', b'"../../a"'))
    with pytest.raises(MessageError, match="got one with a tokenizer"):
        list_answered(good.replace(b'"data"', b'"tokenizer"'))


STUDENT = parse_run_spec({
    "task": "distil", "steps": 1, "model": {"config": {"model_type": "llama"}},
    "data": {"train": "logits"},
})  # fmt: skip


def begun_later(*files: BlobFile) -> tuple[FileFetch, BlobList, str]:
    """A student's files, of which those of logits are for later; its task is being built."""
    listing = listing_of(*files)
    document = listing.to_bytes()
    digest = blake3(document).hexdigest()
    fetch = FileFetch("run", STUDENT, digest)
    fetch.start()
    later = frozenset(each.digest for each in files if each.name.endswith(".parquet"))
    assert fetch.chunk(answer(digest, 0), np.frombuffer(document, np.uint8)) == [
        act.Locate(digest, STUDENT, listing, later)
    ]
    assert fetch.event(fet.Located(())) == [act.Assemble(digest, STUDENT, listing, later)]
    built = fetch.event(fet.Assembled(STUDENT, {}))
    assert isinstance(built[-1], act.Build)
    return fetch, listing, digest


def test_a_file_for_later_is_fetched_when_something_waits_for_it():
    files = [file("capture.json", 10), *(file(f"{n}.parquet", 20) for n in range(3))]
    fetch, listing, digest = begun_later(*files)
    waiting = act.Evaluate(0, 1)
    left = frozenset(each.digest for each in files[1:] if each.name != "1.parquet")
    located = act.Locate(digest, STUDENT, listing, left)
    assert fetch.request(("1.parquet",), waiting) == [located]
    assert fetch.request(("0.parquet",), None) == []  # one after the other
    actions = fetch.event(fet.Located((files[2],)))
    assert requests(actions) == [(files[2].digest, 0)]
    fetch.chunk(answer(files[2].digest, 0), body(20))
    assert fetch.event(fet.ChunkStored(files[2].digest, is_complete=True)) == [
        act.Assemble(digest, STUDENT, listing, left)
    ]
    after = fetch.event(fet.Assembled(STUDENT, {}))
    last = frozenset({files[3].digest})
    assert after == [waiting, act.Locate(digest, STUDENT, listing, last)]
    fetch.event(fet.Located(()))  # it was here
    assert fetch.event(fet.Assembled(STUDENT, {})) == []
    assert fetch.request(("0.parquet", "1.parquet"), waiting) == [waiting]


def test_what_is_waited_for_comes_before_what_will_be_needed():
    files = [file(f"{n}.parquet", 20) for n in range(3)]
    fetch, listing, digest = begun_later(file("capture.json", 10), *files)
    fetch.request(("0.parquet",), None)
    fetch.request(("1.parquet",), None)
    fetch.request(("2.parquet",), act.Evaluate(0, 0))
    fetch.event(fet.Located(()))
    left = frozenset({files[1].digest})
    assert fetch.event(fet.Assembled(STUDENT, {})) == [act.Locate(digest, STUDENT, listing, left)]


def test_a_file_that_changed_at_the_coordinator_in_the_middle_of_a_run_ends_this_worker():
    files = [file("capture.json", 10), file("0.parquet", 20)]
    fetch, _, _ = begun_later(*files)
    fetch.request(("0.parquet",), act.Evaluate(0, 0))
    fetch.event(fet.Located((files[1],)))
    actions = fetch.chunk(answer(files[1].digest, 0), body(3))
    (leave,) = [each for each in actions if isinstance(each, act.Leave)]
    assert leave.is_failure
    assert "has changed at the coordinator" in leave.reason
    assert fetch.request(("0.parquet",), None) == []


def test_files_of_another_role_may_have_the_names_of_those_for_later():
    """Every capture begins with 00000.parquet."""
    document = STUDENT.model_dump(mode="json") | {
        "data": {"train": "logits", "validation": "others"}
    }
    student = parse_run_spec(document)
    later, other = file("0.parquet", 20), file("0.parquet", 30)
    listing = BlobList(
        sources=(
            BlobSource(role="data", form="directory", files=(later,)),
            BlobSource(role="validation", form="directory", files=(other,)),
        )
    )
    whole = listing.to_bytes()
    digest = blake3(whole).hexdigest()
    fetch = FileFetch("run", student, digest)
    fetch.start()
    fetch.chunk(answer(digest, 0), np.frombuffer(whole, np.uint8))
    fetch.event(fet.Located(()))
    fetch.event(fet.Assembled(student, {}))
    located = act.Locate(digest, student, listing, frozenset())
    assert fetch.request(("0.parquet",), act.Evaluate(0, 0)) == [located]


def test_a_file_that_has_come_and_is_wanted_again_ends_this_worker():
    """Rather than be fetched for ever."""
    fetch, _, _ = begun_later(file("capture.json", 10), file("0.parquet", 20))
    waiting = act.Evaluate(0, 0)
    fetch.request(("0.parquet",), waiting)
    fetch.event(fet.Located(()))
    assert fetch.event(fet.Assembled(STUDENT, {})) == [waiting]
    assert fetch.request(("0.parquet",), waiting) == [waiting]  # it was asked for meanwhile
    (leave,) = [
        each for each in fetch.request(("0.parquet",), waiting) if isinstance(each, act.Leave)
    ]
    assert "'0.parquet' was fetched, but the task does not find it" in leave.reason
