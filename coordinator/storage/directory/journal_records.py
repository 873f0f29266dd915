"""What a journal records, and which articles of the EU AI Act each record serves.

Regulation (EU) 2024/1689: article 10 (data and data governance), 12 (record-keeping), 13
(transparency), 15 (accuracy, robustness and cybersecurity). That a record serves an article says
what it is good for, not that keeping it is all the article asks.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from coordinator.disk.canonical_json import canonical_json, json_digest
from protocol.base import limits
from protocol.base.fields import Digest, Number, finite_or_none
from protocol.exact.tree import Node

Name = Annotated[str, Field(max_length=limits.NAME_CHARACTERS)]
Words = Annotated[str, Field(max_length=2_000)]
Figure = Annotated[float | None, BeforeValidator(finite_or_none)]
"""JSON has no NaN: what is not finite is null."""
Nodes = dict[Name, tuple[tuple[Number, Number], ...]]
"""Nodes [lo, hi) of the reduction tree over a step's microbatches, by worker."""


class Record(BaseModel):
    """Base of all; `articles` and `serves` are the same for every record of a kind."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    articles: ClassVar[tuple[int, ...]]
    serves: ClassVar[str]
    older: ClassVar[tuple[str, ...]] = ()
    """Fields that older releases wrote, always null."""


class RunBegins(Record):
    """A run is accepted: everything that was asked for, and by which software it is done."""

    articles = (10, 12, 13)
    serves = "what was trained, on which data, with which settings and software"

    kind: Literal["run"] = "run"
    run_id: Name
    spec: dict[str, Any]
    spec_digest: Digest
    versions: dict[Name, Name]

    @staticmethod
    def of(run_id: str, spec: dict[str, Any], versions: dict[str, str]) -> RunBegins:
        """The record of a run spec's plain document."""
        return RunBegins(run_id=run_id, spec=spec, spec_digest=json_digest(spec), versions=versions)


class ManifestSettled(Record):
    """What the workers found and agreed on: digests of data, base model and tokenizer, counts."""

    articles = (10, 13)
    serves = "proof of the exact data, base model and tokenizer; what was left out of the data"

    kind: Literal["manifest"] = "manifest"
    manifest_digest: Digest
    digests: dict[Name, Name]
    train_samples: Annotated[int, Field(ge=1)]
    evaluation_parts: Number
    notes: dict[Name, int] = {}


class FilesKept(Record):
    """BLAKE3 of the small files that a restart reads. Two for one that is being replaced: a crash
    may leave either; None where that is no file."""

    articles = (12, 15)
    serves = "that settings and terms of a resumed run are those that it was begun with"

    kind: Literal["files"] = "files"
    epoch: Number
    digests: dict[Name, tuple[Digest | None, ...]]


class Resumed(Record):
    """A coordinator took the run up again. Commits from `step` on, if there were any, are void:
    those steps are done again."""

    articles = (12, 15)
    serves = "resilience: what a restart found, and from where the run went on"
    older = ("state_digest",)

    kind: Literal["resumed"] = "resumed"
    epoch: Number
    step: Number
    optimizer_step: Number
    notes: tuple[Words, ...] = ()


class MemberNoted(BaseModel):
    """One worker as a view lists it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    backend: Name
    device: Name
    signature: Name
    admitted_by: Words = ""
    """What it proved itself with: the join token, or a key and whose."""


class ViewChanged(Record):
    """Who computes from now on, and why that changed. `view` restarts with the epoch."""

    articles = (12, 15)
    serves = "which machines took part, when, with which numeric signature"

    kind: Literal["view"] = "view"
    epoch: Number
    step: Number
    view: Number
    change: Literal["started", "joined", "lost", "late", "drained", "reseeded"]
    worker: Name | None = None
    reason: Words = ""
    members: tuple[MemberNoted, ...]


class Planned(Record):
    """Which worker was given which microbatches. Which samples these are follows from the run
    spec's seed and batch and the number of samples (`protocol.exact.samples`)."""

    articles = (10, 12)
    serves = "which worker was to use which samples, in which step"

    kind: Literal["plan"] = "plan"
    epoch: Number
    step: Number
    attempt: Number
    view: Number
    microbatches: Annotated[int, Field(ge=1, le=limits.MICROBATCHES_PER_STEP)]
    nodes: Nodes
    cause: Literal["step", "reassigned", "speculative"] = "step"

    def planned(self) -> list[Node]:
        """All nodes given."""
        return [Node(lo, hi) for nodes in self.nodes.values() for lo, hi in nodes]


class Owned(Record):
    """Which part of every block each worker averages from now on; none: the coordinator does."""

    articles = (12, 15)
    serves = "which machine added the gradients of others, in which step"

    kind: Literal["owners"] = "owners"
    epoch: Number
    step: Number
    number: Number
    reason: Words = ""
    owners: dict[Name, Annotated[float, Field(ge=0, le=1)]]


