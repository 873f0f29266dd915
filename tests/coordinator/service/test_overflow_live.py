"""An update that overflows: all gradients are finite, but not the weights."""

from __future__ import annotations

from tests.event_loop import on_uvloop
from tests.live_service import live_service, scripted_spec


@on_uvloop
async def test_infinite_weight_halts_the_run_and_is_named(tmp_path):
    # Each step multiplies the weights by a million; the scripted gradients do not change.
    spec = scripted_spec(steps=12, optimizer={"name": "sgd", "lr": 1e3, "weight_decay": 1e3})
    async with live_service(tmp_path, 1) as live:
        live.service.submit(spec)
        live.start_worker("w0")
        halt = await live.wait_for("halted")
    assert "produced a non-finite value: block" in halt["reason"]
    assert "(parameters)" in halt["reason"]
