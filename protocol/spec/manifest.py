"""The manifest: facts that each worker derives from a run spec, and on which all must agree.

It lists the trainable tensors, divided into blocks; the number of samples and evaluation parts;
how sums become metrics; the digests of everything that was read; and how the result is saved.
Every worker sends it with `Ready`, and one whose manifest differs is refused. The coordinator
learns the model's shape from the manifest alone, so it does not need torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.base import limits
from protocol.base.errors import MessageError
from protocol.base.fields import PRINTABLE, ShortText
from protocol.spec.cross_check import CrossCheck
from protocol.spec.sampling import Sampling

FLOAT16_BYTES: Final = 2
_SAMPLE_ID_BYTES: Final = 8
_COUNT_BYTES: Final = 4
_TOKEN_BYTES: Final = 4
_MASK_BYTES: Final = 1
_LSE_BYTES: Final = 2 * 4


class CaptureLayout(BaseModel):
    """The layout of captured logits: which logits, for how many tokens of each sample.

    A sample is a window of tokens. Row t is the teacher's prediction of token t + 1.

    Attributes:
        tokens: Maximum number of rows of a sample; a sample has one more token than rows.
        vocabulary: Number of tokens in the teacher's vocabulary.
        top_k: Number of logits per row: the largest logits, or those of drawn tokens.
        drawn: Whether the tokens of a row are drawn from the distribution.
        temperature: Temperature of the draws and of the second log-sum-exp.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Annotated[int, Field(ge=1, le=65_536)]
    vocabulary: Annotated[int, Field(ge=1, le=2**31 - 1)]
    top_k: Annotated[int, Field(ge=1, le=limits.ROW_LOGITS_ELEMENTS)]
    drawn: bool = False
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0

    @property
    def id_bytes(self) -> int:
        """Size of a token id."""
        return 2 if self.vocabulary <= 2**16 else 4

    @property
    def logits_bytes(self) -> int:
        """Size of a row's token ids, logits and log-sum-exps: 264 for 64 of 65,536 tokens."""
        return self.top_k * (self.id_bytes + FLOAT16_BYTES) + _LSE_BYTES

    @property
    def sample_bytes(self) -> int:
        """Size of a sample in a message, padded to the longest sample."""
        bytes_per_token = self.logits_bytes + _TOKEN_BYTES + _MASK_BYTES
        return _SAMPLE_ID_BYTES + _COUNT_BYTES + _TOKEN_BYTES + self.tokens * bytes_per_token


Name = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARACTERS, pattern=PRINTABLE)]
BlockKind = Literal["block", "non_block", "buffers", "counters"]

BEST: Final = "best"
"""Directory of the state with the best evaluation metric, beside the last state's."""

RESERVED_NAMES: Final = frozenset(
    {
        BEST,
        "capture",
        "checkpoints",
        "epoch.json",  # the term file of older releases
        "files.json",
        "journal.jsonl",
        "lock",
        "log",
        "manifest.json",
    }
    | {"replicas", "report.html", "result.json", "run.json", "set-aside", "term.json"}
    | {"terms.json", "trackers"}
)
"""Names in a run's directory that an export may not use."""

SCRIPT_DIRECTORY: Final = "script"
"""Directory for a copy of the script whose `samestep.fit` begins the run."""
INITIAL_ENTRIES: Final = frozenset(
    {"lock", "term.json", "epoch.json", "lost+found", SCRIPT_DIRECTORY}
)
"""Entries that a run's directory may have before the run begins: a copy of the script, files of a
run that was not accepted, and `lost+found`."""

ADAPTER_CONFIG: Final = "adapter_config.json"
"""File of an export that names the base model of an adapter."""

