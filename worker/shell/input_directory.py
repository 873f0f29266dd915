"""What a task is given to read: a directory with exactly the files that were listed, as links.

So it does not matter where a file lies on this machine, and a file that was not listed is not
seen. Names were checked when the list was read (`protocol.spec.blob_list`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from protocol.spec.blob_list import BlobList, Role
from protocol.spec.run_spec import RunSpec, source_of
from worker.shell.blob_cache import storing

Found = Mapping[tuple[Role, str], Path]


def assemble(directory: Path, listing: BlobList, found: Found) -> None:
    """Make the links; those that are there and right stay untouched, for a task may read them.

    Args:
        directory: Of this run's inputs; others beside it are of earlier runs, and are removed.
        listing: What is to be there.
        found: Where each file is.

    Raises:
        StorageFailed: The disk refuses.
    """
    with storing("link the run's files in", directory):
        directory.mkdir(parents=True, exist_ok=True)
        for other in directory.parent.iterdir():
            if other != directory:
                shutil.rmtree(other, ignore_errors=True)
        for source in listing.sources:
            for file in source.files:
                if (source.role, file.name) not in found:
                    continue  # it is needed later, or never
                _link(directory / source.role / file.name, found[source.role, file.name])


def placed_spec(
    spec: RunSpec, listing: BlobList, directory: Path
) -> tuple[RunSpec, dict[str, str]]:
    """The run spec with these places instead of sources, and the sources by place.

    What is trained and written does not depend on the places: an adapter's base keeps its name.
    """
    words: dict[str, str] = {}
    for source in listing.sources:
        named = source_of(spec, source.role)
        assert named is not None
        alone = source.form == "file"
        place = str(directory / source.role / (source.files[0].name if alone else ""))
        words[place] = named
        spec = _replaced(spec, source.role, place, alone=alone)
    return spec, words


def _replaced(spec: RunSpec, role: Role, place: str, *, alone: bool) -> RunSpec:
    if role == "data":
        assert spec.data is not None
        change = {"train": place} if alone else {"train": place, "pattern": "*"}
        return spec.model_copy(update={"data": spec.data.model_copy(update=change)})
    if role == "validation":
        assert spec.data is not None
        return spec.model_copy(update={"data": spec.data.model_copy(update={"validation": place})})
    if role == "adapter":
        assert spec.model is not None
        return spec.model_copy(update={"model": spec.model.model_copy(update={"adapter": place})})
    if role == "model":
        assert spec.model is not None
        change = {"source": place, "name": spec.model.name or str(spec.model.source)}
        return spec.model_copy(update={"model": spec.model.model_copy(update=change)})
    assert spec.tokenizer is not None
    tokenizer = spec.tokenizer.model_copy(update={"source": place})
    return spec.model_copy(update={"tokenizer": tokenizer})


def _link(path: Path, target: Path) -> None:
    if path.is_symlink() and Path(os.readlink(path)) == target:  # noqa: PTH115 -- as it was written
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{os.getpid()}.link")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(path)
