"""`init_from`: what of a finished run another one begins with, as keys of a run spec.

What decides what the model computes is as it was, where the document does not say another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from protocol.base.errors import DataError, RunSpecError
from protocol.base.regular_file import read_json
from protocol.spec.earlier_run import EarlierRun

_ADAPTER_CONFIG: Final = "adapter_config.json"

OF_BASE: Final = ("base_dtype",)
"""Of the section model: taken over with an adapter; a whole model has no base any more."""
ORIGIN: Final = ("source", "name", "adapter", "config")
"""Of the section model: what `init_from` itself says; a config is refused beside it."""
COMPUTING: Final = ("dtype", "precision", "attention", "loss_scale", "loss_scale_every")
"""Of the section model: taken over with either."""
NOT_TAKEN: Final = ("gradient_checkpointing",)
"""Of the section model: what the new run's machines have room for, and changes no bit."""


def begin_from(document: dict[str, Any]) -> None:
    """Set `model`, for an adapter `lora` and `tokenizer`, and the template, where they are not.

    Raises:
        RunSpecError: There is no finished run, or the document says another model.
    """
    source = document.get("init_from")
    if not isinstance(source, str):
        return
    found = _result(source)
    model = document.setdefault("model", {})
    if not isinstance(model, dict):
        return
    if model.get("config") is not None:
        raise RunSpecError("expected init_from or model.config, got both: leave out one of them")
    try:
        earlier = EarlierRun.that_left(found)
    except DataError as error:
        raise RunSpecError(f"init_from: {error}") from None
    if (found / _ADAPTER_CONFIG).is_file():
        _begin_from_adapter(document, model, found, earlier)
    elif model.setdefault("source", str(found)) != str(found):
        raise RunSpecError(
            f"expected init_from or model.source, got both ({source!r} and {model['source']!r}): "
            "leave out one of them"
        )
    _take_over(model, earlier.model, COMPUTING)
    data = document.get("data")
    if isinstance(data, dict) and _reads_conversations(document, data):
        _take_over(data, {"chat_template": earlier.chat_template}, ("chat_template",))


def _begin_from_adapter(
    document: dict[str, Any], model: dict[str, Any], found: Path, earlier: EarlierRun
) -> None:
    try:
        config = read_json(found / _ADAPTER_CONFIG)
        told = {
            "r": config["r"],
            "alpha": float(config["lora_alpha"]),
            "dropout": float(config.get("lora_dropout", 0.0)),
            "targets": sorted(config["target_modules"]),
        }
        named = str(config["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunSpecError(f"cannot read the adapter in {str(found)!r}: {error!r}") from None
    if "source" not in model:
        # A base that has a name of its own is found where the run had it.
        known = earlier.model.get("source") if earlier.model.get("name") == named else None
        model["source"] = known or named
        _take_over(model, earlier.model, ("name",))
    model.setdefault("adapter", str(found))
    _take_over(model, earlier.model, OF_BASE)
    lora = document.get("lora")
    if lora is None:
        lora = document["lora"] = {}
    if isinstance(lora, dict):
        _take_over(lora, told, told)
    if earlier.tokenizer is not None and document.get("task") == "causal-lm":
        document.setdefault("tokenizer", {"source": str(found)})  # what it was trained with


def _take_over(section: dict[str, Any], earlier: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if earlier.get(key) is not None:
            section.setdefault(key, earlier[key])


def _reads_conversations(document: dict[str, Any], data: dict[str, Any]) -> bool:
    conversing = document.get("task") in {"causal-lm", "teacher-logits"}
    return document.get("task") == "dpo" or (conversing and data.get("format", "text") != "text")


def _result(source: str) -> Path:
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # no such user
        path = Path(source)
    if (path / "run.json").is_file() and not (path / "result.json").is_file():
        raise RunSpecError(
            f"init_from: the run in {source!r} has not finished: go on with it (--resume), or give "
            "another"
        )
    for inner in (path, path / "model", path / "adapter"):
        if (inner / _ADAPTER_CONFIG).is_file() or (inner / "config.json").is_file():
            return inner
    raise RunSpecError(
        f"init_from: expected a finished run or a trained model in {source!r}, found neither model "
        "nor adapter there"
    )
