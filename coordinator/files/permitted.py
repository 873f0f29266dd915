"""Which files a submitted run may read: those below the directories that the operator named, and
never what holds the secrets of the coordinator's user.

Whoever may submit a run chooses what is sent to workers. A run spec on the coordinator's own
command line is the operator's word and is not checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from protocol.base.errors import DataError
from protocol.spec import sources


class PermittedFiles:
    """Checks paths with all links resolved.

    Args:
        roots: Directories whose files may be read; none: all files but secrets.
        secrets: Files and directories that no run may read.
    """

    def __init__(self, roots: Sequence[Path], secrets: Sequence[Path]) -> None:
        self._roots = tuple(root.resolve() for root in roots)
        self._secrets = tuple(path.resolve() for path in secrets)

    def check_source(self, source: str) -> None:
        """Check what a run spec names, before anything of it is read. Hub names and installed
        packages are not paths.

        Raises:
            DataError: It is a path that may not be read.
        """
        if self._is_path(source):
            self.check(Path(os.path.expanduser(source)), source)  # noqa: PTH111 (an unknown ~name)

    def check(self, path: Path, source: str) -> None:
        """Check one file of a source.

        Raises:
            DataError: It may not be read.
        """
        try:
            place = path.resolve()
        except (OSError, RuntimeError) as error:  # links in a circle
            raise DataError(f"cannot read {str(path)!r}: {error}") from None
        self._check_place(place, source)

    def check_open(self, descriptor: int, path: Path, source: str) -> None:
        """Check an open file: since `check` a link may have come into its path.

        Raises:
            DataError: It may not be read.
        """
        self.check(path, source)
        with suppress(OSError):  # of Linux
            self._check_place(Path(os.readlink(f"/proc/self/fd/{descriptor}")), source)  # noqa: PTH115

    def _check_place(self, place: Path, source: str) -> None:
        if any(place.is_relative_to(secret) for secret in self._secrets):
            raise DataError(
                f"expected data or a model in {source!r}, got a file that may hold secrets of the "
                "coordinator's user, which no submitted run may read; name another"
            )
        inside = any(place.is_relative_to(root) for root in self._roots)
        if self._roots and self._is_path(source) and not inside:
            named = ", ".join(repr(str(root)) for root in self._roots)
            raise DataError(
                f"expected files below {named} (--data-root of the coordinator), got {source!r}, "
                "which leads elsewhere; put them there, or start the coordinator with a further "
                "--data-root DIR"
            )

    @staticmethod
    def _is_path(source: str) -> bool:
        if source == sources.PYTHON_STDLIB or source.startswith(sources.PACKAGE):
            return False
        return os.path.lexists(os.path.expanduser(source))  # noqa: PTH111
