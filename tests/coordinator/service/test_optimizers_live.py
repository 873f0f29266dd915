"""Every kind of optimizer state in a live run: one digest for 1, 2 and 4 workers in a star and
sharded, with a joiner, after a restart, and in the audit."""

from itertools import product
from typing import Any

import pytest

from coordinator.audit.audit import audit
from coordinator.storage.states.checkpoint import checkpoint_steps, load_tensors
from tests.live_service import ScriptedFactory, live_service, run_undisturbed, scripted_spec

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw-amsgrad-ema-groups": {
        "name": "adamw", "amsgrad": True, "ema": {"decay": 0.75, "start_step": 3}, "clip_norm": 0.5,
        "groups": [{"match": "layer.1.*", "clip_norm": 0.01}],
    },
    "rmsprop-swa-clip-value": {
        "name": "rmsprop", "momentum": 0.9, "centered": True, "clip_value": 0.25,
        "swa": {"every": 2},
    },
    "nesterov-plateau": {
        "name": "nesterov", "schedule": "plateau",
        "plateau": {"metric": "samples_held_out", "patience": 0, "factor": 0.5},
    },
    "adafactor-ema": {"name": "adafactor", "ema": {"count_initial": True}, "clip_norm": 0.5},
}  # fmt: skip


def spec_of(name, **changes):
    optimizer, checkpoint = OPTIMIZERS[name], {"every": 5}
    if "plateau" in optimizer:
        changes["evaluate_every"] = 2
    return scripted_spec(steps=12, optimizer=optimizer, checkpoint=checkpoint, **changes)


async def train_with_workers(directory, spec, count):
    async with live_service(directory, count) as live:
        for number in range(count):
            live.start_worker(f"w{number}")
        return await live.result(live.service.submit(spec))


async def test_optimizers_have_one_digest_for_any_number_of_workers(tmp_path):
    name = "adamw-amsgrad-ema-groups"
    single_worker = await run_undisturbed(tmp_path / "alone", spec_of(name))
    two_workers = await train_with_workers(tmp_path / "two", spec_of(name), 2)
    assert two_workers["weights_digest"] == single_worker["weights_digest"]
    [run] = (tmp_path / "two").glob("scripted-*")
    report = audit(run)
    assert report.ok, report.lines()
    last = run / "checkpoints" / f"step-{max(checkpoint_steps(run / 'checkpoints')):010d}"
    kinds = {name.partition("/")[0] for name in load_tensors(last / "optimizer.safetensors")}
    assert kinds == {"first_moment", "second_moment", "third_moment", "average"}


FREQUENT_COMBINATIONS = {
    ("adamw-amsgrad-ema-groups", "sharded"), ("rmsprop-swa-clip-value", "star"),
    ("nesterov-plateau", "sharded"), ("adafactor-ema", "star"),
}  # fmt: skip
"""Each optimizer in one topology: an update does not depend on the topology."""
COMBINATIONS = [
    pytest.param(
        *combination, marks=() if combination in FREQUENT_COMBINATIONS else pytest.mark.release
    )
    for combination in product(OPTIMIZERS, ("star", "sharded"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "topology"), COMBINATIONS)
async def test_joins_losses_and_restarts_do_not_change_the_digest(tmp_path, name, topology):
    spec = spec_of(name, exchange={"topology": topology})
    single_worker = await run_undisturbed(tmp_path / "alone", spec_of(name))
    for count in (2, 4):
        result = await train_with_workers(tmp_path / f"{count}", spec, count)
        assert result["weights_digest"] == single_worker["weights_digest"]
    runs = tmp_path / "disturbed"
    async with live_service(runs, 2) as live:
        run_id = live.service.submit(spec)
        backend_factory = ScriptedFactory(microbatch_ms=2.0)
        for worker in ("w0", "w1"):
            live.start_worker(worker, backend_factory=backend_factory)
        await live.wait_for("committed", step=2)
        channel = live.clients[1]._channel
        assert channel is not None
        channel.abort("pulled out")  # the worker returns
        live.start_worker("late", backend_factory=backend_factory)
        await live.wait_for("committed", step=7)
    assert not live.events_named("internal_error")
    async with live_service(runs, 1) as live:
        live.service.resume(runs / run_id)
        live.start_worker("w0")
        result = await live.result(run_id)
    assert result["weights_digest"] == single_worker["weights_digest"]
    assert result["losses"] == single_worker["losses"]
    report = audit(runs / run_id)
    assert report.ok, report.lines()
