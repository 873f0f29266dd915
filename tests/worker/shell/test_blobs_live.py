"""File transfers from a live service to real workers: lost connections, changes, full disks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.files.blob_index import Blob, BlobIndex, index_blobs
from protocol.base import limits
from protocol.spec.files.blob_list import document_digest
from protocol.spec.files.file_digest import FileDigests, file_digest
from protocol.wire.connection import ReceivedMessage
from protocol.wire.messages import BlobChunk, BlobRequest
from protocol.wire.transport import Channel
from tests import reading_task
from tests.cluster import PATIENCE_S
from tests.durable_run import small_disk
from tests.event_loop import on_uvloop
from tests.live_service import LiveService, live_service, scripted_spec
from worker.logic import actions as act
from worker.shell import file_fetcher
from worker.shell.blob_cache import BlobCache
from worker.shell.client import Client

SPEC = scripted_spec(task=reading_task.NAME, data={"train": "input.bin"})
LARGE = 5 * limits.BODY_BYTES + 17


class Machines:
    """Two machines as two directories: the process runs in the worker's."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = top / "coordinator/input.bin"
        self.local = top / "worker/input.bin"
        self.cache = top / "cache"
        for directory in (self.file.parent, self.local.parent):
            directory.mkdir()
        self._monkeypatch = monkeypatch

    def index(self, content: bytes) -> BlobIndex:
        """Return the coordinator's file index, built in its own directory."""
        self.file.write_bytes(content)
        self._monkeypatch.chdir(self.file.parent)
        index = index_blobs(SPEC)
        self._monkeypatch.chdir(self.local.parent)
        assert index is not None
        return index

    def cached_files(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*") if path.is_file())


@pytest.fixture
def machines(tmp_path, monkeypatch) -> Machines:
    return Machines(tmp_path, monkeypatch)


def content(size: int = LARGE) -> bytes:
    return np.random.default_rng(size).bytes(size)


class RecordingClient(Client):
    """A worker that records its chunk requests, and drops the connection at a given chunk.

    Attributes:
        offsets: Offsets of all file requests, in order.
        drop_at: The connection is cut when the chunk at this offset has arrived.
    """

    offsets: list[int]
    drop_at: int = -1

    def _transmit(self, action: act.Transmit) -> None:
        if isinstance(action.message, BlobRequest):
            self.__dict__.setdefault("offsets", []).append(action.message.offset)
        super()._transmit(action)

    def on_message(self, channel: Channel, received: ReceivedMessage) -> None:
        message = received.message
        if isinstance(message, BlobChunk) and message.offset == self.drop_at > 0:
            self.drop_at = -1
            channel.abort("cut by the test")
            return
        super().on_message(channel, received)


def enlarge(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)


async def digest_read_by_workers(live: LiveService, run_id: str) -> str:
    """Return the digest of what the workers read, after the run has finished."""
    await live.result(run_id)
    assert live.service.finished is not None
    manifest = live.service.finished.run.manifest
    assert manifest is not None
    return manifest.digests["data"]


def recording_worker(
    live: LiveService, machines: Machines, name: str = "w0", **changes: Any
) -> RecordingClient:
    client = live.start_worker(name, RecordingClient, cache=machines.cache)
    assert isinstance(client, RecordingClient)
    vars(client).update(offsets=[], **changes)
    return client


@pytest.mark.parametrize("size", [0, 1, limits.BODY_BYTES, limits.BODY_BYTES + 1, LARGE])
@on_uvloop
async def test_a_worker_without_the_file_fetches_it_once(tmp_path, machines, size):
    index = machines.index(content(size))
    async with live_service(tmp_path / "out", 1) as live:
        worker = recording_worker(live, machines)
        for _ in range(2):
            run_id = live.service.submit(SPEC, blobs=index)
            assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]
        # Each run's list, and each chunk once.
        chunks = range(0, max(size, 1), limits.BODY_BYTES)
        assert worker.offsets == [0, *chunks, 0]
    assert machines.cached_files() == [file_digest(machines.file)[1]]


@on_uvloop
async def test_local_copy_with_the_right_digest_is_used(tmp_path, machines):
    index = machines.index(content())
    machines.local.write_bytes(content())
    async with live_service(tmp_path / "out", 1) as live:
        worker = recording_worker(live, machines)
        run_id = live.service.submit(SPEC, blobs=index)
        assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]
        assert worker.offsets == [0]
    assert machines.cached_files() == []


