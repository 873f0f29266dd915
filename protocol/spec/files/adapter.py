"""Check a LoRA adapter in PEFT's layout against a run spec, by its config alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from protocol.base.errors import DataError
from protocol.base.regular_file import read_json
from protocol.spec.earlier_run import EarlierRun
from protocol.spec.files.sources import model_source
from protocol.spec.manifest import ADAPTER_CONFIG
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.model import LoraSpec

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_UNLIKE: Final = ("layers_to_transform", "layers_pattern", "exclude_modules")
"""Config keys of LoRA variants that runs do not support."""
_SHOWN: Final = 10
"""Number of labels in a message."""


def adapter_directory(source: str) -> Path:
    """Return the directory of an adapter.

    Raises:
        DataError: There is no adapter.
    """
    path = Path(os.path.expanduser(source))  # noqa: PTH111  (leaves an unknown ~name as it is)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise DataError(
                f"expected an adapter in PEFT's layout in {source!r}, found no {name}; name the "
                "directory that has it"
            )
    return path


def adapter_config(directory: Path) -> dict[str, Any]:
    """Read an adapter's config.

    Raises:
        DataError: It cannot be read, or a run cannot continue from the adapter.
    """
    path = directory / ADAPTER_CONFIG
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the adapter's {str(path)!r}: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise DataError(
            f"expected a LoRA adapter in {str(path)!r}, got another kind; remove model.adapter to "
            "train a new one"
        )
    odd = [key for key in _UNLIKE if config.get(key)]
    odd += ["bias"] if config.get("bias", "none") != "none" else []
    if odd:
        raise DataError(
            f"expected a plain LoRA adapter in {str(directory)!r}, got one with {odd[0]}: remove "
            "model.adapter to train a new one"
        )
    return config


def targets_of(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the adapted layers; None if the config has a pattern."""
    targets = config.get("target_modules")
    return tuple(sorted(map(str, targets))) if isinstance(targets, list) else None


def lora_more(lora: LoraSpec) -> dict[str, Any]:
    """Return the seldom used keys of the section `lora`."""
    return {
        "rslora": lora.rslora,
        "dora": lora.dora,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "target_parameters": list(lora.target_parameters),
    }


def more_of_lora(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same of an adapter's configuration."""
    return {
        "rslora": bool(config.get("use_rslora")),
        "dora": bool(config.get("use_dora")),
        "rank_pattern": config.get("rank_pattern") or {},
        "alpha_pattern": config.get("alpha_pattern") or {},
        "target_parameters": config.get("target_parameters") or [],
    }


def check_lora(directory: Path, config: Mapping[str, Any], lora: LoraSpec) -> None:
    """Check that an adapter has the rank, scale and layers of the run spec.

    Raises:
        DataError: It does not; names the keys to set.
    """
    pairs: list[tuple[str, object, object]] = [
        ("r", config.get("r"), lora.r),
        ("alpha", config.get("lora_alpha"), lora.alpha),
    ]
    if isinstance(lora.targets, tuple):
        pairs.append(("targets", targets_of(config), tuple(sorted(lora.targets))))
    theirs_more = more_of_lora(config)
    for key, ours_of_key in lora_more(lora).items():
        pairs.append((key, theirs_more[key], ours_of_key))
    for key, theirs, ours in pairs:
        if theirs != ours:
            shown = list(theirs) if isinstance(theirs, tuple) else theirs
            mine = list(ours) if isinstance(ours, tuple) else ours
            raise DataError(
                f"the adapter in {str(directory)!r} has lora.{key} {shown}, the run spec {mine}: "
                f"--set lora.{key}={json.dumps(shown)}"
            )


def check_adapter(spec: RunSpec) -> None:
    """Check the adapter that a run spec names, before any worker builds the model.

    Raises:
        DataError: It does not fit the run spec; names the keys to set.
    """
    model = spec.model
    if model is None or model.adapter is None or spec.lora is None:
        return
    directory = adapter_directory(model.adapter)
    config = adapter_config(directory)
    check_lora(directory, config, spec.lora)
    theirs = str(config.get("base_model_name_or_path") or "")
    source = str(model.source)
    ours = {source, model.name or source, model_source(source)}
    if theirs and Path(theirs).name not in {Path(each).name for each in ours}:
        raise DataError(
            f"the adapter in {str(directory)!r} was trained on {theirs!r}, the run's model is "
            f"{source!r}: set model.source to that base, or, if it is the same model, "
            f"--set model.name={theirs}"
        )
    _check_earlier(directory, spec, model.base_dtype)


def _check_earlier(directory: Path, spec: RunSpec, base_dtype: str) -> None:
    earlier = EarlierRun.that_left(directory)
    rounded = earlier.model.get("base_dtype")
    if rounded not in {None, base_dtype}:
        raise DataError(
            f"the adapter in {str(directory)!r} has model.base_dtype {rounded}, the run spec "
            f"{base_dtype}: --set model.base_dtype={rounded}"
        )
    added = [*(earlier.model.get("added_tokens") or ())]
    ours = [] if spec.model is None else [*spec.model.added_tokens]
    if added != ours:
        raise DataError(
            f"the adapter in {str(directory)!r} has model.added_tokens {added}, the run spec "
            f"{ours}: "
            f"--set 'model.added_tokens={json.dumps(added)}'"
        )
    if earlier.tokenizer is not None and spec.tokenizer is None:
        remedy = f"--set tokenizer.source={directory}"
        if spec.task != "causal-lm":
            remedy = f"worker merge {directory} --out NEW, and set model.source=NEW"
        raise DataError(
            f"the adapter in {str(directory)!r} was trained with its own tokenizer instead of its "
            f"base's: {remedy}"
        )


def check_labels(spec: RunSpec, labels: Sequence[str]) -> None:
    """Check that a trained classification head has the labels of the data, in the same order.

    Results of samestep's classify runs record their labels; others do not and are not checked.

    Args:
        spec: Names the adapter or model.
        labels: The labels of the data, by number.

    Raises:
        DataError: The labels differ; says what to do.
    """
    model = spec.model
    if model is None or model.source is None:
        return
    if model.adapter is not None:
        what, place = "adapter", adapter_directory(model.adapter)
    else:
        what, place = "model", Path(model_source(model.source))
    theirs = EarlierRun.that_left(place).labels
    if not theirs or theirs == tuple(labels):
        return
    key = "init_from" if spec.init_from is not None else "model.adapter"
    base = json.dumps(model.source) if what == "adapter" else "BASE (what it began with)"
    anew = f"--set model.source={base}"
    if what == "adapter" or spec.init_from is not None:
        anew = f"leave out {key}, {anew}"
    ours_shown, theirs_shown = _unlike(labels, theirs), _unlike(theirs, labels)
    raise DataError(
        f"the {what} in {str(place)!r} was trained for the labels {theirs_shown}, the data has "
        f"{ours_shown}: give data with the same labels, or start with a new head: {anew}"
    )


def _unlike(labels: Sequence[str], others: Sequence[str]) -> str:
    """A list in brackets; of a long one some, from where it differs from another."""
    if len(labels) <= _SHOWN:
        return str([*labels])
    first = next(
        (n for n, pair in enumerate(zip(labels, others, strict=False)) if len({*pair}) > 1), 0
    )
    return f"{[*labels[first : first + _SHOWN]]} (from number {first}, of {len(labels)})"
