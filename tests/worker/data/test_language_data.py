"""Conversations as a run reads them, and the error line of each common mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.base.errors import DataError
from protocol.datasets.data_check import check_data
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.commands import run_command
from tests.small_chat import (
    CHATML,
    CHATML_WITH_GENERATION,
    conversation,
    save_chat_tokenizer,
    write_jsonl,
)
from worker.data.language_data import ConversationSamples, LanguageData, read_language_data
from worker.models.tokens import IGNORED_LABEL
from worker.tasks.language.teacher_logits import TeacherLogits
from worker.tasks.registry import build

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
}  # fmt: skip
ROWS = [{"messages": conversation(number)} for number in range(12)]
REPLY = {"role": "assistant", "content": "Yes."}
USER = {"role": "user", "content": "Is it?"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> Path:
    """Tokenizers with and without a template."""
    directory: Path = tmp_path_factory.mktemp("tokenizers")
    save_chat_tokenizer(directory / "chat")
    save_chat_tokenizer(directory / "bare", template=None)
    return directory


def document_of(tokenizers: Path, data: dict[str, Any], tokenizer: str = "chat") -> dict[str, Any]:
    return {
        "task": "causal-lm",
        "steps": 1,
        "seed": 3,
        "model": {"config": LLAMA},
        "tokenizer": {"source": str(tokenizers / tokenizer)},
        "data": {"format": "messages", "max_tokens": 96, **data},
        "batch": {"samples": 4, "microbatch": 2},
    }


def read(tokenizers: Path, data: dict[str, Any], fraction: float = 0.0) -> LanguageData:
    return read_language_data(parse_run_spec(document_of(tokenizers, data)), fraction)


def turns(data: LanguageData) -> list[tuple[list[int], list[bool]]]:
    return [
        (tokens.tolist(), count_mask.tolist())
        for tokens, count_mask in map(data.train.sample, range(len(data.train)))
    ]


def write_parquet(path: Path, rows: list[Any]) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def write_csv(path: Path, rows: list[Any]) -> Path:
    import csv

    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        for row in rows:
            table.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})
    return path


PAIRS = [(f"What is {n}?", f"It is {n}.") for n in range(5)]
FORMS: dict[str, list[Any]] = {
    "messages": [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in PAIRS
    ],
    "prompt-completion": [{"prompt": a, "completion": b} for a, b in PAIRS],
    "alpaca": [{"instruction": a, "input": "", "output": b} for a, b in PAIRS],
}


def test_each_form_in_each_kind_of_file_is_the_same_data(tokenizers, tmp_path):
    writers: dict[str, Callable[[Path, list[Any]], Path]] = {
        "a.jsonl": write_jsonl, "a.csv": write_csv, "a.parquet": write_parquet,
    }  # fmt: skip
    data_sets = []
    for form, form_rows in FORMS.items():
        rows: list[Any] = [*form_rows, form_rows[2]]
        for name, write in writers.items():
            path = write(tmp_path / name, rows)
            data_sets.append(read(tokenizers, {"train": str(path), "format": form}))
    assert all(data.digests == data_sets[0].digests for data in data_sets)
    assert all(turns(data) == turns(data_sets[0]) for data in data_sets)
    assert all(data.notes["duplicates_removed"] == 1 for data in data_sets)


def test_alpaca_columns_may_have_other_names(tokenizers, tmp_path):
    rows = [{"task": a, "context": f"{n}!", "output": b} for n, (a, b) in enumerate(PAIRS)]
    data = {
        "train": str(write_jsonl(tmp_path / "a.jsonl", rows)),
        "format": "alpaca",
        "columns": {"instruction": "task", "input": "context"},
    }
    language_data = read(tokenizers, data)
    texts = language_data.tokenizer.batch_decode([tokens for tokens, _ in turns(language_data)])
    assert texts[1].startswith("<|im_start|>user\nWhat is 1?\n\n1!<|im_end|>\n")
    rows_without_input = [{"instruction": a, "output": b} for a, b in PAIRS]
    data_section = {
        "train": str(write_jsonl(tmp_path / "b.jsonl", rows_without_input)),
        "format": "alpaca",
    }
    assert len(read(tokenizers, data_section).train) == len(PAIRS)


def test_batch_predicts_each_counted_token_from_its_prefix(tokenizers, tmp_path):
    language_data = read(tokenizers, {"train": str(write_jsonl(tmp_path / "a.jsonl", ROWS))})
    all_turns = turns(language_data)
    batch = language_data.train.batch(np.array([4, 1, 8]))
    inputs, labels = batch.arrays["input_ids"], batch.arrays["labels"]
    assert inputs.shape == labels.shape
    assert inputs.shape[1] % 16 == 0
    for row, number in enumerate((4, 1, 8)):
        tokens, count_mask = all_turns[number]
        length = len(tokens) - 1
        assert inputs[row, :length].tolist() == tokens[:-1]
        expected = [t if c else IGNORED_LABEL for t, c in zip(tokens, count_mask, strict=True)][1:]
        assert labels[row, :length].tolist() == expected
        assert not inputs[row, length:].any()
        assert (labels[row, length:] == IGNORED_LABEL).all()
    assert batch.weight == sum(sum(all_turns[n][1]) for n in (4, 1, 8))


def test_truncation_is_counted_and_rows_without_answer_are_dropped(tokenizers, tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", ROWS))
    full_turns = turns(read(tokenizers, {"train": path}))
    length = sorted(len(tokens) for tokens, _ in full_turns)[6]
    truncated_data = read(tokenizers, {"train": path, "max_tokens": length})
    expected = [(tokens[:length], count_mask[:length]) for tokens, count_mask in full_turns]
    assert turns(truncated_data) == [one for one in expected if any(one[1])]
    assert truncated_data.notes["left_out_as_no_answer_fits"] == sum(
        not any(c) for _, c in expected
    )
    longer = sum(len(t) > length and any(c[:length]) for t, c in full_turns)
    assert truncated_data.notes["conversations_truncated"] == longer > 0
    short = read(tokenizers, {"train": path, "max_tokens": 24})
    assert short.notes["left_out_as_no_answer_fits"] > 0
    assert all(any(count_mask) for _, count_mask in turns(short))


def test_digests_cover_the_mask(tokenizers, tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", ROWS))
    one, marked, all_turns = (
        read(tokenizers, {"train": path, **keys}).digests
        for keys in ({}, {"chat_template": CHATML_WITH_GENERATION}, {"loss": "all"})
    )
    assert one["data"] == marked["data"] == all_turns["data"]
    assert one["tokenizer"] == marked["tokenizer"] == all_turns["tokenizer"]
    assert len({digests["counted_tokens"] for digests in (one, marked, all_turns)}) == 3


def test_evaluation_split_is_disjoint_and_repeatable(tokenizers, tmp_path):
    data = {"train": str(write_jsonl(tmp_path / "a.jsonl", ROWS))}
    first, repeat = (read(tokenizers, data, 0.25) for _ in range(2))
    assert (len(first.train), len(first.held_out)) == (9, 3)
    assert isinstance(first.held_out, ConversationSamples)
    assert first.digests == repeat.digests
    assert turns(first) == turns(repeat)
    held_out_tokens = {tuple(tokens.tolist()) for tokens in first.held_out.tokens}
    assert not held_out_tokens & {tuple(tokens) for tokens, _ in turns(first)}


def test_template_of_the_spec_is_saved_with_the_model(tokenizers, tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", ROWS))
    data = {"train": path, "chat_template": CHATML}
    task = build(parse_run_spec(document_of(tokenizers, data, "bare")))
    assert task.manifest.export.files["chat_template.jinja"] == CHATML
    digests = task.manifest.digests
    assert digests.keys() == {"base_weights", "tokenizer", "counted_tokens", "data"}


def test_rows_of_a_teacher_have_its_mask(tokenizers, tmp_path):
    from protocol.datasets.logits_file import records_of

    document = document_of(tokenizers, {"train": str(write_jsonl(tmp_path / "a.jsonl", ROWS))})
    task = build(parse_run_spec(document | {"task": "teacher-logits", "capture": {"top_k": 4}}))
    assert isinstance(task, TeacherLogits)
    assert task.manifest.capture is not None
    from backends.eager.eager import EagerBackend

    batch = task.batch([0, 5])
    assert batch.arrays["input_ids"].shape == (2, 96)
    program = EagerBackend("cpu").compile(task.trainable, batch)
    records = records_of(program.capture_rows(batch).rows.reshape(-1), task.manifest.capture)
    program.close()
    for row, record in enumerate(records):
        labels = batch.arrays["labels"][row]
        last = int(np.flatnonzero(labels != IGNORED_LABEL)[-1]) + 1
        assert record["rows"] == last
        assert record["loss_mask"][:last].tolist() == (labels[:last] != IGNORED_LABEL).tolist()
        assert record["input_ids"][:last].tolist() == batch.arrays["input_ids"][row, :last].tolist()
        assert record["input_ids"][last] == labels[last - 1]
        assert (record["lse_1"][:last] != 0).all()


def test_student_uses_the_mask_of_its_teacher(tokenizers, tmp_path):
    """Labels from the coordinator's files equal those of the conversations."""
    from backends.eager.eager import EagerBackend
    from coordinator.capture.captured_files import CapturedFiles

    pytest.importorskip("pyarrow")
    document = document_of(tokenizers, {"train": str(write_jsonl(tmp_path / "a.jsonl", ROWS))})
    spec = parse_run_spec(document | {"task": "teacher-logits", "capture": {"top_k": 4}})
    teacher = build(spec)
    program = EagerBackend("cpu").compile(teacher.trainable, teacher.batch([0, 1]))
    (tmp_path / "capture").mkdir()
    files = CapturedFiles(tmp_path / "capture", teacher.manifest, spec, 0, lambda: None)
    for step in range(3):
        rows = [
            program.capture_rows(teacher.batch([n, n + 1])).rows for n in (4 * step, 4 * step + 2)
        ]
        files.store_step(step, [row.reshape(-1) for row in rows])
    files.finish(is_complete=True)
    files.close()
    program.close()
    data = {"train": str(tmp_path / "capture" / "logits"), "holdout": 0.0}
    student = build(
        parse_run_spec(
            {key: document[key] for key in ("model", "steps", "batch")}
            | {"task": "distil", "data": data}
        )
    )
    for number in range(len(ROWS)):
        labels = teacher.batch([number]).arrays["labels"]
        batch = student.batch([number])
        np.testing.assert_array_equal(batch.arrays["labels"], labels)
        assert batch.weight == np.count_nonzero(labels != IGNORED_LABEL)


