"""A teacher's output for each token, against plain torch over all logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backends.eager.eager import EagerBackend
from protocol.base import limits
from protocol.base.errors import DataError, RunSpecError
from protocol.datasets.logits_file import Records, records_of
from protocol.spec.run_spec import RunSpec, parse_run_spec
from worker.tasks.language.teacher_logits import TeacherLogits
from worker.tasks.registry import build

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "initializer_range": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("corpus")
    for number in range(9):
        lines = [f"def f{number % 7}(x, y):\n    return x + {number * n % 10}\n" for n in range(9)]
        (directory / f"{number:02}.txt").write_text(f"# {number}\n" + "".join(lines))
    return str(directory)


def spec_of(texts: str, **changes: Any) -> RunSpec:
    document = {
        "task": "teacher-logits",
        "seed": 7,
        "model": {"config": LLAMA},
        "tokenizer": {"vocab_size": 280},
        "data": {"train": texts, "max_tokens": 24},
        "batch": {"samples": 8, "microbatch": 2},
        "capture": {"top_k": 12},
    }
    return parse_run_spec(document | changes)


def capture(spec: RunSpec, samples: list[int]) -> tuple[TeacherLogits, Records, torch.Tensor]:
    """Return the task, its records of these samples, and all logits of the same model."""
    task = build(spec)
    assert isinstance(task, TeacherLogits)
    assert task.manifest.capture is not None
    batch = task.batch(samples)
    program = EagerBackend("cpu").compile(task.trainable, batch)
    row_results = program.capture_rows(batch)
    module = task.trainable.module
    assert module is not None
    with torch.no_grad():
        logits = module(input_ids=torch.tensor(batch.arrays["input_ids"])).logits
    labels = torch.tensor(batch.arrays["labels"])
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    assert row_results.loss_sum == pytest.approx(float(loss), rel=1e-6)
    program.close()
    return task, records_of(row_results.rows.reshape(-1), task.manifest.capture), logits


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_rows_equal_the_teacher_output(texts, temperature):
    spec = spec_of(texts, capture={"top_k": 12, "temperature": temperature})
    task = build(spec)
    last = task.manifest.train_samples - 1
    _, records, logits = capture(spec, [3, last])
    logits = logits[..., :280]
    assert records["sample_id"].tolist() == [3, last]
    assert records["rows"][0] == 24
    assert 0 < records["rows"][1] < 24
    for record, full in zip(records, logits, strict=True):
        rows = int(record["rows"])
        best = full[:rows].topk(12)
        assert (record["topk_ids"][:rows] == best.indices.numpy()).all()
        shifted_logits = (best.values - full[:rows].amax(-1, keepdim=True)).numpy()
        assert np.abs(record["topk_logits"][:rows] - shifted_logits).max() <= 2.0**-8
        for name, t in (("lse_1", 1.0), ("lse_T", temperature)):
            shift = full[:rows].amax(-1) / t
            exact = torch.logsumexp(full[:rows].double() / t, -1) - shift
            assert record[name][:rows] == pytest.approx(exact.numpy(), rel=1e-5, abs=1e-5)
        for name in (records.dtype.names or ())[2:]:
            assert not record[name][rows + (name == "input_ids") :].any()


def test_row_predicts_the_next_token(texts):
    task, records, _ = capture(spec_of(texts), [0, 1])
    first, second = records["input_ids"]
    arrays = task.batch([0, 1]).arrays
    assert first[:-1].tolist() == arrays["input_ids"][0].tolist()
    assert first[1:].tolist() == arrays["labels"][0].tolist()
    assert first[-1] == second[0]


def test_draws_follow_the_distribution_and_the_sample_alone(texts):
    spec = spec_of(texts, capture={"drawn": 4000, "temperature": 2.0})
    task, records, logits = capture(spec, [3])
    probabilities = (logits[0, :, :280] / 2.0).softmax(-1).numpy()
    for row in (0, 11):
        counts = np.bincount(records["topk_ids"][0, row], minlength=280) / 4000
        assert np.abs(counts - probabilities[row]).max() < 0.04
    assert task.manifest.capture is not None
    assert task.manifest.capture.drawn
    _, among_others, _ = capture(spec, [5, 3])
    assert among_others[1].tobytes() == records[0].tobytes()


def test_more_logits_than_the_vocabulary_has_are_refused(texts):
    with pytest.raises(DataError, match=r"capture.top_k of at most 280.*got 300"):
        build(spec_of(texts, capture={"top_k": 300}))


def test_step_too_large_for_memory_is_refused(texts, monkeypatch):
    monkeypatch.setattr(limits, "CAPTURED_STEP_BYTES", 10_000)
    with pytest.raises(DataError, match=r"over the limit.*batch.samples="):
        build(spec_of(texts))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"data": {"train": "x", "holdout": 0.1}}, "no 'data.holdout'"),
        ({"lora": {"r": 4}}, "task teacher-logits has no 'lora'"),
        ({"capture": {"top_k": 0}}, "capture.top_k"),
        ({"capture": {"temperature": 0}}, "capture.temperature"),
    ],
)
def test_keys_unused_by_a_capture_are_refused(section, message):
    with pytest.raises(RunSpecError, match=message):
        spec_of("x", **section)
