"""Workers can join under many hostile connections from one address, and memory stays bounded.

`benchmarks/hostile.py` measures the delays.
"""

from __future__ import annotations

import asyncio
from typing import Final

from benchmarks.attack import ATTACKS, SOURCE_ADDRESS
from benchmarks.hostile import Attacker
from protocol.base import limits
from tests.event_loop import on_uvloop
from tests.hostile_worker import HostileWorker
from tests.live_service import live_service, run_undisturbed, scripted_spec
from tests.resident_memory import MIB, measured_growth

CONNECTIONS: Final = 1_000
ATTEMPTS: Final = 1_500
"""Minimum number of attack connections, so that some have been refused and have returned."""
MEMORY_BYTES: Final = 24 * MIB
SPEC: Final = scripted_spec(steps=6)


@on_uvloop
async def test_run_and_joiners_succeed_under_a_thousand_hostile_connections(tmp_path):
    reference = await run_undisturbed(tmp_path / "calm", SPEC)
    loop = asyncio.get_running_loop()
    async with live_service(tmp_path / "attacked", 2) as live:
        run_id = live.service.submit(SPEC)
        live.start_worker("w0")
        await live.wait_for("worker_ready", worker="w0")
        attacker = Attacker(live.port, CONNECTIONS)
        try:
            with measured_growth() as growth:
                await loop.run_in_executor(None, attacker.send_command, "attack")
                limit = await join_under_attack(live, attacker)
                live.start_worker("w1")
                result = await live.result(run_id)
        finally:
            attacker.close()
        assert growth.peak_bytes <= MEMORY_BYTES
        assert 0 < limit <= limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS
        assert all(attacker.attempts[kind.__name__] for kind in ATTACKS)
        assert not live.find_event("worker_lost", worker="w0")
    assert result["weights_digest"] == reference["weights_digest"]


async def join_under_attack(live, attacker):
    """Let workers join until the attack has opened enough connections; return the largest number of
    pending attackers."""
    loop, limit = asyncio.get_running_loop(), 0
    while attacker.attempts.total() < ATTEMPTS:
        async with HostileWorker(live.port, "newcomer") as newcomer:
            await newcomer.join()
            pending_hosts = [connection.host for connection in live.service._pending]
            limit = max(limit, pending_hosts.count(SOURCE_ADDRESS))
        await loop.run_in_executor(None, attacker.send_command, "count")
    return limit
