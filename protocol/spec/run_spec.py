"""The run spec: one training job as a YAML document, validated before anything starts.

This is the source of truth for every key. An unknown key is an error that names the most similar
key. Each task is a variant of `RunSpec` with its own sections.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

import yaml
from blake3 import blake3
from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, model_validator

from protocol.base import limits
from protocol.base.errors import MessageError, RunSpecError
from protocol.base.fields import Count, CountOrZero, Document
from protocol.base.regular_file import parse_json
from protocol.spec.earlier_run import apply_init_from
from protocol.spec.sections.checkpoint import CaptureCheckpoints, CheckpointSpec, StopSpec
from protocol.spec.sections.data import (
    LOGITS_SUFFIX,
    AnyTeacherText,
    AnyText,
    CapturedData,
    DataSpec,
    EmbeddingPairs,
    LabeledData,
    MaskedText,
    PreferencePairs,
    TaggedData,
    TextPairs,
    UserTaskData,
)
from protocol.spec.sections.document import (
    RENAMED_KEYS,
    apply_override,
    read_yaml,
    rename_keys,
    rename_override,
    yaml_fault,
)
from protocol.spec.sections.exchange import Codecs, ExchangeSpec, ReplicasSpec
from protocol.spec.sections.key_errors import NAME_PATTERN, explain
from protocol.spec.sections.model import (
    ArithmeticSpec,
    LoraSpec,
    ModelSpec,
    PretrainedModel,
    StudentModel,
    TeacherModel,
    TokenizerSpec,
)
from protocol.spec.sections.optimizer import Adamw, AnyOptimizer, OptimizerSpec
from protocol.spec.sections.section import (
    RESTORED,
    USER_DOCUMENT,
    KeyFault,
    Needs,
    OmittedByDefault,
    Section,
    TaggedUnion,
    drop_unsupported_keys,
)
from protocol.spec.sections.tasks import (
    BatchSpec,
    CaptureSpec,
    DigitsSpec,
    DistilSpec,
    DpoSpec,
    EmbedSpec,
    RegressSpec,
    ScriptedSpec,
)

Exactness = Literal["require", "prefer"]
LogMode = Literal["full", "checkpoint"]
Role = Literal["data", "validation", "model", "adapter", "tokenizer"]
"""The purpose for which a task reads a file."""

_EARLIER_RELEASE_SECTIONS: Final = frozenset({"regress", "digits", "scripted"})
"""Sections of three different tasks. Only an earlier release wrote documents with all of them."""
_TYPE_NAMES: Final = {
    type(None): "an empty document", list: "a list", str: "a text", int: "a number",
    float: "a number", bool: "a boolean",
}  # fmt: skip
_USER_TASK: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"


class RunSpec(Section):
    """One training job, with the sections of all tasks.

    `task` is a built-in task, or a class that the user has installed on every worker
    (`package.module:Class`). `options` are for such a class.
    """

    name: str = Field("run", pattern=NAME_PATTERN, description="name of the run and its directory")
    task: str = Field(description="a built-in task, or a class of your own")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of all random draws")
    data_seed: Annotated[int | None, OmittedByDefault()] = Field(
        None, ge=0, lt=2**63, description="seed of the order of samples; default: seed"
    )
    exactness: Exactness = Field(
        "prefer", description="require: workers with another numerics profile are refused"
    )
    arithmetic: ArithmeticSpec = ArithmeticSpec()
    init_from: str | None = Field(
        None,
        description="a finished run, or a directory that it wrote, to continue from: sets "
        "model.source, and for an adapter also model.adapter and lora",
    )
    model: ModelSpec | None = None
    tokenizer: TokenizerSpec | None = None
    lora: LoraSpec | None = None
    data: DataSpec | None = None
    capture: CaptureSpec = CaptureSpec()
    distil: DistilSpec = DistilSpec()
    dpo: DpoSpec = DpoSpec()
    embed: EmbedSpec = EmbedSpec()
    regress: RegressSpec = RegressSpec()
    digits: DigitsSpec = DigitsSpec()
    scripted: ScriptedSpec = ScriptedSpec()
    options: Document = Field({}, description="options of a task of your own")
    batch: BatchSpec = BatchSpec()
    optimizer: AnyOptimizer = Adamw()
    replicas: ReplicasSpec | None = None
    exchange: Annotated[
        ExchangeSpec,
        Needs("replicas", (None,), ", or set replicas.codec and replicas.averages instead"),
    ] = ExchangeSpec()
    steps: Count = Field(
        description="optimizer updates; with replicas: rounds; teacher-logits: maximum number of "
        "batches, all by default"
    )
    epochs: Count | None = Field(
        None,
        description="passes over the training samples, instead of steps; the last step of each may "
        "be smaller, and no sample is left out",
    )
    evaluate_every: CountOrZero = Field(
        0, description="steps between evaluations; 0: only at the end"
    )
    log: LogMode = Field(
        "full",
        description="full: log averaged gradients since the last checkpoint, so that a restart "
        "loses no committed step; checkpoint: log no gradients, which is cheaper for large states, "
        "but a restart repeats the steps since the last checkpoint (with the same bits in an exact "
        "run)",
    )
    checkpoint: CheckpointSpec = CheckpointSpec()
    stop: StopSpec | None = None
    threads: int = Field(1, ge=1, le=256, description="CPU threads of each worker")
    double_check_every: CountOrZero = Field(
        256,
        description="average number of steps between double checks, in which two workers compute "
        "the same subtree and their results are compared; 0: never",
    )

    @model_validator(mode="after")
    def _check_unless_restored(self, info: ValidationInfo) -> Self:
        if info.context != RESTORED:
            self._check()
        return self

    def _check(self) -> None:
        """Refuse keys of different sections that conflict; tasks add their own checks.

        Raises:
            KeyFault: Names the keys and what to do.
        """
        if self.epochs is not None and self.known_steps is not None:
            text = "expected steps or epochs, got both: remove one of them, or --set steps=null"
            raise KeyFault(text, "epochs", "steps")
        self._check_stop()
        self._check_plateau()
        self._check_unit()
        self._check_tokens()
        self._check_replicas()

    def _check_stop(self) -> None:
        if self.stop is None:
            return
        metric, better = self.checkpoint.metric, self.checkpoint.better
        if not self.evaluate_every:
            text = "expected evaluations for early stopping, got none: --set evaluate_every=N"
            raise KeyFault(text, "stop", "evaluate_every")
        if (metric, better) != (self.stop.figure, self.stop.better):
            text = (
                "expected checkpoint.metric and checkpoint.better as in stop "
                f"({self.stop.figure}, {self.stop.better}), got {metric}, {better}: remove them"
            )
            raise KeyFault(text, "checkpoint.metric", "checkpoint.better")

    def _check_plateau(self) -> None:
        if self.optimizer.plateau is not None and not self.evaluate_every:
            text = "expected evaluations for schedule plateau, got none: --set evaluate_every=N"
            raise KeyFault(text, "optimizer.plateau", "evaluate_every")

    def _check_unit(self) -> None:
        if self.batch.unit == "microbatch" and not self.is_user_task:
            text = f"the loss of task {self.task} is a sum over samples: remove batch.unit"
            raise KeyFault(text, "batch.unit")

    def _check_tokens(self) -> None:
        tokens, data = self.batch.tokens, self.data
        if tokens is None:
            return
        text = ""
        if self.task != "causal-lm" or data is None:
            text = f"task {self.task} does not support batch.tokens: set batch.samples"
        elif data.format != "text" and not data.packing:
            text = (
                "batch.tokens does not determine how many conversations are in a batch: pack them "
                "(--set data.packing=true), or set batch.samples"
            )
        elif tokens != self.batch.samples * data.max_tokens:
            lower = tokens // data.max_tokens * data.max_tokens
            multiples = " or ".join(str(n) for n in (lower, lower + data.max_tokens) if n)
            text = (
                f"expected batch.tokens to be a multiple of data.max_tokens, {data.max_tokens}, "
                f"got {tokens}: set it to {multiples}"
            )
        if text:
            raise KeyFault(text, "batch.tokens")

    def _check_replicas(self) -> None:
        replicas = self.replicas
        is_float16 = self.model is not None and self.model.precision == "float16"
        if replicas is None:
            return
        for key, is_set in (
            ("epochs", self.epochs is not None),
            ("data.group_by_length", self.groups_by_length),
            ("optimizer.name schedule-free", self.optimizer.name == "schedule-free"),
            ("optimizer.name adafactor", self.optimizer.name == "adafactor"),
            ("optimizer.schedule plateau", self.optimizer.schedule == "plateau"),
            ("model.precision float16", is_float16),
        ):
            if is_set:
                text = f"expected no {key} with replicas, got both: remove one of them"
                raise KeyFault(text, key.split()[0], "replicas")
        if replicas.has_carried_state and self.optimizer.name == "sgd" and replicas.codec != "topk":
            text = "optimizer sgd has no moments to carry: remove replicas.inner_state"
            raise KeyFault(text, "replicas.inner_state", "optimizer.name")
        if replicas.has_carried_state and self.checkpoint.copies:
            text = (
                "copies of checkpoints lack the per-replica state: remove checkpoint.copies, or "
                "set replicas.inner_state=reset and a codec other than topk"
            )
            raise KeyFault(text, "checkpoint.copies", "replicas.inner_state", "replicas.codec")

    @property
    def known_steps(self) -> int | None:
        """Number of steps; None if it depends on the number of samples (epochs, captures)."""
        return known_steps(self.steps)

    def steps_with(self, train_samples: int) -> int:
        """Return the number of steps for a number of training samples."""
        passes = 1 if self.is_capture else self.epochs
        if passes is None:
            return self.steps
        return min(self.steps, passes * -(-train_samples // self.batch.samples))

    def epochs_after(self, step: int, train_samples: int) -> str:
        """Format the progress after some steps: `1.25 of 3 epochs`; empty without `epochs`."""
        if self.epochs is None:
            return ""
        return f"{step / -(-train_samples // self.batch.samples):.3g} of {self.epochs} epochs"

    @property
    def order_seed(self) -> int:
        """The seed of the order of samples."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def groups_by_length(self) -> bool:
        """Whether microbatches group samples of similar lengths."""
        return self.data is not None and self.data.group_by_length

    @property
    def step_optimizer(self) -> OptimizerSpec:
        """The optimizer whose update ends a step: with replicas, the outer one."""
        if self.replicas is None:
            return self.optimizer
        outer = self.replicas.outer
        name = "nesterov" if outer.nesterov else "momentum"
        return OptimizerSpec(
            name=name if outer.momentum else "sgd",
            lr=outer.lr,
            momentum=outer.momentum,
            ema=self.optimizer.ema,
            swa=self.optimizer.swa,
        )

    @property
    def step_samples(self) -> int:
        """Samples per step; with replicas, per round."""
        replicas = self.replicas
        batches = 1 if replicas is None else replicas.count * replicas.inner_steps
        return self.batch.samples * batches

    @property
    def codecs(self) -> Codecs:
        """Encodings of the sums and averages of a step, and the precision of additions."""
        return self.exchange.codecs if self.replicas is None else self.replicas.codecs

    @property
    def is_capture(self) -> bool:
        """Whether the run captures a teacher's logits instead of training."""
        return self.task == "teacher-logits"

    @property
    def is_user_task(self) -> bool:
        """Whether the task is a user's class."""
        return ":" in self.task

    def to_bytes(self) -> bytes:
        """Return the canonical document, which is sent to workers."""
        return self.model_dump_json().encode()

    def digest(self) -> str:
        """Return the BLAKE3 digest of the canonical document, in hex."""
        return blake3(self.to_bytes()).hexdigest()


