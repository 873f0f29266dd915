"""Detects user files named like one of samestep's packages, such as `protocol.py`.

Python has one module per name, so whichever file is imported first would be used for both. The
import is refused, and the error names the file. This module imports no other module of samestep,
since that may be shadowed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

HOME: Final = Path(__file__).resolve().parents[1]
NAMES: Final = ("backends", "coordinator", "protocol", "samestep", "worker")
"""samestep's packages, side by side in `HOME`."""


def shadowed_packages() -> list[Path]:
    """Return user files that shadow one of samestep's packages in this process, or are shadowed by
    one."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return [*_imported_first(), *(conflicting_files(Path(script).parent) if script else ())]


def conflicting_files(folder: Path) -> list[Path]:
    """Return the modules in a script's folder that are named like one of samestep's packages."""
    if folder.resolve() == HOME:
        return []
    modules = [folder / f"{name}.py" for name in NAMES]
    packages = [folder / name / "__init__.py" for name in NAMES]
    return [path for path in (*modules, *packages) if path.is_file()]


def conflict_message(file: Path) -> str:
    """Return the error message for a conflicting file."""
    return (
        f"{str(file)!r} has the name of one of samestep's packages, and Python has one module per "
        "name: rename it"
    )


def is_samestep_file(file: Path) -> bool:
    """Return whether a source file belongs to one of samestep's packages."""
    return any(file.is_relative_to(HOME / name) for name in NAMES)


def _imported_first() -> Iterator[Path]:
    """Yield the files that this process imports under the name of a samestep package, although they
    are not samestep's."""
    for name in NAMES:
        module = sys.modules.get(name)
        spec = find_spec(name) if module is None else None
        file = spec.origin if spec is not None else getattr(module, "__file__", None)
        if file is not None and not is_samestep_file(Path(file).resolve()):
            yield Path(file)
