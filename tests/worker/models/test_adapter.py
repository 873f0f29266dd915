"""Start a run from an adapter, or from the result of an earlier run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.disk.artifacts import write_model
from protocol.base.errors import DataError, RunSpecError
from protocol.exact.replica import Replica
from protocol.spec.files.adapter import check_adapter
from protocol.spec.files.run_files import source_files
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.small_chat import write_chat_run
from worker.tasks.registry import build


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Return a run's directory whose adapter differs from its initial values, and the run spec."""
    directory: Path = tmp_path_factory.mktemp("finished")
    document = json.loads(write_chat_run(directory).read_text())
    spec = parse_run_spec(document)
    task = build(spec)
    replica = Replica(task.manifest.blocks, spec.optimizer)
    replica.load_parameters([values + np.float32(0.5) for values in task.initial_parameters()])
    (directory / "out").mkdir()
    write_model(directory / "out", task.manifest, replica)
    (directory / "out" / "run.json").write_text("{}")
    (directory / "out" / "result.json").write_text("{}")
    return directory, document


def spec_with_adapter(finished_run: tuple[Path, dict[str, Any]], **changes: Any) -> RunSpec:
    directory, document = finished_run
    adapter = str(directory / "out" / "adapter")
    model = {**document["model"], "adapter": adapter}
    return parse_run_spec({**document, "model": model, **changes})


def test_run_starts_from_the_values_of_the_adapter(finished_run):
    first, spec = build(parse_run_spec(finished_run[1])), spec_with_adapter(finished_run)
    check_adapter(spec)
    task = build(spec)
    for base_values, adapter_values in zip(
        first.initial_parameters(), task.initial_parameters(), strict=True
    ):
        np.testing.assert_array_equal(adapter_values, base_values + np.float32(0.5))
    assert task.manifest.digests["base_weights"] == first.manifest.digests["base_weights"]
    assert "adapter" in task.manifest.digests
    files = source_files(spec, "adapter")
    assert files is not None
    assert [name for name, _ in files.files] == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "text"),
    [
        ({"r": 2}, "has lora.r 4, the run spec 2: --set lora.r=4"),
        ({"r": 4, "alpha": 8.0}, "has lora.alpha 16, the run spec 8.0: --set lora.alpha=16"),
        ({"r": 4, "targets": ["k_proj"]}, "has lora.targets ['q_proj', 'v_proj'], the run spec"),
    ],
)
def test_adapter_with_other_settings_is_refused_in_one_line(finished_run, lora, text):
    with pytest.raises(DataError, match=re.escape(text)) as error_info:
        check_adapter(spec_with_adapter(finished_run, lora=lora))
    assert "\n" not in str(error_info.value)


def test_adapter_of_another_base_is_refused_in_one_line(finished_run, tmp_path):
    spec = spec_with_adapter(finished_run)
    assert spec.model is not None
    other = spec.model_copy(update={"model": spec.model.model_copy(update={"source": "an/other"})})
    with pytest.raises(DataError, match=r"was trained on .*model', the run's model is 'an/other'"):
        check_adapter(other)
    renamed = other.model_copy(
        update={"model": spec.model.model_copy(update={"source": "an/other", "name": "a/model"})}
    )
    check_adapter(renamed)
    without_adapter = spec.model.model_copy(update={"adapter": str(tmp_path)})
    with pytest.raises(DataError, match=r"found no adapter_config\.json"):
        check_adapter(spec.model_copy(update={"model": without_adapter}))


def test_init_from_sets_base_adapter_and_lora(finished_run):
    directory, document = finished_run
    document_without_model = {
        key: value for key, value in document.items() if key not in {"model", "lora"}
    }
    spec = parse_run_spec({**document_without_model, "init_from": str(directory / "out")})
    assert spec.model is not None
    assert spec.model.adapter == str(directory / "out" / "adapter")
    assert spec.model.source == str(directory / "model")
    assert spec.lora is not None
    assert (spec.lora.r, spec.lora.targets) == (4, ("q_proj", "v_proj"))
    check_adapter(spec)
    next_spec = parse_run_spec({**document_without_model, "init_from": str(directory / "model")})
    assert next_spec.model is not None
    assert (next_spec.model.source, next_spec.lora) == (str(directory / "model"), None)
    with pytest.raises(RunSpecError, match="found neither a model nor an adapter"):
        parse_run_spec({**document_without_model, "init_from": str(directory) + "/none"})
    (directory / "out" / "result.json").rename(directory / "moved.json")
    with pytest.raises(RunSpecError, match="has not finished"):
        parse_run_spec({**document_without_model, "init_from": str(directory / "out")})
    (directory / "moved.json").rename(directory / "out" / "result.json")