SECTIONS: Final = frozenset({
    "model", "tokenizer", "lora", "data", "capture", "distil", "dpo", "embed", "regress", "digits",
    "scripted", "options",
})  # fmt: skip
"""Sections that some tasks do not support."""


class RegressRun(RunSpec, lacks=SECTIONS - {"regress"}):
    """Linear regression on generated data, for trying things out."""

    task: Literal["regress"]


class DigitsRun(RunSpec, lacks=SECTIONS - {"digits"}):
    """Classification of scikit-learn's images of digits."""

    task: Literal["digits"]


class ScriptedRun(RunSpec, lacks=SECTIONS - {"scripted"}):
    """Scripted gradients without a model, for benchmarks."""

    task: Literal["scripted"]


class ModelRun(RunSpec):
    """A run with a transformer."""

    model: ModelSpec
    data: DataSpec

    def _check(self) -> None:
        super()._check()
        model = self.model
        if model.config is not None and self.lora is not None:
            text = "lora needs model.source: a model initialized from a config is trained whole"
            raise KeyFault(text, "lora", "model.config")
        if self.lora is None and model.adapter is not None:
            text = "model.adapter needs lora with the adapter's rank and scale: --set lora.r=8"
            raise KeyFault(text, "model.adapter")
        if self.lora is None and model.base_dtype != "float32" and not self.is_capture:
            text = (
                f"model.base_dtype {model.base_dtype} needs lora: without it there is no frozen "
                "base"
            )
            raise KeyFault(text, "model.base_dtype")
        if model.base_dtype == "nf4" and self.arithmetic.is_canonical:
            text = "canonical arithmetic does not support nf4: use model.base_dtype int4, or native"
            raise KeyFault(text, "model.base_dtype", "arithmetic")

    @model_validator(mode="after")
    def _refuse_base_name_without_lora(self, info: ValidationInfo) -> Self:
        if info.context == USER_DOCUMENT and self.lora is None and self.model.name is not None:
            text = "model.name has no effect without lora; remove it, or set lora"
            raise KeyFault(text, "model.name")
        return self


