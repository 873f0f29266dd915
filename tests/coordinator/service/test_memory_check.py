"""A coordinator's memory stays within its prediction; a run that does not fit is refused."""

from __future__ import annotations

import gc
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from coordinator.service import memory_check
from coordinator.service.memory_check import MemoryBudget, check_memory
from protocol.base import limits
from protocol.base.errors import RunFailed
from protocol.machine.memory import Memory
from protocol.spec.run_spec import parse_run_spec
from tests.chaos.processes import Coordinator, Event, Worker
from tests.event_loop import on_uvloop
from tests.live_service import live_service, scripted_spec
from tests.resident_memory import MIB, Growth
from tests.small_limits_coordinator import SMALL_LIMITS
from worker.tasks.small.scripted import Scripted

FEW_BLOCKS: Final = 8
BLOCKS: Final = 20
MANY_BLOCKS: Final = 112
BLOCK_BYTES: Final = 1 * MIB
WORKERS: Final = 3
JOINERS: Final = 1
BASE_BYTES: Final = 48 * MIB
"""Memory of the process itself: its imports, and the free memory of its allocator. With few
parameters, it dominates; with many, it is within the factor of six."""


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "large",
        "task": "scripted",
        "steps": 10_000,
        "batch": {"samples": 5, "microbatch": 1},
        "optimizer": {"name": "adamw"},
        "scripted": {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "samples": 64},
        "checkpoint": {"every": 2},
        "evaluate_every": 0,
        **changes,
    }


def required_bytes(spec: dict[str, Any], workers: int) -> MemoryBudget:
    parsed = parse_run_spec(spec)
    return MemoryBudget.of(parsed, Scripted(parsed).manifest, workers)


def test_adamw_needs_at_most_six_times_the_memory_of_parameters():
    large_run = document(scripted={"blocks": 40, "block_bytes": 256 * MIB, "samples": 64})
    one_worker_bytes, many_workers_bytes = (
        required_bytes(large_run, 1),
        required_bytes(large_run, 64),
    )
    assert one_worker_bytes.parameters == many_workers_bytes.parameters == 40 * 256 * MIB
    assert (
        one_worker_bytes.replica + one_worker_bytes.gradients == 5.5 * one_worker_bytes.parameters
    )
    assert (
        many_workers_bytes.replica + many_workers_bytes.gradients
        == 5.5 * one_worker_bytes.parameters
    )
    assert many_workers_bytes.workers == 64 * 24 * MIB
    assert many_workers_bytes.total < 6 * many_workers_bytes.parameters


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("blocks", "steps"), [(FEW_BLOCKS, 1), pytest.param(MANY_BLOCKS, 2, marks=pytest.mark.slow)]
)
def test_coordinator_memory_stays_within_the_prediction(tmp_path, monkeypatch, blocks, steps):
    """Workers of unequal speed make many sums wait; the run has checkpoints and joiners."""
    large_run = document(scripted={"blocks": blocks, "block_bytes": BLOCK_BYTES, "samples": 64})
    growth = memory_growth(tmp_path, large_run, steps, microbatch_ms=10 * blocks)
    for name, value in SMALL_LIMITS.items():
        monkeypatch.setattr(limits, name, value)
    budget = required_bytes(large_run, WORKERS + JOINERS)
    assert growth.peak_bytes <= budget.total + BASE_BYTES
    if blocks == MANY_BLOCKS:
        assert growth.peak_bytes <= 6 * budget.parameters