_CHUNKS_OF_A_BLOCK: Final = 4
_ALIGNED_ELEMENTS: Final = 1024
_TOPK_REGION: Final = 4096

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(_FrozenModel):
    """One trainable float32 tensor."""

    name: Name
    shape: tuple[Annotated[int, Field(ge=0, le=2**31)], ...] = Field(max_length=8)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Block(_FrozenModel):
    """Tensors that travel together: a transformer layer's, or a group of non-block tensors.

    On the wire and in memory a block is one flat float32 array: its tensors concatenated in this
    order, each in C order.

    Tensors that forward itself changes (running statistics, a teacher) are `buffers`; integers
    among them are `counters`. No optimizer updates them. Instead of a gradient, a worker sends the
    change that a microbatch made, and a step adds the mean change, rounded to an integer for
    counters (`Replica.apply`).
    """

    name: Name
    kind: BlockKind
    tensors: tuple[TensorSpec, ...] = Field(min_length=1)

    @cached_property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer updates these tensors by their gradients."""
        return self.kind in {"block", "non_block"}

    @property
    def chunk_elements(self) -> int:
        """Elements of each chunk except the last.

        A chunk is a quarter of the block, within limits. So averages of the first chunks are sent
        while the others still arrive, which uses both directions of a link, and several owners can
        share a block.
        """
        quarter = -(-self.elements // _CHUNKS_OF_A_BLOCK)
        # topk selects within regions of 4096 elements, so a small chunk has a whole number of them.
        # Larger chunks have the boundaries of protocol version 10, for the same bits.
        aligned = _TOPK_REGION if quarter <= 2 * limits.SMALL_CHUNK_ELEMENTS else _ALIGNED_ELEMENTS
        chunk_size = -(-quarter // aligned) * aligned
        return min(max(chunk_size, limits.SMALL_CHUNK_ELEMENTS), limits.CHUNK_ELEMENTS)

    @property
    def chunks(self) -> int:
        """Number of chunks into which the block is divided."""
        return max(1, -(-self.elements // self.chunk_elements))

    def chunk_slice(self, chunk: int) -> slice:
        """Return a chunk's elements of the flat array."""
        lo = chunk * self.chunk_elements
        return slice(lo, min(lo + self.chunk_elements, self.elements))

    def slices(self) -> Iterator[tuple[TensorSpec, slice]]:
        """Yield each tensor with its elements of the flat array."""
        start = 0
        for tensor in self.tensors:
            yield tensor, slice(start, start + tensor.elements)
            start += tensor.elements


class Ratio(_FrozenModel):
    """A ratio of evaluation sums s: (sum of a_i * s_i) / (sum of b_i * s_i).

    Accuracy is correct / samples, F1 is 2 tp / (2 tp + fp + fn). Without a denominator the value
    is the numerator, for plain counts. A zero denominator gives NaN, or zero for a share (every
    s_i of the numerator is in the denominator), such as the F1 of a class without samples.
    """

    numerator: dict[ShortText, float] = {}
    denominator: dict[ShortText, float] = {}

    def value(self, sums: dict[str, float]) -> float:
        """Evaluate the ratio; a missing sum counts as zero."""
        numerator = sum(factor * sums.get(name, 0.0) for name, factor in self.numerator.items())
        if not self.denominator:
            return numerator
        denominator = sum(factor * sums.get(name, 0.0) for name, factor in self.denominator.items())
        if denominator:
            return numerator / denominator
        return 0.0 if self.numerator.keys() <= self.denominator.keys() else math.nan


class Metric(Ratio):
    """An evaluation metric, computed from evaluation sums.

    `exponential` applies exp to the value (perplexity). With `mean_of` the metric is the mean of
    those ratios (macro F1) and has no ratio of its own. With `pearson` it is Pearson's correlation
    of x and y, with `spearman` that of their ranks. A correlation is NaN if x or y does not vary;
    its sums are two for each sample (`pair_sums`). `detail` marks metrics that are written to files
    and not shown on consoles (confusion counts).
    """

    name: Name
    exponential: bool = False
    mean_of: tuple[Ratio, ...] = ()
    detail: bool = False
    pearson: bool = False
    spearman: bool = False

    @model_validator(mode="after")
    def _check_rule(self) -> Metric:
        if bool(self.numerator) + bool(self.mean_of) + self.pearson + self.spearman != 1:
            raise ValueError("expected a numerator, mean_of, pearson or spearman")
        return self

    def value(self, sums: dict[str, float]) -> float:
        """Evaluate the metric."""
        if self.pearson:
            return _pearson(*_pairs(sums))
        if self.spearman:
            return _pearson(*map(_ranks, _pairs(sums)))
        if self.mean_of:
            ratios = [ratio.value(sums) for ratio in self.mean_of]
            # fsum raises if the sum is not finite.
            total = sum(ratios)
            value = (math.fsum(ratios) if math.isfinite(total) else total) / len(ratios)
        else:
            value = super().value(sums)
        return math.exp(min(value, 700.0)) if self.exponential else value