@on_uvloop
async def test_local_copy_with_another_digest_is_not_changed(tmp_path, machines):
    index = machines.index(content())
    other = bytearray(content())
    other[-1] ^= 1
    machines.local.write_bytes(other)
    async with live_service(tmp_path / "out", 1) as live:
        live.start_worker("w0", cache=machines.cache)
        run_id = live.service.submit(SPEC, blobs=index)
        assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]
    assert machines.local.read_bytes() == other


@on_uvloop
async def test_data_edited_in_place_is_read_again_by_the_next_run(tmp_path, machines):
    async with live_service(tmp_path / "out", 1) as live:
        live.start_worker("w0", cache=machines.cache)
        for edition in (b"first", b"other"):
            index = machines.index(edition)
            machines.local.write_bytes(edition)
            run_id = live.service.submit(SPEC, blobs=index)
            assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]


@on_uvloop
async def test_a_lost_connection_continues_where_it_was_cut(tmp_path, machines):
    index = machines.index(content())
    drop_offset = 2 * limits.BODY_BYTES
    async with live_service(tmp_path / "out", 1) as live:
        worker = recording_worker(live, machines, drop_at=drop_offset)
        run_id = live.service.submit(SPEC, blobs=index)
        assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]
        assert len(live.events_named("worker_disconnected")) == 1
        offsets = worker.offsets
    # The list was requested twice; data written before the cut was not fetched again.
    second_list = offsets.index(0, 2)
    assert offsets[second_list + 1] == drop_offset
    assert offsets[second_list + 1 :] == list(range(drop_offset, LARGE, limits.BODY_BYTES))


@on_uvloop
async def test_part_damaged_on_disk_is_fetched_again(tmp_path, machines):
    index = machines.index(content())
    digest = file_digest(machines.file)[1]
    part = machines.cache / "blobs" / digest[:2] / (digest + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(limits.BODY_BYTES))
    async with live_service(tmp_path / "out", 1) as live:
        worker = recording_worker(live, machines)
        run_id = live.service.submit(SPEC, blobs=index)
        assert await digest_read_by_workers(live, run_id) == digest
        assert worker.offsets.count(limits.BODY_BYTES) == 2
    assert machines.cached_files() == [digest]


@on_uvloop
async def test_workers_that_share_a_cache_fetch_a_large_file_once(tmp_path, machines, monkeypatch):
    """Both are in this process: flock separates them like two processes."""
    monkeypatch.setattr(
        file_fetcher, "_BUSY_PATIENCE_S", PATIENCE_S
    )  # a busy machine must not count as dead
    index = machines.index(content())
    async with live_service(tmp_path / "out", 2) as live:
        workers = [recording_worker(live, machines, name) for name in ("w0", "w1")]
        await live.wait_for("worker_connected", worker="w1")
        run_id = live.service.submit(SPEC, blobs=index)
        assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]
        chunks = [offset for worker in workers for offset in worker.offsets if offset]
        assert sorted(chunks) == list(range(limits.BODY_BYTES, LARGE, limits.BODY_BYTES))
    assert machines.cached_files() == [file_digest(machines.file)[1]]


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("change", ["other bytes", "truncated", "gone"])
@on_uvloop
async def test_a_file_that_changes_after_it_was_submitted_is_noticed(
    tmp_path, machines, change, size
):
    index = machines.index(content(size))
    if change == "gone":
        machines.file.unlink()
    else:
        machines.file.write_bytes(bytes(size if change == "other bytes" else size - 1))
    async with live_service(tmp_path / "out", 1) as live:
        live.start_worker("w0", cache=machines.cache)
        run_id = live.service.submit(SPEC, blobs=index)
        run_end = await live.wait_for("run_ended", run_id=run_id)
        assert run_end["outcome"] == "failed"
        assert run_end["reason"] == (
            "worker 'w0': the data file 'input.bin' of 'input.bin' has changed at the coordinator "
            "since the run was submitted; restore it, or submit a new run"
        )
        # No wrong file is stored, and the same worker serves the next run.
        index = machines.index(content(size))
        run_id = live.service.submit(SPEC, blobs=index)
        assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]