def test_worker_data_shows_the_mask_and_its_counts(tokenizers, tmp_path):
    path = tmp_path / "run.yaml"
    data = {"train": str(write_jsonl(tmp_path / "a.jsonl", [*ROWS, ROWS[1]])), "holdout": 0.25}
    path.write_text(json.dumps(document_of(tokenizers, data)))
    process = run_command("worker", "data", str(path))
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("with loss\n") >= 5
    assert "<|im_start|>assistant\n⟦It is " in process.stdout
    assert "training samples: 9; tokens of each: min " in process.stdout
    assert "duplicates removed: 1" in process.stdout
    completed = run_command("worker", "data", str(path), "--samples", "1", "--set", "data.loss=all")
    assert completed.stdout.count("sample ") == 1
    assert "(9" in completed.stdout or "(100" in completed.stdout


def line(*messages: Any, **others: Any) -> bytes:
    return json.dumps({"messages": [*messages], **others}, ensure_ascii=False).encode() + b"\n"


GOOD = line(USER, REPLY)
ALPACA = {"format": "alpaca"}
PROMPTS = {"format": "prompt-completion"}
MISTAKES: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "no file": ("", b"", {"train": "nowhere.jsonl"}, "expected a data file at"),
    "empty": ("a.jsonl", b"\n\n", {}, "expected conversations in"),
    "other encoding": ("a.jsonl", GOOD + b'"\xe9"\n', {}, "is not UTF-8 at byte"),
    "not JSON": ("a.jsonl", GOOD + b"{messages: []}\n", {}, "line 2 is not JSON"),
    "an empty JSON list": ("a.json", b"[]", {}, "expected conversations in"),
    "a JSON list that ends early": ("a.json", b"[" + GOOD, {}, "expected ']' after row 1"),
    "a list": ("a.jsonl", GOOD + b"[1]\n", {}, "line 2: expected a JSON object"),
    "no column": ("a.jsonl", b'{"message": 1}\n', {}, "--set data.columns.messages=message"),
    "key twice": ("a.jsonl", b'{"messages": 1, "messages": 2}\n', {}, "occurs twice"),
    "text for messages": ("a.jsonl", GOOD + b'{"messages": "Hi"}\n', {}, "line 2: expected mes"),
    "null": ("a.jsonl", b'{"messages": null}\n', {}, "line 1: expected a list of messages, got"),
    "no message": ("a.jsonl", GOOD + line(), {}, "line 2: expected a list of messages, got []"),
    "a bare text": ("a.jsonl", line("Hi"), {}, "line 1 message 1: expected role and content"),
    "an unanswered ShareGPT": ("a.jsonl", line({"from": "human", "value": "Hi"}), {}, "last mess"),
    "no role": ("a.jsonl", line({"content": "Hi"}), {}, "message 1: expected role and content"),
    "no content": ("a.jsonl", line(USER, {"role": "assistant"}), {}, "found no content"),
    "unknown role": ("a.jsonl", line(USER, REPLY | {"role": "bot"}), {}, "roles system, user, as"),
    "a role that is a list": ("a.jsonl", line(USER | {"role": ["user"]}), {}, "one of the roles"),
    "tool": ("a.jsonl", line(USER, {"role": "tool", "content": "1"}), {}, "got no call before it"),
    "tool calls": ("a.jsonl", line(USER, REPLY | {"tool_calls": [1]}), {}, "expected a call with"),
    "a weight": ("a.jsonl", line(USER, REPLY | {"weight": 0.5}), {}, "expected weight 0 or 1"),
    "an empty turn": ("a.jsonl", GOOD + line(USER, REPLY | {"content": " "}), {}, "line 2 message"),
    "parts": ("a.jsonl", line(USER | {"content": [{"type": "text"}]}), {}, "expected text as con"),
    "a number": ("a.jsonl", line(USER, REPLY | {"content": 4}), {}, "message 2: expected text as"),
    "late system": (
        "a.jsonl", line(USER, {"role": "system", "content": "x"}, REPLY), {}, "only at the start",
    ),
    "two users": ("a.jsonl", line(USER, USER, REPLY), {}, "message 2: expected a message of the"),
    "assistant first": ("a.jsonl", line(REPLY, USER), {}, "message 1: expected a message of the"),
    "no answer": ("a.jsonl", GOOD + line(USER), {}, "line 2: expected the last message"),
    "half a character": (
        "a.jsonl", b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n', {}, "surrogate",
    ),
    "no completion": ("a.jsonl", b'{"prompt": "x"}\n', PROMPTS, "columns.completion=COLUMN"),
    "an empty completion": (
        "a.csv", b"prompt,completion\nx,y\nz,\n", PROMPTS, "line 3: expected text as completion",
    ),
    "no prompt": ("a.jsonl", b'{"prompt": [], "completion": "x"}\n', PROMPTS, "expected a list"),
    "ragged": ("a.csv", b"prompt,completion\nx,y,z\n", PROMPTS, "line 2: expected 2 columns"),
    "no instruction": ("a.jsonl", b'{"output": "x", "input": ""}\n', ALPACA, "'instruction' in"),
    "an input of numbers": (
        "a.jsonl", b'{"instruction": "x", "input": 3, "output": "y"}\n', ALPACA, "text as input",
    ),
    "no Parquet": ("a.parquet", b"PAR1", {}, "expected Parquet in"),
    "running text": ("a.jsonl", GOOD, {"format": "text"}, "--set data.format=messages"),
    "another format's column": ("a.jsonl", GOOD, {"columns": {"prompt": "x"}}, "no column 'prompt"),
    "a key of running text": ("a.jsonl", GOOD, {"text": "x"}, "format messages has no 'text'"),
    "too few": ("a.jsonl", GOOD, {}, "expected at least 2 training samples"),
    "too long": (
        "a.jsonl", GOOD + line(USER | {"content": "b"}, REPLY), {"max_tokens": 2},
        "max_tokens=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_mistake_is_one_line_with_its_location(tokenizers, tmp_path, mistake):
    name, content, data, message = mistake
    if name:
        (tmp_path / name).write_bytes(content)
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    document = document_of(tokenizers, {"train": str(tmp_path / name), **data})
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(document))
    completed = run_command("worker", "data", str(path))
    assert completed.returncode == 2, completed
    assert completed.stdout == ""
    assert len(completed.stderr.splitlines()) == 1
    assert message in completed.stderr


