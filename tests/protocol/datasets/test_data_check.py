"""The coordinator's check of a run's data reports too few samples before workers join."""

import json

import pytest

from protocol.base.errors import DataError
from protocol.datasets.data_check import check_data
from protocol.spec.run_spec import parse_run_spec

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LORA = {"model": {"source": "none"}, "lora": {"r": 2}}
TOO_FEW = {
    "classify": (LORA, [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], {}),
    "tag": (LORA, [{"tokens": ["a"], "tags": ["x"]}, {"tokens": ["b"], "tags": ["y"]}], {}),
    "seq2seq": (LORA, [{"source": "a", "target": "b"}, {"source": "c", "target": "d"}], {}),
    "dpo": (LORA, [{"prompt": "a", "chosen": "b", "rejected": letter} for letter in "cd"], {}),
    "embed": (LORA, [{"anchor": "a", "positive": "b"}, {"anchor": "c", "positive": "d"}], {}),
    "causal-lm": (LORA, [CHAT, {**CHAT, "system": "s"}], {"format": "messages"}),
}


@pytest.mark.parametrize("task", TOO_FEW)
@pytest.mark.parametrize(
    ("copies", "expected_text"), [(1, "got 2; "), (3, "duplicates removed: 4")]
)
def test_too_few_samples_are_reported_with_the_removed_duplicates(
    tmp_path, task, copies, expected_text
):
    model, rows, data = TOO_FEW[task]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * copies))
    spec = parse_run_spec({
        "task": task, "steps": 1, "batch": {"samples": 4, "microbatch": 4}, **model,
        "data": {"train": str(file), "holdout": 0, **data},
    })  # fmt: skip
    with pytest.raises(DataError, match=r"at least 4 training samples \(one microbatch\)") as error:
        check_data(spec)
    assert expected_text in str(error.value)
    assert "--set batch.microbatch=2" in str(error.value)
