"""Multi-label, regression and text pairs: losses of transformers, metrics of sklearn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.registry import choose
from protocol.base.errors import DataError, RunSpecError
from protocol.datasets.data_check import check_data
from protocol.spec.manifest import Metric, pair_sums
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.commands import run_command
from tests.worker.tasks.test_classify import export, perturbed_values
from worker.results_cli import format_value
from worker.tasks.labels.class_counts import label_metrics, label_sums
from worker.tasks.registry import build, view_data

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
def test_loss_and_scores_equal_transformers(tiny, rows, tmp_path, data):
    import torch
    import transformers

    task = build(spec_of(tiny, rows, **data))
    values = perturbed_values(task)
    result_directory = export(task, values, tmp_path)
    batch = task.batch(range(5))
    program = choose("cpu").backend.compile(task.trainable, batch)
    program.load(values)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(result_directory).eval()
    assert task.trainable.loss is not None
    tensors = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    with torch.no_grad():
        expected = model(**tensors)
        loss = float(task.trainable.loss(model, tensors)) / batch.weight
    assert tensors["labels"].shape[0] == 5
    assert loss == pytest.approx(float(expected.loss), rel=1e-6)
    parts = task.manifest.evaluation_parts
    texts = [task.evaluation_batch(n) for n in range(parts)]
    assert all(np.isfinite(list(program.evaluate(each).values())).all() for each in texts)
    if data.get("problem") == "regression":
        part = task.evaluation_batch(0)
        metric_sums = program.evaluate(part)
        metrics = {metric.name: metric.value(dict(metric_sums)) for metric in task.manifest.metrics}
        inputs = {"input_ids", "attention_mask", "token_type_ids"} & part.arrays.keys()
        arrays = {name: torch.tensor(part.arrays[name]) for name in inputs}
        with torch.no_grad():
            scores = model(**arrays).logits[:, 0].numpy()
        assert metrics["mse"] == pytest.approx(((scores - part.arrays["labels"]) ** 2).mean())
        # The untrained scores are nearly equal, so that rounding changes their correlation.
        correlation = np.corrcoef(scores, part.arrays["labels"])[0, 1]
        assert metrics["pearson"] == pytest.approx(correlation, rel=1e-3)
    program.close()


def test_pair_encoding_equals_transformers(tiny, rows):
    import transformers

    task = build(spec_of(tiny, rows, **PAIRS, holdout=0.0))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    expected = tokenizer([(r["text"], r["more"]) for r in ROWS], padding=True, return_tensors="np")
    batch = task.batch(range(len(ROWS)))
    width = expected["input_ids"].shape[1]
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert (batch.arrays[name][:, :width] == expected[name]).all()


def test_label_metrics_equal_sklearn():
    from sklearn.metrics import accuracy_score, f1_score

    rng = np.random.default_rng(0)
    for classes in (3, 21):
        true, predictions = rng.random((2, 40, classes)) < 0.4
        sums: dict[str, float] = {}
        for lo in range(0, 40, 8):
            part = label_sums(true[lo : lo + 8], predictions[lo : lo + 8])
            assert len(part) <= 64
            for name, count in part.items():
                sums[name] = sums.get(name, 0) + count
        metrics = {m.name: m.value(sums) for m in label_metrics([f"c{n}" for n in range(classes)])}
        assert metrics["micro_f1"] == pytest.approx(f1_score(true, predictions, average="micro"))
        assert metrics["exact_match"] == pytest.approx(accuracy_score(true, predictions))
        if classes == 3:
            assert metrics["macro_f1"] == pytest.approx(
                f1_score(true, predictions, average="macro")
            )
            by_class = f1_score(true, predictions, average=None)
            assert [metrics[f"f1[c{n}]"] for n in range(3)] == pytest.approx(by_class)


def test_correlations_equal_scipy():
    from scipy.stats import pearsonr, spearmanr  # type: ignore[import-untyped]

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 50)).round(1)
    pearson, spearman = (Metric(name=n, **{n: True}) for n in ("pearson", "spearman"))
    for level in (0.0, 1.7e9):  # such as times in seconds: sums of squares would lose digits
        x_values, y_values = x + level, y + x + level
        sums = pair_sums(range(50), x_values, y_values)
        assert len({*y.tolist()}) < 50
        assert pearson.value(sums) == pytest.approx(pearsonr(x, y + x).statistic, rel=1e-6)
        assert spearman.value(sums) == pytest.approx(
            spearmanr(x_values, y_values).statistic, rel=1e-6
        )
    for degenerate in (
        pair_sums([0, 1], [1, 1], [1, 2]),
        pair_sums([0, 1], [1, np.nan], [1, 2]),
        {},
    ):
        assert np.isnan(pearson.value(degenerate))
        assert np.isnan(spearman.value(degenerate))


@pytest.mark.parametrize("lora", [None, {"r": 2}])
@pytest.mark.parametrize("data", [MULTI, {**NUMBER, **PAIRS}], ids=str)
def test_a_result_labels_new_texts(tiny, rows, tmp_path, lora, data):
    task = build(spec_of(tiny, rows, lora, **data))
    result_directory = export(task, perturbed_values(task), tmp_path)
    texts = ["cat and dog", "3 of dog"]
    completed = run_command("worker", "classify", str(result_directory), *texts, "--json")
    assert completed.returncode == 0, completed.stderr
    answers = [json.loads(line) for line in completed.stdout.splitlines()]
    if data["problem"] == "multi-label":
        assert [answer["text"] for answer in answers] == texts
        for answer in answers:
            scores = answer["probabilities"]
            assert {*scores} == {"cat", "dog", "fish"}
            assert answer["labels"] == [name for name, score in scores.items() if score > 0.5]
        return
    assert [answer["text"] for answer in answers] == [texts]
    completed = run_command(
        "worker", "classify", str(result_directory), str(rows), "--pair-column", "more", "--json"
    )
    assert len(completed.stdout.splitlines()) == len(ROWS)
    alone = run_command("worker", "classify", str(result_directory), texts[0])
    assert "expected pairs of texts, as the run had, got an odd number, 1; give" in alone.stderr


def test_standardized_numbers_are_reported_in_original_units(tiny, tmp_path):
    prices_path = tmp_path / "prices.jsonl"
    prices = [{**row, "value": 40_000 + 1000 * n * n} for n, row in enumerate(ROWS)]
    prices_path.write_text("".join(json.dumps(row) + "\n" for row in prices))
    data = {**NUMBER, "standardize": True}
    task = build(spec_of(tiny, prices_path, **data, holdout=0.25))
    train = task.batch(range(task.manifest.train_samples)).arrays["labels"]
    assert train.mean() == pytest.approx(0, abs=1e-6)
    assert train.std() == pytest.approx(1)
    result_directory = export(task, perturbed_values(task), tmp_path)
    mean, deviation = json.loads((result_directory / "samestep.json").read_text())["scale"]
    part = task.evaluation_batch(0)
    program = choose("cpu").backend.compile(task.trainable, part)
    program.load(perturbed_values(task))
    sums = dict(program.evaluate(part))
    program.close()
    texts = [ROWS[row]["text"] for row in part.arrays["rows"].tolist()]
    completed = run_command("worker", "classify", str(result_directory), *texts, "--json")
    answers = np.array([json.loads(line)["value"] for line in completed.stdout.splitlines()])
    right = [prices[row]["value"] for row in part.arrays["rows"].tolist()]
    assert part.arrays["labels"] * deviation + mean == pytest.approx(right)
    metrics = {metric.name: metric.value(sums) for metric in task.manifest.metrics}
    assert metrics["mse"] == pytest.approx(((answers - right) ** 2).mean(), rel=1e-4)
    assert metrics["mae"] == pytest.approx(np.abs(answers - right).mean(), rel=1e-4)
    assert [format_value(each) for each in (1234567.8, 0.25, -41000.5, 0, 1e-9)] == [
        "1234570", "0.25", "-41000.5", "0", "1e-09",
    ]  # fmt: skip
    view_text = "\n".join(view_data(spec_of(tiny, prices_path, **NUMBER), 1))
    assert "set data.standardize=true" in view_text
    assert "set data.standardize" not in "\n".join(view_data(spec_of(tiny, prices_path, **data), 1))
    equal = tmp_path / "equal.jsonl"
    equal.write_text("".join(json.dumps({**row, "value": 3}) + "\n" for row in ROWS))
    with pytest.raises(DataError, match="expected labels that differ, got only 3"):
        build(spec_of(tiny, equal, **data))


def test_worker_data_shows_labels_and_a_table(tiny, rows):
    view_text = "\n".join(view_data(spec_of(tiny, rows, **MULTI), 2))
    assert "label: " in view_text
    assert "class  training  held out" in view_text
    by_number = "\n".join(view_data(spec_of(tiny, rows, **NUMBER, **PAIRS), 2))
    assert "[SEP] " in by_number
    assert "training values: min -1.5" in by_number or "training values: min -1.25" in by_number
    single = "\n".join(view_data(spec_of(tiny, rows, stratify=True, holdout=0.25), 0))
    assert all(f"{name}   " in single and "3         1" in single for name in SUBJECTS)


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        ({"labels": 3.5}, MULTI, "line 17: expected a list of labels, got 3.5"),
        ({"labels": "[x"}, MULTI, "expected a list of labels as JSON"),
        ({"value": "much"}, NUMBER, 'expected a finite number as label, got "much"'),
        ({"value": True}, NUMBER, "expected a finite number as label, got true"),
        ({"more": None}, PAIRS, "line 17: expected text, got null"),
    ],
)
def test_a_mistake_is_one_line(rows, tmp_path, row, data, message):
    path = tmp_path / "a.jsonl"
    path.write_text(rows.read_text() + json.dumps({**ROWS[0], "text": "x", **row}) + "\n")
    with pytest.raises(DataError) as error:
        check_data(spec_of(tmp_path, path, **data))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_keys_of_another_problem_are_refused(tiny, rows):
    with pytest.raises(RunSpecError, match=r"class_weights.*problem single-label"):
        spec_of(tiny, rows, **NUMBER, class_weights="balanced")
    with pytest.raises(RunSpecError, match=r"data\.text and data\.text_pair"):
        spec_of(tiny, rows, text_pair="text")
