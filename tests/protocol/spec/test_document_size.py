"""Untrusted YAML and JSON: a few bytes cannot expand beyond the size of a run spec."""

from __future__ import annotations

import time

import pytest

from protocol.base import limits
from protocol.base.errors import DataError, RunSpecError, UsageError
from protocol.datasets.capture_check import tokens_of_file
from protocol.spec.earlier_run import apply_init_from
from protocol.spec.model_card import read_card
from protocol.spec.run_spec import parse_run_spec, parse_run_spec_text
from worker.results.saved_model import find_saved_model


def nested_aliases(levels: int, merge: str = "") -> str:
    """Return a document in which each line expands to nine copies of the line before."""
    lines = ["a0: &a0 {x: 1}" if merge else "a0: &a0 [x]"]
    for n in range(levels):
        nine = f"[{', '.join([f'*a{n}'] * 9)}]"
        lines.append(f"a{n + 1}: &a{n + 1} " + (f"{{{merge}: {nine}}}" if merge else nine))
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested_aliases(12), "values with aliases expanded"),
        (nested_aliases(12, "<<"), "values with aliases expanded"),
        ("a: &a [*a]", "values with aliases expanded"),
        ("[" * 100_000, f"at most {limits.DOCUMENT_LEVELS} levels"),
        ("{a: " * 40 + "1" + "}" * 40, f"at most {limits.DOCUMENT_LEVELS} levels"),
    ],
)
def test_expanding_document_is_refused_at_once(text, message):
    start_s = time.process_time()
    with pytest.raises(RunSpecError, match=message):
        parse_run_spec_text(text, origin="run.yaml")
    with pytest.raises(RunSpecError, match=f"--set.*{message}"):
        parse_run_spec({"task": "regress"}, [f"data={text}"])
    assert time.process_time() - start_s < 1


def test_aliases_of_a_usual_run_spec_are_read():
    text = "task: regress\nsteps: 2\nseed: 1\nbatch: &b {samples: 8, microbatch: 4}\n"
    assert parse_run_spec_text(text + "optimizer: {name: sgd, lr: 0.1}").batch.samples == 8


def test_deeply_nested_json_is_refused(tmp_path):
    """The directory of a model or an adapter may come from a stranger."""
    nested = "[" * 100_000
    for name in ("adapter_config.json", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text(nested)
    with pytest.raises(DataError, match="cannot read"):
        find_saved_model(tmp_path)
    assert tokens_of_file(tmp_path / "tokenizer.json") is None
    with pytest.raises(UsageError, match="cannot read the adapter"):
        apply_init_from({"task": "causal-lm", "init_from": str(tmp_path)})
    (tmp_path / "README.md").write_text(f"---\nsamestep: {nested}\n---\n")
    assert read_card(tmp_path) is None