def memory_growth(
    tmp_path: Path, large_run: dict[str, Any], steps: int, microbatch_ms: int = 100
) -> Growth:
    """Return the memory growth of a coordinator over `steps` steps before and after joins.

    Args:
        microbatch_ms: Computing time of the first worker; the others are slower. A joiner catches
            up meanwhile, so it must be longer than a busy machine takes to pass the state on.
    """
    spec = tmp_path / "run.yaml"
    spec.write_text(json.dumps(large_run))
    arguments = ["--run", str(spec), "--expect-workers", str(WORKERS)]
    started_workers: list[Worker] = []

    def start_worker(number: int) -> None:
        name = f"scripted:{microbatch_ms + microbatch_ms * number // 4}"
        worker = Worker(
            coordinator.address, f"w{number}", name, tmp_path,
            fresh=False, module="tests.small_limits_worker",
        )  # fmt: skip
        started_workers.append(worker)

    with Coordinator(tmp_path / "c", arguments, "tests.small_limits_coordinator") as coordinator:
        coordinator.wait_for("the run", lambda event: event.name == "run_accepted")
        try:
            with coordinator.memory() as growth:
                for number in range(WORKERS):
                    start_worker(number)
                wait_for_commit(coordinator, steps)
                for number in range(WORKERS, WORKERS + JOINERS):
                    start_worker(number)
                    wait_for_join(coordinator, f"w{number}")
                wait_for_commit(coordinator, coordinator.step + steps)
        finally:
            for worker in started_workers:
                worker.kill()
    return growth


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("inner_state", "blocks"), [("reset", 40), ("carry", 100)])
def test_run_with_replicas_stays_within_the_prediction(tmp_path, monkeypatch, inner_state, blocks):
    replicas = {"count": 3, "inner_steps": 2, "inner_state": inner_state, "boundary_every": 1}
    large_run = document(
        scripted={"blocks": blocks, "block_bytes": BLOCK_BYTES, "samples": 64}, replicas=replicas
    )
    growth = memory_growth(tmp_path, large_run, 1)
    for name, value in SMALL_LIMITS.items():
        monkeypatch.setattr(limits, name, value)
    budget = required_bytes(large_run, WORKERS + JOINERS)
    state_bytes = 0
    if inner_state == "carry":  # moments, and the missed updates of each block's one tensor
        state_bytes = 3 * (2 * blocks * MIB + 4 * blocks)
    assert budget.replica + budget.gradients == (2 + 2 + 3) * blocks * MIB + state_bytes + 4 * MIB
    assert growth.peak_bytes <= budget.total + BASE_BYTES


def wait_for_commit(coordinator: Coordinator, step: int) -> None:
    """Wait with a timeout per step, because a step may be slow on a loaded machine."""
    for due in range(step + 1):
        coordinator.wait_for(f"step {due}", partial(_is_commit, step=due), patience_s=150)


def _is_commit(event: Event, step: int) -> bool:
    return event.name == "committed" and event.fields["step"] >= step


def wait_for_join(coordinator: Coordinator, worker: str) -> None:
    coordinator.wait_for(
        f"{worker} joined",
        lambda event: event.name == "worker_joined" and event.fields["worker"] == worker,
        patience_s=270,
    )


def small_machine(free: int) -> Memory:
    return Memory(free=free, free_swap=0, limit=None, swap_limit=None, used=None)


def test_run_that_does_not_fit_is_refused_with_size_and_remedy(monkeypatch):
    spec = parse_run_spec(document())
    manifest = Scripted(spec).manifest
    total = MemoryBudget.of(spec, manifest, 2).total
    monkeypatch.setattr(memory_check, "read_memory", lambda: small_machine(total))
    check_memory(spec, manifest, 2)
    monkeypatch.setattr(memory_check, "read_memory", lambda: small_machine(total - 2 * MIB))
    with pytest.raises(RunFailed) as error:
        check_memory(spec, manifest, 2)
    text = str(error.value)
    assert "20.0 MiB of trained parameters take 212.0 MiB" in text
    assert "210.0 MiB are free" in text
    assert "optimizer.name=sgd" in text
    assert "with 2.0 MiB more" in text
    with pytest.raises(RunFailed) as error:
        check_memory(spec, manifest, 2, is_resumed=True)  # a resumed run keeps its spec
    expected_text = "210.0 MiB are free; run the coordinator on a machine with 2.0 MiB more"
    assert str(error.value).endswith(expected_text)


def test_memory_freed_by_an_earlier_run_counts_as_free(monkeypatch):
    release_calls: list[int] = []
    spec = parse_run_spec(document())
    manifest = Scripted(spec).manifest
    total = MemoryBudget.of(spec, manifest, 2).total
    free_bytes = (total - MIB, total)
    monkeypatch.setattr(
        memory_check, "read_memory", lambda: small_machine(free_bytes[len(release_calls)])
    )
    monkeypatch.setattr(memory_check, "give_back_freed_memory", lambda: release_calls.append(1))
    check_memory(spec, manifest, 2)
    assert release_calls == [1]


@on_uvloop
async def test_oversized_run_is_refused_before_its_first_step(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(memory_check, "read_memory", lambda: small_machine(MIB))
    async with live_service(tmp_path, 1) as live:
        live.service.submit(scripted_spec())
        live.start_worker("w0")
        run_end = await live.wait_for("run_ended")
        assert run_end["outcome"] == "failed"
        assert "the coordinator lacks memory for this run" in run_end["reason"]


@on_uvloop
async def test_ended_run_frees_its_memory(tmp_path: Path):
    async with live_service(tmp_path, 1) as live:
        live.service.submit(scripted_spec())
        live.start_worker("w0")
        await live.wait_for("started")
        run = live.service.current
        assert run is not None
        replica = weakref.ref(run._replica._replica)
        del run
        await live.wait_for("run_ended")
        gc.collect()
        assert live.service.finished is not None
        assert replica() is None
