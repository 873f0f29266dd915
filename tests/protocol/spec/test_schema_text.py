import ast
import re

import pytest

from protocol.base.errors import UsageError
from protocol.spec.run_spec import RunSpec
from protocol.spec.schema_text import UNITS, schema_keys, schema_lines
from tests.structure import modules

NOT_KEYS = {
    "capture.json", "checkpoint.json", "model.safetensors", "optimizer.safetensors",
    "tokenizer.json", "tokenizer.model", "tokenizer.ggml",
    "digits.csv", "exchange.way",
}  # fmt: skip
"""Files, GGUF keys, and the former name of a key."""


def test_every_key_has_its_line_with_default_and_meaning():
    lines = schema_lines()
    assert len(lines) > len(RunSpec.model_fields) * 2
    by_key = {line.split()[0]: line for line in lines}
    assert "0.001" in by_key["optimizer.lr"]
    assert "learning rate" in by_key["optimizer.lr"]
    assert "required" in by_key["steps"]
    lines_without_meaning = [line for line in lines if len(line.split()) < 3]
    assert not lines_without_meaning, lines_without_meaning


def test_keys_are_found_by_search_text():
    assert schema_lines("learning_rate")[0].split()[0] == "optimizer.lr"
    assert {line.split()[0] for line in schema_lines("microbatch")} == {"batch.microbatch"}


def test_unknown_key_is_an_error_with_similar_keys():
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


def test_bounds_are_readable_and_exact():
    bounds = {key.path: key.choices for key in schema_keys()}
    assert bounds["threads"] == "1 to 256"
    assert bounds["seed"] == "0 or more, below 2^63"
    assert bounds["tokenizer.vocab_size"] == "257 to 1,000,000"
    assert bounds["optimizer.clip_value"] == "1e-30 to 1e+30"
    assert bounds["dpo.beta"] == "above 0, at most 100"
    assert bounds["optimizer.eps"] == "1e-30 to 1,000"


def test_union_shows_all_its_types():
    keys = {key.path: key for key in schema_keys()}
    assert keys["lora.targets"].choices == "all-linear | list of text"
    assert keys["data.class_weights"].choices == "balanced | mapping"
    assert keys["data.columns"].type.startswith("mapping with the keys messages, ")


def test_every_key_that_a_text_names_exists():
    keys = {key.path for key in schema_keys()} | NOT_KEYS
    sections = "|".join({path.partition(".")[0] for path in keys if "." in path})
    pattern = re.compile(rf"(?<![\w./-])(?:{sections})\.[a-z_]+\b(?!\()")
    unknown = {
        (name, key)
        for name, path in modules().items()
        for text in texts_of(ast.parse(path.read_text("utf-8")))
        for key in pattern.findall(text)
        if key not in keys
    }
    assert not unknown, "a run spec does not have these keys"


def texts_of(tree: ast.Module) -> list[str]:
    """Return the strings of a module except its docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in docstrings
    ]
