"""Checkpoints: the whole trainable state after a step, each in a directory of its own.

    step-0000000040/
        adapter/ or model/        the parameters as the run's result has them: for LoRA as PEFT's
        optimizer.safetensors     the moments, as first_moment/TENSOR and second_moment/TENSOR; if a
                                  tensor has missed updates, how many, as missed_updates/TENSOR
        checkpoint.json           counters, digests, the losses so far, the hash of every file
        metrics.json              figures of an evaluation of this state, once there are any

One is written under a temporary name, every file and directory synced, then renamed: what has the
right name is whole. Loading checks hashes and the state's digest all the same.
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

from coordinator.disk.artifacts import begin_model
from coordinator.disk.canonical_json import json_digest
from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    NewFile,
    make_below,
    remove_temporaries,
    replace_file,
    storing,
    sync_directory,
)
from coordinator.disk.safetensors_file import safetensors_pieces
from protocol.base.errors import Mismatch, StorageDamaged, StorageFailed
from protocol.base.fields import Digest, Number, Small
from protocol.base.regular_file import open_regular, parse_json, read_json
from protocol.exact.replica import Replica
from protocol.spec.manifest import Manifest

FORMAT: Final = 1
Sealed = TypeVar("Sealed", bound=BaseModel)
STATE_FILE: Final = "optimizer.safetensors"
INFO_FILE: Final = "checkpoint.json"
METRICS_FILE: Final = "metrics.json"
_REMEDY: Final = "bring it back from a copy; until then an older checkpoint has to do"

_NAME: Final = re.compile(r"step-(\d{10,})")


class CheckpointInfo(BaseModel):
    """What `checkpoint.json` says.

    `losses` has one entry for each step so far, None for a skipped one. `files` gives the BLAKE3
    of every other file by its path within the checkpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Annotated[int, Field(ge=1, le=FORMAT)] = FORMAT
    run_id: Small
    epoch: Number
    step: Number
    optimizer_step: Number
    manifest_digest: Digest
    weights_digest: Digest
    state_digest: Digest
    losses: tuple[float | None, ...]
    files: dict[str, Digest]


class Metrics(BaseModel):
    """What `metrics.json` says: figures on held-out data, and of which state they are; an older
    release did not say."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    state_digest: Digest | None
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are what was written."""

    path: Path
    info: CheckpointInfo


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return root / f"step-{step:010d}"


def checkpoint_steps(root: Path) -> list[int]:
    """The steps of all checkpoints there, whole or not, in order.

    Raises:
        StorageFailed: The directory cannot be read.
    """
    if not root.is_dir():
        return []
    with storing("read", root):
        found = (_NAME.fullmatch(path.name) for path in root.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)


def write_checkpoint(
    root: Path,
    manifest: Manifest,
    replica: Replica,
    *,
    run_id: str,
    epoch: int,
    losses: Sequence[float],
    state_read: Callable[[], None] = lambda: None,
) -> Checkpoint:
    """Write a checkpoint, durable when this returns.

    Args:
        root: The directory of all checkpoints; made if it is not there.
        manifest: The run's; settles the layout.
        replica: The state. Nobody may change it until `state_read` is called, or this returns.
        run_id: The run's.
        epoch: The coordinator's.
        losses: The mean loss of each step so far; not finite for a skipped one.
        state_read: Called once the state is written, and not durable yet.

    Raises:
        StorageFailed: The disk refuses; nothing of it is left. The call can be made again.
    """
    assert len(losses) == replica.step
    path = checkpoint_path(root, replica.step)
    with storing("make", root):
        make_below(root.parent, root)
    remove_temporaries(root)
    digests = replica.digests()
    info = CheckpointInfo(
        run_id=run_id,
        epoch=epoch,
        step=replica.step,
        optimizer_step=replica.optimizer_step,
        manifest_digest=manifest.digest(),
        weights_digest=digests.weights,
        state_digest=digests.state,
        losses=tuple(loss if math.isfinite(loss) else None for loss in losses),
        files={},
    )
    there = _same_state(root, info, manifest)
    if there is not None:
        with storing("sync", root):
            sync_directory(root)  # whoever made it may not have got to that
        return there
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with storing("write", path):
            info = _write_files(temporary, manifest, replica, info, state_read)
            remove_checkpoint(path)
            temporary.rename(path)
            sync_directory(root)
    except StorageFailed:
        # It may be this very half that fills the disk.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Checkpoint(path, info)


def find_checkpoint(root: Path, step: int, run_id: str, manifest: Manifest) -> Checkpoint:
    """The checkpoint after `step` steps, every file of it compared with its hash.

    Raises:
        StorageDamaged: A file is missing, or not what was written.
        StorageFailed: It cannot be read.
        Mismatch: It is of another run or manifest.
    """
    path = checkpoint_path(root, step)
    file, info = path / INFO_FILE, _read_info(path)
    if info.run_id != run_id or info.manifest_digest != manifest.digest():
        of = f"is of run {info.run_id!r}" if info.run_id != run_id else "is of another manifest"
        raise Mismatch(f"{str(path)!r} {of}; {_REMEDY}")
    if info.step != step:
        reason = f"expected step {step}, got {info.step}; {_REMEDY}"
        raise StorageDamaged(str(file), "", reason)
    with storing("read", path):
        files = sorted(path.rglob("*"))
    found = _file_digests(path, files)
    for name, digest in info.files.items():
        if name not in found:
            raise StorageDamaged(str(path / name), "", f"it is missing; {_REMEDY}")
        if found[name] != digest:
            raise StorageDamaged(str(path / name), "", f"it is not what was written; {_REMEDY}")
    return Checkpoint(path, info)


