import pytest

from protocol.base.errors import UsageError
from protocol.spec.run_spec import RunSpec
from protocol.spec.schema_text import UNITS, schema_keys, schema_lines


def test_every_key_has_its_line_with_default_and_meaning():
    lines = schema_lines()
    assert len(lines) > len(RunSpec.model_fields) * 2
    by_key = {line.split()[0]: line for line in lines}
    assert "0.001" in by_key["optimizer.lr"]
    assert "learning rate" in by_key["optimizer.lr"]
    assert "required" in by_key["steps"]
    bare = [line for line in lines if len(line.split()) < 3]
    assert not bare, bare


def test_keys_are_found_by_what_one_types():
    assert schema_lines("learning_rate")[0].split()[0] == "optimizer.lr"
    assert {line.split()[0] for line in schema_lines("microbatch")} == {"batch.microbatch"}


def test_a_key_that_does_not_exist_is_an_error_with_those_like_it():
    with pytest.raises(
        UsageError, match=r"expected a key of a run spec, got 'chekpoint'.* checkpoint"
    ):
        schema_lines("chekpoint")
    with pytest.raises(UsageError, match="expected a key of a run spec, got 'zzz'"):
        schema_lines("zzz")


def test_every_unit_belongs_to_a_number():
    kinds = {key.path: key.type for key in schema_keys()}
    for path in UNITS:
        assert kinds[path] in {"integer", "number", "list of integer", "list of number"}, path


def test_bounds_are_words_and_lose_no_digit():
    bounds = {key.path: key.choices for key in schema_keys()}
    assert bounds["threads"] == "1 to 256"
    assert bounds["seed"] == "0 or more, below 2^63"
    assert bounds["tokenizer.vocab_size"] == "257 to 1,000,000"
    assert bounds["optimizer.clip_value"] == "1e-30 to 1e+30"
    assert bounds["dpo.beta"] == "above 0, at most 100"
    assert bounds["optimizer.eps"] == "1e-30 to 1,000"
