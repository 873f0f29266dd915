"""Check before a run starts that the device computes the run's model as torch does.

The check compares loss and gradients of two microbatches, in training mode, with torch's on the
CPU, with the same random draws. If torch would take too long, it compares only a few layers (at
least one of each kind, the second and the last) and everything outside the layers, and if that
would still take too long, with only the first samples of a microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from backends.base.interface import Array, Batch, Trainable
from backends.wgpu.bisection import CaptureRunner, describe_differing_operator
from backends.wgpu.capture.capture import Capture
from backends.wgpu.capture.host_run import HostStep
from backends.wgpu.capture.layer_call import LayerCall, repeated_layers
from backends.wgpu.device.packing import seed_words
from protocol.base.errors import SamestepError

TOLERANCE: Final = 1e-4
"""Allowed difference, relative to a tensor's norm; reordering float32 sums gives about 1e-6."""
FLOAT16_TOLERANCE: Final = 1e-2
"""`TOLERANCE` in float16, where a single different rounding changes a value by 5e-4."""
_SCALES: Final = (256.0, 1.0)
"""Loss scales to try in float16: the first with finite gradients in torch is used."""
_RELATIVE_FLOOR: Final = 1e-2
"""Smallest norm to compare with, relative to the largest gradient's norm: smaller gradients may be
rounding errors alone."""
ROUNDINGS: Final = 10.0
"""Allowed difference as a multiple of torch's own change when the weights' last bits change."""
_BUDGET_S: Final = 4.0
"""Approximate time budget of torch's computations."""
_PRODUCT_SIZE: Final = 512
"""Rows and columns of the matrix product that measures the CPU's speed."""
_OPERATIONS_PER_WEIGHT: Final = 6
"""Floating-point operations per use of a weight (see `_rows`), in forward and backward."""


class ComparableProgram(CaptureRunner, Protocol):
    """The methods of a program that the check uses."""

    loss_scale: float

    def make_value_reader(self) -> Callable[[], dict[str, torch.Tensor]]:
        """Return a function that returns the values of the tensors that the module has now, as the
        device has them (quantized weights dequantized), under all their names."""

    def use_capture(self, batch: Batch, capture: Capture) -> None:
        """Use this capture for batches like this one."""

    def capture(self, batch: Batch, *, closes_layers: bool = True) -> Capture:
        """Capture a step of the module in its current form; `closes_layers` as for
        `capture_step`."""

    def gradients_of(self, batch: Batch, seed: int) -> dict[str, Array]:
        """Run the compiled program; return gradients by name, and the loss under ""."""

    def gradients_once(self, capture: Capture, batch: Batch, seed: int) -> dict[str, Array]:
        """Compute one microbatch as `gradients_of`, with a capture that is used only here."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A microbatch and torch's results; `scale` is the loss scale in float16, else 0."""

    batch: Batch
    seed: int
    capture: Capture
    expected: Mapping[str, Array]
    scale: float


