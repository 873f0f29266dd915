"""Initial weights by the model's library, with the same bits on every machine.

The library's own initialization runs, so values from a formula (the decay of a state-space model,
norms, tables of positions) are unchanged. Random values come from `backends.base.draws`, since
torch's random values depend on the instruction set. So do the last bits of torch's logarithms and
powers, which are therefore computed in float64 and rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backends.base import draws
from backends.base.interface import Array
from protocol.base.errors import DataError

_INEXACT_FUNCTIONS: Final = frozenset({
    "log", "log1p", "log2", "log10", "exp", "expm1", "exp2", "pow", "sin", "cos", "tan", "tanh",
    "sigmoid", "erf", "erfinv", "erfc", "softplus", "rsqrt", "logit",
})  # fmt: skip
"""Functions whose last bits depend on the instruction set, as do those of their in-place forms."""
_INITIALIZED_FLAG: Final = "_is_hf_initialized"
"""The attribute with which transformers marks parameters that it should not initialize."""
_NORMAL: Final = {"normal_", "normal", "randn", "randn_like"}
_TENSOR_OVERLOADS: Final = {"Tensor_float", "float_Tensor", "Tensor_Tensor"}
"""Overloads of torch.normal with a mean or deviation for each value."""
_UNIFORM: Final = {"uniform_", "rand", "rand_like"}


def draw_initial_weights(make: Callable[[], Any], seed: int) -> Any:
    """Create a model of `transformers`, with random weights that depend only on the seed.

    Args:
        make: Creates the model on the CPU, with torch's random weights.
        seed: The run's seed.

    Raises:
        DataError: The model's library uses a random function that is not reproducible on every
            machine.
    """
    construction = _ReproducibleDraws(seed)
    with construction:
        model = make()
    initialization = _ReproducibleDraws(seed, model)
    tied = getattr(model, "all_tied_weights_keys", {})
    _reset_initialized_flags(model, tied)
    _untie(model, tied)
    with initialization:
        model.initialize_weights()
    model.tie_weights(recompute_mapping=False)
    for name, parameter in model.named_parameters():
        storage = _storage_of(parameter)
        if (
            storage in construction.draws_by_storage
            and storage not in initialization.written_storages
        ):
            _fill(parameter, construction.draws_by_storage[storage](draws.derive_key(seed, name)))
    return model


def _reset_initialized_flags(model: Any, tied: Collection[str]) -> None:
    """Mark all parameters for initialization, except tied weights and unsaved buffers.

    Unsaved buffers are not part of the model's digest; every load of the model computes them.
    """
    owners = {name.rpartition(".")[0] for name in tied}
    for name, module in model.named_modules():
        setattr(module, _INITIALIZED_FLAG, name in owners)
    saved_names = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        setattr(buffer, _INITIALIZED_FLAG, name not in saved_names)


def _untie(model: Any, tied: Collection[str]) -> None:
    """Replace tied weights by separate tensors, which are not initialized: tying drops them."""
    for name in tied:
        owner, _, parameter_name = name.rpartition(".")
        module = model.get_submodule(owner)
        parameter = module._parameters.get(parameter_name)  # noqa: SLF001 -- as torch's own pruning does
        if parameter is not None:
            setattr(module, parameter_name, torch.nn.Parameter(torch.empty_like(parameter)))


class _ReproducibleDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces torch's random values by values from `backends.base.draws`.

    The key of values is the parameter's name if one call fills the whole parameter, else a counter.

    Args:
        seed: The run's seed.
        model: The model, for the names of its parameters. None during construction: torch draws the
            parameters, and this mode records their distributions.

    Attributes:
        draws_by_storage: Maps a storage to the function that draws its values from a key.
        written_storages: Storages that in-place functions have written.
    """

    def __init__(self, seed: int, model: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._count = 0
        self._is_construction = model is None
        self._names: dict[int, str] = {}
        for name, parameter in () if model is None else model.named_parameters():
            self._names.setdefault(_storage_of(parameter), name)
        self.draws_by_storage: dict[int, Callable[[int], Array]] = {}
        self.written_storages: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True makes torch import its compiler, which takes 1 s and is not used."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = str(func.overloadpacket.__name__), kwargs or {}
        if name.endswith("_"):
            self.written_storages.add(_storage_of(args[0]))
            self.draws_by_storage.pop(_storage_of(args[0]), None)
        if name in _NORMAL | _UNIFORM and str(func._overloadname) not in _TENSOR_OVERLOADS:  # noqa: SLF001
            return self._draw(func, name, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise DataError(
                f"this model draws its initial weights with torch's {name}, which gives other "
                "values on other machines; save the model once, and set model.source to it"
            )
        if name.removesuffix("_") in _INEXACT_FUNCTIONS and not self._is_construction:
            return _compute_in_float64(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _draw(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        tensor: torch.Tensor = func(*args, **kwargs)
        storage, is_whole = _storage_of(tensor), tensor.numel() * 4 == _bytes_of(tensor)
        distribution_arguments = (
            slice(0, 2) if name == "normal" else slice(1, None if name.endswith("_") else 1)
        )
        parameters = args[distribution_arguments]
        low = float(parameters[0]) if parameters else 0.0
        high = float(parameters[1]) if len(parameters) > 1 else 1.0

        def values(key: int) -> Array:
            if name in _NORMAL:
                return _shift_by(low, draws.uniforms_with_deviation(key, tensor.numel(), high))
            center = (low + high) / 2
            return _shift_by(center, draws.symmetric_uniforms(key, tensor.numel(), high - center))

        if name.endswith("_") and is_whole and self._is_construction:
            self.draws_by_storage[storage] = values
            return tensor
        if is_whole and storage in self._names:
            key = draws.derive_key(self._seed, self._names[storage])
        else:
            self._count += 1
            key = draws.derive_key(self._seed, "initial", self._count)
        return _fill(tensor, values(key))


def _compute_in_float64(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Compute a function of float32 in float64, and round its result once."""
    float64_arguments = [
        argument.double()
        if isinstance(argument, torch.Tensor) and argument.dtype == torch.float32
        else argument
        for argument in args
    ]
    result: torch.Tensor = func(*float64_arguments, **kwargs)
    if name.endswith("_"):
        return torch.Tensor.copy_(args[0], result)
    is_float32 = any(
        isinstance(argument, torch.Tensor) and argument.dtype == torch.float32 for argument in args
    )
    return result.float() if is_float32 else result


def _shift_by(center: float, values: Array) -> Array:
    return values if center == 0 else values + np.float32(center)


def _fill(tensor: torch.Tensor, values: Array) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_(torch.from_numpy(values.reshape(tuple(tensor.shape))))


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
