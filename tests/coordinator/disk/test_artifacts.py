"""What a run leaves behind is whole, named as the manifest says, and strict JSON."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.disk.artifacts import write_json, write_model
from protocol.exact.replica import Replica
from protocol.spec.manifest import Block, Export, Manifest, TensorSpec
from protocol.spec.run_spec import OptimizerSpec

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
    replica = Replica(MANIFEST.blocks, OptimizerSpec())
    replica.load_parameters([np.arange(6, dtype="f4"), np.arange(4, dtype="f4") + 10])
    target = write_model(tmp_path, MANIFEST, replica)
    assert target == tmp_path / "adapter"
    tensors = load_file(target / "weights.safetensors")
    assert tensors["base.a.w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].tolist() == [10, 11, 12, 13]
    assert (target / "config.json").read_text() == "{}"
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "weights.safetensors"]


def test_a_second_result_takes_the_place_of_the_first(tmp_path):
    for value in (1.0, 2.0):
        replica = Replica(MANIFEST.blocks, OptimizerSpec())
        replica.load_parameters([np.full(6, value, "f4"), np.full(4, value, "f4")])
        write_model(tmp_path, MANIFEST, replica)
    assert load_file(tmp_path / "adapter" / "weights.safetensors")["b"].tolist() == [2.0] * 4


def test_numbers_that_are_not_json_are_refused(tmp_path):
    write_json(tmp_path / "a.json", {"loss": 0.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": 0.5}
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "b.json", {"loss": float("nan")})
    assert not (tmp_path / "b.json").exists()
