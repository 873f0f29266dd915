"""Messages of the previous run that arrive after the coordinator has started another run."""

from __future__ import annotations

import numpy as np

from protocol.wire.connection import ReceivedMessage
from protocol.wire.messages import BlockGradientPayload
from tests.event_loop import on_uvloop
from tests.live_service import live_service, scripted_spec


@on_uvloop
async def test_payload_in_the_precision_of_an_earlier_run_is_skipped(tmp_path):
    async with live_service(tmp_path, 2) as live:
        run_id = live.service.submit(scripted_spec())
        live.start_worker("w0")
        await live.wait_for("worker_ready", worker="w0")
        run, session = live.service.current, live.service.sessions["w0"]
        assert run is not None
        connection = session.channel.connection
        earlier_payload = BlockGradientPayload(
            term=run.run.term, step=0, attempt=0, block=0, chunk=0, lo=0, hi=1, weight=1.0
        )
        blocks, connection.blocks = (
            connection.blocks,
            None,
        )  # as before the worker was ready for this run
        run.receive(
            session, ReceivedMessage(earlier_payload, np.zeros(10, np.uint8))
        )  # no float32 values
        connection.blocks = blocks
        live.start_worker("w1")
        assert await live.result(run_id)
        assert not live.events_named("worker_lost")
