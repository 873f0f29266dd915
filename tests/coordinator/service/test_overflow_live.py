"""An update that leaves weights that are not finite, though every gradient was."""

from __future__ import annotations

from tests.event_loop import on_uvloop
from tests.live_service import live_service, scripted_spec


@on_uvloop
async def test_an_infinite_weight_halts_the_run_and_is_named(tmp_path):
    # Each step multiplies the weights by a million; the scripted gradients stay what they are.
    spec = scripted_spec(steps=12, optimizer={"name": "sgd", "lr": 1e3, "weight_decay": 1e3})
    async with live_service(tmp_path, 1) as live:
        live.service.submit(spec)
        live.worker("w0")
        halted = await live.wait_for("halted")
    assert "produced a non-finite value: block" in halted["reason"]
    assert "(parameters)" in halted["reason"]
