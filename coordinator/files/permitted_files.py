"""The files that a submitted run may read: those below the operator's directories, never secrets.

Anyone who may submit a run chooses the files that workers receive. A run spec on the coordinator's
command line comes from the operator and is not checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from protocol.base.errors import DataError
from protocol.spec.files import sources


class PermittedFiles:
    """Checks paths with all links resolved.

    Args:
        roots: Directories whose files may be read; empty: all files except secrets.
        secrets: Files and directories that no run may read.
    """

    def __init__(self, roots: Sequence[Path], secrets: Sequence[Path]) -> None:
        self._roots = tuple(root.resolve() for root in roots)
        self._secrets = tuple(path.resolve() for path in secrets)

    def check_source(self, source: str) -> None:
        """Check a source before it is read. Hub names and installed packages are not paths.

        Raises:
            DataError: The source is a path that may not be read.
        """
        if self._is_path(source):
            self.check(Path(os.path.expanduser(source)), source)  # noqa: PTH111 (an unknown ~name)

    def check(self, path: Path, source: str) -> None:
        """Check one file of a source.

        Raises:
            DataError: The file may not be read.
        """
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError) as error:  # such as a circle of links
            raise DataError(f"cannot read {str(path)!r}: {error}") from None
        self._check_resolved(resolved, source)

    def check_open(self, descriptor: int, path: Path, source: str) -> None:
        """Check an open file: since `check`, a link may have been put into its path.

        Raises:
            DataError: The file may not be read.
        """
        self.check(path, source)
        with suppress(OSError):  # only Linux has /proc
            self._check_resolved(Path(os.readlink(f"/proc/self/fd/{descriptor}")), source)  # noqa: PTH115

    def _check_resolved(self, resolved: Path, source: str) -> None:
        if any(resolved.is_relative_to(secret) for secret in self._secrets):
            raise DataError(
                f"expected data or a model in {source!r}, got a file that may hold secrets of the "
                "coordinator's user, which no submitted run may read; name another file"
            )
        is_inside = any(resolved.is_relative_to(root) for root in self._roots)
        if self._roots and self._is_path(source) and not is_inside:
            root_names = ", ".join(repr(str(root)) for root in self._roots)
            raise DataError(
                f"expected files below {root_names} (--data-root of the coordinator), got "
                f"{source!r}, which leads elsewhere; move them there, or start the coordinator "
                "with another --data-root DIR"
            )

    @staticmethod
    def _is_path(source: str) -> bool:
        if source == sources.PYTHON_STDLIB or source.startswith(sources.PACKAGE):
            return False
        return os.path.lexists(os.path.expanduser(source))  # noqa: PTH111
