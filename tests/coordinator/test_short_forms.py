from __future__ import annotations

import pytest

from coordinator.short_forms import DEFAULT_STEPS, ShortForms, run_spec_from
from protocol.base.errors import RunSpecError, UsageError


def test_one_line_command_is_a_complete_run_spec():
    short = ShortForms(task="classify", model="some/dir", data="it's.jsonl", num_classes=2)
    spec = run_spec_from(None, short, [])
    assert spec is not None
    assert spec.task == "classify"
    assert spec.steps == DEFAULT_STEPS
    assert spec.lora is not None
    assert spec.model is not None
    assert spec.model.source == "some/dir"
    assert spec.data is not None
    assert spec.data.train == "it's.jsonl"
    assert spec.data.num_classes == 2


def test_set_wins_over_short_forms_and_both_over_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("task: regress\nsteps: 3\nseed: 1\n")
    spec = run_spec_from(path, ShortForms(steps=5), ["steps=7"])
    assert spec is not None
    assert (spec.steps, spec.seed) == (7, 1)
    repeat = run_spec_from(path, ShortForms(steps=5), [])
    assert repeat is not None
    assert repeat.steps == 5


@pytest.mark.parametrize(
    ("task", "name"),
    [("my_package.inner:MyTask", "MyTask"), ("a:__", "run"), ("regress", "regress")],
)
def test_a_run_is_named_after_its_task(task, name):
    spec = run_spec_from(None, ShortForms(task=task), [])
    assert spec is not None
    assert (spec.task, spec.name) == (task, name)


def test_without_run_and_task_there_is_no_run():
    assert run_spec_from(None, ShortForms(), []) is None


def test_run_option_without_a_run_is_refused():
    with pytest.raises(UsageError, match="--run"):
        run_spec_from(None, ShortForms(data="x.csv"), [])


def test_task_together_with_a_run_spec_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"expected --run .* or --task regress, got both"):
        run_spec_from(tmp_path / "run.yaml", ShortForms(task="regress"), [])


def test_classify_run_without_data_is_refused():
    with pytest.raises(RunSpecError, match="data"):
        run_spec_from(None, ShortForms(task="classify", model="m"), [])


def test_option_epochs_replaces_steps_of_the_file_and_vice_versa(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("task: regress\nsteps: 3\n")
    spec = run_spec_from(path, ShortForms(epochs=5), [])
    assert spec is not None
    assert (spec.epochs, spec.known_steps) == (5, None)
    path.write_text("task: regress\nepochs: 3\n")
    repeat = run_spec_from(path, ShortForms(steps=5), [])
    assert repeat is not None
    assert (repeat.epochs, repeat.steps) == (None, 5)
    short_form_spec = run_spec_from(None, ShortForms(task="regress", epochs=2), [])
    assert short_form_spec is not None
    assert short_form_spec.epochs == 2
