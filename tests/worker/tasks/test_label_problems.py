"""Several labels a text, numbers, pairs of texts: losses of transformers, metrics of sklearn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.registry import choose
from protocol.base.errors import DataError, RunSpecError
from protocol.datasets.data_check import check_data
from protocol.spec.manifest import Metric
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.commands import called
from tests.worker.tasks.test_classify import export, moved
from worker.tasks.labels.class_counts import label_metrics, label_sums
from worker.tasks.registry import build, view

SUBJECTS = ["cat", "dog", "fish", "bird"]
ROWS = [
    {
        "text": f"{a} and {b}, {number}",
        "more": f"{number} of {b}",
        "labels": sorted({a, b} - {"bird"}),
        "value": number / 4 - 1.5,
        "label": a,
    }
    for number, (a, b) in enumerate((a, b) for a in SUBJECTS for b in SUBJECTS)
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def spec_of(model: Path, rows: Path, lora: Any = None, **data: Any) -> RunSpec:
    return parse_run_spec({
        "task": "classify", "seed": 7, "steps": 1, "model": {"source": str(model)}, "lora": lora,
        "batch": {"samples": 4, "microbatch": 2}, "data": {"train": str(rows), **data},
    })  # fmt: skip


MULTI = {"problem": "multi-label", "label": "labels"}
NUMBER = {"problem": "regression", "label": "value"}
PAIRS = {"text_pair": "more"}


@pytest.mark.parametrize("data", [MULTI, NUMBER, PAIRS, {**PAIRS, **NUMBER}], ids=str)
def test_loss_and_scores_are_those_of_transformers(tiny, rows, tmp_path, data):
    import torch
    import transformers

    task = build(spec_of(tiny, rows, **data))
    values = moved(task)
    saved = export(task, values, tmp_path)
    batch = task.batch(range(5))
    program = choose("cpu").backend.compile(task.trainable, batch)
    program.load(values)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved).eval()
    assert task.trainable.loss is not None
    given = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    with torch.no_grad():
        expected = model(**given)
        loss = float(task.trainable.loss(model, given)) / batch.weight
    assert given["labels"].shape[0] == 5
    assert loss == pytest.approx(float(expected.loss), rel=1e-6)
    texts = [task.batch([n]) for n in range(3)]
    assert all(np.isfinite(list(program.evaluate(each).values())).all() for each in texts)
    program.close()


def test_a_pair_is_encoded_as_transformers_does(tiny, rows):
    import transformers

    task = build(spec_of(tiny, rows, **PAIRS, holdout=0.0))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    expected = tokenizer([(r["text"], r["more"]) for r in ROWS], padding=True, return_tensors="np")
    batch = task.batch(range(len(ROWS)))
    width = expected["input_ids"].shape[1]
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert (batch.arrays[name][:, :width] == expected[name]).all()


def test_label_metrics_are_those_of_sklearn():
    from sklearn.metrics import accuracy_score, f1_score

    rng = np.random.default_rng(0)
    for classes in (3, 20):
        true, chosen = rng.random((2, 40, classes)) < 0.4
        sums: dict[str, float] = {}
        for lo in range(0, 40, 8):
            part = label_sums(true[lo : lo + 8], chosen[lo : lo + 8])
            assert len(part) <= 24
            for name, count in part.items():
                sums[name] = sums.get(name, 0) + count
        found = {m.name: m.value(sums) for m in label_metrics([f"c{n}" for n in range(classes)])}
        assert found["micro_f1"] == pytest.approx(f1_score(true, chosen, average="micro"))
        assert found["exact_match"] == pytest.approx(accuracy_score(true, chosen))
        if classes == 3:
            assert found["macro_f1"] == pytest.approx(f1_score(true, chosen, average="macro"))
            by_class = f1_score(true, chosen, average=None)
            assert [found[f"f1[c{n}]"] for n in range(3)] == pytest.approx(by_class)


def test_pearson_is_that_of_numpy():
    x, y = np.random.default_rng(0).standard_normal((2, 50)) + 3
    sums = {"samples": 50.0, "x": x.sum(), "y": y.sum(), "xx": (x * x).sum(), "yy": (y * y).sum()}
    metric = Metric(name="pearson", pearson=True)
    expected = np.corrcoef(x, y)[0, 1]
    assert metric.value({**sums, "xy": float((x * y).sum())}) == pytest.approx(expected)
    assert np.isnan(metric.value({"samples": 2.0, "x": 2.0, "y": 2.0, "xx": 2.0, "yy": 2.0}))


@pytest.mark.parametrize("lora", [None, {"r": 2}])
@pytest.mark.parametrize("data", [MULTI, {**NUMBER, **PAIRS}], ids=str)
def test_a_result_labels_new_texts(tiny, rows, tmp_path, lora, data):
    task = build(spec_of(tiny, rows, lora, **data))
    saved = export(task, moved(task), tmp_path)
    texts = ["cat and dog", "3 of dog"]
    ended = called("worker", "classify", str(saved), *texts, "--json")
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    if data["problem"] == "multi-label":
        assert [answer["text"] for answer in answers] == texts
        for answer in answers:
            scores = answer["probabilities"]
            assert {*scores} == {"cat", "dog", "fish"}
            assert answer["labels"] == [name for name, score in scores.items() if score > 0.5]
        return
    assert [answer["text"] for answer in answers] == [texts]
    ended = called("worker", "classify", str(saved), str(rows), "--pair-column", "more", "--json")
    assert len(ended.stdout.splitlines()) == len(ROWS)
    alone = called("worker", "classify", str(saved), texts[0])
    assert "expected two texts for each answer" in alone.stderr


def test_worker_data_shows_labels_and_a_table(tiny, rows):
    shown = "\n".join(view(spec_of(tiny, rows, **MULTI), 2))
    assert "label: " in shown
    assert "class  training  held out" in shown
    by_number = "\n".join(view(spec_of(tiny, rows, **NUMBER, **PAIRS), 2))
    assert "[SEP] " in by_number
    assert "training values: least -1.5" in by_number or "training values: least -1.25" in by_number
    single = "\n".join(view(spec_of(tiny, rows, stratify=True, holdout=0.25), 0))
    assert all(f"{name}   " in single and "3         1" in single for name in SUBJECTS)


@pytest.mark.parametrize(
    ("row", "data", "told"),
    [
        ({"labels": 3.5}, MULTI, "line 17: expected a list of labels, got 3.5"),
        ({"labels": "[x"}, MULTI, "expected a list of labels as JSON"),
        ({"value": "much"}, NUMBER, 'expected a finite number as label, got "much"'),
        ({"value": True}, NUMBER, "expected a finite number as label, got true"),
        ({"more": None}, PAIRS, "line 17: expected text, got null"),
    ],
)
def test_a_mistake_is_one_line(rows, tmp_path, row, data, told):
    path = tmp_path / "a.jsonl"
    path.write_text(rows.read_text() + json.dumps({**ROWS[0], "text": "x", **row}) + "\n")
    with pytest.raises(DataError) as raised:
        check_data(spec_of(tmp_path, path, **data))
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_keys_of_one_problem_are_refused_for_another(tiny, rows):
    with pytest.raises(RunSpecError, match=r"class_weights.*problem single-label"):
        spec_of(tiny, rows, **NUMBER, class_weights="balanced")
    with pytest.raises(RunSpecError, match=r"data\.text and data\.text_pair"):
        spec_of(tiny, rows, text_pair="text")