class Committed(Record):
    """A step was taken, or skipped: then its samples are covered, and nothing was applied.

    `counted` says whose sums make up the step's, where that is known: the distinct ways in which
    its chunks and losses were summed, one unless nodes were given out twice. `state_before` is the
    digest of the state that the step started from. `norm` is that of the averaged gradient before
    it was cut, `rate` the learning rate: None for a skipped step, and where an older release wrote
    the line. `own_digest` is that of what replicas have of their own after the step (`own_files`).
    `loss_scale` is what losses were multiplied by, if they were.
    """

    articles = (10, 12, 15)
    serves = "that every sample counted once; loss and digests of every step"
    older = ("weights_before",)

    kind: Literal["commit"] = "commit"
    epoch: Number
    step: Number
    attempt: Number
    optimizer_step: Number
    loss: Figure
    norm: Figure = None
    rate: Figure = None
    loss_scale: Figure = None
    skipped: bool
    averages_digest: Digest
    state_before: Digest | None = None
    own_digest: Digest | None = None
    counted: tuple[Nodes, ...] | None = None
    recovered: bool = False
    """Written after a restart, from the gradient log."""


class Halted(Record):
    """The run stopped: a value that is not finite, unequal digests, a disk that refuses, a word."""

    articles = (12, 15)
    serves = "faults that stopped the line, with worker, block, step and microbatches"

    kind: Literal["halt"] = "halt"
    epoch: Number
    step: Number
    attempt: Number
    reason: Words
    worker: Name | None = None
    block: Name | None = None
    microbatches: tuple[Number, Number] | None = None


class Fault(Record):
    """Something went wrong that did not stop the run, and what was done about it."""

    articles = (12, 15)
    serves = "robustness: faults, and the response to each"

    kind: Literal["fault"] = "fault"
    epoch: Number
    step: Number
    what: Name
    worker: Name | None = None
    reason: Words = ""
    response: Words = ""


class Commanded(Record):
    """An operator's word."""

    articles = (12, 13)
    serves = "human intervention: who asked for what, when"

    kind: Literal["command"] = "command"
    epoch: Number
    step: Number
    command: Literal["submit", "halt", "continue", "skip_step", "checkpoint", "drain", "give_up"]
    source: Words = ""


class Checkpointed(Record):
    """A checkpoint is durable. That of step 0 is the state that training started from."""

    articles = (12, 15)
    serves = "which states were kept, with digests to prove each"

    kind: Literal["checkpoint"] = "checkpoint"
    epoch: Number
    step: Number
    optimizer_step: Number
    weights_digest: Digest
    state_digest: Digest
    directory: Name


class Evaluated(Record):
    """Figures on the held-out data, of the state after `step` steps."""

    articles = (13, 15)
    serves = "accuracy as measured on held-out data, over the course of training"

    kind: Literal["evaluation"] = "evaluation"
    epoch: Number
    step: Number
    metrics: dict[Name, Figure]
    state_digest: Digest | None = None
    """Of that state, where the coordinator's replica had it."""


class Ended(Record):
    """The run is over. `result.json` holds this line's hash, as `journal_head`."""

    articles = (12, 13)
    serves = "how the run ended, and the digest of what it made"

    kind: Literal["end"] = "end"
    epoch: Number
    step: Number
    outcome: Literal["finished", "drained", "failed"]
    reason: Words
    weights_digest: Digest | None = None
    state_digest: Digest | None = None
    result_digest: Digest | None = None
    """Of what `result.json` says, less this line's hash."""


RECORDS: tuple[type[Record], ...] = (
    RunBegins, ManifestSettled, FilesKept, Resumed, ViewChanged, Planned, Owned, Committed, Halted,
    Fault, Commanded, Checkpointed, Evaluated, Ended,
)  # fmt: skip

AnyRecord = Annotated[Union[RECORDS], Field(discriminator="kind")]  # type: ignore[valid-type]  # noqa: UP007 - from the table
_READER: TypeAdapter[Record] = TypeAdapter(AnyRecord)


def read_record(document: Any) -> Record:
    """A record from its plain document.

    Raises:
        pydantic.ValidationError: It is of no kind, or does not fit it.
    """
    if isinstance(document, dict):
        older = _OLDER.get(document.get("kind", ""), ())
        document = {k: v for k, v in document.items() if k not in older or v is not None}
    return _READER.validate_json(canonical_json(document), strict=True)


def kind_of(record: type[Record]) -> str:
    """The name of a kind of record."""
    return str(record.model_fields["kind"].default)


_OLDER: Final = {kind_of(kind): kind.older for kind in RECORDS if kind.older}
