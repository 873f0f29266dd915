"""Create the front matter of a model card, which model hubs read.

Format: https://huggingface.co/docs/hub/model-cards.

A hub refuses a card that refers to unknown models or data sets. So the card names the base model
(`model.name` or `model.source`) and the data set (`data.name`) only if the name can be a hub's.
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
"""Names of samestep's metrics on a hub."""


def hub_name(name: str | None) -> str | None:
    """Return the name if it could be a hub's and is not a path on this machine, else None."""
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
    """Return the front matter of a model card.

    Args:
        name: Name of the run.
        task: Task of the run spec.
        library: Library that loads the result, such as `peft`.
        is_adapter: Whether the result is an adapter for its base.
        base: Name or source of the base model.
        data: `data.name` of the run spec.
        metrics: Evaluation metrics of the saved state.
    """
    base, data = hub_name(base), hub_name(data)
    pipeline = _PIPELINES.get(task)
    front_matter: dict[str, Any] = {"library_name": library}
    if pipeline is not None:
        front_matter["pipeline_tag"] = pipeline
    front_matter["tags"] = ["samestep", *(["lora"] * is_adapter)]
    if base is not None:
        front_matter["base_model"] = base
        front_matter["base_model_relation"] = "adapter" if is_adapter else "finetune"
    if data is not None:
        front_matter["datasets"] = [data]
    results = [*_results(metrics)]
    if results:
        front_matter["metrics"] = sorted({entry["type"] for entry in results})
    if results and pipeline is not None:
        result = {
            "task": {"type": pipeline},
            "dataset": {"type": data or "custom", "name": data or "held-out samples"},
            "metrics": results,
        }
        front_matter["model-index"] = [{"name": name, "results": [result]}]
    return front_matter


def _results(metrics: Mapping[str, float | None]) -> Iterator[dict[str, Any]]:
    for name, value in metrics.items():
        if name in _METRICS and value is not None and math.isfinite(value):
            yield {"type": _METRICS[name], "name": name, "value": value}
