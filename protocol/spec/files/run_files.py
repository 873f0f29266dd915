"""Find the files that a run's task reads, with the same result on the coordinator and on workers.

Only files that the task reads are listed: in a model's directory the configuration, the weights in
safetensors and the tokenizer, but no file that can run code. Each worker resolves hub names and the
sources of a user-defined task itself, except a data file that is named by its path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from protocol.base.errors import DataError
from protocol.base.regular_file import read_json
from protocol.spec.files import sources
from protocol.spec.files.adapter import ADAPTER_WEIGHTS, adapter_directory
from protocol.spec.files.blob_list import Form, name_fault
from protocol.spec.manifest import ADAPTER_CONFIG
from protocol.spec.run_spec import Role, RunSpec, source_of
from protocol.spec.sections.data import (
    LOGITS_SUFFIX,
    DataSpec,
    LabeledData,
    MaskedText,
    RunningText,
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
    """The local files of one source of a run spec.

    Attributes:
        role: The purpose for which the task reads the files.
        source: The source in the run spec.
        form: Whether the task opens a single file or a directory.
        files: Each file's name within the source and its local path, sorted by name.
    """

    role: Role
    source: str
    form: Form
    files: tuple[tuple[str, Path], ...]


def source_files(spec: RunSpec, role: Role) -> SourceFiles | None:
    """Find the files of a role.

    None if the run spec names no source for the role, or if each worker finds the files itself.

    Raises:
        DataError: The source is missing, or its files cannot be used.
    """
    source = source_of(spec, role)
    if source is None:
        return None
    if role == "data":
        assert spec.data is not None
        return _data_files(spec, spec.data)
    if role == "validation":
        assert spec.data is not None
        files = _data_files(spec, spec.data.model_copy(update={"train": source}))
        return None if files is None else replace(files, role="validation")
    if role == "adapter":
        adapter = adapter_directory(source)
        names = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
        return SourceFiles(role, source, "directory", tuple((n, adapter / n) for n in names))
    find = sources.tokenizer_source if role == "tokenizer" else sources.model_source
    path = Path(find(source))
    if path.is_file():
        return _single_file(role, source, path)
    if not path.is_dir():
        return None
    # A tokenizer needs the model's config too: it may name the class and the special tokens.
    names = (
        _model_files(path, source) if role == "model" else _existing_names(path, _CONFIGURATION[:1])
    )
    tokenizer_names = _tokenizer_files(path)
    needs_vocabulary = role == "tokenizer" or spec.tokenizer is None
    if needs_vocabulary and not sources.has_vocabulary(tokenizer_names):
        raise DataError(
            f"expected a tokenizer in {source!r}, found no vocabulary; add the model's "
            "tokenizer.json (or vocab.txt, tokenizer.model)"
        )
    names += tokenizer_names
    return SourceFiles(role, source, "directory", tuple((n, path / n) for n in sorted(set(names))))


def refuse_links_out(files: SourceFiles) -> None:
    """Refuse links that lead out of a data directory.

    Otherwise anyone who can write to the directory could have the coordinator send any file that
    its user can read.

    Raises:
        DataError: A file of the directory is such a link.
    """
    directory = Path(os.path.expanduser(files.source))  # noqa: PTH111  (leaves an unknown ~name)
    if sources.is_pattern(files.source):
        directory = sources.fixed_directory(files.source)
    if files.role not in {"data", "validation"} or not directory.is_dir():
        return
    root = directory.resolve()
    for _, file in files.files:
        if not file.resolve().is_relative_to(root):
            raise DataError(
                f"expected files inside {str(directory)!r}, got a link that leads out of it, "
                f"{str(file)!r}; put the file itself there, or narrow data.pattern"
            )


def _data_files(spec: RunSpec, data: DataSpec) -> SourceFiles | None:
    path = Path(os.path.expanduser(data.train))  # noqa: PTH111  (leaves an unknown ~name)
    if spec.is_user_task:
        return _single_file("data", data.train, path) if path.is_file() else None
    if spec.task == "distil":
        return _capture_files(data, path)
    has_rows = not isinstance(data, RunningText | MaskedText)
    if has_rows:
        paths = sources.row_files(data.train, class_folders=isinstance(data, LabeledData))
    else:
        paths = sources.corpus_files(data.train, data.pattern)
    is_package = data.train.startswith(sources.PACKAGE)
    if paths == [path] or (has_rows and is_package):
        return _single_file("data", data.train, paths[0])
    is_named = path.is_dir() and data.train != sources.PYTHON_STDLIB
    top = path if is_named else Path(os.path.commonpath([file.parent for file in paths]))
    files = [(_check_name(file.relative_to(top).as_posix()), file) for file in paths]
    return SourceFiles("data", data.train, "directory", tuple(files))


def _capture_files(data: DataSpec, path: Path) -> SourceFiles:
    """Find the index of captured logits, the files of logits, and the teacher's tokenizer."""
    if not (path / CAPTURE_INDEX).is_file():
        raise DataError(
            f"expected captured logits in {data.train!r}, found no {CAPTURE_INDEX}; name the "
            "directory 'logits' of a finished run of task teacher-logits"
        )
    logits = [file.name for file in path.iterdir() if file.suffix == LOGITS_SUFFIX]
    names = sorted({CAPTURE_INDEX, *logits, *_tokenizer_files(path)})
    return SourceFiles(
        "data", data.train, "directory", tuple((_check_name(n), path / n) for n in names)
    )


def _single_file(role: Role, source: str, path: Path) -> SourceFiles:
    return SourceFiles(role, source, "file", ((_check_name(path.name), path),))


def _model_files(directory: Path, source: str) -> list[str]:
    """Return the files of a model's configuration and weights.

    Raises:
        DataError: There are no weights that can be read without running code.
    """
    names = _existing_names(directory, _CONFIGURATION)
    if (directory / _WEIGHTS).is_file():
        return [*names, _WEIGHTS]
    if (directory / _INDEX).is_file():
        return [*names, _INDEX, *_shards(directory / _INDEX)]
    weights = sorted(path.name for path in directory.glob("*.safetensors"))
    if not weights:
        raise DataError(
            f"expected weights as .safetensors in {source!r}, found none; convert pickled weights "
            "(.bin, .pt), which can run code and are not read"
        )
    return names + [_check_name(name) for name in weights]


def _shards(index: Path) -> Sequence[str]:
    try:
        values = read_json(index)["weight_map"].values()
        names = sorted({str(value) for value in values})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"cannot read the index of weights {str(index)!r}: {error}") from None
    for name in names:
        if "/" in _check_name(name):
            raise DataError(f"expected plain file names in {str(index)!r}, got {name!r}")
        if not (index.parent / name).is_file():
            raise DataError(f"expected {name!r}, which {str(index)!r} names, found no such file")
    return names


def _tokenizer_files(directory: Path) -> list[str]:
    suffixed = (p.name for p in directory.iterdir() if p.suffix in sources.TOKENIZER_SUFFIXES)
    return _existing_names(directory, (*_TOKENIZER, *suffixed))


def _existing_names(directory: Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if (directory / name).is_file()]


def _check_name(name: str) -> str:
    if fault := name_fault(name):
        raise DataError(f"the file {name!r} cannot be sent to workers: {fault}; rename it")
    return name
