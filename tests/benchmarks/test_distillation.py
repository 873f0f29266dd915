"""Tests of the benchmarks of capture, evaluation duty and distillation, at their smallest size."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import capture, distillation, duty

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
TEACHER = {
    "name": "tiny-teacher", "task": "teacher-logits", "seed": 7, "model": {"config": LLAMA},
    "tokenizer": {"vocab_size": 280}, "batch": {"samples": 16, "microbatch": 4},
    "capture": {"top_k": 8}, "steps": 4,
}  # fmt: skip
STUDENT = {
    "name": "tiny-student", "task": "distil", "seed": 3, "model": {"config": LLAMA},
    "data": {"holdout": 0.2}, "batch": {"samples": 8, "microbatch": 4}, "steps": 4,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("setup", duty.SETUPS)
def test_steps_of_each_duty_setup_are_timed(setup):
    assert all(ms > 0 for ms in duty.measure(setup, steps=4))


@pytest.mark.slow
def test_capture_and_reading_are_timed(tmp_path):
    text = Path(__file__).parents[2] / "docs"
    data = {"train": str(text), "pattern": "*.md", "max_tokens": 32}
    measurement = capture.capture({**TEACHER, "data": data}, tmp_path)
    assert len(measurement.step_ms) >= 2
    assert measurement.tokens == 4 * 16 * 32, "steps x samples x tokens"
    # For each of 8 logits a token number and a float16 value; two log-sum-exps in float32.
    logits_bytes = 8 * (2 + 2) + 2 * 4
    # The other bytes are the input token, its mask, and a part of the sample's header.
    assert logits_bytes < measurement.token_bytes < logits_bytes + 8
    reading = capture.time_reading(STUDENT, capture.logits_in(tmp_path))
    assert 0 < reading.read_fraction < 1


def test_train_students_resumes_a_begun_run_and_skips_a_finished_run(tmp_path, monkeypatch):
    commands: list[list[str]] = []

    def fake_run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "result.json").write_text(json.dumps({"eval": {}, "out": out.name}))
        return type("Completed", (), {"returncode": 0})

    monkeypatch.setattr(subprocess, "run", fake_run)
    spec = tmp_path / "student.yaml"
    (tmp_path / "seed-7-with").mkdir()
    (tmp_path / "seed-7-with" / "run.json").touch()
    with pytest.raises(FileExistsError):
        distillation.train_students(tmp_path, spec, 7, ())
    assert "--resume" in commands[-1]
    (tmp_path / "seed-7-with" / "result.json").write_text('{"eval": {}}')
    distillation.train_students(tmp_path, spec, 7, ("steps=3",))
    assert len(commands) == 2
    assert "--resume" not in commands[-1]
    assert {"distil.alpha=0", "seed=7", "steps=3"} < set(commands[-1])
