"""Load a base that will be stored in low precision without converting it to float32 first.

Safetensors files are memory-mapped, so weights that are not converted occupy only pages, which are
dropped once they have been read. The device quantizes one weight at a time; see
`backends.quantization.mapped_weights`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import nn

from backends.base.progress import Meter
from backends.quantization.frozen_base import frozen_base
from backends.quantization.mapped_weights import release_pages
from protocol.exact.digest import StreamedArray

_PART_ELEMENTS: Final = 1 << 20
_HALF_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16}


def dtype_of(directory: str) -> torch.dtype:
    """Return bfloat16 or float16 if all tensors in a model's directory have it, else float32."""
    dtypes = set()
    try:
        for file in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(file, "np") as tensors:
                names = tensors.keys()
                dtypes |= {tensors.get_slice(name).get_dtype() for name in names}
    except (OSError, SafetensorError):
        return torch.float32  # loading it will report the error
    return _HALF_DTYPES.get(dtypes.pop(), torch.float32) if len(dtypes) == 1 else torch.float32


def convert_except_base(model: Any, drawn_names: Collection[str]) -> bool:
    """Convert all parameters to float32 except the frozen matrices of the model's body.

    Args:
        model: A model loaded in its files' dtype.
        drawn_names: Names of parameters that the files lack and that are drawn.

    Returns:
        False if the model has computed a buffer in 16 bits, so it must be loaded in float32.
    """
    half_dtypes = (torch.bfloat16, torch.float16)
    if any(buffer.dtype in half_dtypes for buffer in model.buffers()):
        return False
    requires_grad = {name: tensor.requires_grad for name, tensor in model.named_parameters()}
    model.requires_grad_(requires_grad=False)
    body_prefix = getattr(model, "base_model_prefix", "") + "."
    base_names = {
        name
        for name in frozen_base(model)
        if name.startswith(body_prefix) and name not in drawn_names
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(requires_grad[name])
        if name not in base_names:
            stored_values = parameter.data
            parameter.data = stored_values.float()
            release_pages(stored_values)
    return True


@contextmanager
def release_pages_after_use(model: nn.Module) -> Iterator[None]:
    """Context that releases the pages of each layer's weights after the layer's forward."""

    def release(layer: nn.Module, *_: object) -> None:
        for parameter in layer.parameters(recurse=False):
            release_pages(parameter.data)

    hooks = [
        layer.register_forward_hook(release)
        for layer in model.modules()
        if any(True for _ in layer.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Float32View(Mapping[str, StreamedArray]):
    """A mapping from names to arrays in parts; 16-bit tensors are converted to float32 on access.

    Mapped files are read here for the first time, so the mapping reports progress.

    Args:
        tensors: Tensors by name.
        releases_pages: Whether to release the pages of mapped files after reading.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, releases_pages: bool) -> None:
        self._tensors = tensors
        self._releases_pages = releases_pages
        self._meter = Meter("read", sum(tensor.nbytes for tensor in tensors.values()))

    def __getitem__(self, name: str) -> StreamedArray:
        tensor = self._tensors[name]
        dtype = torch.float32 if tensor.dtype in _HALF_DTYPES.values() else tensor.dtype
        array_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        return StreamedArray(
            array_dtype, tuple(tensor.shape), self._parts(tensor.reshape(-1), dtype)
        )

    def _parts(self, flat: torch.Tensor, dtype: torch.dtype) -> Iterator[NDArray[Any]]:
        for start in range(0, len(flat), _PART_ELEMENTS):
            part = flat[start : start + _PART_ELEMENTS]
            yield part.to(dtype).numpy()
            self._meter.add(part.nbytes)
        if self._releases_pages:
            release_pages(flat)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
