"""The files that a run's task reads: the same answer on the coordinator and on each worker.

Only what a task reads is named: of a model's directory its configuration, its weights as
safetensors and its tokenizer, and nothing that could run code. A hub name is no file; it is left
to each worker. So are the sources of a task of one's own, except a data file named by its path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from protocol.base.errors import DataError
from protocol.base.regular_file import read_json
from protocol.spec import sources
from protocol.spec.adapter import ADAPTER_WEIGHTS, adapter_directory
from protocol.spec.blob_list import Form, Role, name_fault
from protocol.spec.idle_keys import TASK_SECTIONS
from protocol.spec.manifest import ADAPTER_CONFIG
from protocol.spec.run_spec import (
    LOGITS_SUFFIX,
    DataSpec,
    RunSpec,
    source_of,
)

ROLES: Final[tuple[Role, ...]] = ("data", "validation", "model", "adapter", "tokenizer")
_CONFIGURATION: Final = ("config.json", "generation_config.json")
_TOKENIZER: Final = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
    "vocab.txt",
)  # fmt: skip
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
CAPTURE_INDEX: Final = "capture.json"


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """What one source of a run spec is here.

    Attributes:
        role: What the files are for.
        source: As the run spec names them.
        form: Whether the task is given the lone file or the directory.
        files: Names inside the source and where they are, in the order of the names.
    """

    role: Role
    source: str
    form: Form
    files: tuple[tuple[str, Path], ...]


def source_files(spec: RunSpec, role: Role) -> SourceFiles | None:
    """The files of one role; None if the run spec names none, or leaves them to each worker.

    Raises:
        DataError: The source is not here, or its files cannot be used.
    """
    source = source_of(spec, role)
    if source is None:
        return None
    if role == "data":
        assert spec.data is not None
        return _data(spec, spec.data)
    if role == "validation":
        assert spec.data is not None
        same = _data(spec, spec.data.model_copy(update={"train": source}))
        return None if same is None else replace(same, role="validation")
    if role == "adapter":
        place = adapter_directory(source)
        names = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
        return SourceFiles(role, source, "directory", tuple((n, place / n) for n in names))
    find = sources.tokenizer_source if role == "tokenizer" else sources.model_source
    found = Path(find(source))
    if found.is_file():
        return _lone(role, source, found)
    if not found.is_dir():
        return None
    # Of a tokenizer, too: its class and its marks may be those that the model is known to have.
    names = _model_files(found, source) if role == "model" else _there(found, _CONFIGURATION[:1])
    tokenizer = _tokenizer_files(found)
    if (role == "tokenizer" or spec.tokenizer is None) and not sources.has_vocabulary(tokenizer):
        raise DataError(
            f"expected a tokenizer in {source!r}, found no vocabulary; put the model's "
            "tokenizer.json (or vocab.txt, tokenizer.model) there"
        )
    names += tokenizer
    return SourceFiles(role, source, "directory", tuple((n, found / n) for n in sorted(set(names))))


def refuse_links_out(files: SourceFiles) -> None:
    """What is sent lies where the run spec says: who can write a data directory could have any
    file of the coordinator's user sent.

    Raises:
        DataError: A file of a data directory is a link that leads out of it.
    """
    directory = Path(os.path.expanduser(files.source))  # noqa: PTH111  (as below)
    if files.role not in {"data", "validation"} or not directory.is_dir():
        return
    inside = directory.resolve()
    for _, file in files.files:
        if not file.resolve().is_relative_to(inside):
            raise DataError(
                f"{str(file)!r} is a link that leads out of {str(directory)!r}; "
                "put the file itself there, or narrow data.pattern"
            )


def _data(spec: RunSpec, data: DataSpec) -> SourceFiles | None:
    path = Path(os.path.expanduser(data.train))  # noqa: PTH111  (leaves an unknown ~name as it is)
    if spec.task not in TASK_SECTIONS:
        return _lone("data", data.train, path) if path.is_file() else None
    lone = spec.task in ("classify", "dpo")
    if lone or (spec.task != "distil" and data.format != "text"):
        return _lone("data", data.train, sources.text_source(data.train))
    if spec.task == "distil":
        return _capture(data, path)
    named = data.train != sources.PYTHON_STDLIB and not data.train.startswith(sources.PACKAGE)
    if named and not path.is_dir():
        return _lone("data", data.train, sources.text_source(data.train))
    found = sources.corpus_files(data.train, data.pattern)
    top = path if named else Path(os.path.commonpath([file.parent for file in found]))
    files = [(_name(file.relative_to(top).as_posix()), file) for file in found]
    return SourceFiles("data", data.train, "directory", tuple(files))


def _capture(data: DataSpec, path: Path) -> SourceFiles:
    """The index of captured logits, the files of logits, and the teacher's tokenizer."""
    if not (path / CAPTURE_INDEX).is_file():
        raise DataError(
            f"expected captured logits in {data.train!r}, found no {CAPTURE_INDEX} there; give the "
            "directory 'logits' that a finished run of task teacher-logits has left"
        )
    logits = [file.name for file in path.iterdir() if file.suffix == LOGITS_SUFFIX]
    names = sorted({CAPTURE_INDEX, *logits, *_tokenizer_files(path)})
    return SourceFiles("data", data.train, "directory", tuple((_name(n), path / n) for n in names))


def _lone(role: Role, source: str, path: Path) -> SourceFiles:
    return SourceFiles(role, source, "file", ((_name(path.name), path),))


def _model_files(directory: Path, source: str) -> list[str]:
    """Configuration and weights.

    Raises:
        DataError: There are no weights that can be read without running code.
    """
    names = _there(directory, _CONFIGURATION)
    if (directory / _WEIGHTS).is_file():
        return [*names, _WEIGHTS]
    if (directory / _INDEX).is_file():
        return [*names, _INDEX, *_shards(directory / _INDEX)]
    weights = sorted(path.name for path in directory.glob("*.safetensors"))
    if not weights:
        raise DataError(
            f"expected weights as .safetensors in {source!r}, found none; "
            "pickled weights (.bin, .pt) are not read: convert them"
        )
    return names + [_name(name) for name in weights]


def _shards(index: Path) -> Sequence[str]:
    try:
        values = read_json(index)["weight_map"].values()
        names = sorted({str(value) for value in values})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"cannot read the index of weights {str(index)!r}: {error}") from None
    for name in names:
        if "/" in _name(name):
            raise DataError(f"expected plain file names in {str(index)!r}, got {name!r}")
        if not (index.parent / name).is_file():
            raise DataError(f"expected {name!r}, which {str(index)!r} names, found no such file")
    return names


def _tokenizer_files(directory: Path) -> list[str]:
    suffixed = (p.name for p in directory.iterdir() if p.suffix in sources.TOKENIZER_SUFFIXES)
    return _there(directory, (*_TOKENIZER, *suffixed))


def _there(directory: Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if (directory / name).is_file()]


def _name(name: str) -> str:
    if fault := name_fault(name):
        raise DataError(f"the file {name!r} cannot be sent to workers: {fault}; rename it")
    return name
