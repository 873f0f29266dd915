"""A key that another key makes idle is refused, even with its default value."""

import copy
import json
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from protocol.base.errors import RunSpecError
from protocol.spec.run_spec import (
    RUN_VARIANTS,
    SECTIONS,
    RunSpec,
    parse_run_spec,
    parse_run_spec_bytes,
)
from protocol.spec.sections.section import Model, Needs, TaggedUnion, base_of, model_at

REGRESS = {"task": "regress", "steps": 3}
TEXT = {"task": "causal-lm", "steps": 3, "model": {"source": "m"}, "data": {"train": "d"}}
CLASSIFY = {**TEXT, "task": "classify"}
TEACHER = {"task": "teacher-logits", "model": {"source": "m"}, "data": {"train": "d"}}
STUDENT = {**TEXT, "task": "distil"}

IDLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arithmetic.multiply_add": (REGRESS, {}),
    "arithmetic.subnormals": (REGRESS, {"arithmetic.mode": "native"}),
    "model.loss_scale": (TEXT, {}),
    "model.loss_scale_every": (TEXT, {"model.precision": "bfloat16"}),
    "model.name": (TEXT, {}),
    "tokenizer.vocab_size": (TEXT, {"tokenizer.source": "t"}),
    "data.holdout": (TEXT, {"data.validation": "v"}),
    "data.num_classes": (CLASSIFY, {"data.problem": "regression"}),
    "data.class_weights": (CLASSIFY, {"data.problem": "regression"}),
    "data.sampling": (CLASSIFY, {"data.problem": "regression"}),
    "data.stratify": (CLASSIFY, {"data.validation": "v"}),
    "data.standardize": (CLASSIFY, {"data.problem": "single-label"}),
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
    "optimizer.alpha": (REGRESS, {"optimizer.name": "adamw"}),
    "optimizer.power": (REGRESS, {"optimizer.schedule": "cosine"}),
    "optimizer.cycles": (REGRESS, {"optimizer.schedule": "cosine"}),
    "optimizer.rise_ratio": (REGRESS, {"optimizer.schedule": "cosine"}),
    "optimizer.start_lr_ratio": (REGRESS, {"optimizer.schedule": "cosine"}),
    "optimizer.milestones": (REGRESS, {"optimizer.schedule": "cosine"}),
    "optimizer.gamma": (REGRESS, {"optimizer.schedule": "cosine"}),
    "optimizer.rates": (REGRESS, {"optimizer.schedule": "cosine"}),
    "optimizer.rates_every": (REGRESS, {"optimizer.schedule": "cosine"}),
    "optimizer.decay": (REGRESS, {"optimizer.schedule": "linear"}),
    "optimizer.plateau": (REGRESS, {"optimizer.schedule": "linear"}),
    "optimizer.min_parameter_rms": (
        REGRESS, {"optimizer.name": "adafactor", "optimizer.scale_parameter": False},
    ),
    "replicas.outer.nesterov": (
        REGRESS, {"replicas": {"count": 2, "inner_steps": 3}, "replicas.outer.momentum": 0},
    ),
    "checkpoint.better": (REGRESS, {}),
}  # fmt: skip
"""For each idle key: a document, and the settings that make the key idle in it."""


NO_DEFAULT = {
    "lora.targets": ["q"], "capture.drawn": 4, "data.holdout_samples": 4, "data.num_classes": 3,
    "data.class_weights": "balanced", "data.sampling": "balanced",
    "model.config": {"model_type": "llama"},
    "optimizer.clip_norm": 1.0, "optimizer.clip_value": 1.0, "data.columns": {"messages": "m"},
}  # fmt: skip
"""Values of keys whose default is null, other than text."""


