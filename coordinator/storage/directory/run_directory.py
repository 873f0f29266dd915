"""The files of one run's directory.

    lock, term.json           the coordinator that owns the directory (`directory_lock`)
    run.json                  the run's ID, its spec, and when it was accepted
    manifest.json             the run's manifest, on which the workers agreed
    terms.json                the conditions of admission (`AdmissionRecord`)
    files.json                the files that the run reads, and where they were (`blob_index`)
    journal.jsonl             the events of the run (`journal`)
    log/                      averaged gradients since the last checkpoint (`gradient_log`)
    checkpoints/              whole states (`checkpoint`)
    replicas/                 per-replica state (`replica_states`)
    result.json               how the run ended, with the journal's head
    adapter/ or model/        the trained tensors
    set-aside/                files that a rollback removed from the run (`rollback`)

The coordinator's own directory has lock and term too. If the coordinator executes a single run,
both directories are the same.
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
    read_if_exists,
    remove_temporaries,
    replace_file,
    storage_errors,
    sync_directory,
)
from coordinator.run.outputs.restart import AdmissionRecord
from coordinator.storage.log.log_index import segment_files
from protocol.base.errors import MessageError, Mismatch, StorageDamaged, UsageError
from protocol.base.option_names import option
from protocol.base.regular_file import parse_json, read_json
from protocol.spec.manifest import BEST, Manifest
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes

FORMAT: Final = 1
_DIRECTORIES: Final = (
    "log", "checkpoints", "replicas", "capture", "set-aside", BEST, "trackers",
)  # fmt: skip
RESULT_REMEDY: Final = (
    "restore it from a copy, or remove result.json: --resume writes it and the model again"
)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The content of `run.json`; `document` is the run spec as JSON, unvalidated."""

    run_id: str
    spec: RunSpec
    document: dict[str, Any]


