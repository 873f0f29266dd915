"""Checkpoints: the whole trainable state after a step, each in its own directory.

    step-0000000040/
        adapter/ or model/        the parameters in the run's result format: for LoRA, PEFT's
        optimizer.safetensors     the rest of the state, as KIND/TENSOR with the kinds of
                                  `protocol.exact.replica.state_kinds`, such as first_moment; for
                                  tensors with missed updates also their count, as
                                  missed_updates/TENSOR
        checkpoint.json           counters, digests, the losses so far, the hash of every file
        metrics.json              metrics of an evaluation of this state, once there are any

A checkpoint is written under a temporary name, every file and directory is synced, and the
directory is renamed: under its final name a checkpoint is complete. Loading still checks hashes and
the state's digest.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.numpy import load_file

from coordinator.disk.artifacts import prepare_model_files
from coordinator.disk.canonical_json import json_digest
from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    NewFile,
    make_below,
    remove_temporaries,
    replace_file,
    storage_errors,
    sync_directory,
)
from coordinator.disk.older_names import with_term
from coordinator.disk.safetensors_file import safetensors_pieces
from protocol.base.errors import Mismatch, StorageDamaged, StorageFailed
from protocol.base.fields import Digest, Number, ShortText
from protocol.base.regular_file import open_regular, parse_json, read_json
from protocol.exact.replica import Replica
from protocol.spec.manifest import Manifest

FORMAT: Final = 2
Document = TypeVar("Document", bound=BaseModel)
STATE_FILE: Final = "optimizer.safetensors"
INFO_FILE: Final = "checkpoint.json"
METRICS_FILE: Final = "metrics.json"
_REMEDY: Final = "restore it from a copy; until then an older checkpoint is used"

_NAME: Final = re.compile(r"step-(\d{10,})")


class CheckpointInfo(BaseModel):
    """The content of `checkpoint.json`.

    `state_digest` is `protocol.exact.digest`'s "state", in checkpoints of format 1 its "state 1".
    `losses` has one entry for each step so far, None for a skipped step. `files` has the BLAKE3 of
    every other file, by its path within the checkpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Annotated[int, Field(ge=1, le=FORMAT)] = FORMAT
    run_id: ShortText
    term: Number
    step: Number
    optimizer_step: Number
    manifest_digest: Digest
    weights_digest: Digest
    state_digest: Digest
    losses: tuple[float | None, ...]
    files: dict[str, Digest]


class Metrics(BaseModel):
    """The content of `metrics.json`: metrics, and the digest of their state (None in older
    files)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    state_digest: Digest | None
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are intact."""

    path: Path
    info: CheckpointInfo


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return root / f"step-{step:010d}"


def checkpoint_steps(root: Path) -> list[int]:
    """Return the steps of all checkpoints, intact or not, in order.

    Raises:
        StorageFailed: The directory cannot be read.
    """
    if not root.is_dir():
        return []
    with storage_errors("read", root):
        matches = (_NAME.fullmatch(path.name) for path in root.iterdir())
        return sorted(int(match[1]) for match in matches if match is not None)


def write_checkpoint(
    root: Path,
    manifest: Manifest,
    replica: Replica,
    *,
    run_id: str,
    term: int,
    losses: Sequence[float],
    on_state_written: Callable[[], None] = lambda: None,
) -> Checkpoint:
    """Write a checkpoint, which is durable when this returns.

    Args:
        root: The directory of all checkpoints; created if missing.
        manifest: The run's manifest, which sets the layout.
        replica: The state. It must not change until `on_state_written` is called, or until this
            function returns.
        run_id: The run's ID.
        term: Term of the coordinator.
        losses: The mean loss of each step so far; not finite for a skipped step.
        on_state_written: Called once the state is written, before it is durable.

    Raises:
        StorageFailed: A write failed; no partial checkpoint is left. The call can be repeated.
    """
    assert len(losses) == replica.step
    path = checkpoint_path(root, replica.step)
    with storage_errors("make", root):
        make_below(root.parent, root)
    remove_temporaries(root)
    info = CheckpointInfo(
        format=FORMAT,
        run_id=run_id,
        term=term,
        step=replica.step,
        optimizer_step=replica.optimizer_step,
        manifest_digest=manifest.digest(),
        weights_digest=replica.weights_digest(),
        state_digest=replica.state_digest(),
        losses=tuple(loss if math.isfinite(loss) else None for loss in losses),
        files={},
    )
    existing = _existing_checkpoint(root, info, manifest, replica)
    if existing is not None:
        with storage_errors("sync", root):
            sync_directory(root)  # its writer may have ended before the sync
        return existing
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with storage_errors("write", path):
            info = _write_files(temporary, manifest, replica, info, on_state_written)
            remove_checkpoint(path)
            temporary.rename(path)
            sync_directory(root)
    except StorageFailed:
        # The partial checkpoint may be what fills the disk.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Checkpoint(path, info)


