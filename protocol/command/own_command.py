"""How a process of ours starts another one of ours, from whatever folder that is.

`python -m worker` looks for `worker` in the present folder first, and would run a `worker.py` of
the user's that lies there; with `-P` it does not.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path


def own_command(package: str) -> list[str]:
    """What runs a package of ours; to be started in `own_environment`."""
    return [sys.executable, "-P", "-m", package]


def own_environment() -> dict[str, str]:
    """This process's, in which another finds the packages that this one was started with."""
    home = str(Path(__file__).parents[2])
    if home in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    # A checkout that is not installed.
    others = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{others}" if others else home}
