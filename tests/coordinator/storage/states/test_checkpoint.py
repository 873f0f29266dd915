"""Checkpoints: complete or absent, and a complete checkpoint is never lost."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.storage.states import checkpoint as module
from coordinator.storage.states.checkpoint import (
    checkpoint_path,
    checkpoint_steps,
    find_checkpoint,
    latest_checkpoint,
    read_metrics,
    write_checkpoint,
    write_metrics,
)
from coordinator.storage.states.checkpoint_state import CheckpointState, StatePiece, load_replica
from coordinator.storage.states.retention import prune_checkpoints
from protocol.base.errors import Mismatch, StorageDamaged, StorageFailed
from protocol.exact.reduction.absent import mark_absent
from protocol.exact.replica import Replica
from protocol.spec.sections.checkpoint import CheckpointSpec
from protocol.spec.sections.optimizer import OptimizerSpec
from tests.durable_run import (
    BLOCKS,
    MANIFEST,
    RUN_ID,
    SPEC,
    averages,
    commit_of,
    initial_replica,
    small_disk,
)


def trained_replica(steps, optimizer=SPEC.optimizer):
    replica = initial_replica()
    if optimizer is not SPEC.optimizer:
        replica = Replica(BLOCKS, optimizer)
    for step in range(steps):
        scalars = commit_of(step, step + 1).scalars
        assert scalars is not None
        replica.apply(averages(step), scalars)
    return replica


def write(root, steps, *, run_id=RUN_ID):
    losses = [1.0] * steps
    return write_checkpoint(
        root, MANIFEST, trained_replica(steps), run_id=run_id, term=2, losses=losses
    )


def latest(root):
    return latest_checkpoint(root, RUN_ID, MANIFEST)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_state_round_trip_bit_for_bit(tmp_path, name):
    optimizer = OptimizerSpec(name=name, lr=0.01)
    replica = trained_replica(3, optimizer)
    replica.skip()
    losses = [0.5, 0.25, 0.125, float("nan")]
    new_checkpoint = write_checkpoint(
        tmp_path, MANIFEST, replica, run_id=RUN_ID, term=7, losses=losses
    )
    checkpoint, skipped = latest(tmp_path)
    assert (checkpoint, skipped) == (new_checkpoint, ())
    assert checkpoint.info.losses == (0.5, 0.25, 0.125, None)
    assert (checkpoint.info.term, checkpoint.info.step, checkpoint.info.optimizer_step) == (7, 4, 3)
    loaded = load_replica(checkpoint, MANIFEST, optimizer)
    assert loaded.state_digest() == replica.state_digest()
    for actual, reference in zip(replica.parts(), loaded.parts(), strict=True):
        assert actual.values.tobytes() == reference.values.tobytes()


def test_missed_updates_are_restored_and_sent_to_workers(tmp_path):
    replica = trained_replica(2)
    gradients = averages(2)
    mark_absent(BLOCKS[0], gradients[0], {"layer.0.bias"})
    replica.apply(gradients, commit_of(2, 3).scalars)
    assert replica.has_missed_updates
    write_checkpoint(tmp_path, MANIFEST, replica, run_id=RUN_ID, term=7, losses=[1.0] * 3)
    checkpoint, _ = latest(tmp_path)
    names = set(load_file(checkpoint.path / "optimizer.safetensors"))
    assert {"missed_updates/layer.0.bias", "missed_updates/head"} <= names
    loaded = load_replica(checkpoint, MANIFEST, SPEC.optimizer)
    assert loaded.state_digest() == replica.state_digest()
    joiner = trained_replica(3)
    with CheckpointState(checkpoint, MANIFEST, SPEC.optimizer) as state:
        for kind, block, chunk in state.pieces():
            joiner.load_piece(kind, block, chunk, state.read(StatePiece(kind, block, chunk)))
    assert joiner.state_digest() == replica.state_digest()


def test_parameters_have_the_layout_and_the_names_of_the_result(tmp_path):
    path = write(tmp_path, 2).path
    assert path.name == "step-0000000002"
    assert (path / "adapter" / "adapter_config.json").read_text() == "{}"
    tensors = load_file(path / "adapter" / "adapter_model.safetensors")
    assert set(tensors) == {"layer.0.weight", "layer.0.bias", "base_model.model.head"}
    assert tensors["base_model.model.head"].shape == (2, 3)
    moments = load_file(path / "optimizer.safetensors")
    assert set(moments) == {
        f"{kind}/{name}"
        for kind in ("first_moment", "second_moment")
        for name in ("layer.0.weight", "layer.0.bias", "head")
    }


def test_existing_checkpoint_with_the_same_state_is_kept(tmp_path):
    path = write(tmp_path, 2).path
    before = (path / "checkpoint.json").stat().st_ino
    write(tmp_path, 2)
    assert (path / "checkpoint.json").stat().st_ino == before


def test_flipped_byte_in_any_file_falls_back_to_the_previous_checkpoint(tmp_path):
    intact = write(tmp_path, 1)
    path = write(tmp_path, 2).path
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        content = file.read_bytes()
        for offset in range(0, len(content), max(1, len(content) // 40)):
            file.write_bytes(
                content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]
            )
            if json_equal(file, content):
                continue
            checkpoint, skipped = latest(tmp_path)
            assert checkpoint == intact, (file, offset)
            assert len(skipped) == 1
            assert path.name in skipped[0]
        file.write_bytes(content)
    assert latest(tmp_path)[0].info.step == 2


def json_equal(file, original):
    """Return whether a flip changed only the layout."""
    try:
        return file.suffix == ".json" and json.loads(file.read_bytes()) == json.loads(original)
    except ValueError:
        return False


def test_missing_file_is_found(tmp_path):
    path = write(tmp_path, 2).path
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(StorageDamaged, match="missing"):
        find_checkpoint(tmp_path, 2, RUN_ID, MANIFEST)


def test_state_with_another_digest_is_refused(tmp_path):
    checkpoint = write(tmp_path, 2)
    other = checkpoint.info.model_copy(update={"state_digest": "0" * 64})
    with pytest.raises(StorageDamaged, match="digest"):
        load_replica(module.Checkpoint(checkpoint.path, other), MANIFEST, SPEC.optimizer)


def test_checkpoint_of_another_run_or_manifest_is_refused(tmp_path):
    write(tmp_path, 2)
    with pytest.raises(Mismatch):
        find_checkpoint(tmp_path, 2, "other", MANIFEST)
    other_manifest = MANIFEST.model_copy(update={"train_samples": 11})
    with pytest.raises(Mismatch):
        find_checkpoint(tmp_path, 2, RUN_ID, other_manifest)


CALLS = ("fsync", "replace", "rename", "mkdir")


@pytest.mark.parametrize("call", CALLS)
def test_crash_at_any_call_leaves_the_old_checkpoint_or_the_new(tmp_path, monkeypatch, call):
    """The process ends at the first call, then at the second, and so on."""

    class Crash(BaseException):
        pass

    number = 0
    while True:
        number += 1
        root = tmp_path / f"{call}-{number}"
        write(root, 1)
        calls_left = [number]

        def crash_at_last(real, calls_left=calls_left):
            def work(*arguments, **keywords):
                calls_left[0] -= 1
                if calls_left[0] == 0:
                    raise Crash
                return real(*arguments, **keywords)

            return work

        with monkeypatch.context() as patch:
            patch.setattr(os, call, crash_at_last(getattr(os, call)))
            try:
                write(root, 2)
            except Crash:
                pass
            else:
                break
        checkpoint, skipped = latest(root)
        assert checkpoint.info.step in {1, 2}
        assert skipped == ()
        write(root, 2)
        assert latest(root)[0].info.step == 2
        assert [path.name for path in root.iterdir() if path.suffix == ".part"] == []
    assert number > 1


def test_full_disk_leaves_everything_unchanged(tmp_path):
    with small_disk(tmp_path / "disk", 200) as disk:
        root = disk / "checkpoints"
        write(root, 1)
        ballast = disk / "ballast"
        with ballast.open("wb") as file:
            while True:
                try:
                    os.write(file.fileno(), bytes(4096))
                except OSError:
                    break
        free_bytes = 0
        refusals = []
        # Add space until the checkpoint fits.
        while True:
            try:
                write(root, 2)
                break
            except StorageFailed as error:
                refusals.append(str(error))
            assert checkpoint_steps(root) == [1]
            assert latest(root)[0].info.step == 1
            assert [path.name for path in root.iterdir()] == ["step-0000000001"]
            free_bytes += 4096
            os.truncate(ballast, ballast.stat().st_size - 4096)
        assert len(refusals) > 3
        assert all("make room" in text for text in refusals)
        assert latest(root)[0].info.step == 2


# Retention.


def steps_after_pruning(root, **retention):
    pruned = prune_checkpoints(root, RUN_ID, MANIFEST, CheckpointSpec(**retention))
    assert list(pruned.kept_steps) == checkpoint_steps(root)
    return pruned


def test_last_checkpoints_are_kept(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step)
    pruned = steps_after_pruning(tmp_path, keep_last=2)
    assert (pruned.kept_steps, pruned.removed_steps, pruned.intact_step) == ((4, 5), (1, 2, 3), 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-0000000004",
        "step-0000000005",
    ]


def test_checkpoint_in_copy_is_kept(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step)
    retention = CheckpointSpec(keep_last=2)
    assert prune_checkpoints(
        tmp_path, RUN_ID, MANIFEST, retention, except_step=2
    ).removed_steps == (1, 3)
    assert checkpoint_steps(tmp_path) == [2, 4, 5]
    assert prune_checkpoints(tmp_path, RUN_ID, MANIFEST, retention).kept_steps == (4, 5)


@pytest.mark.parametrize(("better", "best"), [("higher", 2), ("lower", 3)])
def test_best_checkpoint_is_never_removed(tmp_path, better, best):
    for step, figure in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.9), (5, 0.6)):
        digest = write(tmp_path, step).info.state_digest
        write_metrics(tmp_path, step, digest, {"accuracy": figure, "odd": float("nan")})
    metrics = read_metrics(tmp_path, 2)
    assert metrics is not None
    assert metrics.figures == {"accuracy": 0.9}
    pruned = steps_after_pruning(tmp_path, keep_last=1, metric="accuracy", better=better)
    assert pruned.kept_steps == (best, 5)
    assert latest(tmp_path)[0].info.step == 5


def test_first_checkpoint_is_kept_with_the_whole_log(tmp_path):
    for step in range(5):
        write(tmp_path, step)
    assert steps_after_pruning(tmp_path, keep_last=1, keep_log=True).kept_steps == (0, 4)


def test_last_complete_checkpoint_is_never_removed(tmp_path):
    for step in range(1, 5):
        write(tmp_path, step)
    for step in (3, 4):
        (checkpoint_path(tmp_path, step) / "checkpoint.json").write_text("{}")
    pruned = steps_after_pruning(tmp_path, keep_last=1)
    assert pruned.kept_steps == (2, 4)
    assert pruned.intact_step == 2
    shutil.rmtree(checkpoint_path(tmp_path, 2))
    pruned = steps_after_pruning(tmp_path, keep_last=1)
    assert (pruned.kept_steps, pruned.removed_steps, pruned.intact_step) == ((4,), (), None)


def test_metrics_of_a_state_without_checkpoint_are_no_error(tmp_path):
    write_metrics(tmp_path, 3, "d" * 64, {"accuracy": 1.0})
    assert read_metrics(tmp_path, 3) is None


def test_metrics_of_another_state_are_not_kept_with_a_checkpoint(tmp_path):
    checkpoint = write(tmp_path, 3)
    write_metrics(tmp_path, 3, "d" * 64, {"accuracy": 1.0})
    assert read_metrics(tmp_path, 3) is None
    write_metrics(tmp_path, 3, checkpoint.info.state_digest, {"accuracy": 0.5})
    file = checkpoint.path / "metrics.json"
    content = file.read_bytes()
    shutil.rmtree(checkpoint.path)
    other = trained_replica(3)
    other.parameters[0][0] += 1
    write_checkpoint(tmp_path, MANIFEST, other, run_id=RUN_ID, term=1, losses=[1.0] * 3)
    file.write_bytes(content)
    with pytest.raises(StorageDamaged, match="of another state"):
        read_metrics(tmp_path, 3)


def test_metric_with_a_flipped_bit_is_reported_and_its_checkpoint_kept(tmp_path):
    for step, figure in ((1, 0.5), (2, 0.9), (3, 0.1)):
        digest = write(tmp_path, step).info.state_digest
        write_metrics(tmp_path, step, digest, {"accuracy": figure})
    file = checkpoint_path(tmp_path, 1) / "metrics.json"
    file.write_bytes(file.read_bytes().replace(b"0.5", b"0.7"))
    with pytest.raises(StorageDamaged, match="does not match its digest"):
        read_metrics(tmp_path, 1)
    remaining = steps_after_pruning(
        tmp_path, keep_last=1, metric="accuracy", better="higher"
    ).kept_steps
    assert remaining == (1, 2, 3)


def test_metrics_of_an_older_release_are_read(tmp_path):
    (write(tmp_path, 1).path / "metrics.json").write_text('{"accuracy": 0.25}')
    metrics = read_metrics(tmp_path, 1)
    assert metrics is not None
    assert (metrics.figures, metrics.state_digest) == ({"accuracy": 0.25}, None)


def test_values_that_are_not_finite_survive(tmp_path):
    replica = initial_replica()
    replica.parameters[0][:2] = np.array([0x7FC00001, 0x80000000], np.uint32).view(np.float32)
    write_checkpoint(tmp_path, MANIFEST, replica, run_id=RUN_ID, term=1, losses=[])
    loaded = load_replica(latest(tmp_path)[0], MANIFEST, SPEC.optimizer)
    assert loaded.parameters[0].tobytes() == replica.parameters[0].tobytes()
