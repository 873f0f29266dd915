"""A GGUF file's weights on their way into a base that is to be narrow: on disk, not in memory.

transformers widens all of them to float32 before a device narrows the first. Here each large one is
put into a file without a name once it is wide, and mapped from there: the system can take back its
pages. What is read is the same; a release of transformers that goes another way takes more memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import modeling_gguf_pytorch_utils as theirs

from protocol.base import limits
from protocol.data.disk_texts import DiskFile

_SMALL_BYTES: Final = limits.MIB


@contextmanager
def put_aside() -> Iterator[None]:
    """While `from_pretrained` reads a GGUF file for a narrow base.

    Raises:
        StorageFailed: The disk has no room for the weights in float32.
    """
    aside = _Aside()
    register = nn.modules.module.register_module_parameter_registration_hook
    hook = register(aside.parameter)  # type: ignore[arg-type]  # what it gives is taken instead
    numpy_of_theirs = vars(theirs).get("np")
    try:
        if numpy_of_theirs is not None:
            vars(theirs)["np"] = _Numpy(aside)
        yield
    finally:
        if numpy_of_theirs is not None:
            vars(theirs)["np"] = numpy_of_theirs
        hook.remove()


def without_bar() -> None:
    """Of the bar that is drawn for a GGUF file transformers' own switch knows nothing."""
    if "tqdm" in vars(theirs):
        vars(theirs)["tqdm"] = _as_it_is


def _as_it_is(each: Any, **_: object) -> Any:
    return each


class _Aside:
    """What has been put on disk; it is there as long as any of it is in use."""

    def __init__(self) -> None:
        self._file = DiskFile()
        self._places: set[int] = set()

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values, mapped from the file; small ones copied."""
        if values.nbytes < _SMALL_BYTES or values.dtype != np.float32:
            return np.copy(values)
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        mapped = np.frombuffer(self._file.mapped(content), np.float32).reshape(values.shape)
        self._places.add(mapped.ctypes.data)
        return mapped

    def parameter(self, module: nn.Module, name: str, given: Any) -> nn.Parameter | None:
        """A parameter that a module gets; None where it is as it should be.

        The release for which this is does not call `np.copy` for every family.
        """
        del module, name
        values = given.detach() if isinstance(given, nn.Parameter) else None
        if values is None or values.device.type != "cpu" or values.data_ptr() in self._places:
            return None
        if values.dtype != torch.float32 or values.nbytes < _SMALL_BYTES:
            return None
        kept = nn.Parameter(torch.from_numpy(self.array(values.numpy())), given.requires_grad)
        vars(kept).update(vars(given))
        return kept


class _Numpy:
    """numpy, as transformers' reader of GGUF sees it."""

    def __init__(self, aside: _Aside) -> None:
        self.copy = aside.array

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
