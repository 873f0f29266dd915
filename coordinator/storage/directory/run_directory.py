"""What a run keeps, and where: the files of one run's directory.

    lock, epoch.json          whose it is (`claim`)
    run.json                  the run's id, its spec, and when it was accepted
    manifest.json             what the workers agreed on
    terms.json                what workers were accepted by (`terms`)
    files.json                the files that it reads, and where they lay (`kept_index`)
    journal.jsonl             what happened (`journal`)
    log/                      averaged gradients since the last checkpoint (`gradient_log`)
    checkpoints/              whole states (`checkpoint`)
    replicas/                 states of single replicas (`replica_states`)
    result.json               how it ended, with the journal's head
    adapter/ or model/        what was trained
    set-aside/                what came after a checkpoint that the run went back to (`way_back`)

The coordinator's own directory has lock and epoch too. When it runs one run alone, both are one.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from coordinator.disk.canonical_json import json_digest
from coordinator.disk.durable_file import (
    read_if_there,
    remove_temporaries,
    replace_file,
    storing,
    sync_directory,
)
from coordinator.run.outputs.restart import Terms
from coordinator.storage.log.log_index import segment_files
from protocol.base.errors import MessageError, Mismatch, StorageDamaged, UsageError
from protocol.base.regular_file import parse_json, read_json
from protocol.spec.manifest import BEST, Manifest
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes

FORMAT: Final = 1
_DIRECTORIES: Final = (
    "log", "checkpoints", "replicas", "capture", "set-aside", BEST, "trackers",
)  # fmt: skip
RESULT_REMEDY: Final = (
    "bring it back from a copy, or remove result.json: --resume writes that and the model anew"
)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What `run.json` says; `document` is the spec as it was written."""

    run_id: str
    spec: RunSpec
    document: dict[str, Any]


