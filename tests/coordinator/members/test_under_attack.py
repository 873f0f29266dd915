"""Many hostile connections from one address beside a run: newcomers join, and little memory goes.

How long all of it takes is for `benchmarks/hostile.py` to say.
"""

from __future__ import annotations

import asyncio
from typing import Final

from benchmarks.attack import FROM, KINDS
from benchmarks.hostile import Attacker
from protocol.base import limits
from tests.event_loop import on_uvloop
from tests.hostile_worker import HostileWorker
from tests.live_service import live_service, scripted_spec, undisturbed
from tests.resident_memory import MIB, measured_growth

CONNECTIONS: Final = 1_000
BEGUN: Final = 1_500
"""Before the test ends: some have been turned away and have come again."""
MEMORY_BYTES: Final = 24 * MIB
SPEC: Final = scripted_spec(steps=6)


@on_uvloop
async def test_a_run_and_newcomers_beside_a_thousand_hostile_connections(tmp_path):
    reference = await undisturbed(tmp_path / "calm", SPEC)
    loop = asyncio.get_running_loop()
    async with live_service(tmp_path / "attacked", 2) as live:
        run_id = live.service.submit(SPEC)
        live.worker("w0")
        await live.wait_for("worker_ready", worker="w0")
        attacker = Attacker(live.port, CONNECTIONS)
        try:
            with measured_growth() as growth:
                await loop.run_in_executor(None, attacker.told, "attack")
                most = await newcomers(live, attacker)
                live.worker("w1")
                result = await live.result(run_id)
        finally:
            attacker.close()
        assert growth.peak_bytes <= MEMORY_BYTES
        assert 0 < most <= limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS
        assert all(attacker.begun[kind.__name__] for kind in KINDS)
        assert not live.first("worker_lost", worker="w0")
    assert result["weights_digest"] == reference["weights_digest"]


async def newcomers(live, attacker):
    """Let some join until the attack has begun enough; the most attackers that were inside."""
    loop, most = asyncio.get_running_loop(), 0
    while attacker.begun.total() < BEGUN:
        async with HostileWorker(live.port, "newcomer") as newcomer:
            await newcomer.join()
            inside = [stranger.host for stranger in live.service._pending]
            most = max(most, inside.count(FROM))
        await loop.run_in_executor(None, attacker.told, "count")
    return most
