"""DPO on a small Llama: the loss of TRL's formula, over the last answers only."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from backends.base.interface import BlockGradient, Loss
from backends.eager.eager import EagerBackend
from protocol.base.errors import DataError, RunSpecError
from protocol.spec.files.run_spec_file import load_run_spec
from tests.commands import run_command
from tests.small_chat import CHATML, preference_pair, write_dpo_run, write_jsonl
from tests.worker.tasks.test_classify import perturbed_values
from worker.models.tokens import IGNORED_LABEL
from worker.tasks.language.dpo import Dpo
from worker.tasks.registry import build


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> Any:
    return load_run_spec(write_dpo_run(tmp_path_factory.mktemp("dpo"), lora={"r": 4}))


@pytest.fixture(scope="module")
def task(spec) -> Dpo:
    task = build(spec)
    assert isinstance(task, Dpo)
    return task


def test_only_the_last_answers_count(task):
    tokenizer = build_tokenizer(task)
    batch = task.batch([0, 1, 2])
    assert batch.weight == 3
    assert batch.arrays["input_ids"].shape[:2] == (3, 2)
    for pair in batch.arrays["labels"]:
        chosen, rejected = (tokenizer.decode(side[side != IGNORED_LABEL]) for side in pair)
        assert chosen.startswith("It is ")
        assert rejected.startswith("It may be ")
        assert chosen.count("<|im_end|>") == rejected.count("<|im_end|>") == 1


def test_worker_data_shows_both_answers_and_their_lengths(spec, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(spec.model_dump(mode="json", exclude_none=True)))
    process = run_command("worker", "data", str(path), "--samples", "2")
    assert process.returncode == 0, process.stderr
    assert process.stdout.count(", chosen: ") == 2 + 2 * 2
    assert process.stdout.count("<|im_start|>assistant\n⟦It is ") == 2
    assert process.stdout.count("<|im_start|>assistant\n⟦It may be ") == 2
    for line in (
        "training pairs, chosen: 32; tok",
        "held-out pairs, rejected: 8; tok",
        "pairs: 40",
    ):
        assert f"\n{line}" in process.stdout
    token_counts = re.findall(
        r"(?:chosen|rejected): (\d+) tokens, (\d+) of them with loss", process.stdout
    )
    assert all(0 < int(answer_tokens) < int(tokens) for tokens, answer_tokens in token_counts)
    completed = run_command("worker", "data", str(path), "--set", "data.max_tokens=40")
    assert "most 40" in completed.stdout
    assert "pairs truncated: 0" not in completed.stdout


def build_tokenizer(task: Dpo) -> Any:
    from tokenizers import Tokenizer

    return Decoder(Tokenizer.from_str(task.manifest.export.files["tokenizer.json"]))


class Decoder:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Any) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def test_initial_loss_has_no_preference(task):
    program = EagerBackend("cpu").compile(task.trainable, task.batch([0, 1]))
    program.load(task.initial_parameters())
    *_, loss = program.gradients([(task.batch([0, 1]), 3)])
    assert isinstance(loss, Loss)
    assert loss.loss_sum == pytest.approx(2 * np.log(2), rel=1e-6)
    program.close()


def test_dropout_of_the_base_makes_no_preference(tmp_path):
    """Dropout of layers and of attention is off in the base; the adapter's dropout is active."""
    run_path = write_dpo_run(tmp_path, lora={"r": 4, "dropout": 0.5})
    model = load_run_spec(run_path).model
    assert model is not None
    assert model.source is not None
    config = run_path.parent / model.source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.5}))
    task = build(load_run_spec(run_path))
    assert isinstance(task, Dpo)
    batch = task.batch([0, 1])
    program = EagerBackend("cpu").compile(task.trainable, batch)

    def loss_of(seed: int) -> float:
        *_, loss = program.gradients([(batch, seed)])
        assert isinstance(loss, Loss)
        return loss.loss_sum

    program.load(task.initial_parameters())
    assert loss_of(3) == pytest.approx(2 * np.log(2), rel=1e-6)
    program.load(perturbed_values(task, 0.1))
    assert loss_of(3) != loss_of(4)
    program.close()


