"""Compare loss and gradients of a random module on the device with torch's on the CPU."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.base.interface import Batch, Trainable
from backends.wgpu.capture.host_run import HostStep
from backends.wgpu.capture.substitution import named_tensors
from backends.wgpu.device.device import Device
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.device.packing import seed_words
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.parity import perturb
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import SamestepError
from tests.backends.wgpu.products import small_tiles
from tests.backends.wgpu.random_programs import (
    MAX_ELEMENTS,
    ProgramText,
    define_class,
    random_inputs,
)
from worker.models.blocks import cut_into_blocks

RELATIVE_TOLERANCE: Final = 1e-4
_ROUNDING_FACTOR: Final = 50
"""Allowed error of the device as a multiple of torch's own rounding error."""


class Unsupported(Exception):
    """A program that cannot be compared: torch rejects it, or it has no gradient."""


class Mismatch(AssertionError):
    """The device computes other values than torch, or raises anything but a refusal."""


class Model(nn.Module):
    """A program, or several copies of it as the layers of a model."""

    def __init__(self, program: type[nn.Module], layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        if layers:
            self.layers = nn.ModuleList(program(number) for number in range(layers))
        else:
            self.program = program()

    def forward(self, x: torch.Tensor, n: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        if hasattr(self, "program"):
            outputs: list[torch.Tensor] = self.program(x, n, b)
            return outputs
        for layer in self.layers:
            results = layer(x, n, b)
            x = x + 0.1 * sum(result.mean() for result in results)
        return [x, *results]


def weighted_loss(module: Any, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a weighted sum of all results, so that their gradients differ by element."""
    total: Any = 0.0
    for result in module(arrays["x"], arrays["n"], arrays["b"]):
        weights = arrays["weights"][: result.numel()].reshape(result.shape)
        total = total + (result * weights).sum()
    return torch.as_tensor(total)


def compare(device: Device, program: ProgramText, *, use_gpu_kernels: bool = False) -> str:
    """Compare a program on the device with torch; return "agreed", or the message of a refusal.

    Args:
        device: The device that runs the program.
        program: The program.
        use_gpu_kernels: Use the kernels of a GPU, with small tiles, also on a software device.

    Raises:
        Unsupported: The program cannot be compared.
        Mismatch: Values differ, or the device raises anything but a refusal.
    """
    if program.special and re.search(r"(std|var)_mean\(", str(program)):
        raise Unsupported("torch's std_mean and var_mean give NaN for an infinite mean")
    return compare_class(
        device, define_class(program.class_source()), shape=program.shape, seed=program.seed,
        layers=program.layers, special=program.special, use_gpu_kernels=use_gpu_kernels,
    )  # fmt: skip


def compare_class(
    device: Device,
    program: type[nn.Module],
    *,
    shape: tuple[int, ...],
    seed: int,
    layers: int = 0,
    special: str = "",
    use_gpu_kernels: bool = False,
) -> str:
    """Compare a program class as `compare` does; the options are those of `ProgramText`."""
    module = Model(program, layers, seed)
    weights = torch.arange(MAX_ELEMENTS, dtype=torch.float32).mul(0.7).cos() + 0.3
    batches = [
        random_inputs(shape, batch_seed, special) | {"weights": weights}
        for batch_seed in (seed, seed + 1)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            blocks = cut_into_blocks(module)
            for batch in batches:
                weighted_loss(module, batch).backward()
        except Exception as error:
            raise Unsupported(str(error)) from error
        module.zero_grad()
        return _run_comparison(device, module, blocks, batches, use_gpu_kernels=use_gpu_kernels)


def _kernel_options(device: Device, *, use_gpu_kernels: bool) -> KernelOptions:
    """Return the device's options, or those of a GPU with small tiles, which compile quickly."""
    if use_gpu_kernels:
        return KernelOptions(cooperative=True, matmul=small_tiles, bindings=16)
    return KernelOptions(not device.adapter.software, MatmulTuner(device).shader)


def _run_comparison(
    device: Device,
    module: nn.Module,
    blocks: Any,
    batches: Sequence[Mapping[str, torch.Tensor]],
    *,
    use_gpu_kernels: bool,
) -> str:
    kernel_options = _kernel_options(device, use_gpu_kernels=use_gpu_kernels)
    try:
        compiled = CompiledProgram(
            device, Trainable(blocks, module, weighted_loss), kernel_options, adds_on_device=True
        )
        with contextlib.closing(compiled):
            microbatches = [
                Batch({name: tensor.numpy() for name, tensor in batch.items()}, 1.0)
                for batch in batches
            ]
            capture = compiled.capture(microbatches[0])
            compiled.use_capture(microbatches[0], capture)
            for seed, (batch, microbatch) in enumerate(zip(batches, microbatches, strict=True)):
                actual = compiled.gradients_of(microbatch, seed)
                _check_batch(module, batch, actual, capture, seed)
    except SamestepError as error:
        message = str(error)
        if "\n" in message or "wgpu" in message.lower():
            raise Mismatch(f"expected a one-line refusal by samestep, got: {message}") from error
        return message
    except Mismatch:
        raise
    except Exception as error:
        raise Mismatch(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    return "agreed"


def _check_batch(
    module: nn.Module,
    batch: Mapping[str, torch.Tensor],
    actual: Mapping[str, Any],
    capture: Any,
    seed: int,
) -> None:
    """Compare the loss, under the name "", and all gradients."""
    names = [name for name in actual if name]
    values = named_tensors(module)
    seeds = torch.from_numpy(seed_words(seed, capture.seeds).view(np.int32).copy())
    # Torch's results with original and perturbed tensors: their differences bound its rounding.
    tensors = [values, *(perturb(values, number) for number in (1, 2))]
    inputs = [{**batch, "x": x} for x in _perturbed_inputs(batch["x"])]
    expected, *perturbed_results = (
        HostStep(module, weighted_loss, step_tensors, names, capture.calls).run(arrays, seeds)
        for step_tensors, arrays in zip(tensors, inputs, strict=True)
    )
    scale = max(_largest_magnitude(value) for value in expected[1:])
    float64_results: list[torch.Tensor] | None = None
    for index, name in enumerate(["", *names]):
        reference = expected[index].flatten().double().numpy()
        perturbed = [results[index].flatten().double().numpy() for results in perturbed_results]
        floor = 1e-3 * scale if index else 0.0
        comparison = (name or "the loss", actual[name].astype(np.float64), reference)
        try:
            _check_values(*comparison, perturbed, floor)
        except Mismatch:
            # Float64 shows torch's own rounding error, for programs that torch can compute in it.
            with contextlib.suppress(RuntimeError):
                float64_results = float64_results or _run_in_float64(
                    module, batch, names, capture, seeds
                )
            if float64_results is None:
                raise
            perturbed.append(float64_results[index].flatten().numpy())
            _check_values(*comparison, perturbed, floor)
        if not np.isfinite(reference).all() and not index:
            return  # a non-finite loss halts the run, whatever the gradients are


def _run_in_float64(
    module: nn.Module,
    batch: Mapping[str, torch.Tensor],
    names: Sequence[str],
    capture: Any,
    seeds: torch.Tensor,
) -> list[torch.Tensor]:
    values = named_tensors(module)
    float64_by_id = {id(value): _to_float64(value) for value in values.values()}
    float64_values = {name: float64_by_id[id(value)] for name, value in values.items()}
    step = HostStep(module, weighted_loss, float64_values, names, capture.calls)
    results = step.run({name: _to_float64(value) for name, value in batch.items()}, seeds)
    return [value.double() for value in results]


def _to_float64(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def _perturbed_inputs(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the input and two copies that differ in the last bits."""
    yield x
    for seed in range(2):
        yield x * (1 + 3e-7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


def _largest_magnitude(value: torch.Tensor) -> float:
    finite = value[torch.isfinite(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _check_values(
    name: str, actual: Any, reference: Any, perturbed: Sequence[Any], floor: float
) -> None:
    """Compare with torch's values; `floor` is the least magnitude that errors are relative to."""
    with np.errstate(all="ignore"):
        if any((np.isfinite(values) != np.isfinite(reference)).any() for values in perturbed):
            return  # rounding decides whether torch's own result is finite
        rounding_error = max(
            np.nanmax(np.abs(values - reference), initial=0.0) for values in perturbed
        )
        finite = np.isfinite(reference)
        magnitude = max(np.max(np.abs(reference[finite]), initial=0.0), floor)
        allowed = RELATIVE_TOLERANCE * magnitude + _ROUNDING_FACTOR * rounding_error + 1e-6
        # Infinities and NaN count as equal: both halt the run.
        is_non_finite_equal = not np.isfinite(actual[~finite]).any()
        distance = np.abs(actual[finite] - reference[finite])
    if not is_non_finite_equal or not (distance <= allowed).all():
        raise Mismatch(
            f"{name}: torch gives {_format_first(reference)}, the device {_format_first(actual)} "
            f"(allowed difference {allowed:.2g})"
        )


def _format_first(values: Any) -> str:
    return np.array2string(values[:8], precision=6, max_line_width=200).replace("\n", "")


def repeat_comparison(program: type[nn.Module], **options: Any) -> None:
    """Compare a program of an earlier failure again, and print the result."""
    from backends.wgpu.device.adapters import adapters

    available = adapters()
    assert not isinstance(available, str), available
    device = Device(available[0])
    try:
        sys.stdout.write(f"{compare_class(device, program, **options)}\n")
    finally:
        device.close()