def every_key(model: Any = RunSpec, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name in model.model_fields:
        inner = model_at(model, name)
        keys += every_key(base_of(inner), f"{prefix}{name}.") if inner else [prefix + name]
    return keys


def usual_value(key: str) -> Any:
    *parents, name = key.split(".")
    model: Any = RunSpec
    for parent in parents:
        inner = model_at(model, parent)
        assert inner is not None
        model = base_of(inner)
    default = model.model_fields[name].default
    if key == "optimizer.plateau":
        return {"metric": "loss"}
    return NO_DEFAULT.get(key, "x" if default in (None, PydanticUndefined) else default)


def conditional_keys(model: Model, prefix: str = "") -> set[str]:
    if isinstance(model, TaggedUnion):
        return {
            key for variant in model.variants.values() for key in conditional_keys(variant, prefix)
        }
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        inner = model_at(model, name)
        keys |= {prefix + name for item in field.metadata if isinstance(item, Needs)}
        keys |= conditional_keys(inner, f"{prefix}{name}.") if inner else set()
    return keys


def with_keys(document: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(document))
    for key, value in keys.items():
        *parents, name = key.split(".")
        section = result
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = copy.deepcopy(value)
    return result


def refusal(document: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(RunSpecError) as error_info:
        parse_run_spec(document, overrides, origin="run.yaml")
    assert "\n" not in str(error_info.value)
    return str(error_info.value)


def test_every_condition_is_covered():
    assert conditional_keys(RUN_VARIANTS) - {"exchange"} <= set(IDLE)
    sections = {"optimizer.plateau"}
    assert {key for key in IDLE if not key.endswith(".*")} - sections <= {*every_key()}


@pytest.mark.parametrize("key", IDLE)
def test_a_key_that_another_makes_idle_is_refused_even_with_its_default(key):
    base, idle_keys = IDLE[key]
    section = key.removesuffix("*")
    for idle_key in every_key() if key.endswith("*") else [key]:
        if idle_key.startswith(section):
            message = refusal(with_keys(base, {**idle_keys, idle_key: usual_value(idle_key)}))
            assert idle_key in message or f"{idle_key.partition('.')[0]}: " in message
    assert parse_run_spec(with_keys(base, idle_keys)).steps


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            {"name": "sgd", "momentum": 0.9},
            "sgd has no 'momentum'; remove it, or set optimizer.name to momentum, nesterov or rms",
        ),
        (
            {"momentum": 0.9},
            "adamw has no 'momentum'; expected one of betas, eps, amsgrad, momenta; remove it",
        ),
        ({"name": "sgd", "betas": [0.8, 0.9], "eps": 1e-7}, "; optimizer.eps: sgd has no 'eps'"),
        (
            {"warmup_from_zero": True},
            "warmup_from_zero: has an effect only with warmup_steps, got 0; remove",
        ),
    ],
)
def test_an_optimizer_has_its_own_keys(optimizer, text):
    assert text in refusal({**REGRESS, "optimizer": optimizer})


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adamw", "lion", "schedule-free"])
def test_every_key_of_an_optimizer_is_accepted(name):
    keys = {"lr": 0.1, "weight_decay": 0.1, "no_decay": ["bias"], "clip_norm": 1.0}
    keys |= {"momentum": 0.5} if name in ("momentum", "nesterov") else {}
    keys |= {"betas": [0.9, 0.99]} if name in ("adamw", "lion", "schedule-free") else {}
    keys |= {"eps": 1e-7} if name in ("adamw", "schedule-free") else {}
    spec = parse_run_spec({**REGRESS, "optimizer": {"name": name, **keys}})
    assert spec.optimizer.name == name


@pytest.mark.parametrize(
    "task", [task for task in RUN_VARIANTS.variants if task != TaggedUnion.OTHER]
)
def test_sections_of_other_tasks_are_refused_with_defaults_too(task):
    variant = RUN_VARIANTS.variants[task]
    base = with_keys(TEXT if "data" in variant.model_fields else REGRESS, {"task": task})
    for key in every_key():
        section = key.partition(".")[0]
        if section in SECTIONS - variant.model_fields.keys() - {"options"}:
            assert f"{section}: task {task} has no" in refusal(
                with_keys(base, {key: usual_value(key)})
            )
        elif section == "data" and key.partition(".")[2] in _unsupported_data_keys(variant):
            assert f"{key}: " in refusal(with_keys(base, {key: usual_value(key)}))


def _unsupported_data_keys(variant: Any) -> set[str]:
    data = model_at(variant, "data")
    if isinstance(data, TaggedUnion):
        return set.intersection(*({*variant.unsupported} for variant in data.variants.values()))
    return {*data.unsupported}  # type: ignore[union-attr]


def test_set_keys_are_named_and_null_is_ignored():
    message = refusal({**REGRESS, "optimizer": {"name": "sgd"}}, "optimizer.momentum=0.5")
    assert message.endswith("nesterov or rmsprop (from --set optimizer.momentum=0.5)")
    assert parse_run_spec({**REGRESS, "lora": None, "checkpoint": {"metric": None}}).lora is None


def test_canonical_document_has_no_idle_key():
    for document in (REGRESS, TEXT, TEACHER, {**REGRESS, "optimizer": {"name": "sgd"}}):
        spec = parse_run_spec(document)
        canonical_keys = json.loads(spec.to_bytes())
        assert parse_run_spec(canonical_keys) == spec
        assert parse_run_spec(canonical_keys, ["seed=5"]).seed == 5
    assert "momentum" not in canonical_keys["optimizer"]


def test_canonical_document_of_an_earlier_release_has_all_defaults():
    for document in (REGRESS, TEXT, TEACHER, {**REGRESS, "optimizer": {"name": "sgd"}}):
        spec = parse_run_spec(document)
        earlier_text = earlier_document(spec)
        assert earlier_text["optimizer"]["momentum"] == 0.9
        assert parse_run_spec_bytes(json.dumps(earlier_text).encode()) == spec
        assert parse_run_spec(earlier_text) == spec
        assert parse_run_spec(earlier_text, ["seed=5"]).seed == 5
    assert "has no 'momentum'" in refusal(earlier_text, "optimizer.momentum=0.9")


def earlier_document(spec: RunSpec) -> dict[str, Any]:
    """Return the document that earlier releases wrote: every section with every key."""

    def full_document(model: Any, document: Any) -> Any:
        section = {}
        for name, field in model.model_fields.items():
            value = document.get(name, PydanticUndefined)
            if value is PydanticUndefined:
                value = field.get_default()
                value = (
                    json.loads(value.model_dump_json()) if hasattr(value, "unsupported") else value
                )
            inner = model_at(model, name)
            nested = isinstance(value, dict)  # not a list of sections
            section[name] = full_document(base_of(inner), value) if inner and nested else value
        return section

    document: dict[str, Any] = full_document(RunSpec, spec.model_dump(mode="json"))
    document["exchange"]["way"] = document["exchange"].pop("topology")
    return document
