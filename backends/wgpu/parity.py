"""Whether the device computes the run's own model as torch does, asked before a run starts.

Loss and gradients of two microbatches, in training mode, against torch's on the CPU with the same
draws. A model for which that would take torch too long is compared in part: a few of its layers,
one of each kind and the last among them, with all that lies around them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from backends.base.interface import Array, Batch, Trainable
from backends.wgpu.bisection import Runs, odd_operator
from backends.wgpu.capture.capture import Capture
from backends.wgpu.capture.host_run import HostStep
from backends.wgpu.capture.layer_call import LayerCall, repeated_layers
from backends.wgpu.device.packing import seed_words
from protocol.base.errors import SamestepError

WITHIN: Final = 1e-4
"""The largest difference, as a share of a tensor's norm: float32 in another order gives 1e-6."""
WITHIN_HALVES: Final = 1e-2
"""In float16: a sum that is rounded the other way is off by 5e-4, and what follows from it too."""
_SCALES: Final = (256.0, 1.0)
"""Of a loss in float16: the first that torch's gradients are finite with."""
_FLOOR: Final = 1e-2
"""Of the largest gradient's norm: below it, what is zero in exact arithmetic is rounding."""
ROUNDINGS: Final = 10.0
"""As often as torch's own answer moves when its inputs are rounded may the device's be off."""
_BUDGET_S: Final = 4.0
"""What torch may take, roughly, for what it computes."""
_TRIED: Final = 512
"""Rows and columns of a product that tells how fast this CPU is."""
_PASSES: Final = 6
"""Operations for each weight and row of a microbatch, forward and backward."""


class Compiled(Runs, Protocol):
    """What is asked of a program."""

    loss_scale: float

    def values(self) -> dict[str, torch.Tensor]:
        """Of each tensor that the module has now, as the device is to have it, by all its names."""

    def take(self, batch: Batch, capture: Capture) -> None:
        """Use this capture for batches like this one."""

    def capture(self, batch: Batch, *, closes: bool = True) -> Capture:
        """Of a step of the module as it now is; `closes` as for `capture_step`."""

    def computed(self, batch: Batch, seed: int) -> dict[str, Array]:
        """By the compiled program: each gradient by name, and the loss as ""."""

    def computed_once(self, capture: Capture, batch: Batch, seed: int) -> dict[str, Array]:
        """The same, for a capture that is no program's."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A microbatch and what torch makes of it; the scale of a loss in float16, else 0."""

    batch: Batch
    seed: int
    capture: Capture
    expected: Mapping[str, Array]
    scale: float


