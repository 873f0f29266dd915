"""`init_from`: what of a finished run another one begins with, as keys of a run spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.base.errors import RunSpecError

_ADAPTER_CONFIG = "adapter_config.json"


def begin_from(document: dict[str, Any]) -> None:
    """Set `model.source`, and for an adapter `model.adapter` and `lora` too, where they are not.

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
    if (found / _ADAPTER_CONFIG).is_file():
        _begin_from_adapter(document, model, found)
    elif model.setdefault("source", str(found)) != str(found):
        raise RunSpecError(
            f"expected init_from or model.source, got both ({source!r} and {model['source']!r}): "
            "leave out one of them"
        )


def _begin_from_adapter(document: dict[str, Any], model: dict[str, Any], found: Path) -> None:
    try:
        config = json.loads((found / _ADAPTER_CONFIG).read_bytes())
        told = {
            "r": config["r"],
            "alpha": float(config["lora_alpha"]),
            "targets": sorted(config["target_modules"]),
        }
        model.setdefault("source", str(config["base_model_name_or_path"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunSpecError(f"cannot read the adapter in {str(found)!r}: {error!r}") from None
    model.setdefault("adapter", str(found))
    lora = document.get("lora")
    if lora is None:
        lora = document["lora"] = {}
    if isinstance(lora, dict):
        for key, value in told.items():
            lora.setdefault(key, value)


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
