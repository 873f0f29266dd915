"""Recover the settings of the run that wrote a directory, and apply `init_from`.

With `init_from`, a new run inherits the settings that affect the model's results, unless its run
spec sets them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol.base.errors import DataError, RunSpecError
from protocol.base.regular_file import read_json

RESULT_INFO_FILE: Final = "samestep.json"
"""The file beside the result of a classify or tag run; see `worker.tasks.labels.result_info`."""


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """Settings of an earlier run, as sections of its run spec; empty where unknown.

    Attributes:
        task: The task.
        model: The section `model`.
        tokenizer: The section `tokenizer`; None for the model's tokenizer.
        chat_template: The key `data.chat_template`; None for the tokenizer's template.
        labels: Labels of a classifier, by number.
    """

    task: str
    model: dict[str, Any]
    tokenizer: dict[str, Any] | None
    chat_template: str | None
    labels: tuple[str, ...]

    @staticmethod
    def read(directory: Path) -> EarlierRun:
        """Read the settings of the run that wrote a model or an adapter.

        Files in the directory take precedence over the run directory that contains it, and both
        over the model card.

        Args:
            directory: The directory of the model or adapter.

        Raises:
            DataError: `samestep.json` cannot be read.
        """
        info, spec = _result_info(directory), _spec_around(directory)
        model = (
            _get_section(info, "model")
            or _get_section(spec, "model")
            or _model_from_card(directory)
        )
        if name := _get_section(spec, "model").get("name"):
            model = {**model, "source": _get_section(spec, "model").get("source"), "name": name}
        return EarlierRun(
            task=str(info.get("task") or spec.get("task") or ""),
            model=model,
            tokenizer=_get_section(spec, "tokenizer") or None,
            chat_template=_get_section(spec, "data").get("chat_template"),
            labels=tuple(info.get("labels", ())),
        )


def _result_info(directory: Path) -> dict[str, Any]:
    path = directory / RESULT_INFO_FILE
    try:
        document = _read_document(path)
    except (FileNotFoundError, NotADirectoryError):  # a GGUF file is not a directory
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}") from None
    labels = document.get("labels")
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise DataError(
            f"expected the labels of a classify or tag run in {str(path)!r}, found none; copy the "
            "directory again from the run"
        )
    return document


def _spec_around(directory: Path) -> dict[str, Any]:
    """Return the run spec of the run whose directory contains this one; empty if there is none."""
    parent = directory.absolute().parent
    run = parent.parent.parent if parent.parent.name == "checkpoints" else parent
    try:
        return _get_section(_read_document(run / "run.json"), "spec")
    except (OSError, ValueError, RecursionError):
        return {}


def _model_from_card(directory: Path) -> dict[str, Any]:
    from protocol.spec.model_card import read_card  # noqa: PLC0415  (it imports run_spec)

    facts = read_card(directory)
    if facts is None:
        return {}
    added_tokens = {"added_tokens": [*facts.added_tokens]} if facts.added_tokens else {}
    return {"source": facts.base, "base_dtype": facts.base_dtype, **added_tokens}


def _read_document(path: Path) -> dict[str, Any]:
    document = read_json(path)
    return document if isinstance(document, dict) else {}


def _get_section(document: dict[str, Any], key: str) -> dict[str, Any]:
    section = document.get(key)
    return section if isinstance(section, dict) else {}


_ADAPTER_CONFIG: Final = "adapter_config.json"

INHERITED_WITH_ADAPTER: Final = ("base_dtype", "added_tokens")
"""Keys of `model` that are inherited with an adapter only, since a full model has no base."""
INHERITED: Final = ("dtype", "precision", "attention")
"""Keys of `model` that are always inherited."""
INHERITED_IN_FLOAT16: Final = ("loss_scale", "loss_scale_every")
"""Keys of `model` that are inherited if precision is float16."""


def apply_init_from(document: dict[str, Any]) -> None:
    """Apply `init_from` to a run spec: set keys that the document does not set.

    It fills in keys of `model`, `data.chat_template`, and for an adapter `lora` and `tokenizer`.

    Raises:
        RunSpecError: `init_from` names no finished run, or the document names another model.
    """
    source = document.get("init_from")
    if not isinstance(source, str):
        return
    directory = _find_result(source)
    model = document.setdefault("model", {})
    if not isinstance(model, dict):
        return
    if model.get("config") is not None:
        raise RunSpecError("expected init_from or model.config, got both: remove one of them")
    try:
        earlier = EarlierRun.read(directory)
    except DataError as error:
        raise RunSpecError(f"init_from: {error}") from None
    if (directory / _ADAPTER_CONFIG).is_file():
        _init_from_adapter(document, model, directory, earlier)
    elif model.setdefault("source", str(directory)) != str(directory):
        raise RunSpecError(
            f"expected init_from or model.source, got both ({source!r} and {model['source']!r}): "
            "remove one of them"
        )
    _fill_in(model, earlier.model, INHERITED)
    if model.get("precision") == "float16":
        _fill_in(model, earlier.model, INHERITED_IN_FLOAT16)
    data = document.get("data")
    if isinstance(data, dict) and _reads_conversations(document, data):
        _fill_in(data, {"chat_template": earlier.chat_template}, ("chat_template",))


def _init_from_adapter(
    document: dict[str, Any], model: dict[str, Any], directory: Path, earlier: EarlierRun
) -> None:
    try:
        config = read_json(directory / _ADAPTER_CONFIG)
        adapter_lora = {
            "r": config["r"],
            "alpha": float(config["lora_alpha"]),
            "dropout": float(config.get("lora_dropout", 0.0)),
            "targets": sorted(config["target_modules"]),
            "rslora": bool(config.get("use_rslora")) or None,
            "dora": bool(config.get("use_dora")) or None,
            "rank_pattern": config.get("rank_pattern") or None,
            "alpha_pattern": config.get("alpha_pattern") or None,
            "target_parameters": config.get("target_parameters") or None,
        }
        if document.get("task") != "classify":  # classify always trains its head in full
            adapter_lora["modules_to_save"] = config.get("modules_to_save") or None
        base = str(config["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunSpecError(f"cannot read the adapter in {str(directory)!r}: {error!r}") from None
    if "source" not in model:
        # If the base has a name, its files are at the earlier run's source.
        earlier_source = earlier.model.get("source") if earlier.model.get("name") == base else None
        model["source"] = earlier_source or base
        _fill_in(model, earlier.model, ("name",))
    model.setdefault("adapter", str(directory))
    _fill_in(model, earlier.model, INHERITED_WITH_ADAPTER)
    lora = document.get("lora")
    if lora is None:
        lora = document["lora"] = {}
    if isinstance(lora, dict):
        _fill_in(lora, adapter_lora, adapter_lora)
    if earlier.tokenizer is not None and document.get("task") == "causal-lm":
        # The adapter was trained with this tokenizer.
        document.setdefault("tokenizer", {"source": str(directory)})


def _fill_in(section: dict[str, Any], earlier: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if earlier.get(key) is not None:
            section.setdefault(key, earlier[key])


def _reads_conversations(document: dict[str, Any], data: dict[str, Any]) -> bool:
    has_conversations = document.get("task") in {"causal-lm", "teacher-logits"}
    return document.get("task") == "dpo" or (
        has_conversations and data.get("format", "text") != "text"
    )


def _find_result(source: str) -> Path:
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # no such user
        path = Path(source)
    if (path / "run.json").is_file() and not (path / "result.json").is_file():
        raise RunSpecError(
            f"init_from: expected a finished run in {source!r}, got one that has not finished; "
            "resume it (--resume), or name another"
        )
    for inner in (path, path / "model", path / "adapter"):
        if (inner / _ADAPTER_CONFIG).is_file() or (inner / "config.json").is_file():
            return inner
    raise RunSpecError(
        f"init_from: expected a finished run or a trained model in {source!r}, found neither a "
        "model nor an adapter"
    )
