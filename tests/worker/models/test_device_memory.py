"""A run's memory on a card is known before its model is loaded; refusals name the keys to set.

The stand-in's suite compares the estimate with a device's counters.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import transformers

from backends.base.interface import DeviceInfo
from protocol.base.errors import DeviceOutOfMemory
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.run_spec import ModelRun
from tests.small_decoder import write_decoder_run
from worker.local_device import LocalDevice
from worker.models.device_memory import DeviceMemory, check_device_memory, estimate


def run_of(path: Path, *changes: str) -> ModelRun:
    run = load_run_spec(path, changes)
    assert isinstance(run, ModelRun)
    return run


def estimate_bytes(run: ModelRun) -> DeviceMemory:
    memory = estimate(run)
    assert memory is not None
    return memory


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_decoder_run("causal-lm", tmp_path_factory.mktemp("run"))


def test_weights_are_counted_as_they_are_stored(path):
    run = run_of(path)
    source = run.model.source
    assert source is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    adapter = 2 * 4 * ((64 + 64) + (64 + 32))  # layers, rank, q_proj and v_proj
    float32_run = run_of(path, "model.base_dtype=float32")
    assert estimate_bytes(float32_run).weights == 4 * (parameters + adapter)
    assert estimate_bytes(run).weights < estimate_bytes(float32_run).weights * 0.6


def test_lora_of_experts_is_counted_and_oversized_run_is_refused(tmp_path):
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    path = write_decoder_run("causal-lm", tmp_path, model={"source": str(tmp_path / "model")},
                       lora={"r": 4, "target_parameters": parameters})  # fmt: skip
    tokens = json.loads((tmp_path / "model" / "config.json").read_text())
    kind: Any = transformers.Qwen3MoeConfig
    config = kind(
        vocab_size=tokens["vocab_size"], hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    run = run_of(path, "model.base_dtype=float32")
    without_experts = estimate_bytes(
        run_of(path, "model.base_dtype=float32", "lora.target_parameters=[]")
    )
    elements_per_expert = 4 * ((64 + 64) + (32 + 64))  # rank, gate_up_proj and down_proj
    memory = estimate_bytes(run)
    assert memory.weights - without_experts.weights == 4 * 2 * 8 * elements_per_expert
    stacks = 2 * 8 * (64 * 64 + 64 * 32)  # PEFT adds the full stacks
    assert memory.activations - without_experts.activations > 4 * stacks
    quantized = estimate_bytes(run_of(path, "model.base_dtype=int4"))
    assert memory.activations - quantized.activations == 4 * stacks
    with pytest.raises(DeviceOutOfMemory, match=r"got one that takes .*; --set .* takes"):
        check_device_memory(run, "cuda 0", memory.minimum - 1)


@pytest.mark.parametrize(
    ("changes", "memory_bytes", "remedy"),
    [
        (["model.base_dtype=float32", "data.max_tokens=8"], 450_000,
         "--set model.gradient_checkpointing=true --set model.base_dtype="),
        (["lora=null", "model.base_dtype=float32"], 400_000, "train with lora"),
        ([], 1000, "use a larger device, or shard the base in bfloat16"),
    ],
)  # fmt: skip
def test_oversized_run_is_refused_with_a_remedy(path, changes, memory_bytes, remedy):
    run = run_of(path, *changes)
    with pytest.raises(DeviceOutOfMemory, match=r"weights .*, gradients .*") as error_info:
        check_device_memory(run, "cuda 0", memory_bytes)
    assert remedy in str(error_info.value)


def test_samples_that_may_be_too_long_are_a_warning(path):
    run = run_of(path, "data.max_tokens=64", "batch.microbatch=4")
    memory = estimate_bytes(run)
    line = check_device_memory(run, "cuda 0", (memory.minimum + memory.total) // 2)
    assert "if samples are as long as data.max_tokens, --set" in line


def test_worker_prints_memory_and_slow_features_of_its_card(path):
    lines: list[str] = []
    device = LocalDevice("cuda", None, lines.append)
    info = DeviceInfo("cuda", "Card", True, "", 0, 1 << 30)
    device._backend = cast("Any", SimpleNamespace(info=info))
    device.task(load_run_spec(path))
    device.task(load_run_spec(path, ["model.precision=bfloat16", "model.attention=sdpa"]))
    assert [line.partition(" ")[0] for line in lines] == ["memory:", "several", "memory:"]
    assert lines[0].startswith("memory: about ")
    assert lines[1].endswith("--set model.precision=bfloat16 --set model.attention=sdpa")