def test_rows_that_only_the_template_refuses_are_bad_rows(tokenizers, tmp_path):
    """Gemma's template refuses system messages, for example."""
    refusing_prefix = (
        "{% if messages[0].content == 'Be kind.' %}{{ raise_exception('No.') }}{% endif %}"
    )
    kind = {"role": "system", "content": "Be kind."}
    refused_rows = [
        {"messages": [kind, USER | {"content": f"Is it {n}?"}, REPLY]} for n in range(2)
    ]
    path = write_jsonl(
        tmp_path / "a.jsonl", [*ROWS[:3], refused_rows[0], *ROWS[3:], refused_rows[1]]
    )
    data = {"train": str(path), "chat_template": refusing_prefix + CHATML}
    with pytest.raises(DataError) as error:
        read(tokenizers, data)
    for message in (
        "2 bad rows:",
        "line 4: the chat template fails: TemplateError: No.",
        "line 14",
    ):
        assert message in str(error.value)
    skipped = read(tokenizers, {**data, "skip_bad_rows": True}, 0.25)
    assert skipped.notes["bad_rows_skipped"] == 2
    assert skipped.notes["left_out_as_no_answer_fits"] == 0
    assert len(skipped.train) + len(skipped.held_out) == len(ROWS)
    with pytest.raises(DataError, match=r"line 1: the chat template fails: TemplateError: No\.$"):
        read(tokenizers, {**data, "train": str(write_jsonl(tmp_path / "b.jsonl", refused_rows))})


