"""Runs with replicas: one digest, whichever worker computes or loses an inner phase."""

import asyncio
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from backends.registry import choose
from backends.wgpu.device.adapters import adapters
from coordinator.audit.audit import audit
from coordinator.operator.status import status_document
from coordinator.operator.status_text import status_lines
from coordinator.run.exchange.round import Round
from protocol.base.errors import StorageDamaged
from protocol.spec.run_spec import parse_run_spec
from protocol.spec.sections.document import read_yaml
from tests.cluster import PATIENCE_S, RUNS
from tests.event_loop import on_uvloop
from tests.live_service import ScriptedFactory, live_service, run_undisturbed, scripted_spec
from tests.small_decoder import document, save_small_decoder
from tests.worker.tasks.test_own import documented_example
from worker.tasks.registry import build

CODECS = ("float32", "bfloat16", "int8", "int4", "topk")
QUICK = {("float32", "reset"), ("int8", "carry"), ("topk", "carry")}
REGRESS = {
    "name": "regress",
    "task": "regress",
    "seed": 7,
    "regress": {"samples": 256, "features": 8},
    "batch": {"samples": 16, "microbatch": 8},
    "optimizer": {"name": "adamw", "lr": 0.05, "clip_norm": 1.0},
    "steps": 3,
    "checkpoint": {"keep_log": True},
}


class DeviceFactory:
    """Backend factory of a worker on a device of this machine."""

    def __init__(self, name="cpu"):
        self._backend = choose(name).backend

    def backend(self):
        return self._backend

    def task(self, spec):
        return build(spec)


def regress(**changes):
    return parse_run_spec({**REGRESS, **changes})


async def train(directory, spec, workers, device="cpu"):
    async with live_service(directory, workers) as live:
        run_id = live.service.submit(spec)
        for number in range(workers):
            live.start_worker(f"w{number}", backend_factory=DeviceFactory(device))
            # torch captures one model at a time per process.
            await live.wait_for("worker_ready", worker=f"w{number}")
        return await live.result(run_id)


def digest_and_losses(result):
    return result["weights_digest"], result["losses"]


@pytest.mark.parametrize(
    ("codec", "inner_state"),
    [
        pytest.param(codec, state, marks=() if (codec, state) in QUICK else pytest.mark.slow)
        for codec in CODECS
        for state in ("reset", "carry")
    ],
)
@on_uvloop
async def test_any_number_of_workers_has_one_digest(tmp_path, codec, inner_state):
    spec = regress(
        replicas={
            "count": 3, "inner_steps": 3, "codec": codec, "inner_state": inner_state,
            "averages": "int8" if codec == "int4" else "float32", "boundary_every": 2,
        }
    )  # fmt: skip
    single_worker = await train(tmp_path / "one", spec, 1)
    several_workers = await train(tmp_path / "two", spec, 2)
    assert digest_and_losses(several_workers) == digest_and_losses(single_worker)
    assert sum(several_workers["workers"].values()) == 9
    (run,) = (path for path in (tmp_path / "two").iterdir() if path.is_dir())
    report = audit(run)
    assert report.ok, report.lines()
    assert "3 of 3 steps replayed" in "\n".join(report.lines())


SMALL = {"count": 2, "inner_steps": 2, "codec": "int8", "inner_state": "carry"}


def disable_dropout(model):
    """Set dropout to 0, because workers in one process would share its random generator."""
    config = model / "config.json"
    document = json.loads(config.read_text())
    config.write_text(json.dumps({**document, "attention_dropout": 0.0}))
    return str(model)


async def check_one_and_two_workers_agree(tmp_path, task, device="cpu"):
    spec = parse_run_spec({**task, "steps": 2, "evaluate_every": 0, "replicas": SMALL})
    single_worker = await train(tmp_path / "one", spec, 1, device)
    several_workers = await train(tmp_path / "two", spec, 2, device)
    assert digest_and_losses(several_workers) == digest_and_losses(single_worker)
    assert several_workers["eval"] == single_worker["eval"]
    assert all(several_workers["workers"].values())


