"""Workers that exchange slices over real sockets reach the same bits as in a star."""

import pytest

from coordinator.service import service
from coordinator.service.journal_lines import record_of
from tests.live_service import ScriptedFactory, live_service, scripted_spec

_STEPS = 30


def spec(topology, **exchange):
    return scripted_spec(steps=_STEPS, exchange={"topology": topology, **exchange})


async def train(directory, topology, workers=3, on_start=None, **exchange):
    """Return the result and the live service of the run."""
    async with live_service(directory, workers) as live:
        for number in range(workers):
            live.start_worker(f"w{number}", backend_factory=ScriptedFactory(1.0))
        run_id = live.service.submit(spec(topology, **exchange))
        if on_start is not None:
            await on_start(live)
        result = await live.result(run_id)
        assert live.events_named("halted") == []
        return result, live


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_sharded_has_the_bits_of_the_star(precision, tmp_path):
    exchange = {"precision": precision, "averages": precision}
    star, _ = await train(tmp_path / "star", "star", **exchange)
    sharded, live = await train(tmp_path / "sharded", "sharded", **exchange)
    assert sharded["weights_digest"] == star["weights_digest"]
    assert live.events_named("owners")[-1]["owners"].keys() == {"w0", "w1", "w2"}


@pytest.mark.parametrize("topology", ["star", "sharded"])
async def test_shared_memory_is_used_and_changes_no_bit(topology, tmp_path, monkeypatch):
    digests = {}
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(service, "new_segment_owner", lambda: None)
        run = scripted_spec(
            steps=4, exchange={"topology": topology},
            scripted={"blocks": 2, "block_bytes": 400_000, "samples": 64},
        )  # fmt: skip
        async with live_service(tmp_path / str(shared), 2) as live:
            for number in range(2):
                live.start_worker(f"w{number}", backend_factory=ScriptedFactory(1.0))
            result = await live.result(live.service.submit(run))
            digests[shared] = result["weights_digest"]
            shared_bytes_received = [
                s.channel.connection.shared_bytes_received for s in live.service.sessions.values()
            ]
            assert any(shared_bytes_received) == shared
    assert digests[True] == digests[False]


async def test_lost_owner_is_replaced_without_changing_a_bit(tmp_path):
    async def disconnect_owner(live):
        owners = (await live.wait_for("owners"))["owners"]
        number = next(
            n for n in range(3) if f"w{n}" in owners
        )  # some workers may have no links yet
        live.clients[number]._channel.abort("pulled out")  # its links end with it; it returns
        await live.wait_for("worker_lost", worker=f"w{number}")

    star, _ = await train(tmp_path / "star", "star")
    sharded, live = await train(tmp_path / "sharded", "sharded", on_start=disconnect_owner)
    assert sharded["weights_digest"] == star["weights_digest"]
    assert len(live.events_named("owners")) > 1


@pytest.mark.parametrize(
    "counts",
    [(2, 4), pytest.param((2, 4, 8), marks=[pytest.mark.slow, pytest.mark.release])],
    ids=["few", "many"],
)
async def test_bytes_of_the_coordinator_do_not_grow_with_the_workers(tmp_path, counts):
    """Sharded, a step costs one set of averages and control data; a star needs two per worker."""
    blocks, block_bytes, steps = 16, 50_000, 6  # one slice for each worker
    traffic_bytes = {}
    for workers in counts:
        async with live_service(tmp_path / str(workers), workers) as live:
            for number in range(workers):
                live.start_worker(f"w{number}", backend_factory=ScriptedFactory(10.0))
            run = scripted_spec(
                # more steps than the test waits for
                steps=100_000, exchange={"topology": "sharded"},
                scripted={"blocks": blocks, "block_bytes": block_bytes, "samples": 64},
            )  # fmt: skip
            live.service.submit(run)
            number = 1  # a worker whose link was measured as slow may own nothing
            while len((await live.wait_for("owners", number=number))["owners"]) < workers:
                number += 1
            is_undisturbed = False
            # on a busy machine, a worker may count as a straggler for a while
            while not is_undisturbed:
                assert live.service.current is not None
                first_step, owners = (
                    live.service.current.run.steps_committed,
                    len(live.events_named("owners")),
                )
                await live.wait_for("committed", step=first_step)
                before = _bytes(live)
                await live.wait_for("committed", step=first_step + steps)
                traffic_bytes[workers] = (_bytes(live) - before) / steps
                is_undisturbed = len(live.events_named("owners")) == owners
    for workers, per_step in traffic_bytes.items():
        assert per_step < 1.1 * blocks * block_bytes + 20_000 * workers, traffic_bytes


def _bytes(live):
    channels = [session.channel for session in live.service.sessions.values()]
    return sum(channel.bytes_received + channel.bytes_sent for channel in channels)


async def test_journal_names_the_owner_of_each_average(tmp_path):
    _, live = await train(tmp_path, "sharded", workers=2)
    run = live.service.finished.run
    ownership = run.progress._ownership_report()
    assert record_of(ownership, run) is ownership
    lines = (live.service.finished.directory / "journal.jsonl").read_text()
    assert '"kind":"owners"' in lines
