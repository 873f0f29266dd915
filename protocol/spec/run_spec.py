"""The run spec: one training job as a document (YAML), validated before anything starts.

Source of truth for every key; `run_spec_schema` gives it as JSON schema. Unknown keys are errors
that name the nearest known one.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import yaml
from blake3 import blake3
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from protocol.base import limits
from protocol.base.errors import MessageError, RunSpecError
from protocol.base.fields import Bounded
from protocol.spec.arithmetic_spec import ArithmeticSpec
from protocol.spec.blob_list import Role
from protocol.spec.idle_keys import (
    CONVERSATION_KEYS,
    KEYS_OF_DATA,
    OWN_SECTIONS,
    TASK_SECTIONS,
    TEXT_KEYS,
    idle_keys,
)
from protocol.spec.init_from import begin_from
from protocol.spec.replicas_spec import Codecs, ReplicasSpec
from protocol.spec.run_spec_text import (
    NAME_PATTERN,
    KeyFault,
    apply_override,
    explain,
    few,
    read_yaml,
    yaml_fault,
)

LOGITS_SUFFIX: Final = ".parquet"
"""Of files of captured logits."""

_KINDS: Final = {list: "list", str: "text", int: "number", float: "number", bool: "truth value"}
_OWN_TASK: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"


_IDLE_IN_CAPTURES: Final = (
    "optimizer", "exchange", "evaluate_every", "checkpoint.metric", "model.gradient_checkpointing",
)  # fmt: skip
"""Of training and measuring alone."""

COLUMNS_OF_FORMAT: Final[dict[str, tuple[str, ...]]] = {
    "text": (),
    "messages": ("messages", "system"),
    "prompt-completion": ("prompt", "completion", "system"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
}
"""What a row of each `data.format` has, by the keys of `data.columns`."""
PREFERENCE_COLUMNS: Final = ("prompt", "chosen", "rejected", "system")
"""Likewise of task dpo."""
OPTIONAL_COLUMNS: Final = frozenset({"input", "system", "history"})
"""Those that a row need not have."""


def _known_task(task: str) -> str:
    if task in TASK_SECTIONS or re.fullmatch(_OWN_TASK, task):
        return task
    near = difflib.get_close_matches(task, TASK_SECTIONS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"expected one of {', '.join(TASK_SECTIONS)}, or package.module:Class of your own{hint}"
    )


def _sorted(value: Any) -> Any:
    """Free-form documents by key, so that the order of keys changes no digest.

    A number that is not finite is refused: JSON has none, and workers would be told null.
    """
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected finite numbers")
    return [_sorted(inner) for inner in value] if isinstance(value, list) else value


_INEXACT_OPTIMIZERS: Final = {
    "muon": "it orthogonalises whole matrices by matrix products, whose bits are each device's own",
    "adafactor": "it divides by sums over whole rows and columns, and the exact update works "
    "element by element",
    "8bit": "its rounded state is that of one library's kernels on one kind of card",
}
"""What people ask for, and why its bits cannot be the same on every replica."""


def _exact_optimizer(name: Any) -> Any:
    plain = str(name).lower().replace("-", "").replace("_", "")
    for part, reason in _INEXACT_OPTIMIZERS.items():
        if part in plain:
            raise ValueError(f"{name} is not offered: {reason}; take adamw, lion or schedule-free")
    return name


def _offered_form(name: Any) -> Any:
    asked = str(name).lower()
    if re.fullmatch(r"i?q\d_.*|(mx|nv)?fp[48].*", asked) and asked not in {"q8_0", "q4_0"}:
        raise ValueError(
            f"{name} is not offered: its scales have scales or offsets of their own; take float32 "
            "for just the file's values, or q8_0, q4_0, nf4, int8 or int4, which rounds them again"
        )
    return name


TaskName = Annotated[
    str,
    AfterValidator(_known_task),
    WithJsonSchema({"anyOf": [{"enum": [*TASK_SECTIONS]}, {"pattern": f"^{_OWN_TASK}$"}]}),
]
Document = Annotated[dict[str, Any], AfterValidator(_sorted)]
Precision = Literal["float32", "bfloat16"]
Way = Literal["auto", "star", "sharded"]
ComputePrecision = Literal["float32", "bfloat16", "float16"]
OptimizerName = Annotated[
    Literal["sgd", "momentum", "nesterov", "adamw", "lion", "schedule-free"],
    BeforeValidator(_exact_optimizer),
]
BaseDtype = Annotated[
    Literal["float32", "bfloat16", "float16", "int8", "int4", "nf4", "q8_0", "q4_0"],
    BeforeValidator(_offered_form),
]
Exactness = Literal["require", "prefer"]
ScheduleName = Literal["constant", "linear", "cosine", "wsd"]
DecayName = Literal["linear", "cosine", "1-sqrt"]
LogMode = Literal["full", "checkpoint"]

Count = Annotated[Bounded, Field(ge=1)]
Every = Annotated[Bounded, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Weight = Annotated[float, Field(gt=0.0, le=1e6)]
DataFormat = Literal["text", "messages", "prompt-completion", "alpaca"]
CountedTokens = Literal["assistant", "all"]
ColumnOf = Literal[
    "messages",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "chosen",
    "rejected",
]
ClassWeights = Literal["balanced"] | Annotated[dict[str, Weight], AfterValidator(_sorted)]


_ALREADY_VALIDATED: Final = object()
"""Validation context: check types and bounds only, not which keys go with which."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(_Section):
    """The model, loaded from `source` or started anew from `config`, and how it computes.

    Weights, gradients and sums are float32 always; `precision: bfloat16` lets matrix products
    and attention compute in bfloat16 (torch's autocast), float16 in float16: for cards without
    bfloat16. There the loss is multiplied by a scale, and gradients divided by it again; a step
    whose gradients overflow is done again with half of it, so no batch is lost.
    """

    source: str | None = Field(None, description="a directory, `package:DISTRIBUTION`, a hub name")
    name: str | None = Field(
        None, max_length=400, description="what an adapter says is its base; default: the source"
    )
    adapter: str | None = Field(
        None, description="with lora: the directory of an adapter (PEFT's layout) to go on with"
    )
    config: Document | None = Field(
        None, description="a Hugging Face configuration with its model_type, to train from scratch"
    )
    dtype: Literal["float32"] = Field("float32", description="of weights, gradients and sums")
    base_dtype: BaseDtype = Field(
        "float32",
        description="with lora: what the frozen layers' weights are stored in; int8, int4 and nf4 "
        "have a scale for each 64 of a row (or the largest power of two below that divides it), "
        "GGUF's q8_0 and q4_0 for each 32. Every worker computes with the same rounded weights, "
        "and keeps them in so few bits",
    )
    precision: ComputePrecision = Field("float32", description="what forward may compute in")
    loss_scale: float = Field(
        65_536.0,
        ge=1.0,
        le=limits.LOSS_SCALE_FACTOR,
        description="of float16, at first: a power of two",
    )
    loss_scale_every: Count = Field(
        2_000, description="of float16: steps after each of which the scale is doubled"
    )
    attention: Literal["eager", "sdpa"] = Field("eager", description="how it is computed")
    gradient_checkpointing: bool = Field(
        default=False, description="compute activations again in backward: less memory"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSpec:
        if (self.source is None) == (self.config is None):
            raise ValueError("expected either a source (to load) or a config (to start anew)")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("expected a model_type in config, such as llama")
        if math.frexp(self.loss_scale)[0] != 0.5:
            raise ValueError(f"expected loss_scale to be a power of two, got {self.loss_scale:g}")
        return self


class TokenizerSpec(_Section):
    """Of causal-lm: loaded from `source`, or a byte-level BPE trained on the training text.

    Without this section it is the model's own; a model started from its config trains one.
    """

    source: str | None = Field(None, description="a directory, `package:DISTRIBUTION`, a hub name")
    vocab_size: int = Field(2048, ge=257, le=1_000_000, description="of one that is trained")


class LoraSpec(_Section):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685).

    A document of task classify or dpo that does not say has this section with its defaults, on the
    command line and in a file alike; `lora: null` trains the whole model. For causal-lm it is
    used where the section is given.
    """

    r: Count = Field(8, description="rank of the matrices")
    alpha: float = Field(16.0, gt=0, description="scale: what is added is multiplied by alpha / r")
    dropout: Fraction = Field(0.0, description="share of inputs left out while training")
    targets: tuple[str, ...] | None = Field(
        None, min_length=1, description="names of layers; default: attention's queries and values"
    )


class DataSpec(_Section):
    """Text: labelled for classify; running text or conversations for causal-lm, teacher-logits."""

    train: str = Field(
        description="a file, `package:DISTRIBUTION`; for causal-lm also a directory or "
        "`python-stdlib`, the top-level modules of Python itself; for distil a capture's directory"
    )
    text: str = Field("text", description="column or key of the text")
    label: str = Field("label", description="column or key of the label")
    pattern: str = Field("*.txt", min_length=1, description="which files of a directory, at depth")
    holdout: Fraction = Field(0.2, description="the share of samples or documents held out")
    holdout_samples: Count | None = Field(
        None, description="measure at most so many held-out samples, drawn by the seed"
    )
    max_tokens: int = Field(
        64,
        ge=2,
        le=65_536,
        description="classify and conversations: longer ones are cut; running text: sample length",
    )
    num_classes: Bounded | None = Field(
        None, ge=2, description="checked against the data when given"
    )
    class_weights: ClassWeights | None = Field(
        None, description="classify: `balanced`, or a weight by label; those not named have 1"
    )
    conflicts: Literal["refuse", "keep_first"] = Field(
        "refuse",
        description="classify: a text that comes again with another label ends the run, or its "
        "first label counts",
    )
    format: DataFormat = Field(
        "text", description="of causal-lm and teacher-logits: running text, or a conversation a row"
    )
    columns: Annotated[dict[ColumnOf, str], AfterValidator(_sorted)] = Field(
        {}, description="of conversations: names of columns, where they are not the usual ones"
    )
    loss: CountedTokens = Field(
        "assistant", description="of conversations: which tokens are learned"
    )
    chat_template: str | None = Field(
        None, max_length=65_536, description="Jinja, instead of what the tokenizer brings along"
    )
    validation: str | None = Field(
        None,
        description="of causal-lm, classify, distil and dpo: what is measured on, instead of a "
        "share; named as train",
    )
    packing: bool = Field(
        default=False,
        description="of causal-lm: several documents or conversations in a sample of max_tokens; "
        "none attends to another, and positions begin anew with each",
    )
    group_by_length: bool = Field(
        default=False, description="of conversations: microbatches of like lengths, less padding"
    )


class CaptureSpec(_Section):
    """What task teacher-logits keeps of a teacher's distribution over the next token.

    In float16, less the largest of their row: so they have most digits where probability is.
    """

    top_k: int = Field(
        64, ge=1, le=limits.ROW_LOGITS_ELEMENTS, description="the so many largest logits"
    )
    drawn: Annotated[int, Field(ge=1, le=limits.ROW_LOGITS_ELEMENTS)] | None = Field(
        None, description="instead: the logits of so many tokens, drawn from the distribution"
    )
    temperature: float = Field(
        1.0, ge=0.01, le=100.0, description="that a student may use beside 1; draws are made at it"
    )


_DATA_KEYS: Final = frozenset(DataSpec.model_fields)


class DistilSpec(_Section):
    """Loss of task distil: alpha T^2 KL(teacher || student) + (1 - alpha) cross-entropy, by token.

    Both at temperature T in the divergence (Hinton et al. 2015, arXiv:1503.02531), where what the
    capture does not name is one more outcome.
    """

    alpha: float = Field(0.5, ge=0.0, le=1.0, description="share of the divergence")
    temperature: float = Field(1.0, ge=0.01, le=100.0, description="T: 1, or that of the capture")


class DpoSpec(_Section):
    """Loss of task dpo: of each pair -log sigmoid(beta (m(chosen) - m(rejected))).

    m is how much likelier an answer is, in its logarithm, than to the base without the adapter
    (Rafailov et al. 2023, arXiv:2305.18290).
    """

    beta: float = Field(0.1, gt=0.0, le=100.0, description="the higher, the nearer to the base")


class RegressSpec(_Section):
    """Linear regression on generated data: y = x w + b, plus noise of this deviation."""

    samples: Count = Field(1024, description="how many are generated")
    features: Count = Field(8, description="numbers in a sample")
    noise: float = Field(0.0, ge=0.0, description="standard deviation")


class DigitsSpec(_Section):
    """A multi-layer perceptron on scikit-learn's 8 x 8 digits; each hidden layer is a block."""

    hidden: tuple[Count, ...] = Field(
        (64, 64, 64, 64), min_length=1, description="width of each hidden layer"
    )
    holdout: Fraction = Field(0.2, description="the share of samples held out")
    dropout: Fraction = Field(0.0, description="share of inputs left out while training")