class Parity:
    """Compares the device with torch: the constructor computes torch's results, `check` the
    device's.

    It must be constructed before the program moves the module's weights off the host.

    Args:
        program: A program that has compiled nothing yet.
        trainable: The task.
        batches: Microbatches of the run; two are compared.
    """

    def __init__(
        self, program: ComparableProgram, trainable: Trainable, batches: Sequence[Batch]
    ) -> None:
        assert trainable.module is not None
        assert trainable.loss is not None
        self._program = program
        self._module: nn.Module = trainable.module
        self._loss = trainable.loss
        self._trained_names = [
            tensor.name for block in trainable.blocks for tensor in block.tensors
        ]
        self._is_float16 = trainable.precision == "float16"
        self._tolerance = FLOAT16_TOLERANCE if self._is_float16 else TOLERANCE
        self._torch_seconds = 0.0
        microbatches = _two_microbatches(batches)
        widest = max(microbatches, key=_rows)
        affordable_operations = _BUDGET_S * _operations_per_s() / len(microbatches)
        whole_capture = program.capture(microbatches[0])
        program.use_capture(microbatches[0], whole_capture)
        self._part = choose_part(self._module, widest, affordable_operations, whole_capture.calls)
        self._captures = {} if self._part else {_shapes(microbatches[0]): whole_capture}
        seeds = range(trainable.seed, trainable.seed + 2)
        with self._part.isolate():
            self._read_values = program.make_value_reader()
        self._cases = [self._build_case(*pair) for pair in zip(microbatches, seeds, strict=True)]

    def _build_case(self, batch: Batch, seed: int) -> _Case:
        """Compute torch's results for a microbatch."""
        batch = self._part.first_samples(batch)
        with self._part.isolate():
            capture = self._capture_part(batch)
            start_s = time.perf_counter()
            expected, scale = self._finite_results(capture, batch, seed)
        self._torch_seconds += time.perf_counter() - start_s
        return _Case(batch, seed, capture, expected, scale)

    def _finite_results(
        self, capture: Capture, batch: Batch, seed: int
    ) -> tuple[dict[str, Array], float]:
        """Return torch's results and the loss scale with which they are finite."""
        results: dict[str, Array] = {}
        for scale in _SCALES if self._is_float16 else (0.0,):
            results = self._run_on_host(capture, batch, seed, scale)
            if all(np.isfinite(value).all() for value in results.values()):
                break
        return results, scale

    def _capture_part(self, batch: Batch) -> Capture:
        """Capture the compared part, once per shape."""
        shapes = _shapes(batch)
        if shapes not in self._captures:
            self._captures[shapes] = capture = self._program.capture(batch)
            if not self._part:
                self._program.use_capture(batch, capture)
        return self._captures[shapes]

    def _run_on_host(
        self, capture: Capture, batch: Batch, seed: int, scale: float, rounding: int = 0
    ) -> dict[str, Array]:
        """Return torch's results; `rounding`: the seed of a perturbation of the weights, or 0."""
        values = self._read_values()
        names = [name for name in self._trained_names if name in values]
        if rounding:
            values = perturb(values, rounding)
        step = HostStep(self._module, self._loss, values, names, capture.calls, scale=scale)
        arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
        results = step.run(arrays, _seeds(seed, capture))
        return {n: x.numpy().reshape(-1) for n, x in zip(["", *names], results, strict=True)}

    def check(self) -> str:
        """Compare the device's results with torch's and describe the outcome.

        Raises:
            SamestepError: The device's results differ from torch's.
        """
        start_s, worst = time.perf_counter(), 0.0
        for case in self._cases:
            with self._part.isolate():
                results = self._run_on_device(case)
                name, distance = difference(case.expected, results)
                if distance > self._tolerance and not self._is_rounding(case, distance):
                    raise SamestepError(self._describe_difference(case, name, distance))
            worst = max(worst, distance)
        seconds = self._torch_seconds + time.perf_counter() - start_s
        return f"gradients within {worst:.1e} of torch's ({self._part}; {seconds:.1f} s)"

    def _run_on_device(self, case: _Case) -> dict[str, Array]:
        self._program.loss_scale = case.scale or 1.0
        try:
            if not self._part:
                return self._program.gradients_of(case.batch, case.seed)
            return self._program.gradients_once(case.capture, case.batch, case.seed)
        finally:
            self._program.loss_scale = 1.0

    def _is_rounding(self, case: _Case, distance: float) -> bool:
        """Whether changing the last bits of the weights changes torch's results about as much."""
        repeated, *differences = (
            difference(case.expected, self._repeat_on_host(case, rounding))[1]
            for rounding in (0, 1, 2)  # 0: unchanged weights
        )
        return repeated == 0.0 and distance <= ROUNDINGS * max(differences)

    def _repeat_on_host(self, case: _Case, rounding: int = 0) -> dict[str, Array]:
        return self._run_on_host(case.capture, case.batch, case.seed, case.scale, rounding)

    def _describe_difference(self, case: _Case, name: str, distance: float) -> str:
        quantity = f"the gradient of {name!r}" if name else "the loss"
        return (
            f"expected {quantity} within {self._tolerance:g} of torch's, got a difference of "
            f"{distance:.1e} on the vulkan backend: {self._describe_cause(case)}; use a cpu or "
            "cuda worker for this model"
        )

    def _describe_cause(self, case: _Case) -> str:
        """Return the likely cause."""
        if difference(case.expected, self._repeat_on_host(case))[1]:
            return "torch's results differ from run to run as well"
        if self._is_float16:
            return "the operator cannot be determined in float16 (try model.precision: float32)"
        try:
            capture = self._program.capture(case.batch, closes_layers=False)
            seeds = _seeds(case.seed, capture)
            operator = describe_differing_operator(
                self._program,
                capture,
                self._read_values(),
                case.batch,
                seeds,
                case.seed,
                self._tolerance,
            )
            if operator:
                return f"the operator is {operator}"
            # The search has modified its capture.
            capture = self._program.capture(case.batch, closes_layers=False)
            results = self._program.gradients_once(capture, case.batch, case.seed)
        except (SamestepError, RuntimeError) as error:
            return f"the operator cannot be determined ({' '.join(str(error).split())[:200]})"
        if self._has_no_draws(case) and difference(case.expected, results)[1] <= self._tolerance:
            return "layers that differ share one set of kernels"
        return "no single operator, but several fused in one kernel"

    def _has_no_draws(self, case: _Case) -> bool:
        """Whether no layer draws random numbers. With draws, inlined layers give other results
        than layers that share kernels."""
        return not any(call.has_draws for call in case.capture.calls)


