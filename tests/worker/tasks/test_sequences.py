"""Word tags, and texts generated from texts: losses, encodings and answers of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.wgpu.capture.model_proxy import ModelProxy
from protocol.base.errors import DataError
from protocol.datasets.data_check import check_data
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.commands import run_command
from tests.small_sequences import PAIRS, TAGGED_ROWS, save_encoder_decoders
from tests.worker.tasks.test_classify import export, perturbed_values
from worker.data.sequence_data import encode_words
from worker.tasks.labels.tag import span_metrics, span_sums, spans
from worker.tasks.language.rouge import NAMES, rouge
from worker.tasks.registry import build, view_data


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec_of(task: str, model: object, train: Path, **overrides: Any) -> RunSpec:
    data = {"train": str(train), **overrides.pop("data", {})}
    return parse_run_spec({
        "task": task, "seed": 7, "steps": 1, "model": {"source": str(model)}, "data": data,
        "batch": {"samples": 4, "microbatch": 2}, "lora": None, **overrides,
    })  # fmt: skip


@pytest.fixture(scope="module")
def encoder_decoders(tmp_path_factory) -> dict[str, Path]:
    return save_encoder_decoders(tmp_path_factory.mktemp("models"))


def with_values(task: Any, values: Any) -> Any:
    """Return the task's module with these trained values, in evaluation mode."""
    import torch

    parameters = dict(task.trainable.module.named_parameters())
    with torch.no_grad():
        for block, array in zip(task.manifest.blocks, values, strict=True):
            for tensor, elements in block.slices():
                parameters[tensor.name].copy_(torch.tensor(array[elements].reshape(tensor.shape)))
    return task.trainable.module.eval()


