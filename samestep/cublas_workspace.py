"""Reserve, on import, the workspace with which cuBLAS gives the same bits in every run.

Torch reads the variable at the first matrix product on CUDA, which may precede `fit`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

_NAME: Final = "CUBLAS_WORKSPACE_CONFIG"


def reserve_workspace(
    modules: Mapping[str, Any], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variable; warn if CUDA was used without it.

    Args:
        modules: Modules that are already imported, by name.
        environment: The environment in which to set the variable.
    """
    torch = modules.get("torch")
    if _NAME not in environment and torch is not None and torch.cuda.is_initialized():
        warnings.warn(
            f"CUDA was used before samestep was imported, without {_NAME}: if it multiplied "
            f"matrices, fit refuses this card; import samestep first, or set {_NAME}=:4096:8",
            stacklevel=3,
        )
    environment.setdefault(_NAME, ":4096:8")


reserve_workspace(sys.modules)