class ClassifyRun(ModelRun, lacks=SECTIONS - {"model", "lora", "data"}):
    """Text classification."""

    task: Literal["classify"]
    model: PretrainedModel
    lora: LoraSpec | None = LoraSpec()
    data: LabeledData


class TagRun(ModelRun, lacks=SECTIONS - {"model", "lora", "data"}):
    """Token classification: a tag for each word."""

    task: Literal["tag"]
    model: PretrainedModel
    lora: LoraSpec | None = LoraSpec()
    data: TaggedData


class Seq2SeqRun(ModelRun, lacks=SECTIONS - {"model", "lora", "data"}):
    """Sequence to sequence: an encoder-decoder turns one text into another."""

    task: Literal["seq2seq"]
    model: PretrainedModel
    lora: LoraSpec | None = LoraSpec()
    data: TextPairs


class MaskedLmRun(ModelRun, lacks=SECTIONS - {"model", "lora", "data"}):
    """Masked language modeling: an encoder fills in masked tokens of running text."""

    task: Literal["masked-lm"]
    model: PretrainedModel
    data: MaskedText


class CausalLmRun(ModelRun, lacks=SECTIONS - {"model", "lora", "data", "tokenizer"}):
    """Language modeling on running text or conversations."""

    task: Literal["causal-lm"]
    data: AnyText


