"""A capture on disk: rows are stored as steps are committed, and become files of logits.

    capture/00003.rows     the rows of steps that are not yet in a file of logits (`spool`)
    logits/00003.parquet   a file of logits (`protocol.datasets.logits_file`), never changed again
    logits/capture.json    the list of all files, once the capture is complete
                           (`datasets.capture_index`)

The number of whole steps in a file, and of whole microbatches in a row group, follow from run spec
and layout: neither crashes nor workers can affect these numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from coordinator.capture.spool import Bytes, Spool, read_stored_steps
from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    make_below,
    replace_file,
    storage_errors,
    sync_directory,
)
from protocol.base import limits
from protocol.base.errors import StorageDamaged, UsageError
from protocol.datasets.capture_index import CapturedFile, CaptureIndex
from protocol.datasets.logits_file import (
    CaptureMetadata,
    LogitsFile,
    Records,
    records_of,
    write_logits,
)
from protocol.spec.files.file_digest import open_file_digest, open_plain
from protocol.spec.files.run_files import CAPTURE_INDEX
from protocol.spec.manifest import CaptureLayout, Manifest
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.data import LOGITS_SUFFIX

DIRECTORY: Final = "capture"
_ROWS: Final = ".rows"


class CapturedFiles:
    """The files of one capture; one thread at a time.

    Args:
        directory: Directory of the run.
        manifest: The run's manifest, with a layout.
        spec: The run spec.
        committed: Number of committed steps.
        guard: Raises if this coordinator does not own the directory any more.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        spec: RunSpec,
        committed: int,
        guard: Callable[[], None],
    ) -> None:
        assert manifest.capture is not None
        self._layout: CaptureLayout = manifest.capture
        self._metadata = CaptureMetadata(
            teacher=manifest.digests["base_weights"],
            tokenizer=manifest.digests["vocabulary"],
            layout=self._layout,
        )
        self._run_directory = directory
        self._spool_directory = directory / DIRECTORY
        self._export = manifest.export
        self._directory = directory / manifest.export.directory
        self._guard = guard
        self._committed = committed
        self._steps_per_file = steps_of_a_file(spec, self._layout)
        self._samples_per_group = samples_of_a_group(spec, self._layout)
        self._spool: tuple[int, Spool] | None = None

    def store_step(self, step: int, content: Sequence[Bytes]) -> None:
        """Make the rows of a step durable, before its commit.

        Raises:
            StorageDamaged: Rows of an earlier committed step are missing.
            StorageFailed: A write failed.
        """
        self._guard()
        self._committed = min(self._committed, step)
        number = step // self._steps_per_file
        self._finish_before(number)
        self._spool_of(number).append(step, content)
        self._committed = step + 1

    def finish(self, *, is_complete: bool) -> dict[str, str]:
        """Write the files whose steps are all committed, and the last file if no more steps follow.

        Args:
            is_complete: Whether no more steps follow.

        Returns:
            BLAKE3 of each file, by its path below the run's directory.

        Raises:
            StorageDamaged: Rows of a committed step are missing or damaged.
            StorageFailed: A write failed.
        """
        self._guard()
        count = (
            -(-self._committed // self._steps_per_file)
            if is_complete
            else self._committed // self._steps_per_file
        )
        self._finish_before(count)
        descriptions = map(self._describe_file, range(count))
        files = tuple(file for file in descriptions if file is not None)
        digests = {file.name: file.digest for file in files}
        if is_complete and files:
            for name, text in self._export.files.items():
                digests[name] = replace_file(self._directory / name, text.encode())
            index = CaptureIndex(facts=self._metadata, files=files)
            digests[CAPTURE_INDEX] = replace_file(self._directory / CAPTURE_INDEX, index.to_bytes())
        return {f"{self._export.directory}/{name}": value for name, value in digests.items()}

    def close(self) -> None:
        if self._spool is not None:
            self._spool[1].close()
            self._spool = None

    def _spool_of(self, number: int) -> Spool:
        if self._spool is None or self._spool[0] != number:
            self.close()
            path = self._spool_directory / f"{number:05}{_ROWS}"
            with storage_errors("make", self._spool_directory):
                make_below(self._run_directory, self._spool_directory)
            first = number * self._steps_per_file
            committed_steps = min(self._committed, first + self._steps_per_file)
            self._spool = number, Spool(path, first, committed_steps)
        return self._spool[1]

    def _finish_before(self, count: int) -> None:
        """Write all files below this number, including files that a crash left unwritten."""
        for number in range(count):
            path, rows = self._path(number), self._spool_directory / f"{number:05}{_ROWS}"
            if not path.exists():
                self._write(path, self._spool_of(number))
            if rows.exists():
                self.close()
                with storage_errors("remove", rows):
                    rows.unlink()
                    sync_directory(rows.parent)

    def _write(self, path: Path, spool: Spool) -> None:
        """Write one file of logits, durable before it gets its name."""
        with storage_errors("write", path):
            make_below(self._run_directory, path.parent)
            temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
            write_logits(temporary, self._metadata, self._groups(spool))
            fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            self._guard()
            temporary.replace(path)
            sync_directory(path.parent)

    def _groups(self, spool: Spool) -> Iterator[Records]:
        """Yield the rows in groups of whole microbatches; at most a step and a group are in
        memory."""
        rest = records_of(b"", self._layout)
        for content in spool.contents():
            records = records_of(content, self._layout)
            rows = np.concatenate([rest, records]) if len(rest) else records
            full_rows = len(rows) - len(rows) % self._samples_per_group
            for start in range(0, full_rows, self._samples_per_group):
                yield rows[start : start + self._samples_per_group]
            rest = rows[full_rows:]
        if len(rest):
            yield rest

    def _describe_file(self, number: int) -> CapturedFile | None:
        """Describe a file; None if it has no rows because all its steps were skipped."""
        path = self._path(number)
        with storage_errors("read", path), open_plain(path) as file:
            size, digest = open_file_digest(file)
        logits = LogitsFile(path)
        if logits.facts != self._metadata:
            raise StorageDamaged(str(path), "", "it belongs to another capture")
        groups = logits.row_groups
        logits.close()
        if not groups:
            return None
        return CapturedFile(name=path.name, size=size, digest=digest, row_groups=groups)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:05}{LOGITS_SUFFIX}"


