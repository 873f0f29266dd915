"""A run's directory as a coordinator leaves it, with random LoRA weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from coordinator.disk.artifacts import write_json
from coordinator.service.result import write_card
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.spec.files.run_spec_file import load_run_spec
from worker.tasks.registry import build


def write_finished_run(spec_file: Path, directory: Path, run_id: str) -> Path:
    """Write run, manifest, adapter, model card and result of a run with this run spec.

    Returns:
        The run's directory.
    """
    spec = load_run_spec(spec_file)
    task = build(spec)
    run_directory = RunDirectory(directory)
    run_directory.begin(run_id, spec)
    run_directory.write_manifest(task.manifest)
    export = task.manifest.export
    adapter = run_directory.path / export.directory
    adapter.mkdir()
    rng = np.random.default_rng(0)
    tensors = {
        export.names[tensor.name]: (
            values[elements] + 0.05 * rng.standard_normal(tensor.elements, np.float32)
        ).reshape(tensor.shape)
        for block, values in zip(task.manifest.blocks, task.initial_parameters(), strict=True)
        for tensor, elements in block.slices()
    }
    safetensors.numpy.save_file(tensors, adapter / export.weights_file, {"format": "pt"})
    for name, text in export.files.items():
        (adapter / name).write_text(text)
    result = {
        "run_id": run_id, "outcome": "finished", "steps": 4, "weights_digest": "ab" * 32,
        "exact": True,
    }  # fmt: skip
    write_card(run_directory, spec, task.manifest, result)
    write_json(run_directory.result_file, result)
    return run_directory.path