_X, _Y = "x:", "y:"
Values = NDArray[np.float64]


def pair_sums(numbers: Sequence[int], x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Return the sums from which a correlation is computed.

    Args:
        numbers: Numbers of the samples, distinct in an evaluation.
        x: The first value of each sample.
        y: The second value of each sample.
    """
    sums = {f"{_X}{number}": float(value) for number, value in zip(numbers, x, strict=True)}
    return sums | {f"{_Y}{number}": float(value) for number, value in zip(numbers, y, strict=True)}


def _pairs(sums: dict[str, float]) -> tuple[Values, Values]:
    numbers = [name.removeprefix(_X) for name in sums if name.startswith(_X)]
    x, y = (np.array([sums[f"{prefix}{number}"] for number in numbers]) for prefix in (_X, _Y))
    return x, y


def _pearson(x: Values, y: Values) -> float:
    """Return the correlation of x and y, (samples,), in [-1, 1]."""
    if not (len(x) and np.isfinite(x).all() and np.isfinite(y).all()):
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    spread = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    return max(-1.0, min(1.0, float(x @ y) / spread)) if spread > 0 else math.nan


def _ranks(values: Values) -> Values:
    """Return ranks from 1, equal values at their mean rank; NaN where a value is not finite."""
    if not np.isfinite(values).all():
        return np.full_like(values, math.nan)
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Values = np.cumsum(counts) - (counts - 1) / 2
    return means[group]


class EmbeddingField(_FrozenModel):
    """One field of an `EmbeddingLayout`."""

    name: ShortText
    dtype: Literal["float32", "int64"]
    shape: tuple[Annotated[int, Field(ge=1, le=2**20)], ...] = Field((), max_length=4)


class EmbeddingLayout(_FrozenModel):
    """The tensors of each sample that a loss over a whole step reads.

    Fields of float32 are embeddings, through which gradients flow; they come first. Fields of int64
    are labels and numbers of texts. Both travel as rows (`protocol.exact.embedding_rows`).
    """

    fields: tuple[EmbeddingField, ...] = Field(min_length=1, max_length=limits.EMBEDDED_TENSORS)

    @model_validator(mode="after")
    def _check_fields(self) -> EmbeddingLayout:
        if sorted(self.fields, key=lambda field: field.dtype != "float32") != list(self.fields):
            raise ValueError("expected the float32 fields before the int64 fields")
        if self.fields[0].dtype != "float32":
            raise ValueError("expected a field of float32, got only int64")
        if len({field.name for field in self.fields}) != len(self.fields):
            raise ValueError("expected distinct names of fields, got duplicates")
        if self.sample_bytes > limits.EMBEDDING_SAMPLE_BYTES:
            raise ValueError(
                f"expected at most {limits.EMBEDDING_SAMPLE_BYTES} bytes per sample, got "
                f"{self.sample_bytes}"
            )
        return self

    @property
    def embedding_bytes(self) -> int:
        """Size of a sample's embeddings, without labels."""
        return sum(4 * math.prod(f.shape) for f in self.fields if f.dtype == "float32")

    @property
    def sample_bytes(self) -> int:
        """Size of a sample in a message."""
        labels = (8 * math.prod(f.shape) for f in self.fields if f.dtype == "int64")
        return self.embedding_bytes + sum(labels)


class Export(_FrozenModel):
    """How the trained tensors are saved.

    `directory`, in the run's output, contains `weights_file` (safetensors, each tensor under
    `names.get(name, name)`) and the text `files`, each beside it or one folder below.
    """

    directory: str = "model"
    weights_file: str = "model.safetensors"
    names: dict[Name, Name] = {}
    files: dict[str, str] = {}

    @model_validator(mode="after")
    def _check_directory(self) -> Export:
        if self.directory in RESERVED_NAMES:
            raise ValueError(
                f"expected a directory that a run does not use, got {self.directory!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Export:
        for name in (self.directory, self.weights_file, *self.files):
            folder, slash, file = name.rpartition("/")
            is_plain = _FILE_NAME.fullmatch(file) and (not slash or _FILE_NAME.fullmatch(folder))
            if not is_plain or (slash and name not in self.files):
                raise ValueError(f"expected a plain file name, got {name!r}")
        return self


class Manifest(_FrozenModel):
    """The manifest. Blocks are in the order of forward; gradients arrive in reverse order."""

    blocks: tuple[Block, ...] = Field(min_length=1, max_length=limits.BLOCKS)
    train_samples: int = Field(ge=1, le=limits.SAMPLES)
    evaluation_parts: int = Field(ge=0, le=limits.EVALUATION_PARTS, default=0)
    metrics: tuple[Metric, ...] = ()
    digests: dict[Name, str] = {}
    """BLAKE3 digests of the inputs: base_weights, tokenizer, data."""
    notes: dict[Name, int] = {}
    """Counts to report to the user: texts_truncated, duplicates_removed, tokens."""
    export: Export = Export()
    capture: CaptureLayout | None = None
    """The layout of captured logits, if the run is a capture."""
    embeddings: EmbeddingLayout | None = None
    """The tensors of each sample that a loss over all samples of a step reads; such a step has two
    phases (`coordinator.run.exchange.embeddings`)."""
    row_groups: tuple[tuple[int, ...], ...] = ()
    """Sizes of row groups by file, if samples are in files that are read by row group."""
    sampling: Sampling | None = None
    """How an epoch's samples are drawn; None if an epoch uses each sample once."""
    cross_check: CrossCheck | None = None
    """Values of a script that workers compare with a tolerance; not part of the digest."""

    @model_validator(mode="after")
    def _check_tensors_and_metrics(self) -> Manifest:
        names = [tensor.name for block in self.blocks for tensor in block.tensors]
        if len(set(names)) != len(names):
            raise ValueError("expected distinct names of tensors, got duplicates")
        metrics = [metric.name for metric in self.metrics]
        if len(set(metrics)) != len(metrics):
            raise ValueError("expected distinct names of metrics, got duplicates")
        if len(names) > limits.TENSORS:
            raise ValueError(f"expected at most {limits.TENSORS} tensors, got {len(names)}")
        if self.elements > limits.TRAINABLE_ELEMENTS:
            raise ValueError(
                f"expected at most {limits.TRAINABLE_ELEMENTS} elements, got {self.elements}"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Manifest:
        if self.sampling is not None:
            try:
                self.sampling.check(self.train_samples)
            except MessageError as error:
                raise ValueError(str(error)) from None
            if self.row_groups:
                raise ValueError("expected no draws of samples that are read in row groups")
        return self

    @property
    def epoch_samples(self) -> int:
        """Number of samples in an epoch."""
        return self.train_samples if self.sampling is None else self.sampling.draws

    @property
    def elements(self) -> int:
        return sum(block.elements for block in self.blocks)

    def to_bytes(self) -> bytes:
        """Return the canonical document, which is sent and saved."""
        return self._document(set())

    def _document(self, left_out: set[str]) -> bytes:
        # Unused keys are left out, so that the digest is the same as in earlier releases.
        unset: dict[str, Any] = {
            name: True
            for name in ("capture", "embeddings", "row_groups", "sampling", "cross_check")
            if name in left_out or not getattr(self, name)
        }
        defaults = {
            kind
            for kind in ("pearson", "spearman")
            if not any(getattr(metric, kind) for metric in self.metrics)
        }
        if defaults:
            unset["metrics"] = {"__all__": defaults}
        return self.model_dump_json(exclude=unset).encode()

    @staticmethod
    def from_bytes(document: bytes | bytearray | memoryview) -> Manifest:
        """Read a document from the network.

        Raises:
            MessageError: The document is not a manifest.
        """
        try:
            return Manifest.model_validate_json(bytes(document))
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(str(part) for part in first["loc"])
            location_text = f" at {location!r}" if location else ""
            raise MessageError(f"expected a manifest, got {first['msg']}{location_text}") from None

    def digest(self) -> str:
        """Return the digest of everything that must be equal on all workers."""
        return blake3(self._document({"cross_check"})).hexdigest()

    def differences(self, other: Manifest) -> list[str]:
        """Return the names of differing inputs, or of the model and data in general; empty if
        equal."""
        if self.digest() == other.digest():
            return []
        names = self.digests.keys() | other.digests.keys()
        differing = sorted(n for n in names if self.digests.get(n) != other.digests.get(n))
        return differing or ["model shape, sample counts or metrics"]
