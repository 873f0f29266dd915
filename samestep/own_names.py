"""Files of the user's that have the name of one of our packages, which nothing may mix up.

Python has one module by a name. Where a script's folder has a `protocol.py`, that one would be
taken for ours, or ours for it, by whichever is imported first. So neither is: the file is named,
and said to want another name. Imports nothing of ours, since that is what may not be ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

HOME: Final = Path(__file__).resolve().parents[1]
NAMES: Final = ("backends", "coordinator", "protocol", "samestep", "worker")
"""Our packages, side by side in `HOME`."""


def taken_names() -> list[Path]:
    """The user's files that this process imports instead of ours, or that ours would hide."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    return [*_imported_first(), *(files_of_our_names(Path(main).parent) if main else ())]


def files_of_our_names(folder: Path) -> list[Path]:
    """Modules in a script's folder that have one of our names, and are not ours."""
    if folder.resolve() == HOME:
        return []
    modules = [folder / f"{name}.py" for name in NAMES]
    packages = [folder / name / "__init__.py" for name in NAMES]
    return [path for path in (*modules, *packages) if path.is_file()]


def words_for(taken: Path) -> str:
    """What is to be done about one of them."""
    return (
        f"{str(taken)!r} has the name of a part of samestep, and Python has one module by a name: "
        "give it another name"
    )


def ours(file: Path) -> bool:
    """Whether a source file is of our packages."""
    return any(file.is_relative_to(HOME / name) for name in NAMES)


def _imported_first() -> Iterator[Path]:
    """What this process imports, or has imported, by one of our names."""
    for name in NAMES:
        module = sys.modules.get(name)
        spec = find_spec(name) if module is None else None
        file = spec.origin if spec is not None else getattr(module, "__file__", None)
        if file is not None and not ours(Path(file).resolve()):
            yield Path(file)
