"""Optimizer states with real processes: several devices, replicas, Vulkan; one digest each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cluster import RUNS, Cluster
from tests.commands import run_command

pytestmark = pytest.mark.slow  # in one process: tests/coordinator/service/test_optimizers_live.py

DIGITS = (
    "--set", "steps=12", "--set", "evaluate_every=4", "--set", "batch.samples=48",
    "--set", "batch.microbatch=8",
)  # fmt: skip
OPTIMIZERS = {
    "adafactor-ema": {"name": "adafactor", "lr": 0.02, "ema": {"decay": 0.8}, "clip_norm": 1.0},
    "plateau-swa": {
        "name": "rmsprop", "lr": 1e-3, "centered": True, "momentum": 0.5, "clip_value": 0.1,
        "swa": {"start_step": 4}, "schedule": "plateau",
        "plateau": {"metric": "accuracy", "better": "higher", "patience": 0, "threshold": 10.0},
    },
}  # fmt: skip


def train(
    directory: Path, optimizer: dict[str, Any], *workers: tuple[str, ...], **options: Any
) -> Any:
    settings = [f"optimizer={json.dumps(optimizer)}", *(f"{k}={v}" for k, v in options.items())]
    overrides = [argument for each in settings for argument in ("--set", each)]
    devices = sum(1 + arguments.count("0,1") for arguments in workers)
    with Cluster(
        directory, "--expect-workers", str(devices), "--run", str(RUNS / "digits.yaml"), *DIGITS,
        *overrides,
    ) as cluster:  # fmt: skip
        for number, arguments in enumerate(workers):
            cluster.start_worker(f"w{number}", *arguments)
        result = cluster.result()
    audit = run_command("coordinator", "audit", str(directory / "out"))
    assert audit.returncode == 0, audit.stdout
    return result


CPU = ("--backend", "cpu")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_devices_and_workers_give_one_result(tmp_path, name):
    single_worker = train(tmp_path / "alone", OPTIMIZERS[name], CPU)
    two_workers = train(tmp_path / "together", OPTIMIZERS[name], CPU, (*CPU, "--gpus", "0,1"))
    assert two_workers["weights_digest"] == single_worker["weights_digest"]
    assert (two_workers["losses"], two_workers["eval"]) == (
        single_worker["losses"],
        single_worker["eval"],
    )
    out = tmp_path / "together" / "out"
    last_checkpoint = max((out / "checkpoints").iterdir())
    weights = load_file(next((last_checkpoint / "model").glob("*.safetensors")))
    state = load_file(last_checkpoint / "optimizer.safetensors")
    saved_weights = load_file(next((out / "model").glob("*.safetensors")))
    for tensor, values in weights.items():
        np.testing.assert_array_equal(saved_weights[tensor], values + state[f"average/{tensor}"])


def test_average_is_updated_by_rounds_of_replicas(tmp_path):
    optimizer = {"name": "adam", "amsgrad": True, "ema": {"decay": 0.5}, "clip_norm": 1.0}
    replicas = {"replicas": json.dumps({"count": 2, "inner_steps": 3, "inner_state": "carry"})}
    single_worker = train(tmp_path / "alone", optimizer, CPU, **replicas)
    two_workers = train(tmp_path / "together", optimizer, CPU, CPU, **replicas)
    assert two_workers["weights_digest"] == single_worker["weights_digest"]
    without_ema = {**optimizer, "ema": None}
    assert (
        train(tmp_path / "plain", without_ema, CPU, **replicas)["losses"] == single_worker["losses"]
    )


def test_an_average_is_evaluated_on_vulkan_as_on_the_cpu(tmp_path):
    optimizer = OPTIMIZERS["adafactor-ema"]
    cpu = train(tmp_path / "cpu", optimizer, CPU)
    vulkan = train(tmp_path / "vulkan", optimizer, ("--backend", "vulkan"))
    assert vulkan["losses"] == pytest.approx(cpu["losses"], rel=1e-3)
    assert vulkan["eval"]["accuracy"] == pytest.approx(cpu["eval"]["accuracy"], abs=0.02)
