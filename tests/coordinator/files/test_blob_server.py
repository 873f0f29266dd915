"""Requests that a hostile worker may not make; chunks that an honest worker receives while others
train."""

from __future__ import annotations

import pytest

from coordinator.files.blob_index import BlobIndex, index_blobs
from protocol.base import limits
from protocol.wire.messages import BlobChunk, BlobRequest, Goodbye, StartRun
from tests import reading_task
from tests.event_loop import on_uvloop
from tests.hostile_worker import HostileWorker
from tests.live_service import LiveService, live_service, scripted_spec

SIZE = 2 * limits.BODY_BYTES + 5
CONTENT = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)


@pytest.fixture
def index(tmp_path) -> BlobIndex:
    path = tmp_path / "input.bin"
    path.write_bytes(CONTENT)
    return index_of(path)


def index_of(path) -> BlobIndex:
    index = index_blobs(scripted_spec(task=reading_task.NAME, data={"train": str(path)}))
    assert index is not None
    return index


def file_digest(index: BlobIndex) -> str:
    return index.listing.sources[0].files[0].digest


async def invite(live: LiveService, worker: HostileWorker, index: BlobIndex | None) -> str:
    path = "" if index is None else str(index.blobs[file_digest(index)].content)
    spec = scripted_spec(task=reading_task.NAME, data={"train": path})
    run_id = live.service.submit(spec, blobs=index)
    await worker.join()
    start = await worker.wait_for_message(StartRun)
    assert start.blobs == (index.digest if index is not None else None)
    worker.run_id = run_id
    return run_id


def ask(worker: HostileWorker, digest: str, offset: int, run_id: str = "") -> None:
    worker.send(BlobRequest(run_id=run_id or worker.run_id, digest=digest, offset=offset))


async def receive_chunk(worker: HostileWorker) -> tuple[int, bytes]:
    while (received := await worker.receive()) is not None:
        if isinstance(received.message, BlobChunk):
            assert received.body is not None
            return received.message.offset, received.body.tobytes()
        assert not isinstance(received.message, Goodbye), received.message
    raise AssertionError("the connection ended")


@on_uvloop
async def test_chunks_are_sent_in_order_and_from_any_offset(tmp_path, index):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as worker:
        await invite(live, worker, index)
        for offset in (0, limits.BODY_BYTES, SIZE - 1, 7):
            ask(worker, file_digest(index), offset)
        for offset in (0, limits.BODY_BYTES, SIZE - 1, 7):
            assert await receive_chunk(worker) == (offset, CONTENT[offset:][: limits.BODY_BYTES])
        ask(worker, index.digest, 0)
        assert await receive_chunk(worker) == (0, index.listing.to_bytes())
        assert live.find_event("worker_lost") is None


@on_uvloop
async def test_link_in_place_of_a_file_is_not_followed(tmp_path, index):
    """Neither to a secret of the same size nor to a file with the same bytes."""
    path, secret = tmp_path / "input.bin", tmp_path / "key.pem"
    secret.write_bytes(b"s" * SIZE)
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as worker:
        await invite(live, worker, index)
        path.unlink()
        path.symlink_to(secret)
        ask(worker, file_digest(index), 0)
        assert (await receive_chunk(worker))[1] == b""
        path.unlink()
        path.hardlink_to(secret)
        ask(worker, file_digest(index), 0)
        assert (await receive_chunk(worker))[1] == b""
        path.unlink()
        path.write_bytes(CONTENT)
        ask(worker, file_digest(index), 0)
        assert (await receive_chunk(worker))[1] == CONTENT[: limits.BODY_BYTES]


@pytest.mark.parametrize(
    ("digest", "offset", "reason"),
    [
        ("0" * 64, 0, "000000000000 is not a blob of this run"),
        ("", SIZE, f"an offset in {SIZE} bytes, got {SIZE}"),
        ("", 2**63 - 1, "an offset in"),
    ],
)
@on_uvloop
async def test_request_for_an_unlisted_file_ends_the_connection(
    tmp_path, index, digest, offset, reason
):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as worker:
        await invite(live, worker, index)
        ask(worker, digest or file_digest(index), offset)
        goodbye = await worker.wait_for_goodbye()
        assert goodbye is not None
        assert reason in goodbye.reason
        await live.wait_for("worker_lost", worker=worker.name)
        assert live.service.current is not None


@on_uvloop
async def test_a_run_without_blobs_serves_none(tmp_path):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as worker:
        await invite(live, worker, None)
        ask(worker, "0" * 64, 0)
        goodbye = await worker.wait_for_goodbye()
        assert goodbye is not None
        assert "is not a blob of this run" in goodbye.reason


@on_uvloop
async def test_request_of_an_earlier_run_is_dropped(tmp_path, index):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as worker:
        await invite(live, worker, index)
        ask(worker, file_digest(index), 0, run_id="earlier")
        ask(worker, file_digest(index), 3)
        assert (await receive_chunk(worker))[0] == 3


@on_uvloop
async def test_worker_that_requests_without_reading_is_refused(tmp_path, index):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as worker:
        await invite(live, worker, index)
        for _ in range(200):
            ask(worker, file_digest(index), 0)
        loss_event = await live.wait_for("worker_lost", worker=worker.name)
        assert "too many chunks requested at once" in loss_event["reason"]


@on_uvloop
async def test_empty_file_is_sent_as_an_empty_chunk(tmp_path):
    (tmp_path / "empty").touch()
    index = index_of(tmp_path / "empty")
    async with live_service(tmp_path / "out", 1) as live, HostileWorker(live.port) as worker:
        await invite(live, worker, index)
        ask(worker, file_digest(index), 0)
        assert await receive_chunk(worker) == (0, b"")


@on_uvloop
async def test_worker_that_leaves_during_a_download_does_not_stop_the_run(tmp_path, index):
    async with live_service(tmp_path, 2) as live:
        async with HostileWorker(live.port) as worker:
            await invite(live, worker, index)
            for _ in range(limits.UNANSWERED_BLOB_CHUNKS):
                ask(worker, file_digest(index), 0)
            await worker.receive()
        await live.wait_for("worker_lost", worker=worker.name)
        for name in ("w0", "w1"):
            live.start_worker(name, cache=tmp_path / "cache")
        run_id = next(e["run_id"] for e in live.events if e["event"] == "run_accepted")
        await live.result(run_id)
        assert not live.events_named("internal_error")


@on_uvloop
async def test_steps_continue_while_a_joiner_is_served(tmp_path, index):
    """The joiner requests chunks one at a time, with commits in between."""
    spec = scripted_spec(
        task=reading_task.NAME, steps=100,
        data={"train": str(index.blobs[file_digest(index)].content)},
    )  # fmt: skip
    async with live_service(tmp_path, 1) as live:
        live.start_worker("w0", cache=tmp_path / "cache")
        run_id = live.service.submit(spec, blobs=index)
        await live.wait_for("started")
        async with HostileWorker(live.port) as joiner:
            joiner.run_id = run_id
            await joiner.join()
            before, chunks_served = len(live.events_named("committed")), 0
            while live.find_event("run_ended") is None and chunks_served < 30:
                ask(joiner, file_digest(index), 0)
                await receive_chunk(joiner)
                chunks_served += 1
            assert chunks_served
            assert len(live.events_named("committed")) > before
        await live.result(run_id)
