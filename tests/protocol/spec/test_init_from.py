"""How the next run inherits the sections of an earlier run, field by field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from protocol.base.errors import DataError, RunSpecError
from protocol.spec.earlier_run import INHERITED, INHERITED_IN_FLOAT16, INHERITED_WITH_ADAPTER
from protocol.spec.files.adapter import check_adapter, check_labels
from protocol.spec.run_spec import RunSpec, parse_run_spec
from protocol.spec.sections.model import LoraSpec, ModelSpec

COMPUTE_SETTINGS = {
    "dtype": "float32", "precision": "float16", "attention": "sdpa", "loss_scale": 1024.0,
    "loss_scale_every": 7,
}  # fmt: skip
LORA = {"r": 3, "alpha": 5.0, "dropout": 0.25, "targets": ["v_proj"],
    "rslora": True, "modules_to_save": ["norm"], "rank_pattern": {"v_proj": 2},
    "alpha_pattern": {"v_proj": 1.5},
}  # fmt: skip


def write_finished_run(
    run: Path, *, adapter: bool = True, has_tokenizer: bool = False, **changes: Any
) -> Path:
    """Write a finished run's directory, with all its files except the weights."""
    base = run / "base"
    result = run / ("adapter" if adapter else "model")
    for directory in base, result:
        directory.mkdir(parents=True)
        (directory / "tokenizer.json").write_text("{}")
    (base / "config.json").write_text("{}")
    model = {
        "source": str(base),
        "name": "a/base",
        "gradient_checkpointing": True,
        **COMPUTE_SETTINGS,
    }
    if adapter:
        model["base_dtype"] = "int4"
        config = {
            "peft_type": "LORA", "r": 3, "lora_alpha": 5, "lora_dropout": 0.25,
            "target_modules": ["v_proj"], "base_model_name_or_path": "a/base",
            "use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 1.5},
            "modules_to_save": ["norm"],
        }  # fmt: skip
        (result / "adapter_config.json").write_text(json.dumps(config))
        (result / "adapter_model.safetensors").write_text("")
    else:
        (result / "config.json").write_text("{}")
    spec = {
        "task": "causal-lm", "model": model, "lora": LORA if adapter else None,
        "data": {"train": "x", "format": "messages", "chat_template": "{{ messages }}"}, **changes,
    }  # fmt: skip
    if has_tokenizer:
        record = {**spec, "labels": ["no", "yes"], "model": {**model, "source": "a/base"}}
        (result / "samestep.json").write_text(json.dumps(record))
    (run / "run.json").write_text(json.dumps({"spec": spec}))
    (run / "result.json").write_text("{}")
    return result


def next_run(source: Path, **changes: Any) -> RunSpec:
    document = {
        "task": "causal-lm", "steps": 1, "init_from": str(source),
        "data": {"train": "x", "format": "messages"},
    }  # fmt: skip
    return parse_run_spec({**document, **changes})


def test_every_model_field_is_inherited_or_excluded():
    replaced = ("source", "name", "adapter", "config")
    per_machine = ("gradient_checkpointing",)  # they change no bit
    groups = [*replaced, *INHERITED_WITH_ADAPTER, *INHERITED, *INHERITED_IN_FLOAT16, *per_machine]
    assert sorted(groups) == sorted(ModelSpec.model_fields)
    assert sorted(COMPUTE_SETTINGS) == sorted(INHERITED + INHERITED_IN_FLOAT16)
    tested_elsewhere = {"dora", "target_parameters"}  # in tests/worker/models/test_lora_options
    assert {*LORA} | tested_elsewhere == {*LoraSpec.model_fields}
    inherited_keys = {"model", "lora", "tokenizer", "data"}
    training_keys = {
        "name", "task", "seed", "data_seed", "exactness", "arithmetic", "init_from", "capture",
        "distil", "dpo",
        "embed", "regress", "digits", "scripted", "options", "batch", "optimizer", "exchange",
        "replicas", "steps", "epochs", "evaluate_every", "log", "checkpoint", "stop", "threads",
        "double_check_every",
    }  # fmt: skip
    assert inherited_keys | training_keys == {*RunSpec.model_fields}


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_adapter_inherits_all_its_settings(tmp_path, has_tokenizer):
    adapter = write_finished_run(
        tmp_path / "run", tokenizer={"source": "t", "vocab_size": 300}, has_tokenizer=has_tokenizer
    )
    spec = next_run(adapter.parent)
    assert spec.model is not None
    assert spec.lora is not None
    assert spec.model == ModelSpec.model_validate({
        **COMPUTE_SETTINGS, "base_dtype": "int4", "source": str(tmp_path / "run" / "base"),
        "name": "a/base", "adapter": str(adapter),
    })  # fmt: skip
    assert spec.lora.model_dump(mode="json") == LORA
    assert spec.tokenizer is not None
    assert spec.tokenizer.source == str(adapter)
    assert spec.data is not None
    assert spec.data.chat_template == "{{ messages }}"
    check_adapter(spec)


