"""The directory from which a task reads its files: links to exactly the listed files.

A task thus does not depend on where this machine stores a file, and sees no file that is not
listed. Names were checked when the list was read (`protocol.spec.files.blob_list`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from protocol.spec.files.blob_list import BlobList
from protocol.spec.run_spec import Role, RunSpec, source_of
from worker.shell.blob_cache import storage_errors

Locations = Mapping[tuple[Role, str], Path]


def link_files(directory: Path, listing: BlobList, locations: Locations) -> None:
    """Create the links, except those that are already correct: a task may be reading them.

    Args:
        directory: Directory of this run's inputs; its siblings, of earlier runs, are removed.
        listing: The files to link.
        locations: Path of each file by role and name; files fetched later may be missing.

    Raises:
        StorageFailed: A file operation failed.
    """
    with storage_errors("link the run's files in", directory):
        directory.mkdir(parents=True, exist_ok=True)
        for sibling in directory.parent.iterdir():
            if sibling != directory:
                shutil.rmtree(sibling, ignore_errors=True)
        for source in listing.sources:
            for file in source.files:
                if (source.role, file.name) not in locations:
                    continue  # fetched when a step needs it
                _link(directory / source.role / file.name, locations[source.role, file.name])


def local_spec(spec: RunSpec, listing: BlobList, directory: Path) -> tuple[RunSpec, dict[str, str]]:
    """Replace the sources in a run spec by paths in `directory`; also return the sources by path.

    The result of training does not depend on the paths: an adapter's base keeps its name.
    """
    sources_by_path: dict[str, str] = {}
    for source in listing.sources:
        source_name = source_of(spec, source.role)
        assert source_name is not None
        is_file = source.form == "file"
        path = str(directory / source.role / (source.files[0].name if is_file else ""))
        sources_by_path[path] = source_name
        spec = _with_source(spec, source.role, path, is_file=is_file)
    return spec, sources_by_path


def _with_source(spec: RunSpec, role: Role, path: str, *, is_file: bool) -> RunSpec:
    if role == "data":
        assert spec.data is not None
        change = {"train": path}
        if not is_file and "pattern" in type(spec.data).model_fields:
            change["pattern"] = "*"
        return spec.model_copy(update={"data": spec.data.model_copy(update=change)})
    if role == "validation":
        assert spec.data is not None
        return spec.model_copy(update={"data": spec.data.model_copy(update={"validation": path})})
    if role == "adapter":
        assert spec.model is not None
        return spec.model_copy(update={"model": spec.model.model_copy(update={"adapter": path})})
    if role == "model":
        assert spec.model is not None
        change = {"source": path, "name": spec.model.name or str(spec.model.source)}
        return spec.model_copy(update={"model": spec.model.model_copy(update=change)})
    assert spec.tokenizer is not None
    tokenizer = spec.tokenizer.model_copy(update={"source": path})
    return spec.model_copy(update={"tokenizer": tokenizer})


def _link(path: Path, target: Path) -> None:
    if path.is_symlink() and Path(os.readlink(path)) == target:  # noqa: PTH115 -- compares the literal target
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)
