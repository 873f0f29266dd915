"""The manifest: what a worker derives from a run spec, and all workers must agree on.

It lists the trainable tensors, cut into blocks; the number of samples and held-out parts; how
sums become metrics; the digests of everything read; and how the result is saved. Every worker
sends it with `Ready`; one whose manifest differs is refused. The coordinator learns the model's
shape from it alone, and so never needs torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Final, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.base import limits
from protocol.base.errors import MessageError
from protocol.base.fields import PRINTABLE, Small
from protocol.spec.capture_layout import CaptureLayout

Name = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARACTERS, pattern=PRINTABLE)]
BlockKind = Literal["block", "non_block"]

BEST: Final = "best"
"""Where the state with the best held-out figure is saved, beside the last one."""

RESERVED: Final = frozenset(
    {
        BEST,
        "capture",
        "checkpoints",
        "epoch.json",
        "files.json",
        "journal.jsonl",
        "lock",
        "log",
        "manifest.json",
    }
    | {"replicas", "report.html", "result.json", "run.json", "set-aside", "terms.json"}
    | {"trackers"}
)
"""What else lies in a run's directory."""

ADAPTER_CONFIG: Final = "adapter_config.json"
"""An export's text file that names the model which the trained tensors are added to."""

_CHUNKS_OF_A_BLOCK: Final = 4
_ALIGNED_ELEMENTS: Final = 1024

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(_Frozen):
    """One trainable float32 tensor."""

    name: Name
    shape: tuple[Annotated[int, Field(ge=0, le=2**31)], ...] = Field(max_length=8)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Block(_Frozen):
    """Tensors that travel together: a transformer layer's, or a group of non-block tensors.

    On the wire and in memory a block is one flat float32 array: its tensors one after the other
    in this order, each in C order.
    """

    name: Name
    kind: BlockKind
    tensors: tuple[TensorSpec, ...] = Field(min_length=1)

    @cached_property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def chunk_elements(self) -> int:
        """Elements of each chunk but the last.

        A quarter of the block, within the limits: what has come of a block is averaged and sent
        while the rest still arrives, so a link is used in both directions at once.
        """
        quarter = -(-self.elements // _CHUNKS_OF_A_BLOCK)
        even = -(-quarter // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
        return min(max(even, limits.SMALL_CHUNK_ELEMENTS), limits.CHUNK_ELEMENTS)

    @property
    def chunks(self) -> int:
        """How many chunks the block is sent in."""
        return max(1, -(-self.elements // self.chunk_elements))

    def chunk_slice(self, chunk: int) -> slice:
        """Elements of the flat array that a chunk holds."""
        lo = chunk * self.chunk_elements
        return slice(lo, min(lo + self.chunk_elements, self.elements))

    def slices(self) -> Iterator[tuple[TensorSpec, slice]]:
        """Each tensor with the elements of the flat array that are its own."""
        at = 0
        for tensor in self.tensors:
            yield tensor, slice(at, at + tensor.elements)
            at += tensor.elements


class Ratio(_Frozen):
    """Evaluation sums over evaluation sums: (sum of a_i * s_i) / (sum of b_i * s_i).

    So accuracy is correct / samples, and F1 is 2 tp / (2 tp + fp + fn). Without any b_i it is the
    numerator, for plain counts. Over zero it is no number; but zero for a share (every s_i above
    is below too), as of a class that nobody has or was taken for.
    """

    numerator: dict[Small, float] = {}
    denominator: dict[Small, float] = {}

    def value(self, sums: dict[str, float]) -> float:
        """The figure for these sums; a sum that is missing counts as zero."""
        above = sum(factor * sums.get(name, 0.0) for name, factor in self.numerator.items())
        if not self.denominator:
            return above
        below = sum(factor * sums.get(name, 0.0) for name, factor in self.denominator.items())
        if below:
            return above / below
        return 0.0 if self.numerator.keys() <= self.denominator.keys() else math.nan


class Metric(Ratio):
    """A figure made of evaluation sums.

    `exponential` takes e to the ratio's power (perplexity). With `mean_of` the figure is the
    mean of those ratios (macro F1), and there is no ratio of its own. `detail` marks figures for
    files rather than for a line on the screen (confusion counts).
    """

    name: Name
    exponential: bool = False
    mean_of: tuple[Ratio, ...] = ()
    detail: bool = False

    @model_validator(mode="after")
    def _one_rule(self) -> Metric:
        if bool(self.numerator) == bool(self.mean_of):
            raise ValueError("expected either a numerator or mean_of")
        return self

    def value(self, sums: dict[str, float]) -> float:
        """The figure for these sums."""
        if self.mean_of:
            figures = [ratio.value(sums) for ratio in self.mean_of]
            # fsum refuses what does not sum to a finite number.
            total = sum(figures)
            figure = (math.fsum(figures) if math.isfinite(total) else total) / len(figures)
        else:
            figure = super().value(sums)
        return math.exp(min(figure, 700.0)) if self.exponential else figure


class Export(_Frozen):
    """How the trained tensors are saved.

    `directory` below the run's output holds `weights_file` (safetensors, every tensor under
    `names.get(name, name)`) and the text `files` as they are.
    """

    directory: str = "model"
    weights_file: str = "model.safetensors"
    names: dict[Name, Name] = {}
    files: dict[str, str] = {}

    @model_validator(mode="after")
    def _own_directory(self) -> Export:
        if self.directory in RESERVED:
            raise ValueError(f"{self.directory!r} is a name that a run keeps for itself")
        return self

    @model_validator(mode="after")
    def _plain_names(self) -> Export:
        for name in (self.directory, self.weights_file, *self.files):
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"expected a plain file name, got {name!r}")
        return self


class Manifest(_Frozen):
    """See the module's text. Blocks are in forward order; gradients arrive in reverse order."""

    blocks: tuple[Block, ...] = Field(min_length=1, max_length=limits.BLOCKS)
    train_samples: int = Field(ge=1, le=limits.SAMPLES)
    evaluation_parts: int = Field(ge=0, le=limits.EVALUATION_PARTS, default=0)
    metrics: tuple[Metric, ...] = ()
    digests: dict[Name, str] = {}
    """BLAKE3 of what was read, by what it is: base_weights, tokenizer, data."""
    notes: dict[Name, int] = {}
    """Counts that a user should hear of: texts_truncated, duplicates_removed, tokens."""
    export: Export = Export()
    capture: CaptureLayout | None = None
    """What is kept of each sample, where the run is no training but the capture of a teacher."""
    row_groups: tuple[tuple[int, ...], ...] = ()
    """Where the samples lie in files in groups that are read at once: samples by group, by file."""

    @model_validator(mode="after")
    def _distinct(self) -> Manifest:
        names = [tensor.name for block in self.blocks for tensor in block.tensors]
        if len(set(names)) != len(names):
            raise ValueError("expected every tensor once, got a name twice")
        figures = [metric.name for metric in self.metrics]
        if len(set(figures)) != len(figures):
            raise ValueError("expected every metric once, got a name twice")
        if len(names) > limits.TENSORS:
            raise ValueError(f"expected at most {limits.TENSORS} tensors, got {len(names)}")
        if self.elements > limits.TRAINABLE_ELEMENTS:
            raise ValueError(
                f"expected at most {limits.TRAINABLE_ELEMENTS} elements, got {self.elements}"
            )
        return self

    @property
    def elements(self) -> int:
        return sum(block.elements for block in self.blocks)

    def to_bytes(self) -> bytes:
        """The canonical document: what is sent, and what the digest is taken of."""
        # What most runs have not is left out: their manifests are those of releases before it.
        seldom = {name for name in ("capture", "row_groups") if not getattr(self, name)}
        return self.model_dump_json(exclude=seldom).encode()

    @staticmethod
    def from_bytes(document: bytes | bytearray | memoryview) -> Manifest:
        """Read a document from the network.

        Raises:
            MessageError: It is no manifest.
        """
        try:
            return Manifest.model_validate_json(bytes(document))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            at = f" at {where!r}" if where else ""
            raise MessageError(f"expected a manifest, got {first['msg']}{at}") from None

    def digest(self) -> str:
        return blake3(self.to_bytes()).hexdigest()
