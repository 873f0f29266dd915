"""A key that another one makes idle is refused, even where it says the default."""

import copy
import json
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from protocol.base.errors import RunSpecError
from protocol.spec.idle_keys import ACTING, KEYS_OF_DATA, OWN_SECTIONS, TASK_SECTIONS
from protocol.spec.run_spec import RunSpec, parse_run_spec
from protocol.spec.run_spec_text import section_of

REGRESS = {"task": "regress", "steps": 3}
TEXT = {"task": "causal-lm", "steps": 3, "model": {"source": "m"}, "data": {"train": "d"}}
TEACHER = {"task": "teacher-logits", "model": {"source": "m"}, "data": {"train": "d"}}
STUDENT = {**TEXT, "task": "distil"}

ALWAYS = {
    "name", "task", "seed", "exactness", "init_from", "options", "steps", "epochs", "log",
    "threads", "double_check_every", "arithmetic.mode",
    "batch.samples", "batch.microbatch", "batch.tokens",
    "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_log", "checkpoint.copies",
    "stop.figure", "stop.better", "stop.patience", "stop.min_delta",
    "replicas.count", "replicas.inner_steps", "replicas.inner_state", "replicas.codec",
    "replicas.averages", "replicas.boundary_every", "replicas.outer.lr", "replicas.outer.momentum",
}  # fmt: skip
"""In every run whose section they are in; some are refused beside others, by `RunSpec`."""

OF_THE_TASK = {
    "model.source", "model.adapter", "model.config", "model.dtype", "model.base_dtype",
    "model.precision", "model.attention", "tokenizer.source", "lora.r", "lora.alpha",
    "lora.dropout", "lora.targets", "capture.drawn", "capture.temperature", "distil.alpha",
    "dpo.beta", "regress.samples", "regress.features", "regress.noise", "digits.hidden",
    "digits.holdout", "digits.dropout", "scripted.blocks", "scripted.block_bytes",
    "scripted.samples",
}  # fmt: skip
"""In every run of a task that reads their section."""

IDLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arithmetic.multiply_add": (REGRESS, {}),
    "arithmetic.subnormals": (REGRESS, {"arithmetic.mode": "native"}),
    "model.loss_scale": (TEXT, {}),
    "model.loss_scale_every": (TEXT, {"model.precision": "bfloat16"}),
    "model.name": (TEXT, {}),
    "tokenizer.vocab_size": (TEXT, {"tokenizer.source": "t"}),
    "data.holdout": (TEXT, {"data.validation": "v"}),
    "data.columns": (TEXT, {}),
    "data.loss": (TEXT, {}),
    "data.chat_template": (TEXT, {}),
    "data.text": (TEXT, {"data.format": "messages"}),
    "data.label": (TEXT, {"data.format": "messages"}),
    "data.pattern": (TEXT, {"data.format": "messages"}),
    "capture.top_k": (TEACHER, {"capture.drawn": 4}),
    "distil.temperature": (STUDENT, {"distil.alpha": 0}),
    "evaluate_every": (TEACHER, {}),
    "checkpoint.metric": (TEACHER, {}),
    "model.gradient_checkpointing": (TEACHER, {}),
    "optimizer.*": (TEACHER, {}),
    "exchange.*": (REGRESS, {"replicas": {"count": 2, "inner_steps": 3}}),
    "optimizer.momentum": (REGRESS, {"optimizer.name": "sgd"}),
    "optimizer.betas": (REGRESS, {"optimizer.name": "sgd"}),
    "optimizer.eps": (REGRESS, {"optimizer.name": "lion"}),
    "optimizer.no_decay": (REGRESS, {}),
    "optimizer.warmup_from_zero": (REGRESS, {}),
    "optimizer.min_lr_ratio": (REGRESS, {"optimizer.schedule": "constant"}),
    "optimizer.decay_ratio": (REGRESS, {"optimizer.schedule": "cosine"}),
    "optimizer.decay": (REGRESS, {"optimizer.schedule": "linear"}),
    "replicas.outer.nesterov": (
        REGRESS, {"replicas": {"count": 2, "inner_steps": 3}, "replicas.outer.momentum": 0},
    ),
    "checkpoint.better": (REGRESS, {}),
}  # fmt: skip
"""Where the keys of the table do nothing."""


NO_DEFAULT = {
    "lora.targets": ["q"], "capture.drawn": 4, "data.holdout_samples": 4, "data.num_classes": 3,
    "data.class_weights": "balanced", "model.config": {"model_type": "llama"},
    "optimizer.clip_norm": 1.0,
}  # fmt: skip
"""What a key can say that is null where it is left out, if that is no text."""


def every_key(model: Any = RunSpec, before: str = "") -> list[str]:
    keys: list[str] = []
    for name in model.model_fields:
        inner = section_of(model, name)
        keys += every_key(inner, f"{before}{name}.") if inner else [before + name]
    return keys


