"""Check a capture (a teacher's stored logits) when a run of a student is submitted.

Vocabularies are read from `tokenizer.json` alone, so that a coordinator can compare those of
teacher and student without tokenizer libraries.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from blake3 import blake3

from protocol.base.errors import DataError
from protocol.base.regular_file import read_json
from protocol.datasets.capture_index import CaptureIndex, read_index
from protocol.spec.files import sources
from protocol.spec.files.blob_list import BlobFile
from protocol.spec.manifest import CaptureLayout
from protocol.spec.run_spec import DistilRun
from protocol.spec.sections.tasks import DistilSpec

_MAX_SHOWN_CHARACTERS: Final = 60


def check_capture(spec: DistilRun) -> CaptureIndex:
    """Check that a capture is complete and that this student can learn from it.

    Raises:
        DataError: A file is missing or has another size, the student has another tokenizer, the
            capture lacks the temperature, or the evaluation capture does not match.
    """
    index = _read_complete_index(spec.data.train)
    if spec.data.validation is not None:
        check_same_facts(index, _read_complete_index(spec.data.validation), spec.data.validation)
    check_temperature(spec.distil, index.facts.layout)
    _check_tokenizers(spec, index)
    return index


def check_same_facts(train: CaptureIndex, evaluation: CaptureIndex, directory: str) -> None:
    """Check that a student of one capture can be evaluated on another.

    Args:
        train: The capture for training.
        evaluation: The capture for evaluation.
        directory: The directory of the evaluation capture.

    Raises:
        DataError: The captures have different teachers or layouts.
    """
    for name, train_value in train.facts:
        evaluation_value = getattr(evaluation.facts, name)
        if evaluation_value != train_value:
            raise DataError(
                f"expected the same {name} in the captures of data.train and data.validation, got "
                f"{_cut_value(train_value)} and, in {directory!r}, {_cut_value(evaluation_value)}; "
                "capture both in the same way"
            )


def _cut_value(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


def _expand_home(source: str) -> Path:
    return Path(os.path.expanduser(source))  # noqa: PTH111  (leaves an unknown ~name as it is)


def _read_complete_index(source: str) -> CaptureIndex:
    """Read the index of a capture, and check that all files exist.

    Raises:
        DataError: A file is missing, or has another size.
    """
    directory = _expand_home(source)
    index = read_index(directory)
    for file in index.files:
        path = directory / file.name
        if not path.is_file():
            raise DataError(
                f"the capture in {source!r} lacks {file.name!r}, one of its {len(index.files)} "
                "files; restore it from a copy, or capture again"
            )
        size = path.stat().st_size
        if size != file.size:
            raise DataError(
                f"{str(path)!r} has {size} bytes, the capture lists it with {file.size}; restore "
                "it from a copy, or capture again"
            )
    return index


def check_digests(source: str, files: tuple[BlobFile, ...]) -> None:
    """Check that the files are those that the capture wrote.

    Args:
        source: The capture, as a run spec names it.
        files: The capture's files on this machine.

    Raises:
        DataError: A file has another digest.
    """
    digests = {file.name: file.digest for file in files}
    for file in read_index(_expand_home(source)).files:
        if digests.get(file.name) != file.digest:
            raise changed_file_error(file.name, source)


def changed_file_error(name: str, directory: str) -> DataError:
    """Return the error for a file whose digest differs from that in the capture's index."""
    return DataError(
        f"{name!r} in {directory!r} has changed since the capture: restore it from a copy, or "
        "capture again"
    )


def check_temperature(spec: DistilSpec, layout: CaptureLayout) -> None:
    """Check that the capture fits the temperature of the student's loss.

    Raises:
        DataError: The tokens were drawn at another temperature, or the capture lacks the
            log-sum-exp at the student's temperature.
    """
    if layout.drawn and spec.alpha > 0 and spec.temperature != layout.temperature:
        raise DataError(
            f"the tokens of this capture were drawn at temperature {layout.temperature:g}: use "
            f"--set distil.temperature={layout.temperature:g}"
        )
    if spec.alpha > 0 and spec.temperature not in {1.0, layout.temperature}:
        temperatures = " or ".join(f"{t:g}" for t in sorted({1.0, layout.temperature}))
        raise DataError(
            f"expected distil.temperature {temperatures}, for which this capture has the "
            f"log-sum-exp, got {spec.temperature:g}; change it, or capture with "
            f"capture.temperature={spec.temperature:g}"
        )


def tokenizer_mismatch(student: str) -> DataError:
    """Return the error for a student with another tokenizer than the teacher."""
    return DataError(
        f"the tokenizer of the student {student!r} differs from that of the capture's teacher, so "
        "their tokens do not mean the same; use a student of the teacher's family, or initialize "
        "one from model.config"
    )


def _check_tokenizers(spec: DistilRun, index: CaptureIndex) -> None:
    """Compare the vocabularies of the student and the teacher, without tokenizer libraries."""
    if spec.model.source is None:
        return
    digest = digest_of_file(Path(sources.model_source(spec.model.source)) / TOKENIZER)
    if digest is not None and digest != index.facts.tokenizer:
        raise tokenizer_mismatch(spec.model.source)


TOKENIZER: Final = "tokenizer.json"


def vocabulary_digest(tokens: Mapping[str, int]) -> str:
    """Return the BLAKE3 digest of all tokens with their ids, in the order of ids."""
    ordered = sorted((number, piece) for piece, number in tokens.items())
    return blake3(json.dumps(ordered).encode()).hexdigest()


def digest_of_file(path: Path) -> str | None:
    """Return the digest of a `tokenizer.json`; None if `tokens_of_file` returns None."""
    tokens = tokens_of_file(path)
    return None if tokens is None else vocabulary_digest(tokens)


def tokens_of_file(path: Path) -> dict[str, int] | None:
    """Return the tokens of a `tokenizer.json` with their ids.

    None if there is no such file, or no vocabulary of a known format in it.
    """
    try:
        document = read_json(path)
        vocabulary = document["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pieces with their scores
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        tokens = {str(piece): int(number) for piece, number in vocabulary.items()}
        for added_token in document.get("added_tokens") or ():
            tokens[str(added_token["content"])] = int(added_token["id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return tokens