class ScriptedSpec(_Section):
    """No model: gradients that follow from (seed, step, microbatch), for measuring."""

    blocks: Count = Field(4, description="how many there are")
    block_bytes: Bounded = Field(262_144, ge=4, description="bytes of each")
    samples: Count = Field(4096, description="training samples")


class BatchSpec(_Section):
    """Samples per step, and per microbatch: the unit that a worker computes at once."""

    samples: Count = Field(48, description="samples of a step, whatever the number of workers")
    microbatch: Count = Field(2, description="samples that a worker computes at once")
    tokens: Count | None = Field(
        None,
        description="of causal-lm, instead of samples: tokens of a step, a multiple of "
        "data.max_tokens",
    )

    @model_validator(mode="after")
    def _bounded(self) -> BatchSpec:
        if self.microbatch > self.samples:
            raise ValueError(
                f"expected microbatch <= samples, got {self.microbatch} > {self.samples}"
            )
        if -(-self.samples // self.microbatch) > limits.MICROBATCHES_PER_STEP:
            raise ValueError(
                f"expected at most {limits.MICROBATCHES_PER_STEP} microbatches a step; "
                "raise batch.microbatch or lower batch.samples"
            )
        return self


class OptimizerSpec(_Section):
    """The exact update (`protocol.exact.update`); `no_decay` lists parts of tensor names.

    The bounds keep every scalar of an update within float32. What schedule-free trains is
    evaluated and saved as the average of its steps.
    """

    name: OptimizerName = Field("adamw", description="the update")
    lr: float = Field(1e-3, ge=1e-30, le=1e3, description="learning rate")
    momentum: Fraction = Field(0.9, description="of the updates momentum and nesterov")
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.999), description="of adamw, lion (there usually 0.9, 0.99) and schedule-free"
    )
    eps: float = Field(1e-8, ge=1e-30, le=1e3, description="of adamw and schedule-free")
    weight_decay: float = Field(
        0.0, ge=0, le=1e3, description="of adamw and lion, beside the gradient; else added to it"
    )
    no_decay: tuple[str, ...] = Field(
        ("bias", "norm"), description="parts of names of tensors that do not decay"
    )
    clip_norm: float | None = Field(
        None, gt=0, description="the gradient's norm is cut to it; default: never"
    )
    schedule: ScheduleName = Field("constant", description="of lr, after the warmup")
    warmup_steps: Every = Field(0, description="steps in which lr rises")
    warmup_from_zero: bool = Field(
        default=False, description="lr is 0 in the first step, as transformers has it"
    )
    min_lr_ratio: Fraction = Field(0.0, description="the share of lr that a schedule ends at")
    decay_ratio: float = Field(
        0.1, gt=0.0, le=1.0, description="of wsd: the share of all steps, at the end, in which lr "
        "falls; before them it stays"
    )  # fmt: skip
    decay: DecayName = Field("linear", description="of wsd: how it falls")

    @model_validator(mode="after")
    def _fitting(self) -> OptimizerSpec:
        if self.name == "schedule-free":
            if self.schedule != "constant":
                text = (
                    "optimizer schedule-free needs no schedule, only warmup_steps: leave out "
                    f"schedule {self.schedule}"
                )
                raise KeyFault(text, "optimizer.schedule")
            if not self.betas[0]:
                text = "optimizer schedule-free averages by betas[0]: expected it above 0"
                raise KeyFault(text, "optimizer.betas")
        return self