def usual(key: str) -> Any:
    *parents, name = key.split(".")
    model: Any = RunSpec
    for parent in parents:
        model = section_of(model, parent)
    default = model.model_fields[name].default
    return NO_DEFAULT.get(key, "x") if default in (None, PydanticUndefined) else default


def with_keys(document: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(document))
    for key, value in keys.items():
        *parents, name = key.split(".")
        at = made
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = copy.deepcopy(value)
    return made


def refusal(document: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(RunSpecError) as caught:
        parse_run_spec(document, overrides, origin="run.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_of_every_key_it_is_said_when_it_acts():
    tabled = {key for acting in ACTING for key in acting.keys}
    known = {*ALWAYS, *OF_THE_TASK, *tabled}
    data = {f"data.{key}" for keys in KEYS_OF_DATA.values() for key in keys}
    for key in every_key():
        section = key.partition(".")[0]
        assert key in known or key in data or f"{section}.*" in known, (
            f"{key}: say in idle_keys.ACTING when it acts, or here that it always does"
        )
    assert {key for key in known if not key.endswith(".*")} <= {*every_key()}
    assert tabled == set(IDLE)


@pytest.mark.parametrize("key", IDLE)
def test_a_key_that_another_makes_idle_is_refused_even_with_its_default(key):
    base, beside = IDLE[key]
    section = key.removesuffix("*")
    for each in every_key() if key.endswith("*") else [key]:
        if each.startswith(section):
            told = refusal(with_keys(base, {**beside, each: usual(each)}))
            # Where it is not the default, `RunSpec` may have said so before.
            assert each in told or f"leave out {each.partition('.')[0]}" in told
    assert parse_run_spec(with_keys(base, beside)).steps


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            {"name": "sgd", "momentum": 0.9},
            "nothing with optimizer sgd: leave it out, or set optimizer.name: momentum in 'run",
        ),
        ({"name": "sgd", "betas": [0.8, 0.9], "eps": 1e-7}, "optimizer.eps does nothing with"),
        ({"warmup_from_zero": True}, "optimizer.warmup_steps 0: leave it out, or set optimizer.w"),
    ],
)
def test_an_optimizer_has_its_own_keys(optimizer, text):
    assert text in refusal({**REGRESS, "optimizer": optimizer})


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adamw", "lion", "schedule-free"])
def test_what_an_optimizer_reads_it_may_be_told(name):
    keys = {"lr": 0.1, "weight_decay": 0.1, "no_decay": ["bias"], "clip_norm": 1.0}
    keys |= {"momentum": 0.5} if name in ("momentum", "nesterov") else {}
    keys |= {"betas": [0.9, 0.99]} if name in ("adamw", "lion", "schedule-free") else {}
    keys |= {"eps": 1e-7} if name in ("adamw", "schedule-free") else {}
    spec = parse_run_spec({**REGRESS, "optimizer": {"name": name, **keys}})
    assert spec.optimizer.name == name


@pytest.mark.parametrize("task", TASK_SECTIONS)
def test_sections_of_other_tasks_are_refused_with_defaults_too(task):
    base = with_keys(TEXT if "data" in TASK_SECTIONS[task] else REGRESS, {"task": task})
    unread = OWN_SECTIONS - TASK_SECTIONS[task] - {"model", "data", "options"}
    for key in every_key():
        if key.partition(".")[0] in unread:
            assert task in refusal(with_keys(base, {key: usual(key)}))


@pytest.mark.parametrize("task", KEYS_OF_DATA)
def test_keys_of_data_that_a_task_does_not_read_are_refused_with_defaults_too(task):
    base = with_keys(TEXT, {"task": task})
    for key in sorted({each.partition(".")[2] for each in every_key() if each[:5] == "data."}):
        if key not in KEYS_OF_DATA[task]:
            told = refusal(with_keys(base, {f"data.{key}": usual(f"data.{key}")}))
            assert f"data.{key}" in told


def test_what_was_set_is_named_and_null_says_nothing():
    told = refusal({**REGRESS, "optimizer": {"name": "sgd"}}, "optimizer.momentum=0.5")
    assert told.endswith("optimizer.name: momentum (from --set optimizer.momentum=0.5)")
    assert parse_run_spec({**REGRESS, "lora": None, "checkpoint": {"metric": None}}).lora is None


def test_a_canonical_document_may_say_every_default_and_nothing_else_that_is_idle():
    for document in (REGRESS, TEXT, TEACHER, {**REGRESS, "optimizer": {"name": "sgd"}}):
        spec = parse_run_spec(document)
        told = json.loads(spec.to_bytes())
        assert parse_run_spec(told) == spec
        assert parse_run_spec(told, ["seed=5", "evaluate_every=0"][: 2 - spec.captures]).seed == 5
    told["optimizer"]["momentum"] = 0.5
    assert "optimizer.momentum does nothing with optimizer sgd" in refusal(told)
    told["optimizer"]["momentum"] = 0.9
    assert "does nothing" in refusal(told, "optimizer.momentum=0.9")
