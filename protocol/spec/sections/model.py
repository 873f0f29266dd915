"""The sections `model`, `tokenizer`, `lora` and `arithmetic` of a run spec."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from protocol.base import limits
from protocol.base.fields import Count, Document, Fraction, sort_keys
from protocol.spec.sections.section import RESTORED, KeyFault, Needs, OmittedByDefault, Section

ComputePrecision = Literal["float32", "bfloat16", "float16"]


def _supported_dtype(name: Any) -> Any:
    lowercase = str(name).lower()
    if re.fullmatch(r"i?q\d_.*|(mx|nv)?fp[48].*", lowercase) and lowercase not in {"q8_0", "q4_0"}:
        raise ValueError(
            f"{name} is not supported: its scales have scales or offsets of their own; use float32 "
            "to keep the file's values, or q8_0, q4_0, nf4, int8 or int4 to round them again"
        )
    return name


BaseDtype = Annotated[
    Literal["float32", "bfloat16", "float16", "int8", "int4", "nf4", "q8_0", "q4_0"],
    BeforeValidator(_supported_dtype),
]


AddedText = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S")]


class ModelSpec(Section):
    """The model, loaded from `source` or initialized from `config`, and how it computes.

    Weights, gradients and sums are always float32. With `precision: bfloat16`, matrix products and
    attention compute in bfloat16 (torch's autocast); `float16` is for cards without bfloat16. With
    float16 the loss is multiplied by a scale and gradients are divided by it; a step whose
    gradients overflow is repeated with half the scale, so no batch is lost.
    """

    source: str | None = Field(
        None, description="a directory, `package:DISTRIBUTION`, or a hub name"
    )
    name: str | None = Field(
        None,
        max_length=400,
        description="with lora: the base model's name in the adapter's config; default: the source",
    )
    adapter: str | None = Field(
        None,
        description="with lora: directory of an adapter in PEFT's layout to continue from",
    )
    config: Document | None = Field(
        None, description="a Hugging Face configuration with its model_type, to train from scratch"
    )
    dtype: Literal["float32"] = Field("float32", description="type of weights, gradients and sums")
    base_dtype: BaseDtype = Field(
        "float32",
        description="with lora: storage type of the frozen layers' weights; int8, int4 and nf4 "
        "have one scale for every 64 values of a row (or the largest smaller power of two that "
        "divides the row), GGUF's q8_0 and q4_0 for every 32. Every worker stores and computes "
        "with the same rounded weights",
    )
    precision: ComputePrecision = Field(
        "float32", description="type in which forward and backward may compute"
    )
    loss_scale: Annotated[float, Needs("precision", ("float16",))] = Field(
        65_536.0,
        ge=1.0,
        le=limits.LOSS_SCALE_FACTOR,
        description="float16: initial loss scale, a power of two",
    )
    loss_scale_every: Annotated[Count, Needs("precision", ("float16",))] = Field(
        2_000, description="float16: steps after which the loss scale doubles"
    )
    added_tokens: Annotated[tuple[AddedText, ...], Field(max_length=4_096), OmittedByDefault()] = (
        Field(
            (),
            description="texts to add as tokens, such as marks of a chat template; with lora, only "
            "their rows of the embeddings and the head are trained, in addition to LoRA's matrices",
        )
    )
    attention: Literal["eager", "sdpa"] = Field("eager", description="implementation of attention")
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in backward, to save memory"
    )

    @model_validator(mode="after")
    def _check_origin_and_loss_scale(self, info: ValidationInfo) -> Self:
        if info.context == RESTORED:
            return self
        if (self.source is None) == (self.config is None):
            raise ValueError("expected either a source to load from or a config to initialize from")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("expected a model_type in config, such as llama")
        if len({*self.added_tokens}) < len(self.added_tokens):
            raise KeyFault("expected each token once, got one twice", "added_tokens")
        if math.frexp(self.loss_scale)[0] != 0.5:
            raise KeyFault(f"expected a power of two, got {self.loss_scale:g}", "loss_scale")
        return self


class PretrainedModel(ModelSpec, lacks={"config"}):
    """A model that is loaded, never initialized."""

    source: str = Field(description="a directory, `package:DISTRIBUTION`, or a hub name")


class StudentModel(ModelSpec, lacks={"added_tokens"}):
    """A model that learns from captured logits of the teacher's tokens."""


class TeacherModel(ModelSpec, lacks={"adapter", "gradient_checkpointing", "added_tokens"}):
    """A model that is evaluated and not trained."""


class TokenizerSpec(Section):
    """The tokenizer: loaded from `source`, or a byte-level BPE trained on the training text.

    Without this section, the model's tokenizer is used; for a model initialized from a config, a
    tokenizer is trained.
    """

    source: str | None = Field(
        None, description="a directory, `package:DISTRIBUTION`, or a hub name"
    )
    vocab_size: Annotated[int, Needs("source", (None,))] = Field(
        2048, ge=257, le=1_000_000, description="vocabulary size of a tokenizer that is trained"
    )


_RARE_KEYS: Final = (
    "rslora", "dora", "target_parameters", "modules_to_save", "rank_pattern", "alpha_pattern",
)  # fmt: skip


class LoraSpec(Section):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685).

    Tasks classify and dpo use LoRA by default; `lora: null` trains the whole model. Task causal-lm
    uses it only if the section is present.
    """

    r: Count = Field(8, description="rank of the matrices")
    alpha: float = Field(16.0, gt=0, description="scale: the update is multiplied by alpha / r")
    rslora: bool = Field(
        default=False, description="multiply by alpha / sqrt(r) instead (Kalajdzievski 2023)"
    )
    dora: bool = Field(
        default=False, description="train magnitude and direction separately (Liu et al. 2024)"
    )
    dropout: Fraction = Field(0.0, description="share of inputs dropped in training")
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None,
        description="names of layers, embeddings and the head included, or all-linear: all linear "
        "layers but the head; default: the query and value projections of attention",
    )
    target_parameters: tuple[str, ...] = Field(
        (),
        description="names of weights that are not layers, such as a mixture's "
        "mlp.experts.gate_up_proj",
    )
    modules_to_save: tuple[str, ...] = Field(
        (), description="names of modules that are trained in full, in addition to the matrices"
    )
    rank_pattern: Annotated[dict[str, Count], AfterValidator(sort_keys)] = Field(
        {}, description="another rank for layers whose names end with a key"
    )
    alpha_pattern: Annotated[dict[str, PositiveFloat], AfterValidator(sort_keys)] = Field(
        {}, description="another alpha for layers whose names end with a key"
    )

    @model_serializer(mode="wrap")
    def _omit_idle_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unused rare keys, so that digests are the same as in earlier releases."""
        document: dict[str, Any] = dump(self)
        return {key: value for key, value in document.items() if value or key not in _RARE_KEYS}

    @model_validator(mode="after")
    def _refuse_dropout_of_parameters(self) -> Self:
        if self.target_parameters and self.dropout:
            raise KeyFault(
                "lora.target_parameters are adapted without dropout: remove lora.dropout",
                "dropout",
                "target_parameters",
            )
        return self


