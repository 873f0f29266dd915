"""Looks at a capture before a student is trained on it: what does not fit shows at submit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from protocol.base.errors import DataError
from protocol.data.capture_index import CaptureIndex, read_index
from protocol.data.vocabulary import TOKENIZER, digest_of_file
from protocol.spec import sources
from protocol.spec.blob_list import BlobFile
from protocol.spec.capture_layout import CaptureLayout
from protocol.spec.run_spec import DistilSpec, RunSpec

_SHOWN: Final = 60


def check_capture(spec: RunSpec) -> CaptureIndex:
    """See that the capture is whole and that this student can learn from it.

    Raises:
        DataError: A file is missing or has another size, the student has another tokenizer, the
            temperature is not one of the capture's, or what is measured on is unlike it.
    """
    assert spec.data is not None
    index = _whole(spec.data.train)
    if spec.data.validation is not None:
        check_alike(index, _whole(spec.data.validation), spec.data.validation)
    check_temperature(spec.distil, index.facts.layout)
    _check_tokenizers(spec, index)
    return index


def check_alike(trained_on: CaptureIndex, measured_on: CaptureIndex, place: str) -> None:
    """See that a student of one capture can be measured on another.

    Args:
        trained_on: The one.
        measured_on: The other.
        place: Of the other.

    Raises:
        DataError: It is of another teacher, or keeps something else.
    """
    for name, own in trained_on.facts:
        other = getattr(measured_on.facts, name)
        if other != own:
            raise DataError(
                f"the capture in {place!r}, data.validation, is unlike the one that is trained on: "
                f"its {name} is {_shown(other)} and not {_shown(own)}; capture both in one way"
            )


def _shown(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _expanded(source: str) -> Path:
    return Path(os.path.expanduser(source))  # noqa: PTH111  (leaves an unknown ~name as it is)


def _whole(source: str) -> CaptureIndex:
    """The index of a capture whose files are all there.

    Raises:
        DataError: One is not, or has another size.
    """
    directory = _expanded(source)
    index = read_index(directory)
    for file in index.files:
        path = directory / file.name
        if not path.is_file():
            raise DataError(
                f"the capture in {source!r} lacks {file.name!r}, one of its "
                f"{len(index.files)} files; bring it back from a copy, or capture anew"
            )
        size = path.stat().st_size
        if size != file.size:
            raise DataError(
                f"{str(path)!r} has {size} bytes, the capture lists it with {file.size}; bring it "
                "back from a copy, or capture anew"
            )
    return index


def check_digests(source: str, found: tuple[BlobFile, ...]) -> None:
    """See that the files are those that the capture has written.

    Args:
        source: The capture, as a run spec names it.
        found: What its files are here.

    Raises:
        DataError: One is not.
    """
    digests = {file.name: file.digest for file in found}
    for file in read_index(_expanded(source)).files:
        if digests.get(file.name) != file.digest:
            raise changed(file.name, source)


def changed(name: str, directory: str) -> DataError:
    """The error that a file of a capture has another digest than the capture says."""
    return DataError(
        f"{name!r} in {directory!r} is not what the capture has written: bring it back from a "
        "copy, or capture anew"
    )


def check_temperature(spec: DistilSpec, layout: CaptureLayout) -> None:
    """See that the capture has the log-sum-exp that the loss needs.

    Raises:
        DataError: It has not.
    """
    if layout.drawn and spec.alpha > 0 and spec.temperature != layout.temperature:
        raise DataError(
            f"the tokens of this capture were drawn at temperature {layout.temperature:g}: --set "
            f"distil.temperature={layout.temperature:g}"
        )
    if spec.alpha > 0 and spec.temperature not in {1.0, layout.temperature}:
        known = " or ".join(f"{t:g}" for t in sorted({1.0, layout.temperature}))
        raise DataError(
            f"expected distil.temperature {known}, of which this capture keeps the log-sum-exp, "
            f"got {spec.temperature:g}; or capture with capture.temperature={spec.temperature:g}"
        )


def tokenizers_differ(student: str) -> DataError:
    """The error that a student and the teacher do not read alike."""
    return DataError(
        f"the student {student!r} has another tokenizer than the teacher of this capture, so their "
        "tokens do not mean the same; take a student of the teacher's family, or start one from "
        "model.config"
    )


def _check_tokenizers(spec: RunSpec, index: CaptureIndex) -> None:
    """As far as that can be told without the libraries that tokenise."""
    assert spec.model is not None
    if spec.model.source is None:
        return
    own = digest_of_file(Path(sources.model_source(spec.model.source)) / TOKENIZER)
    if own is not None and own != index.facts.tokenizer:
        raise tokenizers_differ(spec.model.source)