class RunDirectory:
    """Names of files, and those of them that are written once.

    Args:
        path: The directory; `begin` makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    @property
    def files_file(self) -> Path:
        return self.path / "files.json"

    @property
    def terms_file(self) -> Path:
        return self.path / "terms.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def replicas(self) -> Path:
        return self.path / "replicas"

    def own_file(self, step: int) -> Path:
        """What replicas have of their own at the start of a round."""
        return self.replicas / f"own-{step}"

    @property
    def set_aside(self) -> Path:
        return self.path / "set-aside"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def small_files(self) -> tuple[Path, ...]:
        """What a restart reads beside log, journal and checkpoints (`kept_files`)."""
        return self.run_file, self.manifest_file, self.terms_file, self.files_file

    def begin(self, run_id: str, spec: RunSpec) -> None:
        """A run is accepted: keep its id and spec.

        Raises:
            UsageError: There is a run already.
            StorageFailed: The disk refuses.
        """
        if self.read_run_file() is not None:
            if self.manifest_file.exists() or self.log.exists() or self.checkpoints.exists():
                raise UsageError(f"{str(self.path)!r} holds a run already{self._way_on(spec)}")
            with storing("remove what is left of a run that never began in", self.path):
                for left in (self.journal, self.files_file, self.terms_file, self.result_file):
                    left.unlink(missing_ok=True)
        with storing("make", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        document = {
            "format": FORMAT,
            "run_id": run_id,
            "accepted_ns": time.time_ns(),
            "spec": spec.model_dump(mode="json"),
        }
        document["blake3"] = _seal(document)
        replace_file(self.run_file, (json.dumps(document, indent=2) + "\n").encode())

    def keep_manifest(self, manifest: Manifest) -> None:
        """Keep the manifest that was settled.

        Raises:
            Mismatch: Another one is kept already.
            StorageFailed: The disk refuses.
        """
        known = self.read_manifest()
        if known is not None and known.digest() != manifest.digest():
            raise Mismatch(
                f"expected the manifest of {str(self.manifest_file)!r}, got another: model, data "
                "or release differ from when the run began; start a new run"
            )
        if known is None:
            replace_file(self.manifest_file, manifest.to_bytes())

    def write_terms(self, terms: Terms) -> None:
        """Keep what workers were accepted by.

        Raises:
            StorageFailed: The disk refuses.
        """
        replace_file(self.terms_file, terms_bytes(terms))

    def read_terms(self) -> Terms | None:
        """What workers were accepted by, if any has computed.

        Raises:
            StorageDamaged: The file holds none.
            StorageFailed: It cannot be read.
        """
        content = read_if_there(self.terms_file)
        try:
            return Terms.model_validate_json(content) if content is not None else None
        except ValidationError as error:
            reason = f"{error.errors()[0]['msg']}; bring it back from a copy"
            raise StorageDamaged(str(self.terms_file), "", reason) from None

    def reopen(self) -> None:
        """The run goes on: it has no result any more.

        Raises:
            StorageFailed: The disk refuses.
        """
        with storing("remove", self.result_file):
            if self.result_file.exists():
                self.result_file.unlink()
                sync_directory(self.path)

    def _way_on(self, spec: RunSpec) -> str:
        """What to do where a run is already: one of another run spec is not gone on with as this.

        Raises:
            StorageFailed: It cannot be read.
        """
        try:
            stored = self.read_run()
        except StorageDamaged:
            stored = None  # whoever goes on with it is told
        if stored is None or stored.spec == spec:
            return ": go on with it (--resume), or choose another directory"
        return (
            f", {stored.run_id!r} of another run spec: choose another directory; that one goes on "
            f"by coordinator --resume --out {shlex.quote(str(self.path))}"
        )

    def read_run(self) -> StoredRun | None:
        """The run that is there, if any.

        Raises:
            StorageDamaged: `run.json` holds none that this release can read.
            StorageFailed: It cannot be read.
        """
        content = self.read_run_file()
        if content is None:
            return None
        try:
            document = parse_json(content)
            run_id, spec = document["run_id"], document["spec"]
            parsed = parse_run_spec_bytes(json.dumps(spec).encode())
        except (ValueError, KeyError, TypeError, MessageError) as error:
            reason = f"expected a run's id and spec, got {error}; bring it back from a copy"
            raise StorageDamaged(str(self.run_file), "", reason) from None
        return StoredRun(str(run_id), parsed, spec)

    def read_run_file(self) -> bytes | None:
        """What is in `run.json`; None where there is no run.

        Raises:
            StorageDamaged: There is a run, without that file or with a file for a directory.
            StorageFailed: It cannot be read.
        """
        content = read_if_there(self.run_file)
        if content is not None:
            self._check_directories()
        with storing("read", self.log):
            written = self.journal.exists() or bool(segment_files(self.log))
        if content is None and written:
            reason = "it is missing, though there is a journal or a log; bring it back from a copy"
            raise StorageDamaged(str(self.run_file), "", reason)
        return content

    def _check_directories(self) -> None:
        """See that no file is where the run keeps a directory.

        Raises:
            StorageDamaged: One is.
        """
        for path in (self.path / name for name in _DIRECTORIES):
            if os.path.lexists(path) and not path.is_dir():
                reason = "expected a directory, got a file; remove it, or bring the directory back"
                raise StorageDamaged(str(path), "", f"{reason} from a copy")

    def accepted_ns(self) -> int:
        """When the run was accepted, in nanoseconds since 1970.

        Where `run.json` does not say, that is when the file was last changed: two that came one
        after the other may then have the same time, as file systems count in milliseconds. Where it
        is missing, the directory's own time counts.
        """
        try:
            return int(read_json(self.run_file)["accepted_ns"])
        except (OSError, ValueError, KeyError, TypeError):
            there = self.run_file if self.run_file.exists() else self.path
            return there.stat().st_mtime_ns

    def read_manifest(self) -> Manifest | None:
        """The manifest that was settled, if any.

        Raises:
            StorageDamaged: The file holds none.
            StorageFailed: It cannot be read.
        """
        content = read_if_there(self.manifest_file)
        try:
            return Manifest.from_bytes(content) if content is not None else None
        except MessageError as error:
            reason = f"{error}; bring it back from a copy"
            raise StorageDamaged(str(self.manifest_file), "", reason) from None

    def read_result(self) -> dict[str, Any] | None:
        """What `result.json` says, if the run has ended.

        Raises:
            StorageDamaged: It is not JSON, or no result of this run.
            StorageFailed: It cannot be read.
        """
        content, run = read_if_there(self.result_file), self.read_run()
        if content is None:
            return None
        try:
            document: dict[str, Any] = parse_json(content)
            run_id, outcome = document["run_id"], document["outcome"]
        except (ValueError, KeyError, TypeError):
            found = f"{content[:40]!r}"
        else:
            if run is not None and run_id != run.run_id:
                found = f"that of run {run_id!r}"
            elif outcome in {"finished", "drained"}:
                return document
            else:
                found = f"the outcome {outcome!r}"
        reason = f"expected how the run ended, got {found}; {RESULT_REMEDY}"
        raise StorageDamaged(str(self.result_file), "", reason)

    def clear(self) -> None:
        """Remove what a crash left half written. Only for who holds the directory.

        Raises:
            StorageFailed: The disk refuses.
        """
        for directory in (self.path, self.log, self.checkpoints, self.replicas):
            remove_temporaries(directory)


def is_whole(document: dict[str, Any]) -> bool:
    """Whether id and spec in `run.json` are those that were written; older releases did not say."""
    return document.get("blake3") in (None, _seal(document))


def _seal(document: dict[str, Any]) -> str:
    return json_digest({"run_id": document["run_id"], "spec": document["spec"]})


def terms_bytes(terms: Terms) -> bytes:
    """What `terms.json` holds."""
    return terms.model_dump_json().encode()
