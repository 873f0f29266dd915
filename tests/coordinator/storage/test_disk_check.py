"""A run that cannot fit on disk is refused before it begins, with the option that fits."""

import asyncio
import shutil
import threading

import pytest

from coordinator.service.coordinator_replica import CoordinatorReplica
from coordinator.storage import run_storage
from coordinator.storage.disk_check import DiskBudget, check_disk_space
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.states.checkpoint import write_checkpoint
from protocol.base.errors import StorageFailed
from protocol.spec.manifest import CaptureLayout
from protocol.spec.run_spec import parse_run_spec
from protocol.spec.sections.checkpoint import CheckpointSpec
from tests.durable_run import MANIFEST, RUN_ID, SPEC, initial_replica, log_step, small_disk
from tests.live_service import live_service, scripted_spec

PARAMETER_BYTES = MANIFEST.elements * 4


def spec_of(*, steps=100, log="full", **checkpoint_options):
    checkpoint_spec = CheckpointSpec.model_validate(
        {"every": 10, "keep_last": 2, **checkpoint_options}
    )
    return SPEC.model_copy(update={"steps": steps, "log": log, "checkpoint": checkpoint_spec})


def test_required_space_follows_from_the_spec():
    budget = DiskBudget.of(spec_of(), MANIFEST)
    assert (budget.step_bytes, budget.steps) == (PARAMETER_BYTES, 10)
    assert (budget.state_bytes, budget.states) == (3 * PARAMETER_BYTES, 3)
    assert budget.total_bytes == (10 + 9 + 1) * PARAMETER_BYTES
    assert DiskBudget.of(spec_of(every=0), MANIFEST).steps == 100
    assert DiskBudget.of(spec_of(every=0), MANIFEST).states == 2
    assert DiskBudget.of(spec_of(keep_log=True), MANIFEST).steps == 100
    assert DiskBudget.of(spec_of(log="checkpoint"), MANIFEST).step_bytes == 0


def test_required_space_covers_the_written_files(tmp_path):
    log = GradientLog(tmp_path / "log", RUN_ID, MANIFEST, term=1, next_step=0)
    for step in range(4):
        log_step(log, step)
    assert log.segment.stat().st_size > 4 * DiskBudget.of(spec_of(), MANIFEST).step_bytes
    directory = write_checkpoint(
        tmp_path, MANIFEST, initial_replica(), run_id=RUN_ID, term=1, losses=[]
    ).path
    written_bytes = sum(file.stat().st_size for file in directory.rglob("*.safetensors"))
    assert written_bytes > DiskBudget.of(spec_of(), MANIFEST).state_bytes


@pytest.mark.parametrize(
    ("free_share", "spec", "remedy"),
    [
        (19, spec_of(), "or set checkpoint.every=9 (--set)"),
        (10, spec_of(), "or set log=checkpoint (--set)"),
        (9, spec_of(), "MiB more"),
        (60, spec_of(keep_log=True), "or set checkpoint.keep_log=false (--set)"),
    ],
)
def test_fitting_option_is_named(tmp_path, monkeypatch, free_share, spec, remedy):
    usage = shutil.disk_usage(tmp_path)._replace(free=free_share * PARAMETER_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageFailed, match="No space left") as error:
        check_disk_space(tmp_path, spec, MANIFEST)
    assert remedy in str(error.value)
    assert "\n" not in str(error.value)
    usage = usage._replace(free=10_000 * PARAMETER_BYTES)
    check_disk_space(tmp_path, spec, MANIFEST)


async def test_run_that_does_not_fit_never_begins(tmp_path, monkeypatch):
    is_state_computed, compute_state_0 = threading.Event(), CoordinatorReplica.digest_state_0

    async def digest_then_signal(self):
        digest = await compute_state_0(self)
        asyncio.get_running_loop().call_later(0.1, is_state_computed.set)
        return digest

    def check_late(*arguments):
        assert is_state_computed.wait(60)
        check_disk_space(*arguments)

    monkeypatch.setattr(CoordinatorReplica, "digest_state_0", digest_then_signal)
    monkeypatch.setattr(run_storage, "check_disk_space", check_late)
    spec = scripted_spec(
        steps=1000, scripted={"blocks": 3, "block_bytes": 8192, "samples": 64},
        checkpoint={"every": 500},
    )  # fmt: skip
    with small_disk(tmp_path / "disk", 4096) as disk:
        async with live_service(disk / "runs", 1) as live:
            live.service.submit(spec)
            live.start_worker("w0")
            run_end = await live.wait_for("run_ended")
            assert run_end["outcome"] == "failed"
            assert "or set checkpoint.every=" in run_end["reason"]
            assert live.events_named("committed") == []


def test_capture_that_does_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    layout = CaptureLayout(tokens=512, vocabulary=50_000, top_k=64)
    manifest = MANIFEST.model_copy(update={"train_samples": 10**6, "capture": layout})
    spec = parse_run_spec({
        "task": "teacher-logits", "model": {"source": "teacher"}, "data": {"train": "text"},
    })  # fmt: skip
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    expected_text = (
        r"No space left for this capture: expected 12\d\.\d+ GiB for 1000000 samples, got 953.7 MiB"
    )
    with pytest.raises(StorageFailed, match=expected_text):
        check_disk_space(tmp_path, spec, manifest)
    part = spec.model_copy(update={"steps": 10})
    check_disk_space(tmp_path, part, manifest)
    # Steps beyond the end of the data take no space, whatever the checkpoint options are.
    short_manifest = manifest.model_copy(update={"train_samples": 100})
    for checkpoint_spec in (CheckpointSpec(every=0), CheckpointSpec(keep_log=True)):
        check_disk_space(
            tmp_path, spec.model_copy(update={"checkpoint": checkpoint_spec}), short_manifest
        )