class TeacherLogitsRun(
    ModelRun,
    lacks=SECTIONS - {"model", "data", "tokenizer", "capture"}
    | {"optimizer", "exchange", "replicas", "epochs", "evaluate_every", "stop"},
):
    """Capture of a teacher's logits, once for each sample, without training."""

    task: Literal["teacher-logits"]
    model: TeacherModel
    data: AnyTeacherText
    checkpoint: CaptureCheckpoints = CaptureCheckpoints()


class DistilRun(ModelRun, lacks=SECTIONS - {"model", "lora", "data", "distil"}):
    """Distillation from captured logits."""

    task: Literal["distil"]
    model: StudentModel
    data: CapturedData


class DpoRun(ModelRun, lacks=SECTIONS - {"model", "lora", "data", "dpo"}):
    """Preference optimization of a chat model."""

    task: Literal["dpo"]
    model: PretrainedModel
    lora: LoraSpec | None = LoraSpec()
    data: PreferencePairs

    def _check(self) -> None:
        super()._check()
        if self.lora is None:
            text = "task dpo needs lora: its loss compares the adapted model with the base model"
            raise KeyFault(text, "lora")


class EmbedRun(ModelRun, lacks=SECTIONS - {"model", "lora", "data", "embed"}):
    """Text embeddings for retrieval, with negatives from the whole step."""

    task: Literal["embed"]
    model: PretrainedModel
    data: EmbeddingPairs

    def _check(self) -> None:
        super()._check()
        if self.replicas is not None:
            text = (
                "task embed does not support replicas: its loss reads all samples of a step, and a "
                "replica takes its inner steps alone; remove replicas"
            )
            raise KeyFault(text, "replicas")


