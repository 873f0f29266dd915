"""The records of a journal, and the articles of the EU AI Act that each record serves.

Regulation (EU) 2024/1689: article 10 (data and data governance), 12 (record-keeping), 13
(transparency), 15 (accuracy, robustness and cybersecurity). A record supports the articles that it
lists; an article may ask for more than such records.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Union

from pydantic import Field, TypeAdapter

from coordinator.disk.canonical_json import canonical_json, json_digest
from coordinator.disk.older_names import with_term
from coordinator.run.outputs.events import (
    Checkpointed,
    Committed,
    Evaluated,
    Halted,
    LongText,
    ManifestSettled,
    Name,
    OwnersChanged,
    Planned,
    Record,
    ViewChanged,
)
from protocol.base.fields import Digest, Number


class RunStarted(Record):
    """A run is accepted: its complete spec, and the software that executes it."""

    articles = (10, 12, 13)
    purpose = "model, data, settings and software of the run"

    kind: Literal["run"] = "run"
    run_id: Name
    spec: dict[str, Any]
    spec_digest: Digest
    versions: dict[Name, Name]

    @staticmethod
    def of(run_id: str, spec: dict[str, Any], versions: dict[str, str]) -> RunStarted:
        """Make the record of a run spec's JSON document."""
        return RunStarted(
            run_id=run_id, spec=spec, spec_digest=json_digest(spec), versions=versions
        )


class SpecChanged(Record):
    """The run continues with a changed run spec: it applies to the steps from `step` on."""

    articles = (10, 12, 13)
    purpose = "changes of settings, with their times and the settings of earlier steps"

    kind: Literal["spec_changed"] = "spec_changed"
    term: Number
    step: Number
    changes: tuple[LongText, ...]
    before: Digest
    """`spec_digest` of the spec until then."""
    spec: dict[str, Any]
    spec_digest: Digest


class FileDigests(Record):
    """BLAKE3 of the small files that a restart reads.

    A file that is being replaced has two digests: a crash may leave the old or the new content.
    None means that the file may be missing.
    """

    articles = (12, 15)
    purpose = "proof that a resumed run has the settings and admissions that it began with"

    kind: Literal["files"] = "files"
    term: Number
    digests: dict[Name, tuple[Digest | None, ...]]


class Resumed(Record):
    """A coordinator continued the run. Earlier commits of `step` and later steps are rolled back:
    these steps are redone."""

    articles = (12, 15)
    purpose = "resilience: the state found at a restart, and the step from which the run continued"
    older_fields = ("state_digest",)

    kind: Literal["resumed"] = "resumed"
    term: Number
    step: Number
    optimizer_step: Number
    notes: tuple[LongText, ...] = ()


class Fault(Record):
    """A fault that did not stop the run, and the response to it."""

    articles = (12, 15)
    purpose = "robustness: faults, and the response to each"

    kind: Literal["fault"] = "fault"
    term: Number
    step: Number
    what: Name
    worker: Name | None = None
    reason: LongText = ""
    response: LongText = ""


CommandName = Literal[
    "submit", "halt", "continue", "skip_step", "checkpoint", "drain", "give_up"
]  # fmt: skip


class CommandReceived(Record):
    """An operator's command."""

    articles = (12, 13)
    purpose = "human intervention: each command, with its source and time"

    kind: Literal["command"] = "command"
    term: Number
    step: Number
    command: CommandName
    source: LongText = ""


class Ended(Record):
    """The run is over. `result.json` has this line's hash as `journal_head`."""

    articles = (12, 13)
    purpose = "outcome of the run, and the digest of its result"

    kind: Literal["end"] = "end"
    term: Number
    step: Number
    outcome: Literal["finished", "drained", "failed"]
    reason: LongText
    weights_digest: Digest | None = None
    state_digest: Digest | None = None
    result_digest: Digest | None = None
    """Digest of the content of `result.json` without this line's hash."""


RECORDS: tuple[type[Record], ...] = (
    RunStarted, ManifestSettled, FileDigests, Resumed, SpecChanged, ViewChanged, Planned,
    OwnersChanged, Committed, Halted, Fault, CommandReceived, Checkpointed, Evaluated, Ended,
)  # fmt: skip

AnyRecord = Annotated[Union[RECORDS], Field(discriminator="kind")]  # type: ignore[valid-type]  # noqa: UP007 - from the table
_READER: TypeAdapter[Record] = TypeAdapter(AnyRecord)


def read_record(document: Any) -> Record:
    """Validate a record's JSON document.

    Raises:
        pydantic.ValidationError: The record's kind is unknown, or the record does not fit its kind.
    """
    if isinstance(document, dict):
        older_fields = _OLDER.get(document.get("kind", ""), ())
        fields = {k: v for k, v in document.items() if k not in older_fields or v is not None}
        document = with_term(fields)
    return _READER.validate_json(canonical_json(document), strict=True)


def record_name(record_type: type[Record]) -> str:
    """Return the name of a type of record, as in the key "kind" of its lines."""
    return str(record_type.model_fields["kind"].default)


_OLDER: Final = {
    record_name(record_type): record_type.older_fields
    for record_type in RECORDS
    if record_type.older_fields
}
