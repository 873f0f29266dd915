"""Print the peak memory of reading and quantizing a model, in bytes.

`python -m tests.quantized_reading DIRECTORY` measures in a fresh process, because the state of the
memory allocator depends on earlier tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from backends.eager.quantized_base import quantize_frozen_base
from backends.quantization.frozen_base import frozen_base
from protocol.spec.sections.model import ModelSpec
from tests.resident_memory import MIB, measured_growth
from worker.models import disk_weights
from worker.models.pretrained import load_causal_lm


def read_quantized(source: Path) -> Any:
    """Read and quantize the model as a worker with LoRA does."""
    model: Any = load_causal_lm(ModelSpec(source=str(source), base_dtype="int4"), 0).model
    model.requires_grad_(requires_grad=False)
    quantize_frozen_base(model, "int4", torch.device("cpu"))
    return model


def main(source: Path) -> None:
    """Print the peak memory of reading and quantizing a model, in bytes."""
    vars(disk_weights)["_RELEASE_BATCH_BYTES"] = MIB  # the test's model is small
    read_quantized(source)  # not measured: imports, and allocations that happen once
    with measured_growth() as growth:
        model = read_quantized(source)
    assert not frozen_base(model), "a weight was not quantized"
    sys.stdout.write(str(growth.peak_bytes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
