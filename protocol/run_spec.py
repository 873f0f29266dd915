"""The run spec: one training job as a document (YAML), validated before anything starts.

Source of truth for every key; `run_spec_schema` gives it as JSON schema. Unknown keys are errors
that name the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol import limits
from protocol.errors import MessageError, RunSpecError

Task = Literal["regress", "digits", "classify", "scripted"]
Exactness = Literal["require", "prefer"]
OptimizerName = Literal["sgd", "momentum", "adamw"]
ScheduleName = Literal["constant", "linear", "cosine"]

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(_Section):
    """Where the model comes from, and the type it computes in."""

    source: str = Field(description="a directory, `package:DISTRIBUTION`, or a hub name")
    dtype: Literal["float32"] = "float32"
    attention: Literal["eager", "sdpa"] = "eager"


class LoraSpec(_Section):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685)."""

    r: Count = 8
    alpha: float = Field(16.0, gt=0)
    dropout: Fraction = 0.0
    targets: tuple[str, ...] = Field(("query", "value"), min_length=1)


class DataSpec(_Section):
    """Labelled text: JSONL, CSV or TSV, from a file or out of an installed package."""

    train: str = Field(description="a file, or `package:DISTRIBUTION`")
    text: str = "text"
    label: str = "label"
    holdout: Fraction = 0.2
    max_tokens: int = Field(64, ge=2, le=65_536)
    num_classes: int | None = Field(None, ge=2, description="checked against the data when given")


class RegressSpec(_Section):
    """Linear regression on generated data: y = x w + b, plus noise of this deviation."""

    samples: Count = 1024
    features: Count = 8
    noise: float = Field(0.0, ge=0.0)


class DigitsSpec(_Section):
    """A multi-layer perceptron on scikit-learn's 8 x 8 digits; each hidden layer is a block."""

    hidden: tuple[Count, ...] = Field((64, 64, 64, 64), min_length=1)
    holdout: Fraction = 0.2
    dropout: Fraction = 0.0


class ScriptedSpec(_Section):
    """No model: gradients that follow from (seed, step, microbatch), for measuring."""

    blocks: Count = 4
    block_bytes: int = Field(262_144, ge=4)
    samples: Count = 4096


class BatchSpec(_Section):
    """Samples per step, and per microbatch: the unit that a worker computes at once."""

    samples: Count = 48
    microbatch: Count = 2

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
    """The exact update (`protocol.update`); `no_decay` lists parts of tensor names.

    The bounds keep every scalar of an update within float32.
    """

    name: OptimizerName = "adamw"
    lr: float = Field(1e-3, ge=1e-30, le=1e3)
    momentum: Fraction = 0.9
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: float = Field(1e-8, ge=1e-30, le=1e3)
    weight_decay: float = Field(0.0, ge=0, le=1e3)
    no_decay: tuple[str, ...] = ("bias", "norm")
    clip_norm: float | None = Field(None, gt=0)
    schedule: ScheduleName = "constant"
    warmup_steps: int = Field(0, ge=0)


class RunSpec(_Section):
    """One training job."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    task: Task
    seed: int = Field(0, ge=0, lt=2**63)
    exactness: Exactness = "prefer"
    model: ModelSpec | None = None
    lora: LoraSpec | None = None
    data: DataSpec | None = None
    regress: RegressSpec = RegressSpec()
    digits: DigitsSpec = DigitsSpec()
    scripted: ScriptedSpec = ScriptedSpec()
    batch: BatchSpec = BatchSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    steps: Count
    evaluate_every: int = Field(0, ge=0, description="steps; 0: at the end only")
    threads: int = Field(1, ge=1, le=256, description="CPU threads of each worker")

    @model_validator(mode="after")
    def _has_what_the_task_needs(self) -> RunSpec:
        if self.task == "classify":
            for key in ("model", "data"):
                if getattr(self, key) is None:
                    raise ValueError(f"task classify needs the section {key!r}")
        return self

    def to_bytes(self) -> bytes:
        """The canonical document that is sent to workers."""
        return self.model_dump_json().encode()

    def digest(self) -> str:
        """BLAKE3 of the canonical document."""
        return blake3(self.to_bytes()).hexdigest()


def run_spec_schema() -> dict[str, Any]:
    """The run spec as JSON schema."""
    return RunSpec.model_json_schema()


def load_run_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read and validate a run spec file.

    Args:
        path: A YAML file.
        overrides: `key=value` pairs, dots between nested keys, values in YAML.

    Raises:
        RunSpecError: What is wrong, where, and the nearest known key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunSpecError(f"expected a run spec at {str(path)!r}, found no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunSpecError(f"cannot read the run spec {str(path)!r}: {error}") from None
    if len(text) > limits.RUN_SPEC_BYTES:
        raise RunSpecError(f"expected at most {limits.RUN_SPEC_BYTES} bytes in {str(path)!r}")
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise RunSpecError(f"{str(path)!r} is not YAML: {line}") from None
    return parse_run_spec(document, overrides, origin=str(path))


def parse_run_spec(document: object, overrides: Sequence[str] = (), origin: str = "") -> RunSpec:
    """Validate a document of plain dicts and lists; see `load_run_spec`."""
    where = f" in {origin!r}" if origin else ""
    if not isinstance(document, Mapping):
        raise RunSpecError(f"expected keys and values{where}, got {type(document).__name__}")
    try:
        merged: dict[str, Any] = json.loads(json.dumps(document, default=str))
    except (TypeError, ValueError, RecursionError):
        # Keys that are dates, values that hold themselves: YAML has them, JSON has not.
        raise RunSpecError(f"expected plain keys and values{where}") from None
    for override in overrides:
        _override(merged, override)
    try:
        # Strict JSON mode: lists stand for tuples, yet "8" is not taken for 8.
        return RunSpec.model_validate_json(json.dumps(_exponents(merged)), strict=True)
    except ValidationError as error:
        raise RunSpecError(_explain(error) + where) from None


def parse_run_spec_bytes(document: bytes) -> RunSpec:
    """Read the canonical document that `RunSpec.to_bytes` gives, from the network.

    Raises:
        MessageError: It is no run spec, perhaps of another release.
    """
    try:
        return RunSpec.model_validate_json(document)
    except ValidationError as error:
        raise MessageError(f"expected a run spec: {_explain(error)}") from None


def _override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RunSpecError(f"expected --set KEY=VALUE, got {override!r}")
    *parents, last = key.split(".")
    at = document
    for parent in parents:
        inner = at.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise RunSpecError(f"--set {override!r}: {parent!r} holds a value, not a section")
        at = inner
    try:
        at[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RunSpecError(f"--set {override!r}: expected a YAML value") from None


def _exponents(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text, since it has no dot; read it as the number it is."""
    if isinstance(value, dict):
        return {key: _exponents(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_exponents(inner) for inner in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        number = float(value)
        return int(number) if number.is_integer() else number
    return value


def _explain(error: ValidationError) -> str:
    # A misspelt key comes before the key that is missing for it.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *parents, key = (str(part) for part in first["loc"])
        near = difflib.get_close_matches(key, _keys_of(parents), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown key {place!r}{hint}"
    if first["type"] == "missing":
        return f"the key {place!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not place:
        return message
    return f"{place}: {message}, got {json.dumps(first['input'], default=str)[:80]}"


def _keys_of(parents: Iterable[str]) -> list[str]:
    model: type[BaseModel] = RunSpec
    for parent in parents:
        field = model.model_fields.get(parent)
        if field is None:
            return []
        candidates = (field.annotation, *get_args(field.annotation))
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)
