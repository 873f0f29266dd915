"""Front matter of a model card that model hubs read: https://huggingface.co/docs/hub/model-cards.

A hub refuses a card that names what it does not have, so a base model or a data set is named only
where its name could be a hub's: `model.name` or `model.source`, and `data.name`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_PIPELINES: Final[Mapping[str, str]] = {
    "classify": "text-classification",
    "tag": "token-classification",
    "seq2seq": "text2text-generation",
    "causal-lm": "text-generation",
    "dpo": "text-generation",
    "distil": "text-generation",
    "masked-lm": "fill-mask",
    "embed": "sentence-similarity",
}
_METRICS: Final[Mapping[str, str]] = {
    "accuracy": "accuracy",
    "f1": "f1",
    "macro_f1": "f1",
    "micro_f1": "f1",
    "exact_match": "exact_match",
    "perplexity": "perplexity",
    "rouge1": "rouge",
    "rouge2": "rouge",
    "rougeL": "rouge",
    "mse": "mse",
    "mae": "mae",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
}
"""What a hub calls our metrics."""


def hub_name(name: str | None) -> str | None:
    """Return a name that could be a hub's, and is no path here; else None."""
    if name is None or not _HUB_NAME.fullmatch(name) or Path(name).exists():
        return None
    return name


def hub_metadata(
    *,
    name: str,
    task: str,
    library: str,
    is_adapter: bool,
    base: str | None,
    data: str | None,
    metrics: Mapping[str, float | None],
) -> dict[str, Any]:
    """Return the front matter.

    Args:
        name: Of the run.
        task: Of the run spec.
        library: What loads the result.
        is_adapter: Whether it is an adapter for its base.
        base: Name or source of the base.
        data: `data.name` of the run spec.
        metrics: Of the saved state.
    """
    base, data = hub_name(base), hub_name(data)
    pipeline = _PIPELINES.get(task)
    head: dict[str, Any] = {"library_name": library}
    if pipeline is not None:
        head["pipeline_tag"] = pipeline
    head["tags"] = ["samestep", *(["lora"] * is_adapter)]
    if base is not None:
        head["base_model"] = base
        head["base_model_relation"] = "adapter" if is_adapter else "finetune"
    if data is not None:
        head["datasets"] = [data]
    found = [*_results(metrics)]
    if found:
        head["metrics"] = sorted({each["type"] for each in found})
    if found and pipeline is not None:
        result = {
            "task": {"type": pipeline},
            "dataset": {"type": data or "custom", "name": data or "held-out samples"},
            "metrics": found,
        }
        head["model-index"] = [{"name": name, "results": [result]}]
    return head


def _results(metrics: Mapping[str, float | None]) -> Iterator[dict[str, Any]]:
    for name, value in metrics.items():
        if name in _METRICS and value is not None and math.isfinite(value):
            yield {"type": _METRICS[name], "name": name, "value": value}