def test_conversations_without_an_answer_to_learn_are_named(tokenizers, tmp_path):
    rows = [{"messages": [USER, REPLY | {"weight": 0}]}] * 2
    with pytest.raises(
        DataError, match="with an answer that has loss, found none: every answer has"
    ):
        read(tokenizers, {"train": str(write_jsonl(tmp_path / "a.jsonl", rows))})


def test_a_tokenizer_without_a_template_is_named(tokenizers, tmp_path):
    data = {"train": str(write_jsonl(tmp_path / "a.jsonl", ROWS))}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(document_of(tokenizers, data, "bare")))
    completed = run_command("worker", "data", str(path))
    assert completed.returncode == 2
    assert "expected a tokenizer with a chat template" in completed.stderr


def test_the_coordinator_sees_mistakes_before_a_worker_does(tokenizers, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + line(USER))
    spec: RunSpec = parse_run_spec(document_of(tokenizers, {"train": str(tmp_path / "a.jsonl")}))
    with pytest.raises(Exception, match="line 2: expected the last message to be the assistant's"):
        check_data(spec)


def test_padding_and_batch_neighbors_do_not_change_the_loss(tokenizers, tmp_path):
    """The loss equals torch's over separate, unpadded conversations, labeled as in transformers."""
    import torch

    from backends.eager.eager import EagerBackend

    data = {"train": str(write_jsonl(tmp_path / "a.jsonl", ROWS)), "holdout": 0.0}
    task = build(parse_run_spec(document_of(tokenizers, data)))
    language_data = read(tokenizers, data)
    batch = task.batch(range(len(ROWS)))
    program = EagerBackend("cpu").compile(task.trainable, batch)
    sums = program.evaluate(batch)
    program.close()
    total = 0.0
    assert task.trainable.module is not None
    for tokens, count_mask in turns(language_data):
        labels = [t if c else IGNORED_LABEL for t, c in zip(tokens, count_mask, strict=True)]
        with torch.no_grad():
            ids = torch.tensor([tokens])
            mean = task.trainable.module(ids, labels=torch.tensor([labels])).loss
        total += float(mean) * sum(count_mask)
    assert sums["tokens"] == sum(sum(count_mask) for _, count_mask in turns(language_data))
    assert sums["loss_sum"] == pytest.approx(total, rel=1e-5)