def test_explicit_keys_win_but_another_base_is_refused(tmp_path):
    adapter = write_finished_run(tmp_path / "run")
    spec = next_run(
        adapter, lora={"dropout": 0.5}, model={"precision": "float32", "attention": "eager"}
    )
    assert spec.model is not None
    assert spec.lora is not None
    assert (spec.model.precision, spec.model.attention) == ("float32", "eager")
    assert (spec.lora.r, spec.lora.dropout, spec.tokenizer) == (3, 0.5, None)
    check_adapter(spec)
    text = "has model.base_dtype int4, the run spec nf4: --set model.base_dtype=int4"
    with pytest.raises(DataError, match=re.escape(text)):
        check_adapter(next_run(adapter, model={"base_dtype": "nf4"}))
    model_section = {
        "source": str(tmp_path / "run" / "base"),
        "name": "a/base",
        "adapter": str(adapter),
    }
    with pytest.raises(DataError, match=r"base_dtype int4, the run spec float32: --set"):
        check_adapter(next_run(adapter, init_from=None, model=model_section, lora=LORA))


def test_separate_tokenizer_must_be_given(tmp_path):
    adapter = write_finished_run(tmp_path / "run", tokenizer={"source": "t", "vocab_size": 300})
    with pytest.raises(DataError, match=r"with its own tokenizer .*: --set tokenizer\.source=/"):
        check_adapter(next_run(adapter, tokenizer=None))
    preferences = next_run(adapter, task="dpo", data={"train": "x"})
    assert preferences.data is not None
    assert preferences.data.chat_template == "{{ messages }}"
    with pytest.raises(DataError, match=r"with its own tokenizer .*: worker merge"):
        check_adapter(preferences)


def test_checkpoint_adapter_and_full_model_are_inherited_equally(tmp_path):
    adapter = write_finished_run(tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    adapter_of_step = adapter.rename(step / "adapter")
    spec = next_run(adapter_of_step)
    assert spec.model is not None
    assert spec.model.base_dtype == "int4"
    next_spec = next_run(write_finished_run(tmp_path / "whole", adapter=False))
    assert next_spec.model == ModelSpec.model_validate({
        **COMPUTE_SETTINGS, "source": str(tmp_path / "whole" / "model"),
    })  # fmt: skip
    assert next_spec.lora is None


def test_many_labels_are_shown_from_their_first_difference(tmp_path):
    adapter = write_finished_run(tmp_path / "run", has_tokenizer=True)
    (record,) = adapter.glob("samestep.json")
    labels = [f"l{number:02}" for number in range(30)]
    document = json.loads(record.read_text())
    record.write_text(json.dumps({**document, "labels": labels}))
    spec = next_run(adapter)
    check_labels(spec, labels)
    with pytest.raises(DataError, match=r"\['l25', .*\(from number 25, of 30\), the data has .*x"):
        check_labels(spec, [*labels[:25], "x", *labels[26:]])
    record.write_text('{"labels": 3}')
    with pytest.raises(RunSpecError, match="expected the labels of a classify or tag run in"):
        next_run(adapter)