class RunDirectory:
    """The paths of a run's files; reads and writes the small files, each as a whole.

    Args:
        path: The directory; `begin` creates it.
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
    def admission_file(self) -> Path:
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

    def replica_state_file(self, step: int) -> Path:
        """Return the file of the per-replica state at the start of a round."""
        return self.replicas / f"own-{step}"

    @property
    def set_aside(self) -> Path:
        return self.path / "set-aside"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def small_files(self) -> tuple[Path, ...]:
        """The files that a restart reads besides log, journal and checkpoints (`file_digests`)."""
        return self.run_file, self.manifest_file, self.admission_file, self.files_file

    def begin(self, run_id: str, spec: RunSpec) -> None:
        """Write ID and spec of a new run.

        Raises:
            UsageError: The directory already has a run.
            StorageFailed: A write failed.
        """
        if self.read_run_file() is not None:
            if self.manifest_file.exists() or self.log.exists() or self.checkpoints.exists():
                raise UsageError(
                    f"{str(self.path)!r} holds a run already{self._advice_for_existing_run(spec)}"
                )
            with storage_errors("remove the files of a run that never began in", self.path):
                for leftover in (
                    self.journal,
                    self.files_file,
                    self.admission_file,
                    self.result_file,
                ):
                    leftover.unlink(missing_ok=True)
        with storage_errors("make", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        document = {
            "format": FORMAT,
            "run_id": run_id,
            "accepted_ns": time.time_ns(),
            "spec": spec.model_dump(mode="json"),
        }
        replace_file(self.run_file, _sealed(document))

    def run_file_with(self, spec: RunSpec) -> bytes:
        """Return the content of `run.json` with another run spec.

        Raises:
            StorageFailed: `run.json` cannot be read.
        """
        with storage_errors("read", self.run_file):
            document = read_json(self.run_file)
        return _sealed({**document, "spec": spec.model_dump(mode="json")})

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the run's manifest, if there is none.

        Raises:
            Mismatch: There is a different manifest.
            StorageFailed: A write failed.
        """
        existing = self.read_manifest()
        if existing is not None and existing.digest() != manifest.digest():
            raise Mismatch(
                f"expected the manifest of {str(self.manifest_file)!r}, got a different one: "
                "model, data or release differ from when the run began; start a new run"
            )
        if existing is None:
            replace_file(self.manifest_file, manifest.to_bytes())

    def write_admission_record(self, record: AdmissionRecord) -> None:
        """Write the admission record.

        Raises:
            StorageFailed: A write failed.
        """
        replace_file(self.admission_file, admission_record_bytes(record))

    def read_admission_record(self) -> AdmissionRecord | None:
        """Return the admission record; None if no worker has computed.

        Raises:
            StorageDamaged: The file is damaged.
            StorageFailed: The record cannot be read.
        """
        content = read_if_exists(self.admission_file)
        try:
            return AdmissionRecord.model_validate_json(content) if content is not None else None
        except ValidationError as error:
            reason = f"{error.errors()[0]['msg']}; restore it from a copy"
            raise StorageDamaged(str(self.admission_file), "", reason) from None

    def reopen(self) -> None:
        """Remove the result of a run that continues.

        Raises:
            StorageFailed: A write failed.
        """
        with storage_errors("remove", self.result_file):
            if self.result_file.exists():
                self.result_file.unlink()
                sync_directory(self.path)

    def _advice_for_existing_run(self, spec: RunSpec) -> str:
        """Return the advice for the user whose directory already has a run, perhaps of another run
        spec.

        Raises:
            StorageFailed: The directory cannot be read.
        """
        try:
            run = self.read_run()
        except StorageDamaged:
            run = None  # resuming it reports the damage
        if run is None or run.spec == spec:
            return f": continue it ({option('--resume')}), or choose another directory"
        return (
            f", {run.run_id!r} of another run spec: choose another directory; to continue that "
            f"one: coordinator --resume --out {shlex.quote(str(self.path))}"
        )

    def read_run(self) -> StoredRun | None:
        """Return the run in the directory, if any.

        Raises:
            StorageDamaged: `run.json` cannot be parsed by this release.
            StorageFailed: The directory cannot be read.
        """
        content = self.read_run_file()
        if content is None:
            return None
        document, fault = _parse_run_file(content)
        if fault:
            reason = (
                f"expected JSON with the run's ID and spec, got {fault}; restore it from a copy"
            )
            raise StorageDamaged(str(self.run_file), "", reason)
        spec = document["spec"]
        try:
            run_spec = parse_run_spec_bytes(json.dumps(spec).encode())
        except MessageError as error:
            reason = f"{error}; restore it from a copy"
            raise StorageDamaged(str(self.run_file), "", reason) from None
        return StoredRun(document["run_id"], run_spec, spec)

    def read_run_file(self) -> bytes | None:
        """Return the content of `run.json`; None if there is no run.

        Raises:
            StorageDamaged: A run exists without that file, or has a file in place of a directory.
            StorageFailed: The file cannot be read.
        """
        content = read_if_exists(self.run_file)
        if content is not None:
            self._check_directories()
        with storage_errors("read", self.log):
            has_begun = self.journal.exists() or bool(segment_files(self.log))
        if content is None and has_begun:
            reason = "it is missing, though there is a journal or a log; restore it from a copy"
            raise StorageDamaged(str(self.run_file), "", reason)
        return content

    def _check_directories(self) -> None:
        """Check that no file takes the place of a directory.

        Raises:
            StorageDamaged: A file has the name of a directory.
        """
        for path in (self.path / name for name in _DIRECTORIES):
            if os.path.lexists(path) and not path.is_dir():
                reason = "expected a directory, got a file; remove it, or restore the directory"
                raise StorageDamaged(str(path), "", f"{reason} from a copy")

    def accepted_ns(self) -> int:
        """Return when the run was accepted, in nanoseconds since 1970.

        A `run.json` without this time counts as accepted when it was last changed: two runs may
        then have the same time, since file systems count in milliseconds. Without `run.json`, the
        directory's time counts.
        """
        try:
            return int(read_json(self.run_file)["accepted_ns"])
        except (OSError, ValueError, KeyError, TypeError):
            path = self.run_file if self.run_file.exists() else self.path
            return path.stat().st_mtime_ns

    def read_manifest(self) -> Manifest | None:
        """Return the run's manifest, if there is one.

        Raises:
            StorageDamaged: The file is damaged.
            StorageFailed: The manifest cannot be read.
        """
        content = read_if_exists(self.manifest_file)
        try:
            return Manifest.from_bytes(content) if content is not None else None
        except MessageError as error:
            reason = f"{error}; restore it from a copy"
            raise StorageDamaged(str(self.manifest_file), "", reason) from None

    def read_result(self) -> dict[str, Any] | None:
        """Return the content of `result.json`, if the run has ended.

        Raises:
            StorageDamaged: The file is not JSON, or not a result of this run.
            StorageFailed: The file cannot be read.
        """
        content, run = read_if_exists(self.result_file), self.read_run()
        if content is None:
            return None
        try:
            document: dict[str, Any] = parse_json(content)
            run_id, outcome = document["run_id"], document["outcome"]
        except (ValueError, KeyError, TypeError):
            content_start = f"{content[:40]!r}"
        else:
            if run is not None and run_id != run.run_id:
                content_start = f"that of run {run_id!r}"
            elif outcome in {"finished", "drained"}:
                return document
            else:
                content_start = f"the outcome {outcome!r}"
        reason = f"expected the outcome of the run, got {content_start}; {RESULT_REMEDY}"
        raise StorageDamaged(str(self.result_file), "", reason)

    def clear(self) -> None:
        """Remove temporary files that a crash left; only the holder of the lock may call this.

        Raises:
            StorageFailed: A write failed.
        """
        for directory in (self.path, self.log, self.checkpoints, self.replicas):
            remove_temporaries(directory)


def _parse_run_file(content: bytes) -> tuple[dict[str, Any], str]:
    """Parse `run.json`; return the document, and a description of its fault or an empty string."""
    if not content.strip():
        return {}, "an empty file"
    try:
        document = parse_json(content)
    except ValueError:
        return {}, "a file that is not JSON, or only a part of it"
    if not isinstance(document, dict):
        return {}, "JSON without keys"
    for key, value_type, type_name in (("run_id", str, "a text"), ("spec", dict, "a run spec")):
        if not isinstance(document.get(key), value_type):
            return {}, f"JSON without {type_name} under {key!r}"
    return document, ""


def is_intact(document: dict[str, Any]) -> bool:
    """Return whether ID and spec in `run.json` match its digest. Older releases stored no digest:
    their files count as intact."""
    return document.get("blake3") in (None, _seal(document))


def _sealed(document: dict[str, Any]) -> bytes:
    document["blake3"] = _seal(document)
    return (json.dumps(document, indent=2) + "\n").encode()


def _seal(document: dict[str, Any]) -> str:
    return json_digest({"run_id": document["run_id"], "spec": document["spec"]})


def admission_record_bytes(record: AdmissionRecord) -> bytes:
    """Return the content of `terms.json`."""
    return record.model_dump_json().encode()
