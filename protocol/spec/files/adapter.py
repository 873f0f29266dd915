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
_UNSUPPORTED: Final = ("layers_to_transform", "layers_pattern", "exclude_modules")
"""Config keys of LoRA variants that runs do not support."""
_SHOWN_LABELS: Final = 10
"""Maximum number of labels in a message."""


def adapter_directory(source: str) -> Path:
    """Return the directory of an adapter.

    Raises:
        DataError: The directory does not contain an adapter.
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
        DataError: The config cannot be read, or a run cannot continue from the adapter.
    """
    path = directory / ADAPTER_CONFIG
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the adapter's {str(path)!r}: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise DataError(
            f"expected a LoRA adapter in {str(path)!r}, got another type; remove model.adapter to "
            "train a new one"
        )
    unsupported = [key for key in _UNSUPPORTED if config.get(key)]
    unsupported += ["bias"] if config.get("bias", "none") != "none" else []
    if unsupported:
        raise DataError(
            f"expected a plain LoRA adapter in {str(directory)!r}, got one with "
            f"{unsupported[0]}: remove model.adapter to train a new one"
        )
    return config


def targets_of(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the adapted layers; None if the config has a pattern."""
    targets = config.get("target_modules")
    return tuple(sorted(map(str, targets))) if isinstance(targets, list) else None


def rare_lora_keys(lora: LoraSpec) -> dict[str, Any]:
    """Return the rarely used keys of the section `lora`."""
    return {
        "rslora": lora.rslora,
        "dora": lora.dora,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "target_parameters": list(lora.target_parameters),
    }


def rare_keys_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rarely used keys of `lora`, from an adapter's config."""
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
        DataError: The adapter differs; the error names the key to set.
    """
    pairs: list[tuple[str, object, object]] = [
        ("r", config.get("r"), lora.r),
        ("alpha", config.get("lora_alpha"), lora.alpha),
    ]
    if isinstance(lora.targets, tuple):
        pairs.append(("targets", targets_of(config), tuple(sorted(lora.targets))))
    adapter_keys = rare_keys_of_config(config)
    pairs += [(key, adapter_keys[key], value) for key, value in rare_lora_keys(lora).items()]
    for key, adapter_value, spec_value in pairs:
        if adapter_value != spec_value:
            has = list(adapter_value) if isinstance(adapter_value, tuple) else adapter_value
            expected = list(spec_value) if isinstance(spec_value, tuple) else spec_value
            raise DataError(
                f"the adapter in {str(directory)!r} has lora.{key} {has}, the run spec {expected}: "
                f"--set lora.{key}={json.dumps(has)}"
            )


def check_adapter(spec: RunSpec) -> None:
    """Check the adapter that a run spec names, before any worker builds the model.

    Raises:
        DataError: The adapter does not fit the run spec; the error names the key to set.
    """
    model = spec.model
    if model is None or model.adapter is None or spec.lora is None:
        return
    directory = adapter_directory(model.adapter)
    config = adapter_config(directory)
    check_lora(directory, config, spec.lora)
    base = str(config.get("base_model_name_or_path") or "")
    source = str(model.source)
    names = {source, model.name or source, model_source(source)}
    if base and Path(base).name not in {Path(name).name for name in names}:
        raise DataError(
            f"the adapter in {str(directory)!r} was trained on {base!r}, the run's model is "
            f"{source!r}: set model.source to that base, or, if it is the same model, "
            f"--set model.name={base}"
        )
    _check_earlier(directory, spec, model.base_dtype)


def _check_earlier(directory: Path, spec: RunSpec, base_dtype: str) -> None:
    earlier = EarlierRun.read(directory)
    adapter_dtype = earlier.model.get("base_dtype")
    if adapter_dtype not in {None, base_dtype}:
        raise DataError(
            f"the adapter in {str(directory)!r} has model.base_dtype {adapter_dtype}, the run spec "
            f"{base_dtype}: --set model.base_dtype={adapter_dtype}"
        )
    added_tokens = [*(earlier.model.get("added_tokens") or ())]
    spec_tokens = [] if spec.model is None else [*spec.model.added_tokens]
    if added_tokens != spec_tokens:
        raise DataError(
            f"the adapter in {str(directory)!r} has model.added_tokens {added_tokens}, the run "
            f"spec {spec_tokens}: "
            f"--set 'model.added_tokens={json.dumps(added_tokens)}'"
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

    Only results of samestep's classify runs record their labels; others are not checked.

    Args:
        spec: The run spec that names the adapter or model.
        labels: The labels of the data, by number.

    Raises:
        DataError: The labels differ.
    """
    model = spec.model
    if model is None or model.source is None:
        return
    if model.adapter is not None:
        noun, directory = "adapter", adapter_directory(model.adapter)
    else:
        noun, directory = "model", Path(model_source(model.source))
    trained_labels = EarlierRun.read(directory).labels
    if not trained_labels or trained_labels == tuple(labels):
        return
    key = "init_from" if spec.init_from is not None else "model.adapter"
    base = json.dumps(model.source) if noun == "adapter" else "BASE (its base model)"
    new_head = f"--set model.source={base}"
    if noun == "adapter" or spec.init_from is not None:
        new_head = f"leave out {key}, {new_head}"
    has = _list_from_difference(labels, trained_labels)
    expected = _list_from_difference(trained_labels, labels)
    raise DataError(
        f"the {noun} in {str(directory)!r} was trained for the labels {expected}, the data has "
        f"{has}: use data with the same labels, or start with a new head: {new_head}"
    )


def _list_from_difference(labels: Sequence[str], others: Sequence[str]) -> str:
    """Format a list of labels; of a long one, only those from the first difference on."""
    if len(labels) <= _SHOWN_LABELS:
        return str([*labels])
    start = next(
        (n for n, pair in enumerate(zip(labels, others, strict=False)) if len({*pair}) > 1), 0
    )
    return f"{[*labels[start : start + _SHOWN_LABELS]]} (from number {start}, of {len(labels)})"