def _read_info(path: Path) -> CheckpointInfo:
    return _read_sealed(path / INFO_FILE, "checkpoint", CheckpointInfo, _REMEDY)


def _read_sealed(file: Path, key: str, kind: type[Sealed], remedy: str) -> Sealed:
    """A JSON document that holds its own BLAKE3."""
    if not file.exists():
        raise StorageDamaged(str(file), "", f"it is missing; {remedy}")
    try:
        with storing("read", file):
            document = read_json(file)
        content = kind.model_validate_json(json.dumps(document[key]), strict=True)
        whole = document["blake3"] == json_digest(document[key])
    except (ValueError, TypeError, KeyError):
        whole = False
    if not whole:
        raise StorageDamaged(str(file), "", f"it is not what was written; {remedy}")
    return content


def _seal(key: str, content: BaseModel) -> bytes:
    plain = content.model_dump(mode="json")
    document = {key: plain, "blake3": json_digest(plain)}
    return (json.dumps(document, indent=2) + "\n").encode()


def latest_checkpoint(
    root: Path, run_id: str, manifest: Manifest
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest checkpoint that is whole, and why newer ones were passed over.

    Raises:
        StorageFailed: The directory cannot be read.
    """
    passed: list[str] = []
    for step in reversed(checkpoint_steps(root)):
        try:
            return find_checkpoint(root, step, run_id, manifest), tuple(passed)
        except (StorageDamaged, StorageFailed, Mismatch) as error:
            passed.append(str(error))
    return None, tuple(passed)


def write_metrics(root: Path, step: int, state_digest: str, figures: Mapping[str, float]) -> None:
    """Keep the figures of an evaluation with the checkpoint of that very state, if there is one.

    Raises:
        StorageFailed: The disk refuses.
    """
    path = checkpoint_path(root, step)
    try:
        if not path.is_dir() or _read_info(path).state_digest != state_digest:
            return
    except StorageDamaged:
        return  # it is passed over by whoever would use it
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}
    kept = Metrics(state_digest=state_digest, figures=finite)
    replace_file(path / METRICS_FILE, _seal("metrics", kept))


def read_metrics(root: Path, step: int) -> Metrics | None:
    """The figures kept with a checkpoint; None where there are none.

    Raises:
        StorageDamaged: They are not what was written, or of another state.
        StorageFailed: They cannot be read.
    """
    path = checkpoint_path(root, step)
    file = path / METRICS_FILE
    with storing("read", file):
        if not file.exists():
            return None
        older = _older_figures(file.read_bytes())
    if older is not None:
        return Metrics(state_digest=None, figures=older)
    kept = _read_sealed(file, "metrics", Metrics, "bring it back from a copy, or remove it")
    if kept.state_digest != _read_info(path).state_digest:
        raise StorageDamaged(str(file), "", "its figures are of another state; remove the file")
    return kept


def _older_figures(content: bytes) -> dict[str, float] | None:
    """What a release before this one wrote: the figures alone."""
    try:
        document = parse_json(content)
        return {str(name): float(value) for name, value in document.items()}
    except (ValueError, TypeError, AttributeError):
        return None


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint if it is there; at no time is half of it under its name.

    Raises:
        StorageFailed: The disk refuses.
    """
    if not path.is_dir():
        return
    with storing("remove", path):
        path.rename(path.with_name(f"{path.name}-removed{TEMPORARY_SUFFIX}"))
        sync_directory(path.parent)


def _same_state(root: Path, info: CheckpointInfo, manifest: Manifest) -> Checkpoint | None:
    """The checkpoint of this very state, if a run that was resumed has come here before."""
    try:
        there = find_checkpoint(root, info.step, info.run_id, manifest)
    except (StorageDamaged, StorageFailed, Mismatch):
        return None
    return there if there.info.state_digest == info.state_digest else None


def _write_files(
    path: Path,
    manifest: Manifest,
    replica: Replica,
    info: CheckpointInfo,
    state_read: Callable[[], None],
) -> CheckpointInfo:
    path.mkdir()
    moments = {
        f"{part.kind}/{tensor.name}": values
        for part in replica.parts()
        if part.kind != "parameters"
        for tensor, values in part.by_tensor(manifest.blocks[part.block])
    }
    with ExitStack() as stack:
        new = begin_model(stack, path, manifest, replica.tensors())
        new[STATE_FILE] = stack.enter_context(NewFile(path / STATE_FILE))
        new[STATE_FILE].write(safetensors_pieces(moments, {"step": str(replica.step)}))
        state_read()
        files = {name: file.confirm() for name, file in new.items()}
    info = info.model_copy(update={"files": files})
    replace_file(path / INFO_FILE, _seal("checkpoint", info))
    return info


def _file_digests(path: Path, files: Sequence[Path]) -> dict[str, str]:
    """BLAKE3 of every file below a checkpoint but those that hold no state."""
    digests: dict[str, str] = {}
    for file in files:
        name = file.relative_to(path).as_posix()
        if file.is_file() and name not in {INFO_FILE, METRICS_FILE}:
            with storing("read", file), open_regular(file) as content:
                hasher = blake3(max_threads=blake3.AUTO)
                while piece := content.read(1 << 24):
                    hasher.update(piece)
            digests[name] = hasher.hexdigest()
    return digests


def load_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a safetensors file by name.

    Raises:
        StorageDamaged: It is no such file.
        StorageFailed: It cannot be read.
    """
    try:
        with storing("read", path):
            return load_file(path)
    except SafetensorError as error:
        raise StorageDamaged(str(path), "", str(error)) from None
