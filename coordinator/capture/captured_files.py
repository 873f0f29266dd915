"""A capture on disk: steps are kept as they are committed, and become files of logits.

    capture/00003.rows     the rows of steps that are in no file of logits yet (`spool`)
    logits/00003.parquet   a file of logits (`protocol.data.logits_file`), never changed again
    logits/capture.json    all of them, once the capture is whole (`protocol.data.capture_index`)

A file holds so many whole steps, and a row group so many whole microbatches, as follow from run
spec and layout: neither crashes nor workers can show in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from coordinator.capture.spool import Bytes, Spool, kept_steps
from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    make_below,
    replace_file,
    storing,
    sync_directory,
)
from protocol.base import limits
from protocol.base.errors import StorageDamaged, UsageError
from protocol.data.capture_index import INDEX, SUFFIX, CapturedFile, CaptureIndex
from protocol.data.captured_rows import Records, records_of
from protocol.data.logits_file import CaptureFacts, LogitsFile, write_logits
from protocol.spec.capture_layout import CaptureLayout
from protocol.spec.file_digest import open_file_digest, open_plain
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec

DIRECTORY: Final = "capture"
_ROWS: Final = ".rows"


class CapturedFiles:
    """What one capture keeps; one thread at a time.

    Args:
        directory: The run's.
        manifest: The run's; it has a layout.
        spec: The run's.
        committed: Steps committed.
        guard: Raises if the directory is not this coordinator's any more.
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
        self._facts = CaptureFacts(
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
        self._steps = steps_of_a_file(spec, self._layout)
        self._group = samples_of_a_group(spec, self._layout)
        self._spool: tuple[int, Spool] | None = None

    def keep(self, step: int, content: Sequence[Bytes]) -> None:
        """Make the rows of a step durable; its commit follows.

        Raises:
            StorageDamaged: Rows of a step that was committed before are not there.
            StorageFailed: The disk refuses.
        """
        self._guard()
        self._committed = min(self._committed, step)
        number = step // self._steps
        self._finish_before(number)
        self._spool_of(number).append(step, content)
        self._committed = step + 1

    def finish(self, *, whole: bool) -> dict[str, str]:
        """All steps are committed, or the run ends early: write what can be written.

        Args:
            whole: Whether nothing more is to come.

        Returns:
            BLAKE3 of each file, by its path below the run's directory.

        Raises:
            StorageDamaged: Rows of a committed step are not there, or not what was written.
            StorageFailed: The disk refuses.
        """
        self._guard()
        count = -(-self._committed // self._steps) if whole else self._committed // self._steps
        self._finish_before(count)
        listed = map(self._listed, range(count))
        files = tuple(file for file in listed if file is not None)
        digests = {file.name: file.digest for file in files}
        if whole and files:
            for name, text in self._export.files.items():
                digests[name] = replace_file(self._directory / name, text.encode())
            index = CaptureIndex(facts=self._facts, files=files)
            digests[INDEX] = replace_file(self._directory / INDEX, index.to_bytes())
        return {f"{self._export.directory}/{name}": value for name, value in digests.items()}

    def close(self) -> None:
        if self._spool is not None:
            self._spool[1].close()
            self._spool = None

    def _spool_of(self, number: int) -> Spool:
        if self._spool is None or self._spool[0] != number:
            self.close()
            path = self._spool_directory / f"{number:05}{_ROWS}"
            with storing("make", self._spool_directory):
                make_below(self._run_directory, self._spool_directory)
            first = number * self._steps
            committed = min(self._committed, first + self._steps)
            self._spool = number, Spool(path, first, committed)
        return self._spool[1]

    def _finish_before(self, count: int) -> None:
        """All files below this number are written; those that a crash has left open, too."""
        for number in range(count):
            path, rows = self._path(number), self._spool_directory / f"{number:05}{_ROWS}"
            if not path.exists():
                self._write(path, self._spool_of(number))
            if rows.exists():
                self.close()
                with storing("remove", rows):
                    rows.unlink()
                    sync_directory(rows.parent)

    def _write(self, path: Path, spool: Spool) -> None:
        """One file of logits, durable before it has its name."""
        with storing("write", path):
            make_below(self._run_directory, path.parent)
            temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
            write_logits(temporary, self._facts, self._groups(spool))
            fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            self._guard()
            temporary.replace(path)
            sync_directory(path.parent)

    def _groups(self, spool: Spool) -> Iterator[Records]:
        """The rows in groups of whole microbatches; no more than a step and a group in memory."""
        left = records_of(b"", self._layout)
        for content in spool.contents():
            records = records_of(content, self._layout)
            joined = np.concatenate([left, records]) if len(left) else records
            whole = len(joined) - len(joined) % self._group
            for at in range(0, whole, self._group):
                yield joined[at : at + self._group]
            left = joined[whole:]
        if len(left):
            yield left

    def _listed(self, number: int) -> CapturedFile | None:
        """None for a file without rows: every one of its steps was skipped."""
        path = self._path(number)
        with storing("read", path), open_plain(path) as file:
            size, digest = open_file_digest(file)
        logits = LogitsFile(path)
        if logits.facts != self._facts:
            raise StorageDamaged(str(path), "", "it is a file of another capture")
        groups = logits.row_groups
        logits.close()
        if not groups:
            return None
        return CapturedFile(name=path.name, size=size, digest=digest, row_groups=groups)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:05}{SUFFIX}"


def first_lost_step(directory: Path, manifest: Manifest, spec: RunSpec, committed: int) -> int:
    """The first of the committed steps whose rows are in no file; `committed` if there is none.

    Args:
        directory: The run's; it is only read.
        manifest: The run's; it has a layout.
        spec: The run's.
        committed: Steps committed.

    Raises:
        StorageFailed: A file cannot be read.
    """
    assert manifest.capture is not None
    each = steps_of_a_file(spec, manifest.capture)
    for first in range(0, committed, each):
        wanted = set(range(first, min(first + each, committed)))
        path = directory / manifest.export.directory / f"{first // each:05}{SUFFIX}"
        if path.exists():
            continue
        lost = wanted - set(kept_steps(directory / DIRECTORY / f"{first // each:05}{_ROWS}"))
        if lost and not path.exists():  # (a capture that goes on may have written it just now)
            return min(lost)
    return committed


def files_from(directory: Path, manifest: Manifest, spec: RunSpec, step: int) -> list[Path]:
    """What the result holds that is not of the steps before this one alone.

    Raises:
        UsageError: Rows before this step are lost, or only in a file that would have to grow.
        StorageFailed: A file cannot be read.
    """
    assert manifest.capture is not None
    logits = directory / manifest.export.directory
    number, part = divmod(step, steps_of_a_file(spec, manifest.capture))
    wanted = set(range(step - part, step))
    kept = set(kept_steps(directory / DIRECTORY / f"{number:05}{_ROWS}"))
    if wanted - kept or first_lost_step(directory, manifest, spec, step - part) < step - part:
        raise UsageError(
            f"--from-step {step}: a capture goes back only as far as its rows are in no finished "
            f"file of logits, and these are; nothing was changed, and the files in {str(logits)!r} "
            "stay as good as they were: capture anew into a new directory"
        )
    stays = {f"{before:05}{SUFFIX}" for before in range(number)}
    found = sorted(logits.iterdir()) if logits.is_dir() else []
    return [path for path in found if path.name not in stays]


def steps_of_a_file(spec: RunSpec, layout: CaptureLayout) -> int:
    """How many steps a file of logits holds: their rows are less than it may have bytes."""
    step_bytes = spec.batch.samples * layout.sample_bytes
    return max(1, limits.LOGITS_FILE_BYTES // step_bytes)


def samples_of_a_group(spec: RunSpec, layout: CaptureLayout) -> int:
    """How many samples are read at once: whole microbatches."""
    microbatch = spec.batch.microbatch
    return microbatch * max(1, limits.ROW_GROUP_BYTES // (microbatch * layout.sample_bytes))


def result_bytes(spec: RunSpec, manifest: Manifest) -> int:
    """At most so many bytes all files of logits have, but for what zstd cannot make smaller."""
    assert manifest.capture is not None
    samples = min(manifest.train_samples, spec.steps * spec.batch.samples)
    return samples * manifest.capture.sample_bytes