@on_uvloop
async def test_a_full_cache_is_one_line_and_the_worker_stays(tmp_path, machines):
    index = machines.index(content())
    with small_disk(machines.cache, 4096) as disk:
        async with live_service(tmp_path / "out", 1) as live:
            live.start_worker("w0", cache=disk)
            run_end = await live.wait_for(
                "run_ended", run_id=live.service.submit(SPEC, blobs=index)
            )
            assert "cannot use the cache" in run_end["reason"]
            assert "SAMESTEP_CACHE" in run_end["reason"]
            enlarge(disk)
            run_id = live.service.submit(SPEC, blobs=index)
            assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]


@on_uvloop
async def test_unwritable_cache_is_harmless_if_files_are_local(tmp_path, machines):
    index = machines.index(content(100))
    machines.local.write_bytes(content(100))
    machines.cache.touch()
    async with live_service(tmp_path / "out", 1) as live:
        live.start_worker("w0", cache=machines.cache)
        run_id = live.service.submit(SPEC, blobs=index)
        assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]


@on_uvloop
async def test_a_run_that_ends_while_its_files_are_fetched_leaves_a_part(tmp_path, machines):
    index = machines.index(content())
    async with live_service(tmp_path / "out", 2) as live:
        worker = recording_worker(live, machines)
        first_run_id = live.service.submit(SPEC, blobs=index)
        await live.wait_for("worker_connected", worker="w0")
        live.service.give_up("enough")
        await live.wait_for("run_ended", run_id=first_run_id)
        live.start_worker("w1", cache=machines.cache)
        run_id = live.service.submit(SPEC, blobs=index)
        assert await digest_read_by_workers(live, run_id) == file_digest(machines.file)[1]
        assert not live.events_named("worker_disconnected")
    assert len(worker.offsets) >= 2


@on_uvloop
async def test_data_error_names_the_path_of_the_run_spec(tmp_path, machines):
    index = machines.index(b"bad")
    async with live_service(tmp_path / "out", 1) as live:
        live.start_worker("w0", cache=machines.cache)
        run_end = await live.wait_for("run_ended", run_id=live.service.submit(SPEC, blobs=index))
        assert (
            run_end["reason"] == "worker 'w0': 'input.bin' line 1: expected valid data, got 'bad'"
        )


@on_uvloop
async def test_worker_does_not_wait_for_an_idle_part_of_another(tmp_path, machines, monkeypatch):
    monkeypatch.setattr(file_fetcher, "_BUSY_PATIENCE_S", 0.6)
    index = machines.index(content())
    digest = file_digest(machines.file)[1]
    stalled_part = BlobCache(machines.cache, FileDigests()).open_part(digest, LARGE)
    assert stalled_part is not None
    async with live_service(tmp_path / "out", 1) as live:
        live.start_worker("w0", cache=machines.cache)
        run_id = live.service.submit(SPEC, blobs=index)
        assert await digest_read_by_workers(live, run_id) == digest
    assert machines.cached_files() == [digest, digest + ".part"]
    stalled_part.append(np.frombuffer(content(), np.uint8))
    assert stalled_part.finish()
    assert machines.cached_files() == [digest]


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/../../../evil", "..\\\\evil"])
@on_uvloop
async def test_worker_leaves_a_coordinator_that_names_an_outside_path(tmp_path, machines, name):
    honest_index = machines.index(b"evil content")
    document = honest_index.listing.to_bytes().replace(b'"input.bin"', f'"{name}"'.encode())
    assert document != honest_index.listing.to_bytes()
    digest = document_digest(document)
    hostile_index = BlobIndex(
        digest, honest_index.listing, {**honest_index.blobs, digest: Blob(len(document), document)}
    )
    before = sorted(tmp_path.rglob("*"))
    async with live_service(machines.file.parent / "out", 1) as live:
        worker = recording_worker(live, machines)
        live.service.submit(SPEC, blobs=hostile_index)
        loss_event = await live.wait_for("worker_lost", worker="w0")
        assert "invalid file name" in loss_event["reason"]
        assert worker.offsets == [0]
    files_left = [path for path in tmp_path.rglob("*") if "out" not in path.parts]
    assert sorted(files_left) == before


@on_uvloop
async def test_links_are_removed_with_the_worker(tmp_path, machines, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    os.mkdir(tmp_path / "temporary")  # noqa: PTH102
    index = machines.index(content(100))
    async with live_service(tmp_path / "out", 1) as live:
        live.start_worker("w0", cache=machines.cache)
        await live.result(live.service.submit(SPEC, blobs=index))
        assert len(list((tmp_path / "temporary").glob("samestep-*/*/data/input.bin"))) == 1
    assert list((tmp_path / "temporary").iterdir()) == []