class UserTaskTokenizer(TokenizerSpec):
    """The tokenizer of a user-defined task; the task may read any key."""

    vocab_size: int = Field(
        2048, ge=257, le=1_000_000, description="vocabulary size of a tokenizer that is trained"
    )


class UserTaskRun(RunSpec):
    """A run with a user-defined task; the task may read any section."""

    task: str = Field(pattern=f"^{_USER_TASK}$")
    tokenizer: UserTaskTokenizer | None = None
    data: UserTaskData | None = None


RUN_VARIANTS: Final = TaggedUnion("task", pattern=_USER_TASK)
AnyRun = Annotated[
    RegressRun
    | DigitsRun
    | ClassifyRun
    | TagRun
    | Seq2SeqRun
    | CausalLmRun
    | MaskedLmRun
    | TeacherLogitsRun
    | DistilRun
    | DpoRun
    | EmbedRun
    | ScriptedRun
    | UserTaskRun,
    RUN_VARIANTS,
]
_ADAPTER: Final = TypeAdapter[RunSpec](AnyRun)
_STEPS_OF_ALL_SAMPLES: Final = limits.LARGEST_COUNT
"""`steps` of a run whose number of steps depends on the number of samples."""


def known_steps(steps: int | None) -> int | None:
    """Return the number of steps; None if it depends on the number of samples."""
    return None if steps == _STEPS_OF_ALL_SAMPLES else steps


def run_spec_schema() -> dict[str, Any]:
    """Return the run spec's JSON schema."""
    return _ADAPTER.json_schema()


def parse_run_spec_text(
    text: str,
    overrides: Sequence[str] = (),
    origin: str = "",
    notify: Callable[[str], None] = lambda _: None,
) -> RunSpec:
    """Validate a YAML text; see `parse_run_spec`."""
    if len(text) > limits.RUN_SPEC_BYTES:
        raise RunSpecError(
            f"expected at most {limits.RUN_SPEC_BYTES} bytes in {origin!r}, got more; is it a run "
            "spec?"
        )
    try:
        document = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RunSpecError(f"{origin!r} is not YAML: {yaml_fault(error)}") from None
    return parse_run_spec(document, overrides, origin, notify)


def parse_run_spec(
    document: object,
    overrides: Sequence[str] = (),
    origin: str = "",
    notify: Callable[[str], None] = lambda _: None,
) -> RunSpec:
    """Validate a document of plain dicts and lists.

    Args:
        document: The run spec, parsed from YAML or JSON.
        overrides: `key=value` pairs, dots between nested keys, values in YAML.
        origin: The file or address of the document, for errors.
        notify: Called with a line for each key that has another name in this release.

    Raises:
        RunSpecError: Names each key at fault and what to do.
    """
    in_origin = f" in {origin!r}" if origin else ""
    if not isinstance(document, Mapping):
        actual_type = _TYPE_NAMES.get(type(document), "a value")
        raise RunSpecError(
            f"expected keys and values{in_origin}, got {actual_type}; a run spec needs at least "
            "task: and steps:"
        )
    try:
        values: dict[str, Any] = json.loads(
            json.dumps(document, default=str, ensure_ascii=False).encode()
        )
    except (TypeError, ValueError, RecursionError):
        # YAML allows keys that are dates, values that contain themselves, and surrogates; JSON does
        # not.
        raise RunSpecError(f"expected plain keys and values{in_origin}") from None
    renamed_keys = rename_keys(values)
    if values.keys() >= _EARLIER_RELEASE_SECTIONS:
        values = _rewrite_canonical_document(values)
    for override in overrides:
        renamed_keys += [old for old in RENAMED_KEYS if override.startswith(f"{old}=")]
        apply_override(values, rename_override(override))
    for old in dict.fromkeys(renamed_keys + rename_keys(values)):
        notify(f"{old} is called {RENAMED_KEYS[old]} now: rename it{in_origin}")
    overrides = [*map(rename_override, overrides)]
    apply_init_from(values)
    if values.get("steps", 0) is None:
        del values["steps"]
    _set_samples_from_tokens(values, in_origin)
    stop, checkpoint = values.get("stop"), values.setdefault("checkpoint", {})
    if isinstance(stop, dict) and isinstance(checkpoint, dict):
        checkpoint.setdefault("metric", stop.get("figure"))
        checkpoint.setdefault("better", stop.get("better", "lower"))
    if values.get("task") == "teacher-logits" or values.get("epochs") is not None:
        values.setdefault("steps", _STEPS_OF_ALL_SAMPLES)
    values = drop_unsupported_keys(values, RUN_VARIANTS, with_values=False)
    try:
        # Strict JSON mode accepts lists as tuples, but not "8" as 8.
        return _ADAPTER.validate_json(json.dumps(values), strict=True, context=USER_DOCUMENT)
    except ValidationError as error:
        text = explain(RUN_VARIANTS, error, overrides)
    # A mistake in an override is not in the file.
    raise RunSpecError(text if text.endswith(")") and "(from --set" in text else text + in_origin)