def find_checkpoint(root: Path, step: int, run_id: str, manifest: Manifest) -> Checkpoint:
    """Return the checkpoint after `step` steps, once every file matches its hash.

    Raises:
        StorageDamaged: A file is missing or damaged.
        StorageFailed: The checkpoint cannot be read.
        Mismatch: The checkpoint belongs to another run or manifest.
    """
    path = checkpoint_path(root, step)
    file, info = path / INFO_FILE, _read_info(path)
    if info.run_id != run_id or info.manifest_digest != manifest.digest():
        fault = (
            f"belongs to run {info.run_id!r}" if info.run_id != run_id else "has another manifest"
        )
        raise Mismatch(f"{str(path)!r} {fault}; {_REMEDY}")
    if info.step != step:
        reason = f"expected step {step}, got {info.step}; {_REMEDY}"
        raise StorageDamaged(str(file), "", reason)
    with storage_errors("read", path):
        files = sorted(path.rglob("*"))
    digests = _file_digests(path, files)
    for name, digest in info.files.items():
        if name not in digests:
            raise StorageDamaged(str(path / name), "", f"it is missing; {_REMEDY}")
        if digests[name] != digest:
            raise StorageDamaged(str(path / name), "", f"it does not match its digest; {_REMEDY}")
    return Checkpoint(path, info)


def _read_info(path: Path) -> CheckpointInfo:
    return _read_sealed(path / INFO_FILE, "checkpoint", CheckpointInfo, _REMEDY)


def _read_sealed(file: Path, key: str, model: type[Document], remedy: str) -> Document:
    """Read a JSON file that has a document under `key`, and the document's BLAKE3."""
    if not file.exists():
        raise StorageDamaged(str(file), "", f"it is missing; {remedy}")
    try:
        with storage_errors("read", file):
            document = read_json(file)
        content = model.model_validate_json(json.dumps(with_term(document[key])), strict=True)
        is_intact = document["blake3"] == json_digest(document[key])
    except (ValueError, TypeError, KeyError):
        is_intact = False
    if not is_intact:
        raise StorageDamaged(str(file), "", f"it does not match its digest; {remedy}")
    return content


def _seal(key: str, content: BaseModel) -> bytes:
    plain = content.model_dump(mode="json")
    document = {key: plain, "blake3": json_digest(plain)}
    return (json.dumps(document, indent=2) + "\n").encode()