@on_uvloop
async def test_lora_replicas_agree_on_one_and_two_workers(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(9):
        (texts / f"{number}.txt").write_text(document(number))
    model = disable_dropout(save_small_decoder(tmp_path / "model"))
    data = {"train": str(texts), "pattern": "*.txt", "holdout": 0.2, "max_tokens": 16}
    task = {"task": "causal-lm", "model": {"source": model}, "lora": {"r": 2}, "data": data}
    await check_one_and_two_workers_agree(
        tmp_path, {**task, "batch": {"samples": 4, "microbatch": 2}}
    )


@on_uvloop
async def test_custom_task_replicas_agree_on_one_and_two_workers(tmp_path, monkeypatch):
    state_file, source = documented_example()
    (tmp_path / "my_package.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    batch = {"samples": 8, "microbatch": 4}
    try:
        await check_one_and_two_workers_agree(
            tmp_path, {**state_file.model_dump(mode="json"), "batch": batch}
        )
    finally:
        sys.modules.pop("my_package", None)


@pytest.mark.slow
@on_uvloop
async def test_vulkan_replicas_agree_on_one_and_two_workers(tmp_path):
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    task = {"task": "digits", "digits": {"hidden": [8]}, "batch": {"samples": 8, "microbatch": 4}}
    await check_one_and_two_workers_agree(tmp_path, task, "vulkan")


ONE_PACKAGE = Path(asyncio.__file__).parent
TASKS = {
    "regress": {**REGRESS, "batch": {"samples": 64, "microbatch": 8}},
    "digits": {
        "task": "digits", "steps": 3, "digits": {"hidden": [32, 32]},
        "batch": {"samples": 32, "microbatch": 8},
    },
    "small-llama": {
        **read_yaml((RUNS / "small-llama-replicas.yaml").read_text()), "steps": 2,
        "batch": {"samples": 8, "microbatch": 4}, "evaluate_every": 0,
        "data": {
            "train": str(ONE_PACKAGE), "pattern": "*.py", "holdout": 0.1, "holdout_samples": 24,
        },
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("inner_state", ["reset", "carry"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("task", TASKS)
@on_uvloop
async def test_2_3_and_8_workers_with_one_killed_have_the_digest_of_one(
    tmp_path, progress_queue, task, codec, inner_state
):
    """The worker is killed within an inner phase, after its first inner checkpoint."""
    spec = parse_run_spec({
        **TASKS[task],
        "replicas": {
            "count": 3, "inner_steps": 3, "codec": codec, "inner_state": inner_state,
            "averages": "int8" if codec == "int4" else "float32", "boundary_every": 1,
        },
    })  # fmt: skip
    single_worker = await train(tmp_path / "1", spec, 1)
    for workers in (2, 3, 8):
        async with live_service(tmp_path / str(workers), workers) as live:
            for number in range(workers):
                live.start_worker(f"{workers}-{number}", backend_factory=DeviceFactory())
            run_id = live.service.submit(spec)
            victim = await wait_for_progress(progress_queue, *live.workers)
            kill(live, victim)
            several_workers = await live.result(run_id)
            assert live.find_event("worker_lost", worker=victim), "the run ended before the kill"
        assert digest_and_losses(several_workers) == digest_and_losses(single_worker)
        assert several_workers["eval"] == single_worker["eval"]


@on_uvloop
async def test_one_replica_with_one_step_equals_a_plain_run(tmp_path):
    """Up to rounding: p - (p - p') instead of p', and the average's product with 1."""
    replicas = {
        "count": 1, "inner_steps": 1, "inner_state": "carry", "outer": {"lr": 1, "momentum": 0},
    }  # fmt: skip
    weights = []
    for name, changes in (("plain", {}), ("replicas", {"replicas": replicas})):
        await train(tmp_path / name, regress(steps=8, **changes), 1)
        (model,) = (tmp_path / name).glob("*/model/model.safetensors")
        weights.append(np.concatenate([v.ravel() for v in load_file(model).values()]))
    plain_weights, replica_weights = (values.astype(np.float64) for values in weights)
    assert np.linalg.norm(replica_weights - plain_weights) <= 1e-6 * np.linalg.norm(plain_weights)


def slow_spec(**changes):
    """Return a spec of replicas whose steps are slow enough to be interrupted."""
    return scripted_spec(
        steps=3,
        batch={"samples": 2, "microbatch": 1},
        double_check_every=0,
        replicas={"count": 2, "inner_steps": 12, "boundary_every": 3, **changes},
    )


@pytest.fixture
def progress_queue(monkeypatch):
    """Return a queue of the workers that report progress within an inner phase."""
    progress_queue: asyncio.Queue[str] = asyncio.Queue()
    note_inner_step = Round.note_inner_step

    def record(self, worker, replica, inner):
        note_inner_step(self, worker, replica, inner)
        progress_queue.put_nowait(worker)

    monkeypatch.setattr(Round, "note_inner_step", record)
    return progress_queue


async def wait_for_progress(progress_queue, *workers):
    """Return the first of these workers that reports progress."""
    async with asyncio.timeout(PATIENCE_S):
        while (worker := await progress_queue.get()) not in workers:
            pass
        return worker


def kill(live, name):
    """End a worker and its connection in the middle of its work."""
    client = live.clients[[*live.workers].index(name)]
    client._channel.abort("killed")
    live.workers[name].cancel()


@pytest.mark.parametrize("inner_state", ["reset", "carry"])
@on_uvloop
async def test_inner_phase_of_a_lost_worker_is_reassigned(tmp_path, progress_queue, inner_state):
    async with live_service(tmp_path / "lost", 2) as live:
        live.start_worker("w0", backend_factory=ScriptedFactory(4))
        live.start_worker("w1", backend_factory=ScriptedFactory(4))
        run_id = live.service.submit(slow_spec(inner_state=inner_state))
        await wait_for_progress(progress_queue, "w1")
        kill(live, "w1")
        live.start_worker("w2", backend_factory=ScriptedFactory(1))
        result = await live.result(run_id)
        assert live.events_named("reassigned")
    expected = await run_undisturbed(tmp_path / "calm", slow_spec(inner_state=inner_state))
    assert digest_and_losses(result) == digest_and_losses(expected)


@on_uvloop
async def test_more_workers_than_replicas_stand_by_and_take_over(tmp_path, progress_queue):
    async with live_service(tmp_path / "many", 3) as live:
        for number in range(3):
            live.start_worker(f"w{number}", backend_factory=ScriptedFactory(4))
        run_id = live.service.submit(slow_spec())
        busy_worker = await wait_for_progress(progress_queue, "w0", "w1", "w2")
        lines = list(status_lines(status_document(live.service, 0.0)))
        assert sum("standing by" in line for line in lines) == 1
        assert any(re.search(r"w\d: active.*, replica [01]: step \d+ of 12", x) for x in lines)
        kill(live, busy_worker)
        result = await live.result(run_id)
    expected = await run_undisturbed(tmp_path / "calm", slow_spec())
    assert digest_and_losses(result) == digest_and_losses(expected)


@on_uvloop
async def test_restarted_coordinator_continues_with_carried_states(tmp_path):
    """The service stops between two rounds; a new one resumes in its directory."""
    spec = slow_spec(inner_state="carry", codec="topk")
    expected = await run_undisturbed(tmp_path / "calm", spec)
    async with live_service(tmp_path / "run", 1) as live:
        live.start_worker("w0", backend_factory=ScriptedFactory(2))
        run_id = live.service.submit(spec)
        await live.wait_for("committed", step=1)
        assert live.service.current is not None
        directory = live.service.current.directory
    newest_file = max((directory / "replicas").glob("own-*"))
    content = newest_file.read_bytes()
    newest_file.write_bytes(b"")
    async with live_service(tmp_path / "run", 1) as live:
        with pytest.raises(StorageDamaged, match=newest_file.name):
            live.service.resume(directory)
    newest_file.write_bytes(content)
    async with live_service(tmp_path / "run", 1) as live:
        live.service.resume(directory)
        live.start_worker("w1", backend_factory=ScriptedFactory(0))
        result = await live.result(run_id)
    assert digest_and_losses(result) == digest_and_losses(expected)
    names = sorted(path.name for path in (directory / "replicas").glob("own-*"))
    assert names == ["own-1", "own-2", "own-3"]


def contents(directory):
    """Read all files of a run's directory except the lock."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {p: p.read_bytes() for p in files if p.name not in {"lock", "term.json"}}


@on_uvloop
async def test_per_replica_states_must_match_the_commit(tmp_path):
    """Wrong states are refused before files are set aside; the audit reports the same fault."""
    spec = regress(
        checkpoint={"every": 1, "keep_last": 9},
        replicas={"count": 2, "inner_steps": 2, "inner_state": "carry"},
    )
    expected = await train(tmp_path / "run", spec, 1)
    await train(tmp_path / "other", spec.model_copy(update={"seed": 5}), 1)
    (run,), (other,) = (
        [path for path in (tmp_path / name).iterdir() if path.is_dir()] for name in ("run", "other")
    )
    state_file = run / "replicas" / "own-2"
    original = state_file.read_bytes()
    assert audit(run).ok, audit(run).lines()
    replacements = {
        "emptied": b"",
        "of another round": (run / "replicas" / "own-1").read_bytes(),
        "of another run": (other / "replicas" / "own-2").read_bytes(),
        "one bit": original[:-1] + bytes([original[-1] ^ 1]),
        "gone": None,
    }
    for fault, content in replacements.items():
        state_file.unlink() if content is None else state_file.write_bytes(content)
        before = contents(run)
        async with live_service(tmp_path / "run", 1) as live:
            with pytest.raises(StorageDamaged, match=r"own-2.*N one of 0, 1, 3\)") as error:
                live.service.resume(run, from_step=2)
        assert "\n" not in str(error.value)
        assert contents(run) == before, fault
        bad_lines = [line for line in audit(run).lines() if line.startswith("BAD")]
        assert len(bad_lines) == 1, (fault, bad_lines)
        assert "own-2" in bad_lines[0]
        state_file.write_bytes(original)
    async with live_service(tmp_path / "run", 1) as live:
        live.service.resume(run, from_step=2)
        live.start_worker("w0", backend_factory=DeviceFactory())
        assert digest_and_losses(await live.result(run.name)) == digest_and_losses(expected)
    assert [path.name for path in run.glob("set-aside/*/replicas/*")] == ["own-3"]
    assert audit(run).ok, audit(run).lines()