def _set_samples_from_tokens(document: dict[str, Any], in_origin: str) -> None:
    """Set `batch.samples` from `batch.tokens`.

    Raises:
        RunSpecError: The document has both, and they contradict each other.
    """
    batch, data = document.get("batch"), document.get("data")
    if not isinstance(batch, dict) or not isinstance(batch.get("tokens"), int):
        return
    length = data.get("max_tokens") if isinstance(data, dict) else None
    length = length if isinstance(length, int) else DataSpec.model_fields["max_tokens"].default
    samples = max(1, batch["tokens"] // max(1, length))
    # A canonical document has both.
    if batch.get("samples", samples) not in (None, samples):
        raise RunSpecError(
            f"expected batch.samples or batch.tokens, got both: remove one of them{in_origin}"
        )
    batch["samples"] = samples


def parse_run_spec_bytes(document: bytes) -> RunSpec:
    """Read a canonical document that `RunSpec.to_bytes` of this or an earlier release wrote.

    Raises:
        MessageError: The document is not a run spec that this release can read.
    """
    try:
        content = drop_unused_sections(parse_json(document))
        return _ADAPTER.validate_json(json.dumps(content))
    except ValidationError as error:
        raise MessageError(f"expected a run spec: {explain(RUN_VARIANTS, error)}") from None
    except ValueError as error:
        raise MessageError(f"expected a run spec as JSON: {error}") from None


def drop_unused_sections(document: Any) -> Any:
    """Remove the keys that the task does not support: earlier releases wrote every section."""
    if isinstance(document, dict):
        document = copy.deepcopy(document)
        rename_keys(document)
    return drop_unsupported_keys(document, RUN_VARIANTS, with_values=True)


def _rewrite_canonical_document(document: dict[str, Any]) -> dict[str, Any]:
    """Remove the sections that an earlier release wrote by default and the user did not choose."""
    try:
        spec = parse_run_spec_bytes(json.dumps(document).encode())
    except MessageError:
        return document  # the caller's validation reports why
    return spec.model_dump(mode="json")


def restore_run_spec(document: bytes) -> RunSpec:
    """Read a document that `RunSpec.to_bytes` wrote in another process of the same worker.

    The document has been validated, and its sources are local paths. So the checks of key
    combinations, which are for a user's document, are skipped.
    """
    return _ADAPTER.validate_json(document, context=RESTORED)


def source_of(spec: RunSpec, role: Role) -> str | None:
    """Return the source that the run spec names for a role; None if it names none."""
    is_user_task = spec.is_user_task
    if role == "data":
        return spec.data.train if spec.data is not None else None
    if role == "validation":
        return spec.data.validation if spec.data is not None and not is_user_task else None
    if role == "adapter":
        return spec.model.adapter if spec.model is not None and not is_user_task else None
    if role == "model":
        return spec.model.source if spec.model is not None and not is_user_task else None
    return spec.tokenizer.source if spec.tokenizer is not None and not is_user_task else None


def is_fetched_later(spec: RunSpec, role: Role, name: str) -> bool:
    """Return whether a worker fetches this file only when a step needs it."""
    return spec.task == "distil" and role == "data" and name.endswith(LOGITS_SUFFIX)
