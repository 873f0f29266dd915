"""The sections of a run spec that belong to a single task, and the section `batch`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from protocol.base import limits
from protocol.base.fields import BoundedInt, Count, Fraction
from protocol.spec.sections.section import Needs, Section

Unit = Literal["sample", "microbatch"]
Temperature = Annotated[float, Field(ge=0.01, le=100.0)]


class CaptureSpec(Section):
    """Part of a teacher's next-token distribution that task teacher-logits captures.

    Logits are stored in float16 relative to the largest logit of the row, so that likely tokens
    have the highest precision.
    """

    drawn: Annotated[int, Field(ge=1, le=limits.ROW_LOGITS_ELEMENTS)] | None = Field(
        None,
        description="number of tokens to draw from the distribution, instead of the largest logits",
    )
    top_k: Annotated[int, Needs("drawn", (None,))] = Field(
        64, ge=1, le=limits.ROW_LOGITS_ELEMENTS, description="number of largest logits to keep"
    )
    temperature: Temperature = Field(
        1.0, description="temperature that a student may use besides 1, and that of the draws"
    )


class DistilSpec(Section):
    """Loss of task distil per token: alpha T^2 KL(teacher || student) + (1 - alpha) cross-entropy.

    The divergence is computed at temperature T (Hinton et al. 2015, arXiv:1503.02531). All tokens
    that are not in the capture count together as one more outcome.
    """

    alpha: float = Field(0.5, ge=0.0, le=1.0, description="weight of the divergence")
    temperature: Annotated[Temperature, Needs("alpha")] = Field(
        1.0, description="T: 1, or the temperature of the capture"
    )


class DpoSpec(Section):
    """Loss of task dpo per pair: -log sigmoid(beta (m(chosen) - m(rejected))).

    m is the log-probability ratio of an answer under the model and under the base without the
    adapter (Rafailov et al. 2023, arXiv:2305.18290).
    """

    beta: float = Field(
        0.1, gt=0.0, le=100.0, description="larger values keep the model closer to the base"
    )


Pooling = Literal["mean", "cls", "last"]


class EmbedSpec(Section):
    """Loss of task embed per pair: cross-entropy of its passage among all passages of the step.

    Scores are dot products divided by the temperature (InfoNCE, van den Oord et al. 2018,
    arXiv:1807.03748; MultipleNegativesRankingLoss in sentence-transformers). Passages that equal
    the pair's passage, or belong to an equal anchor, are left out.
    """

    pooling: Pooling = Field(
        "mean",
        description="a text's embedding: mean of its tokens' last states, state of the first "
        "token, or state of the last token (decoder models)",
    )
    normalize: bool = Field(
        default=True, description="scale embeddings to length 1: scores are cosines"
    )
    temperature: Temperature = Field(
        0.05, description="divides the scores; 0.05 is a scale of 20 in sentence-transformers"
    )
    learn_temperature: bool = Field(
        default=False, description="train the temperature, from embed.temperature down to 0.01"
    )
    symmetric: bool = Field(
        default=False,
        description="also score all anchors for each positive; the loss is the mean of both",
    )


class RegressSpec(Section):
    """Linear regression on generated data: y = x w + b, plus noise."""

    samples: Count = Field(1024, description="number of samples to generate")
    features: Count = Field(8, description="length of x")
    noise: float = Field(0.0, ge=0.0, description="standard deviation of the noise")


class DigitsSpec(Section):
    """A multi-layer perceptron on scikit-learn's 8 x 8 digits; each hidden layer is a block."""

    hidden: tuple[Count, ...] = Field(
        (64, 64, 64, 64), min_length=1, description="width of each hidden layer"
    )
    holdout: Fraction = Field(0.2, description="share of samples held out for evaluation")
    dropout: Fraction = Field(0.0, description="share of inputs dropped in training")


class ScriptedSpec(Section):
    """Gradients computed from (seed, step, microbatch) without a model, for benchmarks."""

    blocks: Count = Field(4, description="number of blocks")
    block_bytes: BoundedInt = Field(262_144, ge=4, description="size of each block")
    samples: Count = Field(4096, description="number of training samples")


class BatchSpec(Section):
    """Samples per step and per microbatch, the unit that a worker computes at once."""

    samples: Count = Field(48, description="samples per step, whatever the number of workers")
    microbatch: Count = Field(2, description="samples per microbatch")
    tokens: Count | None = Field(
        None,
        description="causal-lm: tokens per step instead of samples, a multiple of data.max_tokens",
    )
    unit: Unit = Field(
        "sample",
        description="what a loss may depend on: one sample, so that losses add up over samples; or "
        "the whole microbatch (user-defined tasks and scripts), whose loss is then a mean",
    )

    @model_serializer(mode="wrap")
    def _omit_default_unit(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the default unit, so that the digest is the same as in earlier releases."""
        document: dict[str, Any] = dump(self)
        if self.unit == "sample":
            document.pop("unit", None)
        return document

    @model_validator(mode="after")
    def _check_microbatches(self) -> Self:
        if self.microbatch > self.samples:
            raise ValueError(
                f"expected microbatch <= samples, got {self.microbatch} > {self.samples}"
            )
        if -(-self.samples // self.microbatch) > limits.MICROBATCHES_PER_STEP:
            raise ValueError(
                f"expected at most {limits.MICROBATCHES_PER_STEP} microbatches per step, got "
                f"{-(-self.samples // self.microbatch)}; raise batch.microbatch or lower "
                "batch.samples"
            )
        return self
