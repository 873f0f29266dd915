"""Uses what a run has trained: `worker classify DIRECTORY TEXT...`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.base.errors import DataError
from protocol.spec import sources


@dataclass(frozen=True, slots=True)
class Prediction:
    """The likeliest label of a text, and its probability."""

    text: str
    label: str
    probability: float


def classify(directory: Path, texts: Sequence[str]) -> Iterator[Prediction]:
    """Classify texts with the result of a `classify` run.

    Args:
        directory: Where the run left its adapter or model.
        texts: Each is classified by itself.

    Raises:
        DataError: The directory holds no such result, or its base model is not there.
    """
    labels = _labels(directory)
    # Seconds of imports; the errors above come at once.
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    from worker.models.pretrained import quiet  # noqa: PLC0415

    quiet()
    base = _base_model(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=len(labels), ignore_mismatched_sizes=True
        )
        if (directory / "adapter_config.json").exists():
            from peft import PeftModel  # noqa: PLC0415

            model = PeftModel.from_pretrained(model, str(directory))
    except (OSError, ValueError) as error:
        line = " ".join(str(error).split())[:300]
        raise DataError(f"cannot load the model in {str(directory)!r}: {line}") from None
    model.eval()
    for text in texts:
        with torch.no_grad():
            logits = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0]
        probabilities = torch.softmax(logits, dim=0)
        best = int(probabilities.argmax())
        yield Prediction(text, labels[best], float(probabilities[best]))


def _labels(directory: Path) -> list[str]:
    path = directory / "labels.json"
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"expected the result of a classify run in {str(directory)!r}, found no labels.json"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise DataError(f"expected a list of labels in {str(path)!r}")
    return labels


def _base_model(directory: Path) -> str:
    """The base model's source: the adapter says which; a whole model is its own."""
    adapter = directory / "adapter_config.json"
    if not adapter.exists():
        return str(directory)
    source = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path", "")
    return sources.model_source(str(source))