def latest_checkpoint(
    root: Path, run_id: str, manifest: Manifest
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest intact checkpoint, and why newer ones were skipped.

    Raises:
        StorageFailed: The directory cannot be read.
    """
    skip_reasons: list[str] = []
    for step in reversed(checkpoint_steps(root)):
        try:
            return find_checkpoint(root, step, run_id, manifest), tuple(skip_reasons)
        except (StorageDamaged, StorageFailed, Mismatch) as error:
            skip_reasons.append(str(error))
    return None, tuple(skip_reasons)


def write_metrics(root: Path, step: int, state_digest: str, figures: Mapping[str, float]) -> None:
    """Store the metrics of an evaluation with the checkpoint of the same state, if there is one.

    Raises:
        StorageFailed: A write failed.
    """
    path = checkpoint_path(root, step)
    try:
        if not path.is_dir() or _read_info(path).state_digest != state_digest:
            return
    except StorageDamaged:
        return  # a damaged checkpoint is never used
    finite_metrics = {name: value for name, value in figures.items() if math.isfinite(value)}
    metrics = Metrics(state_digest=state_digest, figures=finite_metrics)
    replace_file(path / METRICS_FILE, _seal("metrics", metrics))


def read_metrics(root: Path, step: int) -> Metrics | None:
    """Return the metrics stored with a checkpoint; None if there are none.

    Raises:
        StorageDamaged: The metrics are damaged, or belong to another state.
        StorageFailed: The metrics cannot be read.
    """
    path = checkpoint_path(root, step)
    file = path / METRICS_FILE
    with storage_errors("read", file):
        if not file.exists():
            return None
        older_metrics = _parse_older(file.read_bytes())
    if older_metrics is not None:
        return Metrics(state_digest=None, figures=older_metrics)
    metrics = _read_sealed(file, "metrics", Metrics, "restore it from a copy, or remove it")
    if metrics.state_digest != _read_info(path).state_digest:
        raise StorageDamaged(str(file), "", "its metrics are of another state; remove the file")
    return metrics


def _parse_older(content: bytes) -> dict[str, float] | None:
    """Parse the file of an older release: the metrics alone."""
    try:
        document = parse_json(content)
        return {str(name): float(value) for name, value in document.items()}
    except (ValueError, TypeError, AttributeError):
        return None


def remove_checkpoint(path: Path) -> None:
    """Give a checkpoint, if it exists, a temporary name: `remove_temporaries` then removes it.

    So no partial checkpoint ever has the name of a checkpoint.

    Raises:
        StorageFailed: A write failed.
    """
    if not path.is_dir():
        return
    with storage_errors("remove", path):
        path.rename(path.with_name(f"{path.name}-removed{TEMPORARY_SUFFIX}"))
        sync_directory(path.parent)


def _existing_checkpoint(
    root: Path, info: CheckpointInfo, manifest: Manifest, replica: Replica
) -> Checkpoint | None:
    """Return the checkpoint of exactly this state, if the run wrote one before it was resumed."""
    try:
        existing = find_checkpoint(root, info.step, info.run_id, manifest)
    except (StorageDamaged, StorageFailed, Mismatch):
        return None
    return existing if replica.has_digest(existing.info.state_digest) else None


def _write_files(
    path: Path,
    manifest: Manifest,
    replica: Replica,
    info: CheckpointInfo,
    on_state_written: Callable[[], None],
) -> CheckpointInfo:
    path.mkdir()
    moments = {
        f"{part.kind}/{tensor.name}": values
        for part in replica.parts()
        if part.kind != "parameters"
        for tensor, values in part.by_tensor(manifest.blocks[part.block])
    }
    with ExitStack() as stack:
        new_files = prepare_model_files(stack, path, manifest, replica.tensors())
        new_files[STATE_FILE] = stack.enter_context(NewFile(path / STATE_FILE))
        new_files[STATE_FILE].write(safetensors_pieces(moments, {"step": str(replica.step)}))
        on_state_written()
        files = {name: file.confirm() for name, file in new_files.items()}
    info = info.model_copy(update={"files": files})
    replace_file(path / INFO_FILE, _seal("checkpoint", info))
    return info


def _file_digests(path: Path, files: Sequence[Path]) -> dict[str, str]:
    """Return the BLAKE3 of every file in a checkpoint, by its path within the checkpoint, except
    `checkpoint.json` and `metrics.json`."""
    digests: dict[str, str] = {}
    for file in files:
        name = file.relative_to(path).as_posix()
        if file.is_file() and name not in {INFO_FILE, METRICS_FILE}:
            with storage_errors("read", file), open_regular(file) as content:
                hasher = blake3(max_threads=blake3.AUTO)
                while piece := content.read(1 << 24):
                    hasher.update(piece)
            digests[name] = hasher.hexdigest()
    return digests


def load_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Load every tensor of a safetensors file by name.

    Raises:
        StorageDamaged: The file is not a safetensors file.
        StorageFailed: The file cannot be read.
    """
    try:
        with storage_errors("read", path):
            return load_file(path)
    except SafetensorError as error:
        raise StorageDamaged(str(path), "", str(error)) from None
