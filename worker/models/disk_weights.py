"""Keeps converted weights on disk while a base is loaded that will be stored narrow.

transformers converts weights before a device narrows the first: all of a GGUF file are widened to
float32, and so are those of a checkpoint of several dtypes; a mixture's experts are stacked. Here
each large one is written to an unnamed file as soon as it is converted, and mapped from there, so
its pages can be dropped. Weights that safetensors has mapped stay where they are. The values are
the same; with a transformers release that loads differently, loading only takes more memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import modeling_gguf_pytorch_utils as gguf_utils

from protocol.base import limits
from protocol.datasets.disk_texts import DiskFile
from protocol.machine.allocator import give_back_freed_memory
from protocol.machine.mapped_pages import is_mapped_file, release_mapped_files

_SMALL_BYTES: Final = limits.MIB
_RELEASED_AT_ONCE_BYTES: Final = 128 * limits.MIB
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_ONE_BY_ONE: Final = "HF_DEACTIVATE_ASYNC_LOAD"
"""Else its threads convert weights ahead of the one that places them in the model."""


@contextmanager
def weights_on_disk(directory: Path) -> Iterator[None]:
    """Context for `from_pretrained` of a model that is loaded for a narrow base.

    Args:
        directory: Of the model's own files, whose pages are let go of.

    Raises:
        StorageFailed: The disk has no room for the converted weights.
    """
    storage = _DiskWeights(directory)
    asynchronous = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    register = nn.modules.module.register_module_parameter_registration_hook
    hook = register(storage.parameter)  # type: ignore[arg-type]  # its return value replaces the parameter
    original_numpy = vars(gguf_utils).get("np")
    try:
        if original_numpy is not None:
            vars(gguf_utils)["np"] = _Numpy(storage)
        yield
    finally:
        if original_numpy is not None:
            vars(gguf_utils)["np"] = original_numpy
        hook.remove()
        if asynchronous is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = asynchronous


def hide_progress_bar() -> None:
    """Hide the progress bar for GGUF files, which transformers' own switch does not."""
    if "tqdm" in vars(gguf_utils):
        vars(gguf_utils)["tqdm"] = _unchanged


def _unchanged(each: Any, **_: object) -> Any:
    return each


class _DiskWeights:
    """Weights in an unnamed file, which exists as long as any of them is in use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = DiskFile()
        self._unreleased_bytes = 0

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values, mapped from the file; small ones copied."""
        if values.nbytes < _SMALL_BYTES or values.dtype != np.float32:
            return np.copy(values)
        return self._mapped(np.ascontiguousarray(values))

    def parameter(self, module: nn.Module, name: str, given: Any) -> nn.Parameter | None:
        """Replace a parameter that a module registers; None to keep it."""
        del module, name
        values = given.detach() if isinstance(given, nn.Parameter) else None
        if values is None or values.device.type != "cpu" or values.nbytes < _SMALL_BYTES:
            return None
        if values.dtype not in _DTYPES or is_mapped_file(values.data_ptr()):
            return None
        content = self._mapped(values.contiguous().view(torch.uint8).numpy())
        stored = torch.from_numpy(content).view(values.dtype)
        mapped = nn.Parameter(stored, given.requires_grad)
        vars(mapped).update(vars(given))
        return mapped

    def _mapped(self, values: NDArray[Any]) -> NDArray[Any]:
        content = self._file.mapped(values.reshape(-1).view(np.uint8).data)
        self._unreleased_bytes += len(content)
        if self._unreleased_bytes > _RELEASED_AT_ONCE_BYTES:
            self._unreleased_bytes = 0
            release_mapped_files(self._directory)
            give_back_freed_memory()
        return np.frombuffer(content, values.dtype).reshape(values.shape)


class _Numpy:
    """Stands in for numpy in transformers' GGUF reader; only `copy` differs."""

    def __init__(self, storage: _DiskWeights) -> None:
        self.copy = storage.array

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
