"""A teacher's logits, captured by real processes: the same files whichever workers took part."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator.audit.audit import audit
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.rollback import roll_back
from coordinator.storage.states.checkpoint import checkpoint_steps
from protocol.base.errors import UsageError
from protocol.datasets.capture_index import read_index
from protocol.spec.manifest import CaptureLayout
from tests.cluster import ROOT, Cluster
from tests.end_to_end.test_restart import ANY_PORT, result_of, run
from tests.free_ports import free_address
from tests.sample_capture import write_capture

SPEC = """
name: tiny-teacher
task: teacher-logits
seed: 7
model:
  config:
    {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
     num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64}
tokenizer: {vocab_size: 300}
data: {train: %s, pattern: "cli.md", max_tokens: 32}
batch: {samples: 16, microbatch: 4}
capture: {top_k: 16}
"""


@pytest.fixture(scope="module")
def run_options(tmp_path_factory) -> tuple[str, ...]:
    spec = tmp_path_factory.mktemp("job") / "run.yaml"
    spec.write_text(SPEC % (ROOT / "docs"))
    return "--run", str(spec)


@pytest.fixture(scope="module")
def reference_directory(run_options, tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("undisturbed") / "out"
    local = ("--local-workers", "1", "--backend", "cpu")
    completed = run(*ANY_PORT, *run_options, *local, "--out", str(directory))
    assert completed.returncode == 0, completed.stderr
    assert "bytes per token" in completed.stdout
    return directory


def exported_digests(result: dict[str, Any]) -> dict[str, str]:
    files: dict[str, str] = result["exported"]
    assert "logits/capture.json" in files
    return files


def test_killed_worker_and_coordinator_leave_the_same_files(
    run_options, reference_directory, tmp_path
):
    arguments = (
        "--bind",
        free_address(),
        "--control",
        "127.0.0.1:0",
        "--expect-workers",
        "3",
        *run_options,
    )
    with Cluster(tmp_path, *arguments, "--resume") as first:
        ann = first.start_paused_worker("ann", 4, "--backend", "cpu")
        for name in ("bob", "cid"):
            first.start_worker(name, "--backend", "cpu")
        ann.wait_until_paused()
        mark = first.event_count()
        first.workers["bob"].kill()
        ann.release()
        first.wait_for("worker_lost", worker="bob", start=mark)
        committed_step = first.wait_for("committed", nth=3, start=mark)["step"]
        first.coordinator.send_signal(signal.SIGKILL)
        first.wait_for_exit(first.coordinator)
        with Cluster(tmp_path, *arguments, "--resume") as second:
            join_event = second.wait_for("worker_joined")
            assert join_event["step"] >= committed_step
            result = second.result()
    assert exported_digests(result) == exported_digests(result_of(reference_directory))
    assert result["losses"] == result_of(reference_directory)["losses"]
    report = run("audit", str(tmp_path / "out"))
    assert report.returncode == 0, report.stdout


def test_finished_capture_is_sound_and_has_an_index(reference_directory):
    report = run("audit", str(reference_directory))
    assert report.returncode == 0, report.stdout
    index = read_index(reference_directory / "logits")
    assert index.facts.layout.top_k == 16
    assert index.samples > 100


def test_finished_capture_refuses_rollback_and_stays_unchanged(reference_directory, tmp_path):
    directory = tmp_path / "out"
    shutil.copytree(reference_directory, directory)
    names_before = sorted(path.relative_to(directory) for path in directory.rglob("*"))
    step = checkpoint_steps(directory / "checkpoints")[-1]
    with pytest.raises(UsageError, match=r"nothing was changed.* capture again") as error:
        roll_back(RunDirectory(directory), step, 2)
    assert "\n" not in str(error.value)
    assert sorted(path.relative_to(directory) for path in directory.rglob("*")) == names_before
    assert audit(directory).ok
    # The directory as a release without this check left it.
    (directory / "result.json").unlink()
    shutil.rmtree(directory / "logits")
    journal = directory / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    report = audit(directory)
    assert not report.ok
    assert "the logits of step 0 are missing" in "\n".join(report.lines())


STUDENT = """
name: tiny-student
task: distil
seed: 3
model:
  config:
    {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
     num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64}
data: {train: logits, holdout: 0.05}
batch: {samples: 16, microbatch: 4}
steps: 6
"""


def test_remote_worker_fetches_only_the_files_of_its_steps(tmp_path):
    layout = CaptureLayout(tokens=16, vocabulary=50, top_k=4)
    write_capture(tmp_path / "at_home", layout, 40, steps_per_file=5, samples_per_group=16)
    machine = tmp_path / "at_home"
    (machine / "student.yaml").write_text(STUDENT)
    arguments = ("--expect-workers", "1", "--run", "student.yaml")
    with Cluster(tmp_path / "a", *arguments, cwd=machine) as cluster:
        cluster.start_worker("w0", "--backend", "cpu", cwd=machine)
        expected = cluster.result()
    cache = tmp_path / "cache"
    with Cluster(tmp_path / "b", *arguments, cwd=machine) as cluster:
        environment = {"SAMESTEP_CACHE": str(cache)}
        cluster.start_worker("w0", "--backend", "cpu", environment=environment)
        result = cluster.result()
    assert result["weights_digest"] == expected["weights_digest"]
    assert result["eval"] == expected["eval"]
    digests = {file.digest for file in read_index(machine / "logits").files}
    fetched_digests = {path.name for path in cache.rglob("*") if path.is_file()} & digests
    # 6 steps of 16 samples span 3 files of 40 samples, and a worker fetches 8 steps ahead; the
    # evaluation samples are in the last file.
    assert 3 <= len(fetched_digests) <= 6
    assert len(digests) == 8
