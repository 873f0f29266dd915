"""Looks at a capture before a student is trained on it: what does not fit shows at submit."""

from __future__ import annotations

from pathlib import Path

from protocol.base.errors import DataError
from protocol.data.capture_index import CaptureIndex, read_index
from protocol.data.vocabulary import TOKENIZER, digest_of_file
from protocol.spec import sources
from protocol.spec.blob_list import BlobFile
from protocol.spec.capture_layout import CaptureLayout
from protocol.spec.run_spec import DistilSpec, RunSpec


def check_capture(spec: RunSpec) -> CaptureIndex:
    """See that the capture is whole and that this student can learn from it.

    Raises:
        DataError: A file is missing or has another size, the student has another tokenizer, or the
            temperature is not one of the capture's.
    """
    assert spec.data is not None
    directory = Path(spec.data.train).expanduser()
    index = read_index(directory)
    for file in index.files:
        path = directory / file.name
        if not path.is_file():
            raise DataError(
                f"the capture in {spec.data.train!r} lacks {file.name!r}, one of its "
                f"{len(index.files)} files; bring it back from a copy, or capture anew"
            )
        size = path.stat().st_size
        if size != file.size:
            raise DataError(
                f"{str(path)!r} has {size} bytes, the capture lists it with {file.size}; bring it "
                "back from a copy, or capture anew"
            )
    check_temperature(spec.distil, index.facts.layout)
    _check_tokenizers(spec, index)
    return index


def check_digests(spec: RunSpec, found: tuple[BlobFile, ...]) -> None:
    """See that the files are those that the capture has written.

    Args:
        spec: Of a student.
        found: What its data are here.

    Raises:
        DataError: One is not.
    """
    assert spec.data is not None
    digests = {file.name: file.digest for file in found}
    for file in read_index(Path(spec.data.train).expanduser()).files:
        if digests.get(file.name) != file.digest:
            raise changed(file.name, spec.data.train)


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