def test_loss_equals_trl(task, spec):
    """The reference follows trl/trainer/dpo_trainer.py.

    Log-probabilities are gathered from a log-softmax, masked and summed, by policy and by base;
    the loss is -logsigmoid(beta * log-ratios).
    """
    import peft
    import transformers

    values, batch = perturbed_values(task, 0.1), task.batch([0, 1, 2, 3])
    program = EagerBackend("cpu").compile(task.trainable, batch)
    program.load(values)
    *blocks, loss = program.gradients([(batch, 3)])
    figures = program.evaluate(batch)
    program.close()
    base = transformers.AutoModelForCausalLM.from_pretrained(spec.model.source)
    names = {
        tensor.name: torch.tensor(array[elements].reshape(tensor.shape))
        for block, array in zip(task.manifest.blocks, values, strict=True)
        for tensor, elements in block.slices()
    }
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    policy = peft.get_peft_model(copy.deepcopy(base), config)
    policy.load_state_dict(names, strict=False)
    ids, labels = (torch.tensor(batch.arrays[name]) for name in ("input_ids", "labels"))

    def log_probabilities(model: Any, side: int) -> torch.Tensor:
        log_probs = model(input_ids=ids[:, side]).logits.log_softmax(-1)
        mask = labels[:, side] != IGNORED_LABEL
        label_scores = log_probs.gather(-1, labels[:, side].clamp(min=0)[..., None])[..., 0]
        return (label_scores * mask).sum(-1)

    chosen, rejected = (log_probabilities(policy, side) for side in (0, 1))
    with torch.no_grad():
        base_chosen, base_rejected = (log_probabilities(base, side) for side in (0, 1))
    logits = (chosen - base_chosen) - (rejected - base_rejected)
    expected = -functional.logsigmoid(0.1 * logits)
    assert isinstance(loss, Loss)
    assert loss.loss_sum == pytest.approx(float(expected.detach().sum()), rel=1e-5)
    assert figures["preferred"] == int((logits > 0).sum())
    assert figures["margin_sum"] == pytest.approx(float(0.1 * logits.detach().sum()), rel=1e-4)
    expected.sum().backward()
    parameters = dict(policy.named_parameters())
    for item in blocks:
        assert isinstance(item, BlockGradient)
        for tensor, elements in task.manifest.blocks[item.block].slices():
            gradient = parameters[tensor.name].grad
            assert gradient is not None
            expected_gradient = gradient.reshape(-1).numpy()
            np.testing.assert_allclose(item.values[elements], expected_gradient, atol=2e-5)


def test_the_loss_adds_up_over_pairs(task):
    values = perturbed_values(task, 0.1)
    program = EagerBackend("cpu").compile(task.trainable, task.batch([0, 1]))
    program.load(values)
    joint_sums = program.evaluate(task.batch([0, 1, 2]))
    separate_sums = [program.evaluate(task.batch([n])) for n in (0, 1, 2)]
    program.close()
    for name, value in joint_sums.items():
        assert value == pytest.approx(sum(sums[name] for sums in separate_sums), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": None}, "needs lora"),
        ({"data": {"train": "x", "loss": "all"}}, "task dpo has no 'data.loss'"),
        ({"data": {"train": "x", "columns": {"messages": "m"}}}, "no column 'messages'"),
        ({"dpo": {"beta": 0}}, "dpo.beta"),
        ({"model": {"config": {"model_type": "llama"}}}, "set model.source"),
    ],
)
def test_contradictory_run_spec_is_refused(tmp_path, changes, message):
    with pytest.raises(RunSpecError, match=message):
        load_run_spec(write_dpo_run(tmp_path, **changes))


def test_pairs_that_only_the_template_refuses_are_bad_rows(tmp_path):
    valid_rows = [row(prompt=f"Is it {n}?", chosen="Yes.", rejected="No.") for n in range(9)]
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"".join([*valid_rows, row(prompt="a", chosen="b", rejected="b ")]))
    data = {"train": str(path), "chat_template": TRIMMED, "holdout": 0.25}
    with pytest.raises(DataError, match="line 10: expected chosen and rejected to differ"):
        build(load_run_spec(write_dpo_run(tmp_path / "a", data=data)))
    skipping = write_dpo_run(tmp_path / "b", data={**data, "skip_bad_rows": True})
    task = build(load_run_spec(skipping))
    assert task.manifest.notes["bad_rows_skipped"] == 1
    assert task.manifest.notes["left_out_as_no_answer_fits"] == 0
    assert task.manifest.train_samples == 7


def row(**columns: Any) -> bytes:
    return json.dumps(columns).encode() + b"\n"


