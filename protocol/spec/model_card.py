"""The model card: a README beside a trained model, with the facts that its run recorded.

The front matter follows the format of model hubs (https://huggingface.co/docs/hub/model-cards),
with the run's facts under `samestep`; the body shows them as tables. The publisher adds the license
and the intended use, which the run does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.base.regular_file import read_regular
from protocol.spec.hub_metadata import hub_metadata
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.document import read_yaml
from protocol.spec.sections.model import BaseDtype

CARD: Final = "README.md"
_FENCE: Final = "---\n"
_KEY: Final = "samestep"


class EvaluationRecord(BaseModel):
    """Evaluation metrics after a number of steps; None for a value that is not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    figures: dict[str, float | None]


class CardFacts(BaseModel):
    """What a run recorded about itself.

    Attributes:
        run_id: The run's id.
        name: The name in the run spec.
        task: The task.
        release: The release of samestep that wrote the card.
        outcome: How the run ended.
        steps: Number of steps taken.
        train_samples: Number of training samples.
        data: Source of the training data in the run spec.
        data_name: Name of the data, such as a hub's.
        workers: Number of workers that took part.
        base: The name or source of the base model; None for a model trained from scratch.
        base_dtype: The type to which frozen weights were rounded.
        added_tokens: Tokens that the base does not have.
        adapter: Whether the result is a LoRA adapter.
        digests: Digests of the inputs; see `Manifest.digests`.
        weights_digest: Digest of the trained tensors.
        exact: Whether all workers computed with the same numerics profile.
        evaluations: Evaluation metrics, in order of steps.
        made: Sentences that describe changes to the result after the run, such as a merge.
        run_spec: The run spec; empty in cards of earlier releases.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    name: str
    task: str
    release: str
    outcome: str
    steps: int
    train_samples: int
    base: str | None
    base_dtype: BaseDtype
    added_tokens: tuple[str, ...] = ()
    adapter: bool
    digests: dict[str, str]
    weights_digest: str
    exact: bool
    evaluations: tuple[EvaluationRecord, ...]
    made: tuple[str, ...] = ()
    data: str | None = None
    data_name: str | None = None
    workers: int | None = None
    run_spec: dict[str, Any] = {}

    @staticmethod
    def of(
        spec: RunSpec,
        manifest: Manifest,
        result: Mapping[str, Any],
        release: str,
        evaluations: Sequence[EvaluationRecord],
    ) -> CardFacts:
        """Collect the facts of a run that has ended.

        Args:
            spec: The run spec.
            manifest: The run's manifest.
            result: The content of `result.json`.
            release: The release of samestep.
            evaluations: Evaluation metrics from the journal.
        """
        shown_names = {metric.name for metric in manifest.metrics if not metric.detail}
        model = spec.model
        return CardFacts(
            run_id=str(result["run_id"]),
            name=spec.name,
            task=spec.task,
            release=release,
            outcome=str(result["outcome"]),
            steps=int(result["steps"]),
            train_samples=manifest.train_samples,
            base=(model.name or model.source) if model is not None else None,
            base_dtype=model.base_dtype if model is not None else "float32",
            added_tokens=model.added_tokens if model is not None else (),
            adapter=spec.lora is not None,
            digests=manifest.digests,
            weights_digest=str(result["weights_digest"]),
            exact=bool(result["exact"]),
            evaluations=tuple(
                EvaluationRecord(
                    step=evaluation.step,
                    figures={k: v for k, v in evaluation.figures.items() if k in shown_names},
                )
                for evaluation in evaluations
            ),
            data=spec.data.train if spec.data is not None else None,
            data_name=spec.data.name if spec.data is not None else None,
            workers=len(result.get("workers") or ()) or None,
            run_spec=spec.model_dump(mode="json"),
        )

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The evaluation metrics of the last step; empty if it was not evaluated."""
        last = self.evaluations[-1] if self.evaluations else None
        return last.figures if last is not None and last.step == self.steps else {}


def card_text(facts: CardFacts) -> str:
    """Return the card's text."""
    front_matter = hub_metadata(
        name=facts.name,
        task=facts.task,
        library="peft" if facts.adapter else "transformers",
        is_adapter=facts.adapter,
        base=facts.base,
        data=facts.data_name,
        metrics=facts.metrics,
    )
    front_matter[_KEY] = facts.model_dump(mode="json")
    return f"{_FENCE}{_to_yaml(front_matter)}{_FENCE}\n" + "\n".join(_body_lines(facts)) + "\n"


def _to_yaml(document: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100))


def read_card(directory: Path) -> CardFacts | None:
    """Read the facts from a directory's model card; None if samestep has written none there."""
    try:
        text = read_regular(directory / CARD).decode("utf-8")
        _, front, _ = text.split(_FENCE, 2)
        return CardFacts.model_validate(read_yaml(front)[_KEY])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, ValidationError):
        return None


def _body_lines(facts: CardFacts) -> Iterator[str]:
    subject = "A LoRA adapter" if facts.adapter else "A model"
    yield f"# {facts.name}"
    yield ""
    yield (
        f"{subject}, trained with samestep. The run recorded everything below; add the model's "
        "intended use and limits before you publish it."
    )
    yield ""
    yield (
        "License: not stated. Add one that the licenses of the base model and of the data permit, "
        "as `license:` at the top of this file."
    )
    for sentence in facts.made:
        yield ""
        yield sentence
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in _fact_rows(facts):
        cell = str(value).replace("|", "\\|")
        yield f"| {name} | {cell} |"
    if facts.evaluations:
        yield ""
        yield "## Evaluation metrics"
        yield ""
        yield from _metrics_table(facts.evaluations)
    if facts.run_spec:
        yield ""
        yield "## Run spec"
        yield ""
        yield "```yaml"
        yield _to_yaml(facts.run_spec).rstrip()
        yield "```"


def _fact_rows(facts: CardFacts) -> Iterator[tuple[str, object]]:
    yield "run", f"`{facts.run_id}`"
    yield "task", facts.task
    yield "base model", "none: from scratch" if facts.base is None else f"`{facts.base}`"
    if facts.base_dtype != "float32":
        yield "base weights rounded to", facts.base_dtype
    yield "steps", f"{facts.steps} ({facts.outcome})"
    if facts.added_tokens:
        yield "added tokens", " ".join(f"`{token}`" for token in facts.added_tokens)
    if facts.data is not None:
        yield "data", f"`{facts.data_name or facts.data}`"
    yield "training samples", facts.train_samples
    for name, digest in facts.digests.items():
        yield f"BLAKE3 of {name.replace('_', ' ')}", f"`{digest}`"
    yield "BLAKE3 of the trained weights", f"`{facts.weights_digest}`"
    if facts.workers is not None:
        yield "workers", facts.workers
    yield (
        "exact",
        (
            "yes: every worker computed with the same bits"
            if facts.exact
            else "no: machines with different numerics profiles took part"
        ),
    )
    yield "software", f"samestep {facts.release}"


def _metrics_table(evaluations: Sequence[EvaluationRecord]) -> Iterator[str]:
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.figures))
    yield "| step | " + " | ".join(name.replace("_", " ") for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for evaluation in evaluations:
        figures = (_format_metric(evaluation.figures.get(name)) for name in names)
        yield f"| {evaluation.step} | " + " | ".join(figures) + " |"


def _format_metric(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.6g}"
