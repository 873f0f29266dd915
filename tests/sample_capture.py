"""A capture of synthetic rows in a directory, as a coordinator writes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.capture.captured_files import CapturedFiles
from protocol.base import limits
from protocol.datasets.logits_file import record_dtype
from protocol.spec.manifest import Block, CaptureLayout, Export, Manifest, TensorSpec
from protocol.spec.run_spec import parse_run_spec

STEP_SAMPLES = 8
"""Samples of one step, which has one microbatch."""


def write_capture(
    directory: Path,
    layout: CaptureLayout,
    steps: int,
    *,
    steps_per_file: int,
    samples_per_group: int = STEP_SAMPLES,
    vocabulary_digest: str = "b" * 64,
) -> Path:
    """Write a capture of this many steps; return its directory of logits.

    Each row has consecutive token ids from a random id on, the most likely token first. The last
    sample of a step is one row short.
    """
    spec = parse_run_spec(
        {
            "task": "teacher-logits",
            "model": {"source": "teacher"},
            "data": {"train": "text"},
            "batch": {"samples": STEP_SAMPLES, "microbatch": STEP_SAMPLES},
        }
    )
    manifest = Manifest(
        blocks=(Block(name="none", kind="block", tensors=(TensorSpec(name="none", shape=(1,)),)),),
        train_samples=STEP_SAMPLES * steps,
        digests={"base_weights": "a" * 64, "vocabulary": vocabulary_digest},
        export=Export(directory="logits"),
        capture=layout,
    )
    with pytest.MonkeyPatch.context() as patch:
        sample_bytes = layout.sample_bytes
        patch.setattr(limits, "LOGITS_FILE_BYTES", steps_per_file * STEP_SAMPLES * sample_bytes)
        patch.setattr(limits, "ROW_GROUP_BYTES", samples_per_group * sample_bytes)
        directory.mkdir(exist_ok=True)
        files = CapturedFiles(directory, manifest, spec, 0, lambda: None)
        for step in range(steps):
            files.store_step(step, [_rows(layout, step)])
        files.finish(is_complete=True)
        files.close()
    return directory / "logits"


def _rows(layout: CaptureLayout, step: int) -> np.ndarray:
    rng = np.random.default_rng(step)
    records = np.zeros(STEP_SAMPLES, record_dtype(layout))
    records["sample_id"] = STEP_SAMPLES * step + np.arange(STEP_SAMPLES)
    records["rows"] = layout.tokens
    records["rows"][-1] = layout.tokens - 1
    records["input_ids"] = rng.integers(0, layout.vocabulary, records["input_ids"].shape)
    records["loss_mask"] = 1
    first_ids = rng.integers(0, layout.vocabulary, (STEP_SAMPLES, layout.tokens, 1))
    records["topk_ids"] = (first_ids + np.arange(layout.top_k)) % layout.vocabulary
    records["topk_logits"] = -np.arange(layout.top_k) / 2
    # 0.5: the sum of exp(logit) over all other tokens.
    lse = np.log(np.exp(-np.arange(layout.top_k) / 2).sum() + 0.5)
    records["lse_1"] = records["lse_T"] = lse
    for name in (records.dtype.names or ())[2:]:  # all but sample_id and rows
        records[name][-1, -1] = 0
    return records.view(np.uint8).reshape(-1)
