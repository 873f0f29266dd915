"""Workers that average slices among themselves, on real sockets: the bits of the star."""

import pytest

from coordinator.service import service
from coordinator.service.journal_lines import record_of
from tests.live_service import Scripted, live_service, scripted_spec

_STEPS = 30


def spec(way, **exchange):
    return scripted_spec(steps=_STEPS, exchange={"topology": way, **exchange})


async def trained(directory, way, workers=3, during=None, **exchange):
    """The result, and the service that it is of."""
    async with live_service(directory, workers) as live:
        for number in range(workers):
            live.worker(f"w{number}", toolbox=Scripted(1.0))
        run_id = live.service.submit(spec(way, **exchange))
        if during is not None:
            await during(live)
        result = await live.result(run_id)
        assert live.every("halted") == []
        return result, live


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_sharded_has_the_bits_of_the_star(precision, tmp_path):
    exchange = {"precision": precision, "averages": precision}
    star, _ = await trained(tmp_path / "star", "star", **exchange)
    sharded, live = await trained(tmp_path / "sharded", "sharded", **exchange)
    assert sharded["weights_digest"] == star["weights_digest"]
    assert live.every("owners")[-1]["owners"].keys() == {"w0", "w1", "w2"}


@pytest.mark.parametrize("way", ["star", "sharded"])
async def test_shared_memory_changes_no_bit_and_is_used_where_it_can_be(way, tmp_path, monkeypatch):
    digests = {}
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(service, "new_segment_owner", lambda: None)
        run = scripted_spec(
            steps=4, exchange={"topology": way},
            scripted={"blocks": 2, "block_bytes": 400_000, "samples": 64},
        )  # fmt: skip
        async with live_service(tmp_path / str(shared), 2) as live:
            for number in range(2):
                live.worker(f"w{number}", toolbox=Scripted(1.0))
            result = await live.result(live.service.submit(run))
            digests[shared] = result["weights_digest"]
            used = [s.channel.connection.shared_bytes for s in live.service.sessions.values()]
            assert any(used) == shared
    assert digests[True] == digests[False]


async def test_an_owner_that_is_lost_is_replaced_and_the_bits_stay(tmp_path):
    async def lose_one(live):
        owners = (await live.wait_for("owners"))["owners"]
        number = next(n for n in range(3) if f"w{n}" in owners)  # not all may have links by then
        live.clients[number]._channel.abort("pulled out")  # its links end with it; it comes back
        await live.wait_for("worker_lost", worker=f"w{number}")

    star, _ = await trained(tmp_path / "star", "star")
    sharded, live = await trained(tmp_path / "sharded", "sharded", during=lose_one)
    assert sharded["weights_digest"] == star["weights_digest"]
    assert len(live.every("owners")) > 1


@pytest.mark.parametrize(
    "counts",
    [(2, 4), pytest.param((2, 4, 8), marks=[pytest.mark.slow, pytest.mark.release])],
    ids=["few", "many"],
)
async def test_what_it_takes_of_the_coordinator_does_not_grow_with_the_workers(tmp_path, counts):
    """One set of averages and control a step: in a star it is two for each worker."""
    blocks, block_bytes, steps = 16, 50_000, 6  # a slice each: there is one for each worker
    passed = {}
    for workers in counts:
        async with live_service(tmp_path / str(workers), workers) as live:
            for number in range(workers):
                live.worker(f"w{number}", toolbox=Scripted(10.0))
            run = scripted_spec(
                steps=100_000, exchange={"topology": "sharded"},  # it is left once that is measured
                scripted={"blocks": blocks, "block_bytes": block_bytes, "samples": 64},
            )  # fmt: skip
            live.service.submit(run)
            number = 1  # one whose way was measured as slow may own nothing
            while len((await live.wait_for("owners", number=number))["owners"]) < workers:
                number += 1
            undisturbed = False
            while not undisturbed:  # on a busy machine one is taken for a straggler, and comes back
                assert live.service.current is not None
                first_step, owners = (
                    live.service.current.run.steps_committed,
                    len(live.every("owners")),
                )
                await live.wait_for("committed", step=first_step)
                before = _bytes(live)
                await live.wait_for("committed", step=first_step + steps)
                passed[workers] = (_bytes(live) - before) / steps
                undisturbed = len(live.every("owners")) == owners
    for workers, per_step in passed.items():
        assert per_step < 1.1 * blocks * block_bytes + 20_000 * workers, passed


def _bytes(live):
    channels = [session.channel for session in live.service.sessions.values()]
    return sum(channel.bytes_received + channel.bytes_sent for channel in channels)


async def test_the_journal_says_who_averaged_what(tmp_path):
    _, live = await trained(tmp_path, "sharded", workers=2)
    run = live.service.finished.run
    owned = run.progress._owned()
    assert record_of(owned, run) is owned
    lines = (live.service.finished.directory / "journal.jsonl").read_text()
    assert '"kind":"owners"' in lines