class ExchangeSpec(_Section):
    """How gradients travel, between coordinator and workers or among workers.

    In a star all go to the coordinator, which averages and sends to all. Sharded, each worker
    averages some slices of every block and sends them to all others: on many machines each link
    carries as much as in a ring. The bits are the same.

    bfloat16 halves their bytes. Rounding (to nearest, ties to even) is a part of the sum then:
    every microbatch's gradient and every sum of two nodes is rounded, so the bits are the same for
    any number of workers; they are others than those of float32.
    """

    precision: Precision = Field(
        "float32", description="of sums, from workers; bfloat16: rounded at every addition"
    )
    averages: Precision = Field(
        "float32", description="of averages, to workers, before norm, clipping and update"
    )
    way: Way = Field(
        "star",
        description="star: all by way of the coordinator; sharded: workers that reach each other "
        "average among themselves; auto: sharded where that is expected to be faster",
    )

    @model_validator(mode="before")
    @classmethod
    def _way_alone(cls, given: Any) -> Any:
        """`exchange: sharded` stands for its way."""
        return {"way": given} if isinstance(given, str) else given

    @property
    def codecs(self) -> Codecs:
        """Sums are rounded as they travel."""
        return Codecs(self.precision, self.averages, sums=self.precision)


class CheckpointSpec(_Section):
    """When the whole state is saved, and what of it is kept.

    The newest checkpoint that is whole is always kept, and the best one if `metric` says which.
    """

    every: Every = Field(50, description="steps; 0: at the start and the end only")
    keep_last: Count = Field(2, description="how many of the newest are kept")
    metric: str | None = Field(
        None,
        description="a held-out figure; the best is kept too, and saved at the end as `best`; "
        "default: stop.figure",
    )
    better: Literal["higher", "lower"] = Field("higher", description="which figure is the best")
    keep_log: bool = Field(
        default=False,
        description="keep the first state and the gradients of every step, so that an audit can "
        "replay them all",
    )
    copies: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        max_length=8,
        description="directories (with a / in them) on other disks or machines, and names of "
        "workers, that get a copy of each checkpoint; --resume --from goes on from one",
    )