@pytest.mark.parametrize("lora", [None, {"r": 2}])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_seq2seq_has_the_loss_and_the_answers_of_transformers(
    encoder_decoders, tmp_path, family, lora
):
    import peft
    import torch
    import transformers

    base = encoder_decoders[family]
    rows = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    task = build(spec_of("seq2seq", base, rows, lora=lora))
    values, batch = perturbed_values(task), task.batch(range(4))
    module = with_values(task, values)
    tensors = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    (tmp_path / "out").mkdir()
    result_directory = export(task, values, tmp_path / "out")
    if lora is None:
        model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(result_directory)
    else:
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(base)
        model = peft.PeftModel.from_pretrained(model, result_directory)
    model.eval()
    assert task.trainable.loss is not None
    with torch.no_grad():
        run_loss = float(task.trainable.loss(module, tensors)) / batch.weight
        expected = float(model(**tensors).loss)
    assert run_loss == pytest.approx(expected, rel=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    read = tokenizer("add 2 and 1", return_tensors="pt")
    read.pop("token_type_ids", None)
    answer = model.generate(**read, max_new_tokens=8, do_sample=False, num_beams=1)
    reference = tokenizer.decode(answer[0], skip_special_tokens=True)
    process = run_command(
        "worker", "generate", str(result_directory), "add 2 and 1", "--max-tokens", "8"
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.rstrip("\n") == reference
    if family == "bart":  # T5 has no positions
        process = run_command(
            "worker", "generate", str(result_directory), "add 2 and 1", "--max-tokens", "100000"
        )
        assert process.returncode == 2
        assert "positions, got" in process.stderr
    if lora is not None:
        merged = run_command(
            "worker", "merge", str(result_directory), "--out", str(tmp_path / "merged")
        )
        assert merged.returncode == 0, merged.stderr


@pytest.mark.parametrize("lora", [None, {"r": 2}])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_seq2seq_metrics_use_the_targets_of_transformers(encoder_decoders, tmp_path, family, lora):
    import torch
    import transformers

    rows = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    data = {"holdout": 0.4, "max_tokens": 64, "generate_tokens": 6}
    task = build(spec_of("seq2seq", encoder_decoders[family], rows, lora=lora, data=data))
    module = with_values(task, perturbed_values(task))
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder_decoders[family])
    part = task.evaluation_batch(0)
    tensors = {name: torch.tensor(array) for name, array in part.arrays.items()}
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    answers = module.generate(**inputs, max_new_tokens=6, do_sample=False, num_beams=1)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    labels = torch.where(tensors["labels"] == -100, 0, tensors["labels"])
    right = tokenizer.batch_decode(labels, skip_special_tokens=True)
    assert task.trainable.evaluate is not None
    with torch.no_grad():
        sums = dict(task.trainable.evaluate(module, tensors))
        # A device that computes whole calls, like Vulkan, writes the same.
        separate_metrics = dict(
            task.trainable.evaluate(ModelProxy(module, lambda a, k: module(*a, **k)), tensors)
        )
    metrics = {metric.name: metric.value(sums) for metric in task.manifest.metrics}
    scores = [rouge(one, other) for one, other in zip(right, texts, strict=True)]
    for name in NAMES:
        assert metrics[name] == pytest.approx(sum(score[name] for score in scores) / len(scores))
        assert separate_metrics[name] == pytest.approx(sums[name])
    is_equal = [one.split() == other.split() for one, other in zip(right, texts, strict=True)]
    assert metrics["exact_match"] == pytest.approx(sum(is_equal) / len(is_equal))
    assert task.manifest.notes["references_without_words_for_rouge"] == 0


def test_targets_longer_than_the_model_are_refused(encoder_decoders, tmp_path):
    rows = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(DataError, match=r"data\.generate_tokens of at most 64"):
        build(spec_of("seq2seq", encoder_decoders["bart"], rows, data={"generate_tokens": 65}))


def test_words_have_the_tokens_and_labels_of_transformers(tiny):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    word_list = TAGGED_ROWS[0]["tokens"]
    encoding = tokenizer(word_list, is_split_into_words=True)
    ids, numbers, is_cut = encode_words(tokenizer, word_list, 64)
    assert ids.tolist() == encoding["input_ids"]
    word_ids: set[int | None] = {None}
    expected = [-1 if w in word_ids or word_ids.add(w) else w for w in encoding.word_ids()]  # type: ignore[func-returns-value]
    assert numbers.tolist() == expected
    assert not is_cut
    assert encode_words(tokenizer, word_list, 5)[2]


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_tag_loss_equals_transformers_and_tags_new_words(tiny, tmp_path, lora):
    import torch
    import transformers

    rows = write_rows(tmp_path / "tags.jsonl", TAGGED_ROWS)
    task = build(spec_of("tag", tiny, rows, lora=lora))
    names = [metric.name for metric in task.manifest.metrics]
    assert names == ["f1", "accuracy", "f1[LOC]", "f1[PER]"]
    values, batch = perturbed_values(task), task.batch(range(5))
    module = with_values(task, values)
    tensors = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    assert task.trainable.loss is not None
    assert task.trainable.evaluate is not None
    assert batch.weight == 5 * 8
    with torch.no_grad():
        run_loss = float(task.trainable.loss(module, tensors)) / batch.weight
        sums = task.trainable.evaluate(module, tensors)
    assert sums["words"] == 5 * 8
    (tmp_path / "out").mkdir()
    result_directory = export(task, values, tmp_path / "out")
    if lora is None:
        model = transformers.AutoModelForTokenClassification.from_pretrained(
            result_directory
        ).eval()
        with torch.no_grad():
            assert run_loss == pytest.approx(float(model(**tensors).loss), rel=1e-5)
    process = run_command(
        "worker", "classify", str(result_directory), "Ada Lovelace in Rome", "--json"
    )
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    assert answer["words"] == ["Ada", "Lovelace", "in", "Rome"]
    with torch.no_grad():
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
        encoding = tokenizer(answer["words"], is_split_into_words=True, return_tensors="pt")
        arrays = {name: encoding[name] for name in ("input_ids", "attention_mask")}
        tag_ids = module(**arrays).logits[0].argmax(-1).tolist()
    labels = json.loads((result_directory / "samestep.json").read_text())["labels"]
    firsts = [encoding.word_ids().index(n) for n in range(4)]
    assert answer["tags"] == [labels[tag_ids[index]] for index in firsts]
    if lora is not None:
        merged = run_command(
            "worker", "merge", str(result_directory), "--out", str(tmp_path / "merged")
        )
        assert merged.returncode == 0, merged.stderr


def test_spans_count_only_as_a_whole():
    true = ["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-PER"]
    predictions = ["B-PER", "I-PER", "O", "I-LOC", "I-LOC", "O"]
    assert [*spans(true)] == [("PER", 0, 2), ("LOC", 3, 4), ("LOC", 4, 5), ("PER", 5, 6)]
    assert [*spans(predictions)] == [("PER", 0, 2), ("LOC", 3, 5)]
    # A single word is S-x or U-x, the last of several E-x or L-x, as in seqeval.
    several = ["S-PER", "B-LOC", "I-LOC", "E-LOC", "U-LOC", "I-PER", "L-PER", "E-LOC", "O", "S-"]
    assert [*spans(several)] == [
        ("PER", 0, 1), ("LOC", 1, 4), ("LOC", 4, 5), ("PER", 5, 7), ("LOC", 7, 8),
    ]  # fmt: skip
    names = sorted({*true, *predictions})
    sums = span_sums([(true, predictions)], names)
    figures = {metric.name: metric.value(dict(sums)) for metric in span_metrics(names)}
    assert figures["f1"] == pytest.approx(2 / (2 + 3 + 1))
    assert figures["f1[PER]"] == pytest.approx(2 / 3)
    assert figures["accuracy"] == pytest.approx(3 / 6)
    assert [metric.name for metric in span_metrics(["ADJ", "NOUN"])] == ["accuracy"]


def test_wrong_model_kind_is_named_with_its_type(tiny, tmp_path):
    pairs = write_rows(tmp_path / "a.jsonl", PAIRS)
    with pytest.raises(DataError, match=r"encoder-decoder such as T5 or BART.*type 'bert'; take"):
        build(spec_of("seq2seq", tiny, pairs))


def test_worker_data_shows_tags_and_targets(tiny, encoder_decoders, tmp_path):
    tags = "\n".join(
        view_data(spec_of("tag", tiny, write_rows(tmp_path / "a.jsonl", TAGGED_ROWS)), 1)
    )
    assert "B-PER" in tags
    assert "tag B-LOC: 10 training words" in tags
    pairs = write_rows(tmp_path / "b.jsonl", PAIRS)
    text = "\n".join(view_data(spec_of("seq2seq", encoder_decoders["t5"], pairs), 1))
    assert "it is</s>" in text
    assert "training targets: 10;" in text


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("tag", {"tokens": ["a", "b"], "tags": ["O"]}, "a tag for each word, got 2 words and 1 t"),
        ("tag", {"tokens": ["a", " "], "tags": ["O", "O"]}, 'text as each of the words, got " "'),
        ("tag", {"tokens": 3, "tags": ["O"]}, "expected a list of words, got 3"),
        ("tag", {"tokens": ["a"]}, "a column 'tags'"),
        ("seq2seq", {"source": "a", "target": " "}, "expected text as target, found none"),
        ("seq2seq", {"source": "a"}, "a column 'target'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, task, row, message):
    valid_rows = TAGGED_ROWS if task == "tag" else PAIRS
    spec = spec_of(task, tmp_path, write_rows(tmp_path / "a.jsonl", [*valid_rows, row]))
    with pytest.raises(DataError) as error:
        check_data(spec)
    assert message in str(error.value)
    assert "line 13" in str(error.value)
    assert "\n" not in str(error.value)