class Parity:
    """The comparison: torch's side when it is made, the device's by `check`.

    Made before the program takes the module's weights, which then are no longer on the host.

    Args:
        program: Not yet ready.
        trainable: The task.
        batches: Microbatches of the run; two are looked at.
    """

    def __init__(self, program: Compiled, trainable: Trainable, batches: Sequence[Batch]) -> None:
        assert trainable.module is not None
        assert trainable.loss is not None
        self._program = program
        self._module: nn.Module = trainable.module
        self._loss = trainable.loss
        self._trained = [tensor.name for block in trainable.blocks for tensor in block.tensors]
        self._halves = trainable.precision == "float16"
        self._within = WITHIN_HALVES if self._halves else WITHIN
        self._seconds = 0.0
        two = _two(batches)
        widest = max(two, key=_rows)
        affordable = _BUDGET_S * _operations_per_s() / len(two)
        whole = program.capture(two[0])
        program.take(two[0], whole)
        self._part = part_of(self._module, widest, affordable, whole.calls)
        self._captures = {} if self._part else {_shapes(two[0]): whole}
        seeds = range(trainable.seed, trainable.seed + 2)
        with self._part.alone():
            self._values = program.values()
        self._cases = [self._case(*pair) for pair in zip(two, seeds, strict=True)]

    def _case(self, batch: Batch, seed: int) -> _Case:
        """On torch's side."""
        batch = self._part.of(batch)
        with self._part.alone():
            capture = self._captured(batch)
            began = time.perf_counter()
            expected, scale = self._finite(capture, batch, seed)
        self._seconds += time.perf_counter() - began
        return _Case(batch, seed, capture, expected, scale)

    def _finite(self, capture: Capture, batch: Batch, seed: int) -> tuple[dict[str, Array], float]:
        """What torch makes of it, and the scale of its loss."""
        found: dict[str, Array] = {}
        for scale in _SCALES if self._halves else (0.0,):
            found = self._on_host(capture, batch, seed, scale)
            if all(np.isfinite(value).all() for value in found.values()):
                break
        return found, scale

    def _captured(self, batch: Batch) -> Capture:
        """Of the part that is compared."""
        shapes = _shapes(batch)
        if shapes not in self._captures:
            self._captures[shapes] = made = self._program.capture(batch)
            if not self._part:
                self._program.take(batch, made)
        return self._captures[shapes]

    def _on_host(
        self, capture: Capture, batch: Batch, seed: int, scale: float, rounding: int = 0
    ) -> dict[str, Array]:
        names = [name for name in self._trained if name in self._values]
        values = rounded_otherwise(self._values, rounding) if rounding else self._values
        step = HostStep(self._module, self._loss, values, names, capture.calls, scale=scale)
        arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
        found = step.run(arrays, _seeds(seed, capture))
        return {n: x.numpy().reshape(-1) for n, x in zip(["", *names], found, strict=True)}

    def check(self) -> str:
        """Compute the same on the device; gives what was found, in words.

        Raises:
            SamestepError: The device computes otherwise than torch.
        """
        began, worst = time.perf_counter(), 0.0
        for case in self._cases:
            with self._part.alone():
                got = self._on_device(case)
                name, apart = difference(case.expected, got)
                if apart > self._within and not self._is_rounding(case, apart):
                    raise SamestepError(self._refusal(case, name, apart))
            worst = max(worst, apart)
        seconds = self._seconds + time.perf_counter() - began
        return f"gradients within {worst:.1e} of torch's ({self._part}; {seconds:.1f} s)"

    def _on_device(self, case: _Case) -> dict[str, Array]:
        self._program.loss_scale = case.scale or 1.0
        try:
            if not self._part:
                return self._program.computed(case.batch, case.seed)
            return self._program.computed_once(case.capture, case.batch, case.seed)
        finally:
            self._program.loss_scale = 1.0

    def _is_rounding(self, case: _Case, apart: float) -> bool:
        """Whether torch's own answer moves about as far with the last bits of the weights."""
        again, *moved = (
            difference(case.expected, self._again(case, number))[1] for number in range(3)
        )
        return again == 0.0 and apart <= ROUNDINGS * max(moved)

    def _again(self, case: _Case, rounding: int = 0) -> dict[str, Array]:
        return self._on_host(case.capture, case.batch, case.seed, case.scale, rounding)

    def _refusal(self, case: _Case, name: str, apart: float) -> str:
        what = f"the gradient of {name!r}" if name else "the loss"
        return (
            f"the vulkan backend computes {what} otherwise than torch, by {apart:.1e} of its norm "
            f"where {self._within:g} is allowed: {self._culprit(case)}; use a cpu or cuda worker "
            "for this model"
        )

    def _culprit(self, case: _Case) -> str:
        """What is to blame, as far as can be told."""
        if difference(case.expected, self._again(case))[1]:
            return "in torch, too, it gives other numbers each time"
        if self._halves:
            return "the operator cannot be determined in float16 (try model.precision: float32)"
        try:
            opened = self._program.capture(case.batch, closes=False)
            seeds = _seeds(case.seed, opened)
            found = odd_operator(
                self._program, opened, self._values, case.batch, seeds, case.seed, self._within
            )
            if found:
                return f"its {found}"
            opened = self._program.capture(case.batch, closes=False)
            got = self._program.computed_once(opened, case.batch, case.seed)
        except (SamestepError, RuntimeError) as error:
            return f"the operator cannot be determined ({' '.join(str(error).split())[:200]})"
        if self._draws_alike(case) and difference(case.expected, got)[1] <= self._within:
            return "it treats different layers as equal"
        return "no operator by itself, but several in one kernel"

    def _draws_alike(self, case: _Case) -> bool:
        """Whether open layers draw what closed ones do: none."""
        return not any(call.draws for call in case.capture.calls)


def difference(expected: Mapping[str, Array], got: Mapping[str, Array]) -> tuple[str, float]:
    """The tensor that differs most, and by what share of its norm; infinity where only one of the
    two is finite. The loss goes by no name."""
    norms = {name: _norm(value) for name, value in expected.items()}
    floor = _FLOOR * max((norm for name, norm in norms.items() if name), default=0.0)
    found = ("", 0.0)
    for name, value in expected.items():
        scale = max(norms[name], floor if name else 0.0)
        apart = _apart(value, got[name], scale)
        if apart > found[1]:
            found = (name, apart)
    return found


def _apart(one: Array, other: Array, scale: float) -> float:
    finite = np.isfinite(one)
    if not np.isfinite(other[finite]).all():
        return float("inf")
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return float("inf")
    apart = _norm(one[finite].astype(np.float64) - other[finite])
    if apart == 0.0:
        return 0.0
    return apart / scale if scale > 0 else float("inf")


def _norm(values: Any) -> float:
    finite = values[np.isfinite(values)].astype(np.float64)
    return float(np.linalg.norm(finite))


def _seeds(seed: int, capture: Capture) -> torch.Tensor:
    """As the program is given them."""
    return torch.from_numpy(seed_words(seed, capture.seeds).view(np.int32).copy())