class StopSpec(_Section):
    """Stop before all steps are done, once a held-out figure gets no better.

    The state with the best figure is kept and saved beside the last one, in the directory `best`.
    """

    figure: str = Field(description="a held-out figure, such as loss_per_token")
    better: Literal["higher", "lower"] = Field("lower", description="which figure is the best")
    patience: Count = Field(3, description="evaluations in a row without a better figure")
    min_delta: float = Field(0.0, ge=0, description="by how much a better one has to be better")


class RunSpec(_Section):
    """One training job.

    `task` is one of those that come along, or `package.module:Class` of the user's own, installed
    on every worker; `options` are for the latter alone.
    """

    name: str = Field("run", pattern=NAME_PATTERN, description="of runs and directories")
    task: TaskName = Field(
        description=f"{', '.join(TASK_SECTIONS)}, or package.module:Class of your own"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of every draw")
    exactness: Exactness = Field(
        "prefer", description="require: workers of another numeric signature are refused"
    )
    arithmetic: ArithmeticSpec = ArithmeticSpec()
    init_from: str | None = Field(
        None,
        description="a finished run, or a directory it left, to begin with: stands for "
        "model.source, and for an adapter for model.adapter and lora",
    )
    model: ModelSpec | None = None
    tokenizer: TokenizerSpec | None = None
    lora: LoraSpec | None = None
    data: DataSpec | None = None
    capture: CaptureSpec = CaptureSpec()
    distil: DistilSpec = DistilSpec()
    dpo: DpoSpec = DpoSpec()
    regress: RegressSpec = RegressSpec()
    digits: DigitsSpec = DigitsSpec()
    scripted: ScriptedSpec = ScriptedSpec()
    options: Document = Field({}, description="whatever a task of your own wants to know")
    batch: BatchSpec = BatchSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    exchange: ExchangeSpec = ExchangeSpec()
    replicas: ReplicasSpec | None = None
    steps: Count = Field(
        description="optimizer updates; with replicas: rounds; teacher-logits: at most so many "
        "batches, by default all"
    )
    epochs: Count | None = Field(
        None,
        description="instead of steps: passes over the training samples; the last step of each is "
        "smaller where they do not fill it, and no sample is left out",
    )
    evaluate_every: Every = Field(0, description="steps; 0: at the end only")
    log: LogMode = Field(
        "full",
        description="full: averaged gradients are kept since the last checkpoint, and a restart "
        "loses no committed step; checkpoint: they are not, which costs less for large states, "
        "and a restart does the steps since the last checkpoint again (with the same bits in an "
        "exact run)",
    )
    checkpoint: CheckpointSpec = CheckpointSpec()
    stop: StopSpec | None = None
    threads: int = Field(1, ge=1, le=256, description="CPU threads of each worker")
    double_check_every: Every = Field(
        256,
        description="steps, about; in one a node is computed by two workers, and their "
        "answers compared; 0: never",
    )

    @model_validator(mode="after")
    def _sections_fit_the_task(self, info: ValidationInfo) -> RunSpec:
        if info.context is _ALREADY_VALIDATED:
            return self
        if self.epochs is not None and self.known_steps is not None:
            text = "expected steps or epochs, got both: leave out one of them, or --set steps=null"
            raise KeyFault(text, "epochs", "steps")
        if self.epochs is not None and self.captures:
            text = "task teacher-logits takes each sample once: leave out epochs"
            raise KeyFault(text, "epochs")
        self._check_stop()
        self._check_tokens()
        self._check_alone()
        if self.task not in TASK_SECTIONS:
            return self
        for section in sorted(OWN_SECTIONS):
            fits = section in TASK_SECTIONS[self.task]
            if not fits and getattr(self, section) != type(self).model_fields[section].default:
                text = f"task {self.task} has no use for the section {section!r}"
                raise KeyFault(text, section)
        if "data" in TASK_SECTIONS[self.task]:
            self._check_text_task()
        return self

    @model_validator(mode="after")
    def _replicas_fit(self, info: ValidationInfo) -> RunSpec:
        if self.replicas is None or info.context is _ALREADY_VALIDATED:
            return self
        if self.captures:
            raise KeyFault("task teacher-logits trains nothing: leave out replicas", "replicas")
        if self.exchange != ExchangeSpec():
            text = (
                "replicas exchange differences: set replicas.codec and replicas.averages, and "
                "leave out exchange"
            )
            raise KeyFault(text, "exchange.precision", "exchange.averages", "exchange.way")
        if self.replicas.carries and self.optimizer.name == "sgd" and self.replicas.codec != "topk":
            text = "optimizer sgd has no moments to carry: leave out replicas.inner_state"
            raise KeyFault(text, "replicas.inner_state", "optimizer.name")
        if self.replicas.carries and self.checkpoint.copies:
            text = (
                "a copy of a checkpoint has no state of single replicas in it: leave out "
                "checkpoint.copies, or set replicas.inner_state=reset and a codec other than topk"
            )
            raise KeyFault(text, "checkpoint.copies", "replicas.inner_state", "replicas.codec")
        return self

    def _check_text_task(self) -> None:
        if self.captures:
            self._check_capture()
        if self.model is None or self.data is None:
            missing, key = (
                ("model", "model.source=DIR") if self.model is None else ("data", "data.train=FILE")
            )
            raise ValueError(f"task {self.task} needs the section {missing!r}: --set {key}")
        anew = self.model.config is not None
        if anew and self.task == "classify":
            text = "task classify needs model.source; it starts no model from a config"
            raise KeyFault(text, "model.config")
        if anew and self.lora is not None:
            text = "lora needs model.source: a model started from its config is trained whole"
            raise KeyFault(text, "lora", "model.config")
        if self.model.adapter is not None and (self.lora is None or self.captures):
            text = "model.adapter needs lora with its rank and scale: --set lora.r=8"
            if self.captures:
                text = "task teacher-logits trains nothing: merge the adapter, and give the model"
            raise KeyFault(text, "model.adapter")
        if self.model.base_dtype != "float32" and self.lora is None and not self.captures:
            text = (
                f"model.base_dtype {self.model.base_dtype} needs lora: a model that is trained "
                "whole has no frozen base"
            )
            raise KeyFault(text, "model.base_dtype")
        if self.model.base_dtype == "nf4" and self.arithmetic.is_canonical:
            text = "canonical arithmetic widens no nf4: take model.base_dtype int4, or native"
            raise KeyFault(text, "model.base_dtype", "arithmetic")
        if self.task == "classify" and self.data.text == self.data.label:
            text = f"expected two columns, got {self.data.text!r} for data.text and data.label"
            raise KeyFault(text, "data.text", "data.label")
        for key in sorted(_DATA_KEYS - KEYS_OF_DATA.get(self.task, _DATA_KEYS)):
            if getattr(self.data, key) != DataSpec.model_fields[key].default:
                text = f"task {self.task} has no use for data.{key}"
                if "class" in key:
                    text = f"data.{key} is for task classify; {self.task} has no classes"
                raise KeyFault(text, f"data.{key}")
        if self.task in KEYS_OF_DATA:
            self._check_samples(self.data)
        self._check_data_format(self.data)
        if self.task == "dpo":
            self._check_preferences(self.model, self.data)

    def _check_capture(self) -> None:
        if self.checkpoint.copies:
            text = (
                "a capture cannot go on from copies of its checkpoints, which have no logits in "
                "them: copy its directory 'logits' once it has finished, and leave out "
                "checkpoint.copies"
            )
            raise KeyFault(text, "checkpoint.copies")
        for key in _IDLE_IN_CAPTURES:
            section, _, name = key.rpartition(".")
            of = getattr(self, section) if section else self
            if of is not None and getattr(of, name) != type(of).model_fields[name].default:
                text = f"task teacher-logits trains nothing: leave out {key}"
                raise KeyFault(text, key)
        top_k = CaptureSpec.model_fields["top_k"].default
        if self.capture.drawn is not None and self.capture.top_k != top_k:
            text = "expected capture.top_k or capture.drawn, got both: leave out one of them"
            raise KeyFault(text, "capture.drawn", "capture.top_k")

    def _check_preferences(self, model: ModelSpec, data: DataSpec) -> None:
        if model.config is not None:
            text = "task dpo needs model.source: preferences refine a model that answers already"
            raise KeyFault(text, "model.config")
        if self.lora is None:
            text = (
                "task dpo needs lora: what is learned is measured against the base without its "
                "adapter"
            )
            raise KeyFault(text, "lora")
        self._check_columns(data, PREFERENCE_COLUMNS, "task dpo")

    def _check_data_format(self, data: DataSpec) -> None:
        if self.task not in KEYS_OF_DATA or "format" not in KEYS_OF_DATA[self.task]:
            return
        others = CONVERSATION_KEYS if data.format == "text" else TEXT_KEYS
        for key in sorted(others):
            if getattr(data, key) == DataSpec.model_fields[key].default:
                continue
            text = f"data.format {data.format} has no use for data.{key}"
            if data.format == "text":
                text = (
                    f"data.{key} is for conversations; say how they are written: "
                    "data.format=messages, prompt-completion or alpaca"
                )
            raise KeyFault(text, f"data.{key}")
        self._check_columns(data, COLUMNS_OF_FORMAT[data.format], f"data.format {data.format}")

    @staticmethod
    def _check_columns(data: DataSpec, columns: Sequence[str], whose: str) -> None:
        for key in data.columns:
            if key not in columns:
                text = f"{whose} has no column {key!r}; it has {', '.join(columns)}"
                raise KeyFault(text, "data.columns")
        given: Mapping[str, str] = dict(data.columns.items())
        names = [given.get(key, key) for key in columns]
        if len(set(names)) < len(names):
            text = f"expected columns of different names, got {', '.join(names)}"
            raise KeyFault(text, "data.columns")

    def _check_stop(self) -> None:
        if self.stop is None:
            return
        kept = (self.checkpoint.metric, self.checkpoint.better)
        if self.captures:
            raise KeyFault("task teacher-logits measures nothing: leave out stop", "stop")
        if not self.evaluate_every:
            text = "stop looks at evaluations: say how often there is one: --set evaluate_every=N"
            raise KeyFault(text, "stop", "evaluate_every")
        if kept != (self.stop.figure, self.stop.better):
            text = (
                "expected checkpoint.metric and checkpoint.better to be those of stop "
                f"({self.stop.figure}, {self.stop.better}), got {kept[0]}, {kept[1]}: leave them "
                "out"
            )
            raise KeyFault(text, "checkpoint.metric", "checkpoint.better")

    def _check_alone(self) -> None:
        """What replicas that take many steps alone do without."""
        if self.replicas is None:
            return
        for key, given in (
            ("epochs", self.epochs is not None),
            ("data.group_by_length", self.grouped),
            ("optimizer.name schedule-free", self.optimizer.name == "schedule-free"),
            (
                "model.precision float16",
                self.model is not None and self.model.precision == "float16",
            ),
        ):
            if given:
                text = f"replicas do without {key}: leave out one of them"
                raise KeyFault(text, key.split()[0], "replicas")

    def _check_tokens(self) -> None:
        tokens, data = self.batch.tokens, self.data
        if tokens is None:
            return
        text = ""
        if self.task != "causal-lm" or data is None:
            text = f"batch.tokens is for task causal-lm: give {self.task} batch.samples"
        elif data.format != "text" and not data.packing:
            text = (
                "conversations have unlike lengths, so batch.tokens says nothing of their number: "
                "pack them (--set data.packing=true), or give batch.samples"
            )
        elif tokens != self.batch.samples * data.max_tokens:
            lower = tokens // data.max_tokens * data.max_tokens
            near = " or ".join(str(n) for n in (lower, lower + data.max_tokens) if n)
            text = (
                f"expected batch.tokens to be a multiple of data.max_tokens, {data.max_tokens}, "
                f"got {tokens}: take {near}"
            )
        if text:
            raise KeyFault(text, "batch.tokens")

    def _check_samples(self, data: DataSpec) -> None:
        text, keys = "", ("data.validation", "data.holdout")
        if data.validation is not None and data.holdout != DataSpec.model_fields["holdout"].default:
            text = "expected data.validation or data.holdout, got both: leave out one of them"
        elif data.group_by_length and data.packing:
            text, keys = "packed samples are all full: leave out data.group_by_length", (
                "data.group_by_length", "data.packing",
            )  # fmt: skip
        elif data.group_by_length and data.format == "text":
            text = "samples of running text are all of one length: leave out data.group_by_length"
            keys = ("data.group_by_length", "data.format")
        if text:
            raise KeyFault(text, *keys)

    @property
    def known_steps(self) -> int | None:
        """None where the number of samples decides: of epochs, and a capture that does not say."""
        return known_steps(self.steps)

    def steps_with(self, train_samples: int) -> int:
        """How many steps the run has with so many training samples."""
        passes = 1 if self.captures else self.epochs
        if passes is None:
            return self.steps
        return min(self.steps, passes * -(-train_samples // self.batch.samples))

    def epochs_after(self, step: int, train_samples: int) -> str:
        """How far so many steps are, as `1.25 of 3 epochs`; empty if the run counts steps."""
        if self.epochs is None:
            return ""
        return f"{step / -(-train_samples // self.batch.samples):.3g} of {self.epochs} epochs"

    @property
    def grouped(self) -> bool:
        """Whether microbatches are of samples of like lengths."""
        return self.data is not None and self.data.group_by_length

    @property
    def update(self) -> OptimizerSpec:
        """The exact update that commits a step: the optimizer, or with replicas the outer one."""
        if self.replicas is None:
            return self.optimizer
        outer = self.replicas.outer
        name: OptimizerName = "nesterov" if outer.nesterov else "momentum"
        return OptimizerSpec(
            name=name if outer.momentum else "sgd", lr=outer.lr, momentum=outer.momentum
        )

    @property
    def step_samples(self) -> int:
        """Samples of a step; with replicas, of a round."""
        alone = self.replicas
        return self.batch.samples * (1 if alone is None else alone.count * alone.inner_steps)

    @property
    def codecs(self) -> Codecs:
        """How what is exchanged in a step travels, and how it is added."""
        return self.exchange.codecs if self.replicas is None else self.replicas.codecs

    @property
    def captures(self) -> bool:
        """Whether it trains nothing, and keeps what a teacher says."""
        return self.task == "teacher-logits"

    def to_bytes(self) -> bytes:
        """The canonical document that is sent to workers."""
        return self.model_dump_json().encode()

    def digest(self) -> str:
        """BLAKE3 of the canonical document."""
        return blake3(self.to_bytes()).hexdigest()


def known_steps(steps: int | None) -> int | None:
    """What a document says, unless it stands for all there is."""
    return None if steps == limits.COUNTED_SAMPLES else steps


def run_spec_schema() -> dict[str, Any]:
    """The run spec as JSON schema."""
    return RunSpec.model_json_schema()


def parse_run_spec_text(text: str, overrides: Sequence[str] = (), origin: str = "") -> RunSpec:
    """Validate a YAML text; see `run_spec_file.load_run_spec`."""
    if len(text) > limits.RUN_SPEC_BYTES:
        raise RunSpecError(f"expected at most {limits.RUN_SPEC_BYTES} bytes in {origin!r}")
    try:
        document = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RunSpecError(f"{origin!r} is not YAML: {yaml_fault(error)}") from None
    return parse_run_spec(document, overrides, origin=origin)


def parse_run_spec(document: object, overrides: Sequence[str] = (), origin: str = "") -> RunSpec:
    """Validate a document of plain dicts and lists; see `parse_run_spec_text`."""
    where = f" in {origin!r}" if origin else ""
    if not isinstance(document, Mapping):
        got = "nothing" if document is None else f"a lone {_KINDS.get(type(document), 'value')}"
        raise RunSpecError(
            f"expected keys and values{where}, got {got}; a run spec has at least task: and steps:"
        )
    try:
        merged: dict[str, Any] = json.loads(
            json.dumps(document, default=str, ensure_ascii=False).encode()
        )
    except (TypeError, ValueError, RecursionError):
        # Keys that are dates, values that hold themselves, half a character: YAML has them, JSON
        # has not.
        raise RunSpecError(f"expected plain keys and values{where}") from None
    for override in overrides:
        apply_override(merged, override)
    said = copy.deepcopy(merged)
    begin_from(merged)
    if merged.get("task") in ("classify", "dpo"):
        merged.setdefault("lora", {})
    if merged.get("steps", 0) is None:
        del merged["steps"]
    _count_samples_of_tokens(merged, where)
    stop, checkpoint = merged.get("stop"), merged.setdefault("checkpoint", {})
    if isinstance(stop, dict) and isinstance(checkpoint, dict):
        checkpoint.setdefault("metric", stop.get("figure"))
        checkpoint.setdefault("better", stop.get("better", "lower"))
    if merged.get("task") == "teacher-logits" or merged.get("epochs") is not None:
        merged.setdefault("steps", limits.COUNTED_SAMPLES)
    try:
        # Strict JSON mode: lists stand for tuples, yet "8" is not taken for 8.
        spec = RunSpec.model_validate_json(json.dumps(merged), strict=True)
        told = few(idle_keys(spec, said, overrides))
    except ValidationError as error:
        told = explain(RunSpec, error, overrides)
    if told:
        # What was set is not the file's mistake.
        raise RunSpecError(told if told.endswith(")") and "(from --set" in told else told + where)
    return spec


def _count_samples_of_tokens(document: dict[str, Any], where: str) -> None:
    """A batch that is given in tokens has as many samples as they fill."""
    batch, data = document.get("batch"), document.get("data")
    if not isinstance(batch, dict) or not isinstance(batch.get("tokens"), int):
        return
    length = data.get("max_tokens") if isinstance(data, dict) else None
    length = length if isinstance(length, int) else DataSpec.model_fields["max_tokens"].default
    samples = max(1, batch["tokens"] // max(1, length))
    # The canonical document says both.
    if batch.get("samples", samples) not in (None, samples):
        raise RunSpecError(
            f"expected batch.samples or batch.tokens, got both: leave out one of them{where}"
        )
    batch["samples"] = samples


def parse_run_spec_bytes(document: bytes) -> RunSpec:
    """Read the canonical document that `RunSpec.to_bytes` gives, from the network.

    Raises:
        MessageError: It is no run spec, perhaps of another release.
    """
    try:
        return RunSpec.model_validate_json(document)
    except ValidationError as error:
        raise MessageError(f"expected a run spec: {explain(RunSpec, error)}") from None


def restore_run_spec(document: bytes) -> RunSpec:
    """Rebuild a run spec that this machine validated before and `RunSpec.to_bytes` wrote.

    For another process of the same worker. There the sources are local paths already, so the rules
    about which keys go together hold for the user's document and not for this one.
    """
    return RunSpec.model_validate_json(document, context=_ALREADY_VALIDATED)


def source_of(spec: RunSpec, role: Role) -> str | None:
    """What the run spec says, in the user's words."""
    own = spec.task not in TASK_SECTIONS
    if role == "data":
        return spec.data.train if spec.data is not None else None
    if role == "validation":
        return spec.data.validation if spec.data is not None and not own else None
    if role == "adapter":
        return spec.model.adapter if spec.model is not None and not own else None
    if role == "model":
        return spec.model.source if spec.model is not None and not own else None
    return spec.tokenizer.source if spec.tokenizer is not None and not own else None


def is_fetched_later(spec: RunSpec, role: Role, name: str) -> bool:
    """Whether a worker fetches this file only when a step needs it."""
    return spec.task == "distil" and role == "data" and name.endswith(LOGITS_SUFFIX)