LONG = b"".join(line(USER | {"content": f"{n}?"}, REPLY) for n in range(4))
OTHER_MISTAKES: dict[str, tuple[bytes, dict[str, Any], dict[str, Any], str]] = {
    "no validation file": (b"", {"validation": "nowhere.jsonl"}, {}, "expected a data file at"),
    "a validation file's line": (
        GOOD + line(USER), {"validation": "v.jsonl"}, {},
        "v.jsonl' line 2: expected the last message to be the assistant's",
    ),
    "an empty validation file": (b"\n", {"validation": "v.jsonl"}, {}, "expected conversations in"),
    "validation with a share": (
        GOOD, {"validation": "v.jsonl", "holdout": 0.1}, {}, "has no effect with validation",
    ),
    "packing with grouping": (
        GOOD, {"packing": True, "group_by_length": True}, {}, "remove data.group_by_length",
    ),
    "epochs with steps": (GOOD, {}, {"epochs": 2}, "steps or epochs"),
    "tokens of conversations": (GOOD, {}, {"batch": {"tokens": 512}}, "data.packing=true"),
    "tokens with samples": (
        GOOD, {"packing": True}, {"batch": {"tokens": 512, "samples": 4}}, "got both",
    ),
    "tokens that are no multiple": (
        GOOD, {"packing": True, "max_tokens": 256}, {"batch": {"tokens": 600}}, "to 512 or 768",
    ),
    "a scale that is no power of two": (
        GOOD, {}, {"model": {"precision": "float16", "loss_scale": 1000}}, "a power of two, got",
    ),
    "weights for classes": (GOOD, {"class_weights": "balanced"}, {}, "set task to classify"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", OTHER_MISTAKES.values(), ids=list(OTHER_MISTAKES))
def test_conflicting_options_are_one_line(tokenizers, tmp_path, mistake):
    content, data, others, message = mistake
    (tmp_path / "a.jsonl").write_bytes(LONG)
    (tmp_path / "v.jsonl").write_bytes(content)
    if "validation" in data:
        data = {**data, "validation": str(tmp_path / data["validation"])}
    document = document_of(tokenizers, {"train": str(tmp_path / "a.jsonl"), **data})
    for key, value in others.items():
        document[key] = {**document[key], **value} if key == "model" else value
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(document))
    completed = run_command("worker", "data", str(path))
    assert (completed.returncode, completed.stdout) == (2, ""), completed
    assert len(completed.stderr.splitlines()) == 1
    assert message in completed.stderr


def test_at_least_forty_mistakes_are_covered():
    from tests.worker.tasks import test_dpo

    assert len(MISTAKES) + len(OTHER_MISTAKES) >= 40
    assert len({*MISTAKES, *OTHER_MISTAKES, *test_dpo.MISTAKES}) >= 60


END_OUTSIDE = CHATML_WITH_GENERATION.replace(
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)
NEXT_ROLE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "loss", "is_learned"),
    [
        (CHATML, "assistant", True),
        (CHATML_WITH_GENERATION, "assistant", True),
        (END_OUTSIDE, "assistant", False),
        (END_OUTSIDE, "all", True),
        (NEXT_ROLE, "assistant", False),
        (NEXT_ROLE, "all", False),
        (NEXT_ROLE.replace("+ '\n'", "+ eos_token + '\n'"), "assistant", True),
    ],
)
def test_an_answer_whose_end_is_not_learned_is_refused(
    tokenizers, tmp_path, template, loss, is_learned
):
    train = str(write_jsonl(tmp_path / "chat.jsonl", ROWS))
    data = {"train": train, "chat_template": template, "loss": loss}
    spec = parse_run_spec(document_of(tokenizers, data, tokenizer="bare"))
    if is_learned:
        read_language_data(spec, 0.2)
    else:
        with pytest.raises(
            DataError, match=r"stops at '<\|im_end\|>', and no answer trains that token"
        ):
            read_language_data(spec, 0.2)