QUESTION = {"role": "user", "content": "Is it?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("Yes.", "No."))
GOOD = row(prompt="Is it?", chosen="Yes.", rejected="No.")
TRIMMED = CHATML.replace("message['content']", "message['content'] | trim")
LAST_TURN_ONLY = (
    "{% for message in messages[-2:] %}{{ message['role'] + message['content'] }}{% endfor %}"
)
MISTAKES: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "empty": ("a.jsonl", b"\n", {}, "expected pairs in"),
    "no rejected": (
        "a.jsonl", GOOD + row(prompt="a", chosen="b"), {}, "expected a column 'rejected' in",
    ),
    "no chosen": ("a.csv", b"prompt,good,rejected\na,b,c\n", {}, "data.columns.chosen=good"),
    "conversations": ("a.jsonl", row(messages=[QUESTION, YES]), {}, "'chosen' and 'rejected' in"),
    "a missing column": (
        "a.jsonl", GOOD, {"columns": {"chosen": "best"}}, "expected a column 'best' in",
    ),
    "the same answer": (
        "a.jsonl", GOOD + row(prompt="a", chosen="b", rejected="b"), {},
        "line 2: expected chosen and rejected to differ, got the same twice",
    ),
    "the same to the template": (
        "a.jsonl", GOOD + row(prompt="a", chosen="b", rejected="b "), {"chat_template": TRIMMED},
        "line 2: expected chosen and rejected to differ, got the same tokens",
    ),
    "no answer": (
        "a.jsonl", GOOD + row(prompt="a", chosen="b", rejected=" "), {},
        "line 2 rejected: expected text as answer, found none",
    ),
    "null for an answer": (
        "a.jsonl", GOOD + row(prompt="a", chosen=None, rejected="b"), {},
        "line 2: expected chosen, got null",
    ),
    "an empty cell": ("a.csv", b"prompt,chosen,rejected\na,,c\n", {}, "line 2 chosen: expected te"),
    "an empty list": (
        "a.jsonl", GOOD + row(prompt="a", chosen=[], rejected="b"), {},
        "line 2 chosen: expected a list of messages, got []",
    ),
    "an empty turn": (
        "a.jsonl", GOOD + row(prompt=[QUESTION], chosen=[YES | {"content": ""}], rejected=[NO]), {},
        "line 2 chosen message 1: expected text as content, found none",
    ),
    "an empty prompt": (
        "a.jsonl", row(prompt="", chosen="b", rejected="c"), {}, "line 1 prompt: expected text as",
    ),
    "a number": ("a.jsonl", row(prompt="a", chosen=1, rejected=2), {}, "text as answer, got 1"),
    "no prompt": ("a.jsonl", row(chosen="b", rejected="c"), {}, "chosen: expected a prompt before"),
    "two prompts": (
        "a.jsonl",
        GOOD + row(chosen=[QUESTION, YES], rejected=[QUESTION | {"content": "No?"}, NO]), {},
        "line 2: expected chosen and rejected to be the same up to their last answers",
    ),
    "another prompt": (
        "a.jsonl", row(prompt="a", chosen=[QUESTION, YES], rejected=[QUESTION, NO]), {},
        "expected an answer to the prompt, or a conversation that begins with the prompt",
    ),
    "a prompt that is answered": (
        "a.jsonl", row(prompt=[QUESTION, YES], chosen=[YES], rejected=[NO]), {},
        "line 1 chosen message 3: expected a message of the user, got assistant",
    ),
    "a question at the end": (
        "a.jsonl", row(prompt=[QUESTION], chosen=[YES, QUESTION], rejected=[NO]), {},
        "line 1 chosen: expected the last message to be the assistant's, got user",
    ),
    "an unknown role": (
        "a.jsonl", row(prompt=[QUESTION], chosen=[YES | {"role": "narrator"}], rejected=[NO]), {},
        'message 1: expected one of the roles system, user, assistant, tool, got "narrator"',
    ),
    "cells that are no JSON": (
        "a.csv", b"prompt,chosen,rejected\na,[{role: user}],c\n", {}, "expected messages as JSON",
    ),
    "earlier turns left out by the template": (
        "a.jsonl", row(prompt=[QUESTION, YES, QUESTION], chosen=[YES], rejected=[NO]),
        {"chat_template": LAST_TURN_ONLY}, "message 3: expected the user's message in the chat",
    ),
    "too few": ("a.jsonl", GOOD, {}, "expected at least 2 training samples"),
    "too long": ("a.jsonl", GOOD, {"max_tokens": 2}, "found none; raise that limit"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_mistake_is_one_line_with_its_location(spec, tmp_path, mistake):
    name, content, data, message = mistake
    (tmp_path / name).write_bytes(content)
    document = spec.model_dump(mode="json", exclude_none=True)
    document["data"] = {"train": str(tmp_path / name), "holdout": 0, "max_tokens": 96, **data}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(document))
    completed = run_command("worker", "data", str(path))
    assert (completed.returncode, completed.stdout) == (2, ""), completed
    assert len(completed.stderr.splitlines()) == 1
    assert message in completed.stderr


def test_run_without_lora_is_one_line_with_its_location(spec, tmp_path):
    document = spec.model_dump(mode="json", exclude_none=True)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(document | {"lora": None}))
    completed = run_command("worker", "data", str(path))
    assert (completed.returncode, completed.stdout) == (2, ""), completed
    [line] = completed.stderr.splitlines()
    assert "run.yaml" in line
    assert "task dpo needs lora" in line


def test_too_long_pairs_are_reported(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [preference_pair(n) for n in range(4)])
    data = {"train": str(path), "max_tokens": 8, "holdout": 0}
    with pytest.raises(DataError, match="raise that limit"):
        build(load_run_spec(write_dpo_run(tmp_path, data=data)))


def test_pairs_of_a_validation_file_are_evaluated(spec, tmp_path):
    rows = [preference_pair(3), preference_pair(41), preference_pair(42)]
    valid = str(write_jsonl(tmp_path / "v.jsonl", rows))
    assert spec.data is not None
    data = spec.data.model_copy(update={"validation": valid, "holdout": 0.2})
    task = build(spec.model_copy(update={"data": data}))
    notes = task.manifest.notes
    assert (task.manifest.train_samples, task.manifest.evaluation_parts) == (40, 1)
    assert task.evaluation_batch(0).weight == 3
    assert (notes["validation_documents"], notes["of_them_trained_on_too"]) == (3, 1)
    assert task.manifest.digests["validation"] != task.manifest.digests["data"]