def difference(expected: Mapping[str, Array], results: Mapping[str, Array]) -> tuple[str, float]:
    """Return the name of the tensor that differs most ("" for the loss), and the relative
    difference.

    The difference is relative to the tensor's norm, for a gradient to at least `_RELATIVE_FLOOR`
    of the largest gradient's norm. It is infinite if a value that is not finite differs.
    """
    norms = {name: _norm(value) for name, value in expected.items()}
    floor = _RELATIVE_FLOOR * max((norm for name, norm in norms.items() if name), default=0.0)
    worst = ("", 0.0)
    for name, value in expected.items():
        scale = max(norms[name], floor if name else 0.0)
        distance = _distance(value, results[name], scale)
        if distance > worst[1]:
            worst = (name, distance)
    return worst


def _distance(expected: Array, actual: Array, scale: float) -> float:
    is_finite = np.isfinite(expected)
    if not np.isfinite(actual[is_finite]).all():
        return float("inf")
    if not np.array_equal(expected[~is_finite], actual[~is_finite], equal_nan=True):
        return float("inf")
    distance = _norm(expected[is_finite].astype(np.float64) - actual[is_finite])
    if distance == 0.0:
        return 0.0
    return distance / scale if scale > 0 else float("inf")


def _norm(values: Any) -> float:
    finite = values[np.isfinite(values)].astype(np.float64)
    return float(np.linalg.norm(finite))


def _seeds(seed: int, capture: Capture) -> torch.Tensor:
    """Return seeds in the program's format."""
    return torch.from_numpy(seed_words(seed, capture.seeds).view(np.int32).copy())


def _two_microbatches(batches: Sequence[Batch]) -> list[Batch]:
    """Return two microbatches: the first two, or the only one and its samples reversed."""
    first_batch, *other_batches = batches
    if other_batches:
        return [first_batch, other_batches[0]]
    reversed_arrays = {
        n: array[::-1].copy() if array.ndim else array for n, array in first_batch.arrays.items()
    }
    return [first_batch, Batch(reversed_arrays, first_batch.weight)]


