"""The sections `checkpoint` and `stop` of a run spec."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocol.base.fields import Count, CountOrZero
from protocol.spec.sections.section import Needs, OmittedByDefault, Section

Better = Literal["higher", "lower"]


class CheckpointSpec(Section):
    """When the whole state is saved, and which checkpoints are kept.

    The newest intact checkpoint is always kept, and if `metric` is set also the best checkpoint.
    """

    every: CountOrZero = Field(
        50, description="steps between checkpoints; 0: only at the start and the end"
    )
    keep_last: Count = Field(2, description="number of newest checkpoints to keep")
    metric: str | None = Field(
        None,
        description="an evaluation metric; the best checkpoint is kept too, and saved at the end "
        "as `best`; default: stop.figure",
    )
    better: Annotated[Better, Needs("metric")] = Field(
        "higher", description="whether a higher or a lower value of the metric is better"
    )
    keep_log: bool = Field(
        default=False,
        description="keep the first state and the gradients of every step, so that an audit can "
        "replay the whole run",
    )
    copies: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        max_length=8,
        description="directories (with a / in them) on other disks or machines that receive a "
        "copy of each checkpoint; continue from one with --resume --from",
    )


class CaptureCheckpoints(CheckpointSpec, lacks={"metric", "better", "copies"}):
    """Checkpoints of a run that trains nothing."""


class StopSpec(Section):
    """Early stopping, once an evaluation metric no longer improves.

    The best state is kept, and saved beside the last state in the directory `best`.
    """

    figure: str = Field(description="an evaluation metric, such as loss_per_token")
    better: Better = Field(
        "lower", description="whether a higher or a lower value of the metric is better"
    )
    patience: Count = Field(3, description="evaluations without improvement before the run stops")
    min_delta: float = Field(0.0, ge=0, description="smallest change that counts as improvement")
    baseline: Annotated[Literal["counted", "best"], OmittedByDefault()] = Field(
        "counted",
        description="what min_delta is measured from: the last value that counted as improvement, "
        "or the best value so far, as in transformers",
    )
