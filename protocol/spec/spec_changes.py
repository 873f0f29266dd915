"""Keys of the run spec that a resumed run may change, and the reasons for refusing the others.

A key may change only if committed steps and state stay valid. Later steps follow the new run spec.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from protocol.base.errors import UsageError
from protocol.spec.run_spec import RunSpec, parse_run_spec

MAY_CHANGE: Final = {
    "steps": "a longer or shorter run",
    "epochs": "likewise",
    "optimizer.lr": "the rate from the next step on",
    "optimizer.schedule": "likewise, with the keys of the schedule",
    "optimizer.warmup_steps": "counted from the run's first step",
    "optimizer.warmup_from_zero": "likewise",
    "optimizer.min_lr_ratio": "a key of the schedule",
    "optimizer.power": "likewise",
    "optimizer.cycles": "likewise",
    "optimizer.rise_ratio": "likewise",
    "optimizer.start_lr_ratio": "likewise",
    "optimizer.milestones": "likewise",
    "optimizer.gamma": "likewise",
    "optimizer.rates": "likewise",
    "optimizer.rates_every": "likewise",
    "optimizer.decay_ratio": "likewise",
    "optimizer.decay": "likewise",
    "optimizer.plateau": "likewise; evaluations so far count",
    "optimizer.weight_decay": "from the next step on",
    "optimizer.clip_norm": "likewise",
    "optimizer.clip_value": "likewise",
    "evaluate_every": "which states are evaluated",
    "checkpoint": "which states are kept",
    "stop": "when the run ends early; evaluations so far count",
    "double_check_every": "how often two workers compute the same",
}
"""The effect of each key; a section stands for its keys."""

_SCHEDULE_KEYS: Final = {
    "min_lr_ratio", "power", "cycles", "rise_ratio", "start_lr_ratio", "milestones", "gamma",
    "rates", "rates_every", "decay_ratio", "decay", "plateau",
}  # fmt: skip
"""Keys of `optimizer` that belong to one schedule."""

_REASONS: Final = {
    "seed": "it determines the order of samples and every random draw",
    "batch": "it determines which samples each step used",
    "data": "it determines the samples",
    "model": "the saved state belongs to this model",
    "lora": "the saved state belongs to this adapter",
    "arithmetic": "it determines the bits of every gradient so far",
    "threads": "it determines the bits of every gradient so far",
    "exchange": "it determines the bits of every average so far",
    "replicas": "it determines what a round computes",
    "optimizer": "the saved moments belong to this optimizer",
}
_NEW_RUN: Final = (
    "begin a new run from the result of this one (init_from, or model.source) with other settings"
)


def apply_changes(
    spec: RunSpec, changes: Sequence[str] | RunSpec
) -> tuple[RunSpec, tuple[str, ...]]:
    """Change the spec of a run that is to be resumed.

    Args:
        spec: The run's current spec.
        changes: `key=value` pairs as in `parse_run_spec`, or the whole new spec.

    Returns:
        The new spec, and a line for each change, such as `steps: 10 -> 20`.

    Raises:
        RunSpecError: The new spec is not valid.
        UsageError: An override sets a key that may not change.
    """
    new = changes if isinstance(changes, RunSpec) else _with_overrides(spec, changes)
    if fault := refused_change(spec, new):
        raise UsageError(f"--set: {fault}")
    return new, tuple(changes_between(spec, new))


def _with_overrides(spec: RunSpec, overrides: Sequence[str]) -> RunSpec:
    document = spec.model_dump(mode="json", exclude_defaults=True)
    # `init_from` was applied when the run began.
    init_from = document.pop("init_from", None)
    if any(override.startswith("optimizer.schedule=") for override in overrides):
        for key in _SCHEDULE_KEYS & document.get("optimizer", {}).keys():
            del document["optimizer"][key]
    new = parse_run_spec(document, overrides, "the run's spec")
    return new.model_copy(update={"init_from": init_from})


def may_change(key: str) -> bool:
    """Return whether a resumed run may change a setting."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in MAY_CHANGE)


def refused_change(spec: RunSpec, new: RunSpec) -> str:
    """Describe a change that a resumed run may not make; empty if there is none."""
    is_schedule_free = spec.optimizer.name == "schedule-free"
    for key, _, _ in _differences(spec, new):
        if is_schedule_free and key in {"optimizer.lr", "optimizer.warmup_steps"}:
            return f"{key} cannot change: schedule-free weighs its average by the rates; {_NEW_RUN}"
        if not may_change(key):
            section = key.partition(".")[0]
            reason = _REASONS.get(section, "the steps so far were computed with it")
            return (
                f"{key} cannot change in a run that has begun: {reason}; a resumed run may change "
                f"{', '.join(MAY_CHANGE)}; for others, {_NEW_RUN}"
            )
    return ""


def changes_between(spec: RunSpec, new: RunSpec) -> Iterator[str]:
    """Yield a line for each difference, such as `steps: 10 -> 20`."""
    for key, old_value, new_value in _differences(spec, new):
        yield f"{key}: {_format_value(old_value)} -> {_format_value(new_value)}"


def _differences(spec: RunSpec, new: RunSpec) -> Iterator[tuple[str, Any, Any]]:
    old_keys, new_keys = (
        dict(_flatten(run_spec.model_dump(mode="json"))) for run_spec in (spec, new)
    )
    for key in sorted(old_keys | new_keys):
        old_value, new_value = old_keys.get(key), new_keys.get(key)
        if old_value != new_value:
            yield key, old_value, new_value


def _flatten(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _format_value(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