def _two(batches: Sequence[Batch]) -> list[Batch]:
    """Two microbatches; of one alone also its samples in the opposite order."""
    first, *others = batches
    if others:
        return [first, others[0]]
    turned = {n: array[::-1].copy() if array.ndim else array for n, array in first.arrays.items()}
    return [first, Batch(turned, first.weight)]


def rounded_otherwise(values: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """The same but for rounding; tensors with several names stay one."""
    draws = torch.Generator().manual_seed(number)
    made: dict[int, torch.Tensor] = {}
    for value in values.values():
        if id(value) not in made and value.is_floating_point():
            noise = torch.randn(value.shape, generator=draws)
            made[id(value)] = value * (1 + 2.0**-23 * noise)
    return {name: made.get(id(value), value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """What of a model is compared.

    Attributes:
        layers: The lists of layers that are shortened, and the names there of those that stay;
            empty for the whole model.
        samples: Of a microbatch; 0 for all.
    """

    layers: tuple[tuple[nn.ModuleList, tuple[str, ...]], ...] = ()
    samples: int = 0

    def __bool__(self) -> bool:
        """Whether it is less than all."""
        return bool(self.layers or self.samples)

    def __str__(self) -> str:
        what = f"{sum(len(names) for _, names in self.layers)} layers" if self.layers else "all"
        return f"{what}, {self.samples} samples" if self.samples else what

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While it is entered, the model has no other layers."""
        before = [(stack, dict(stack._modules)) for stack, _ in self.layers]  # noqa: SLF001
        try:
            for stack, names in self.layers:
                for name in stack._modules.keys() - {*names}:  # noqa: SLF001
                    del stack._modules[name]  # noqa: SLF001
            yield
        finally:
            for stack, modules in before:
                stack._modules.clear()  # noqa: SLF001
                stack._modules.update(modules)  # noqa: SLF001

    def of(self, batch: Batch) -> Batch:
        """So many of its samples."""
        if not self.samples:
            return batch
        first = {n: a[: self.samples] if a.ndim else a for n, a in batch.arrays.items()}
        return Batch(first, batch.weight)


def part_of(
    module: nn.Module, batch: Batch, operations: float, calls: Sequence[LayerCall]
) -> _Part:
    """As much of the model as takes so many operations, and no less than what tells most: of each
    list of layers one of each kind, the second and the last; of a microbatch one sample.

    Layers are of one kind that are `LayerCall`s of one kind: they have one set of kernels.
    """
    stacks: dict[str, tuple[nn.ModuleList, dict[str, nn.Module]]] = {}
    for path, layer in repeated_layers(module, ""):
        name, _, key = path.rpartition(".")
        stack = module.get_submodule(name)
        assert isinstance(stack, nn.ModuleList)
        stacks.setdefault(name, (stack, {}))[1][key] = layer
    weights = _weights(module)
    per_layer = {name: _weights(stack) / len(stack) for name, (stack, _) in stacks.items()}
    around = weights - sum(_weights(stack) for stack, _ in stacks.values())
    affordable = operations / (_PASSES * _rows(batch))
    if weights <= affordable:
        return _Part()
    first: dict[Any, str] = {}
    for call in calls:
        first.setdefault(call.kind, call.path)
    kept = {
        name: _telling(name, [*layers], {*first.values()}) for name, (_, layers) in stacks.items()
    }
    least = around + sum(per_layer[name] * len(names) for name, names in kept.items())
    samples = 0
    lengths = {len(array) for array in batch.arrays.values() if array.ndim}
    if least > affordable and len(lengths) == 1:
        (count,) = lengths
        samples = max(1, int(count * affordable / least))
    return _Part(tuple((stacks[name][0], tuple(names)) for name, names in kept.items()), samples)


def _telling(stack: str, names: Sequence[str], first: Collection[str]) -> list[str]:
    """The first layer of each kind, the second and the last."""
    wanted = {names[0], names[1], names[-1]}
    return [name for name in names if name in wanted or f"{stack}.{name}" in first]


def _weights(module: nn.Module) -> int:
    """Those that products read."""
    tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    return sum(
        parameter.numel()
        for parameter in module.parameters()
        if parameter.dim() > 1 and id(parameter) not in tables
    )


def _shapes(batch: Batch) -> tuple[object, ...]:
    return tuple((name, array.shape) for name, array in sorted(batch.arrays.items()))


def _rows(batch: Batch) -> int:
    """How often a weight is used: tokens, else samples."""
    whole = [array.size for array in batch.arrays.values() if array.dtype.kind in "iu"]
    return max([*whole, *(len(array) for array in batch.arrays.values() if array.ndim)], default=1)


def _operations_per_s() -> float:
    """Of torch on this CPU, measured with one product."""
    one = torch.ones(_TRIED, _TRIED)
    one @ one
    began = time.perf_counter()
    one @ one
    return 2.0 * _TRIED**3 / max(time.perf_counter() - began, 1e-6)
