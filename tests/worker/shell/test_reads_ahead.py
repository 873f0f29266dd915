"""A worker with a slow engine stops reading, so its pending data are bounded."""

from __future__ import annotations

import threading
from typing import Any, Final

from protocol.base import limits
from tests.event_loop import on_uvloop
from tests.live_service import live_service, scripted_spec
from tests.resident_memory import MIB
from worker.logic import actions as act
from worker.shell.engine import Engine

BLOCKS: Final = 3
STEP_BYTES: Final = BLOCKS * MIB // 4
PAUSED_STEP: Final = 2


@on_uvloop
async def test_pending_data_of_a_slow_engine_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "RECEIVED_AHEAD_BYTES", STEP_BYTES)
    spec = scripted_spec(
        steps=60,
        batch={"samples": 2, "microbatch": 1},
        scripted={"blocks": BLOCKS, "block_bytes": STEP_BYTES // BLOCKS, "samples": 64},
    )
    async with live_service(tmp_path, 2) as live:
        run_id = live.service.submit(spec)
        live.start_worker("w0")
        client = live.start_worker("w1")
        continue_event, most_bytes = threading.Event(), 0
        device = client._engine
        assert isinstance(device, Engine)
        apply, count_bytes = Engine._HANDLERS[act.Apply], client._start_handover

        def pause_at_step(engine: Engine, action: act.Apply) -> None:
            apply(engine, action)
            if engine is device and device._require_job().replica.step == PAUSED_STEP:
                continue_event.wait()

        def record_length(length_bytes: int) -> Any:
            nonlocal most_bytes
            result = count_bytes(length_bytes)
            most_bytes = max(most_bytes, client._pending_bytes)
            return result

        monkeypatch.setitem(Engine._HANDLERS, act.Apply, pause_at_step)
        monkeypatch.setattr(client, "_start_handover", record_length)
        try:
            await live.result(run_id)
            # The current step and one more, out of sixty.
            assert STEP_BYTES < most_bytes <= 2 * STEP_BYTES
            assert client._channel is not None
            assert client._channel.is_paused
        finally:
            continue_event.set()