def perturb(values: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Change the last bits of float tensors at random; tensors with several names stay shared."""
    generator = torch.Generator().manual_seed(number)
    perturbed_by_id: dict[int, torch.Tensor] = {}
    for value in values.values():
        if id(value) not in perturbed_by_id and value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator)
            perturbed_by_id[id(value)] = value * (1 + 2.0**-23 * noise)
    return {name: perturbed_by_id.get(id(value), value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a model that is compared.

    Attributes:
        layers: Lists of layers to shorten, with the names of the layers that stay; empty for the
            whole model.
        samples: Samples of a microbatch; 0 for all.
    """

    layers: tuple[tuple[nn.ModuleList, tuple[str, ...]], ...] = ()
    samples: int = 0

    def __bool__(self) -> bool:
        """Whether any layer or sample is left out."""
        return bool(self.layers or self.samples)

    def __str__(self) -> str:
        layers = f"{sum(len(names) for _, names in self.layers)} layers" if self.layers else "all"
        return f"{layers}, {self.samples} samples" if self.samples else layers

    @contextmanager
    def isolate(self) -> Iterator[None]:
        """Remove the other layers from the model within the context."""
        saved_layers = [(stack, dict(stack._modules)) for stack, _ in self.layers]  # noqa: SLF001
        try:
            for stack, names in self.layers:
                for name in stack._modules.keys() - {*names}:  # noqa: SLF001
                    del stack._modules[name]  # noqa: SLF001
            yield
        finally:
            for stack, modules in saved_layers:
                stack._modules.clear()  # noqa: SLF001
                stack._modules.update(modules)  # noqa: SLF001

    def first_samples(self, batch: Batch) -> Batch:
        """Return the batch's first `samples` samples."""
        if not self.samples:
            return batch
        arrays = {n: a[: self.samples] if a.ndim else a for n, a in batch.arrays.items()}
        return Batch(arrays, batch.weight)


def choose_part(
    module: nn.Module, batch: Batch, operations: float, calls: Sequence[LayerCall]
) -> _Part:
    """Choose the part of a model to compare: all of it if that takes at most `operations`.

    Otherwise at least one layer of each kind, and the second and the last layer of each list; if
    these take more, as many samples as do not, but at least one (all if arrays differ in length).
    Layers are of the same kind if their `LayerCall`s are: they share one set of kernels.
    """
    stacks: dict[str, tuple[nn.ModuleList, dict[str, nn.Module]]] = {}
    for path, layer in repeated_layers(module, ""):
        name, _, key = path.rpartition(".")
        stack = module.get_submodule(name)
        assert isinstance(stack, nn.ModuleList)
        stacks.setdefault(name, (stack, {}))[1][key] = layer
    weights = _weights(module)
    per_layer = {name: _weights(stack) / len(stack) for name, (stack, _) in stacks.items()}
    outside_weights = weights - sum(_weights(stack) for stack, _ in stacks.values())
    affordable_weights = operations / (_OPERATIONS_PER_WEIGHT * _rows(batch))
    if weights <= affordable_weights:
        return _Part()
    first_by_kind: dict[Any, str] = {}
    for call in calls:
        first_by_kind.setdefault(call.kind, call.path)
    kept_names = {
        name: _informative_layers(name, [*layers], {*first_by_kind.values()})
        for name, (_, layers) in stacks.items()
    }
    smallest = outside_weights + sum(
        per_layer[name] * len(names) for name, names in kept_names.items()
    )
    samples = 0
    lengths = {len(array) for array in batch.arrays.values() if array.ndim}
    if smallest > affordable_weights and len(lengths) == 1:
        (count,) = lengths
        samples = max(1, int(count * affordable_weights / smallest))
    return _Part(
        tuple((stacks[name][0], tuple(names)) for name, names in kept_names.items()), samples
    )


def _informative_layers(
    stack: str, names: Sequence[str], first_layers: Collection[str]
) -> list[str]:
    """Return the first layer of each kind, the second and the last."""
    selected = {names[0], names[1], names[-1]}
    return [name for name in names if name in selected or f"{stack}.{name}" in first_layers]


def _weights(module: nn.Module) -> int:
    """Count the weights that matrix products read."""
    tables = {
        id(embedding.weight)
        for embedding in module.modules()
        if isinstance(embedding, nn.Embedding)
    }
    return sum(
        parameter.numel()
        for parameter in module.parameters()
        if parameter.dim() > 1 and id(parameter) not in tables
    )


def _shapes(batch: Batch) -> tuple[object, ...]:
    return tuple((name, array.shape) for name, array in sorted(batch.arrays.items()))


def _rows(batch: Batch) -> int:
    """Estimate how often a microbatch uses a weight: its tokens (the elements of its largest
    integer array), or its samples if it has more."""
    token_counts = [array.size for array in batch.arrays.values() if array.dtype.kind in "iu"]
    return max(
        [*token_counts, *(len(array) for array in batch.arrays.values() if array.ndim)], default=1
    )


def _operations_per_s() -> float:
    """Measure torch's speed on this CPU with one matrix product."""
    ones = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)
    ones @ ones
    start_s = time.perf_counter()
    ones @ ones
    return 2.0 * _PRODUCT_SIZE**3 / max(time.perf_counter() - start_s, 1e-6)