class ArithmeticSpec(Section):
    """Arithmetic of gradients: each device's own, or one convention for all.

    Canonical arithmetic gives the same bits on any CPU with any number of threads, and on every
    Vulkan device that follows the convention. The convention fixes the choices in which devices
    differ; `worker devices` shows which one a device follows.
    """

    mode: Literal["native", "canonical"] = Field(
        "native", description="native: each device's own; canonical: equal bits on all devices"
    )
    multiply_add: Annotated[Literal["fused", "separate"], Needs("mode", ("canonical",))] = Field(
        "fused", description="canonical: round a multiply-add once (fused) or twice (separate)"
    )
    subnormals: Annotated[Literal["kept", "flushed"], Needs("mode", ("canonical",))] = Field(
        "kept", description="canonical: keep numbers below 2^-126, or flush them to zero"
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_the_mode_alone(cls, document: Any) -> Any:
        """Read `arithmetic: canonical` as `arithmetic: {mode: canonical}`."""
        return {"mode": document} if isinstance(document, str) else document

    @property
    def is_canonical(self) -> bool:
        """Whether all devices give the same bits."""
        return self.mode == "canonical"

    def __str__(self) -> str:
        if not self.is_canonical:
            return "native"
        return f"canonical, {self.multiply_add}, subnormals {self.subnormals}"
