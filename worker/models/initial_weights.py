"""Initial weights as a model's library sets and draws them, with the same bits everywhere.

The library's own initialization runs, so whatever it computes by a formula (the decay of a
state-space model, norms, tables of positions) is kept. Its draws come from `backends.base.draws`,
since torch's depend on the instruction set; so do the last bits of torch's logarithms and powers,
which are computed in float64 and rounded here.
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

_INEXACT: Final = frozenset({
    "log", "log1p", "log2", "log10", "exp", "expm1", "exp2", "pow", "sin", "cos", "tan", "tanh",
    "sigmoid", "erf", "erfinv", "erfc", "softplus", "rsqrt", "logit",
})  # fmt: skip
"""Functions whose last bits are each instruction set's own, with and without `_` behind."""
_DONE: Final = "_is_hf_initialized"
"""How transformers marks what is not to be initialized."""
_NORMAL: Final = {"normal_", "normal", "randn", "randn_like"}
_OF_TENSORS: Final = {"Tensor_float", "float_Tensor", "Tensor_Tensor"}
"""Forms of torch.normal with a mean or deviation for each value."""
_UNIFORM: Final = {"uniform_", "rand", "rand_like"}


def draw_initial_weights(make: Callable[[], Any], seed: int) -> Any:
    """Make a model of `transformers` whose weights are drawn from the seed.

    Args:
        make: Makes it on the CPU, with weights of torch's draws.
        seed: The run's.

    Raises:
        DataError: Its library draws in a way that has no equal on every machine.
    """
    construction = _Draws(seed)
    with construction:
        model = make()
    initialization = _Draws(seed, model)
    tied = getattr(model, "all_tied_weights_keys", {})
    _forget_that_it_is_initialized(model, tied)
    _separate(model, tied)
    with initialization:
        model.initialize_weights()
    model.tie_weights(recompute_mapping=False)
    for name, parameter in model.named_parameters():
        storage = _storage_of(parameter)
        if storage in construction.drawn and storage not in initialization.written:
            _fill(parameter, construction.drawn[storage](draws.key_of(seed, name)))
    return model


def _forget_that_it_is_initialized(model: Any, tied: Collection[str]) -> None:
    """Have the library initialize all but tied weights and buffers that are computed anew.

    Those buffers are no part of the model's digest, and stay as every load of the model has them.
    """
    owners = {name.rpartition(".")[0] for name in tied}
    for name, module in model.named_modules():
        setattr(module, _DONE, name in owners)
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        setattr(buffer, _DONE, name not in saved)


def _separate(model: Any, tied: Collection[str]) -> None:
    """Untie weights, as they are while the library initializes: what they are tied to counts."""
    for name in tied:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        parameter = module._parameters.get(leaf)  # noqa: SLF001 -- as torch's own pruning does
        if parameter is not None:
            setattr(module, leaf, torch.nn.Parameter(torch.empty_like(parameter)))


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has torch draw from our own hashes, by a parameter's name where a whole one is drawn.

    Args:
        seed: The run's.
        model: Whose parameters have names. While it is still being constructed, torch draws its
            parameters, and how is remembered.

    Attributes:
        drawn: By storage, the values that a key gives.
        written: Storages that were written.
    """

    def __init__(self, seed: int, model: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._count = 0
        self._is_construction = model is None
        self._names: dict[int, str] = {}
        for name, parameter in () if model is None else model.named_parameters():
            self._names.setdefault(_storage_of(parameter), name)
        self.drawn: dict[int, Callable[[int], Array]] = {}
        self.written: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch's way to skip that imports its compiler: 1 s."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = str(func.overloadpacket.__name__), kwargs or {}
        if name.endswith("_"):
            self.written.add(_storage_of(args[0]))
            self.drawn.pop(_storage_of(args[0]), None)
        if name in _NORMAL | _UNIFORM and str(func._overloadname) not in _OF_TENSORS:  # noqa: SLF001
            return self._draw(func, name, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise DataError(
                f"this model's initial weights are drawn by torch's {name}, which draws other "
                "values on other machines; save the model once, and give it as model.source"
            )
        if name.removesuffix("_") in _INEXACT and not self._is_construction:
            return _in_float64(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _draw(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        tensor: torch.Tensor = func(*args, **kwargs)
        storage, is_whole = _storage_of(tensor), tensor.numel() * 4 == _bytes_of(tensor)
        own = slice(0, 2) if name == "normal" else slice(1, None if name.endswith("_") else 1)
        parameters = args[own]
        low = float(parameters[0]) if parameters else 0.0
        high = float(parameters[1]) if len(parameters) > 1 else 1.0

        def values(key: int) -> Array:
            if name in _NORMAL:
                return _about(low, draws.with_deviation(key, tensor.numel(), high))
            middle = (low + high) / 2
            return _about(middle, draws.symmetric(key, tensor.numel(), high - middle))

        if name.endswith("_") and is_whole and self._is_construction:
            self.drawn[storage] = values
            return tensor
        if is_whole and storage in self._names:
            key = draws.key_of(self._seed, self._names[storage])
        else:
            self._count += 1
            key = draws.key_of(self._seed, "initial", self._count)
        return _fill(tensor, values(key))


def _in_float64(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """A function of float32, rounded once from float64."""
    wide = [
        each.double() if isinstance(each, torch.Tensor) and each.dtype == torch.float32 else each
        for each in args
    ]
    found: torch.Tensor = func(*wide, **kwargs)
    if name.endswith("_"):
        return torch.Tensor.copy_(args[0], found)
    narrow = any(isinstance(each, torch.Tensor) and each.dtype == torch.float32 for each in args)
    return found.float() if narrow else found


def _about(middle: float, values: Array) -> Array:
    return values if middle == 0 else values + np.float32(middle)


def _fill(tensor: torch.Tensor, values: Array) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_(torch.from_numpy(values.reshape(tuple(tensor.shape))))


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