def find_first_lost_step(directory: Path, manifest: Manifest, spec: RunSpec, committed: int) -> int:
    """Return the first committed step without rows in any file; `committed` if there is none.

    Args:
        directory: Directory of the run; only read.
        manifest: The run's manifest, with a layout.
        spec: The run spec.
        committed: Number of committed steps.

    Raises:
        StorageFailed: A file cannot be read.
    """
    assert manifest.capture is not None
    steps_per_file = steps_of_a_file(spec, manifest.capture)
    for first in range(0, committed, steps_per_file):
        expected_steps = set(range(first, min(first + steps_per_file, committed)))
        path = (
            directory / manifest.export.directory / f"{first // steps_per_file:05}{LOGITS_SUFFIX}"
        )
        if path.exists():
            continue
        missing_steps = expected_steps - set(
            read_stored_steps(directory / DIRECTORY / f"{first // steps_per_file:05}{_ROWS}")
        )
        if missing_steps and not path.exists():  # (a running capture may have written it just now)
            return min(missing_steps)
    return committed


def find_files_from(directory: Path, manifest: Manifest, spec: RunSpec, step: int) -> list[Path]:
    """Return the result files that contain `step` or later steps.

    Raises:
        UsageError: Rows of earlier steps are lost, or in a file that would have to grow.
        StorageFailed: A file cannot be read.
    """
    assert manifest.capture is not None
    logits = directory / manifest.export.directory
    number, part = divmod(step, steps_of_a_file(spec, manifest.capture))
    expected_steps = set(range(step - part, step))
    present = set(read_stored_steps(directory / DIRECTORY / f"{number:05}{_ROWS}"))
    if (
        expected_steps - present
        or find_first_lost_step(directory, manifest, spec, step - part) < step - part
    ):
        raise UsageError(
            f"--from-step {step}: a capture can only roll back to steps after its finished files "
            f"of logits; nothing was changed, and the files in {str(logits)!r} stay valid: capture "
            "again into a new directory"
        )
    remaining_names = {f"{earlier_number:05}{LOGITS_SUFFIX}" for earlier_number in range(number)}
    paths = sorted(logits.iterdir()) if logits.is_dir() else []
    return [path for path in paths if path.name not in remaining_names]


def steps_of_a_file(spec: RunSpec, layout: CaptureLayout) -> int:
    """Return how many steps a file of logits holds, limited by its bytes."""
    step_bytes = spec.batch.samples * layout.sample_bytes
    return max(1, limits.LOGITS_FILE_BYTES // step_bytes)


def samples_of_a_group(spec: RunSpec, layout: CaptureLayout) -> int:
    """Return the number of samples in a row group: whole microbatches."""
    microbatch = spec.batch.microbatch
    return microbatch * max(1, limits.ROW_GROUP_BYTES // (microbatch * layout.sample_bytes))


def result_bytes(spec: RunSpec, manifest: Manifest) -> int:
    """Return the maximum size of all files of logits in bytes, without the overhead of zstd."""
    assert manifest.capture is not None
    samples = min(manifest.train_samples, spec.steps * spec.batch.samples)
    return samples * manifest.capture.sample_bytes
