"""Compare a random module on the device with torch on the CPU: two forward and backward passes."""

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
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.parity import perturb
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import SamestepError
from tests.backends.wgpu.products import small_tiles
from tests.backends.wgpu.random_programs import MOST_ELEMENTS, Text, data_of, make
from worker.models.blocks import cut_into_blocks

RELATIVE_TOLERANCE: Final = 1e-4
_ROUNDINGS: Final = 50
"""How many times torch's rounding error the device's error may be."""


class Unsupported(Exception):
    """Torch itself rejects the program, or the program has nothing to train."""


class Mismatch(AssertionError):
    """The device gives different numbers, or crashes."""


class Model(nn.Module):
    """The program once, or repeated as layers of a model."""

    def __init__(self, program: type[nn.Module], layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        if layers:
            self.layers = nn.ModuleList(program(number) for number in range(layers))
        else:
            self.only = program()

    def forward(self, x: torch.Tensor, n: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        if hasattr(self, "only"):
            outputs: list[torch.Tensor] = self.only(x, n, b)
            return outputs
        for layer in self.layers:
            results = layer(x, n, b)
            x = x + 0.1 * sum(each.mean() for each in results)
        return [x, *results]


def loss_of(module: Any, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Weigh each element of a result differently."""
    total: Any = 0.0
    for result in module(arrays["x"], arrays["n"], arrays["b"]):
        weights = arrays["weights"][: result.numel()].reshape(result.shape)
        total = total + (result * weights).sum()
    return torch.as_tensor(total)


def compare(device: Device, text: Text, *, as_on_a_card: bool = False) -> str:
    """Return "agreed" or the message of the refusal.

    Args:
        device: The device that runs the program.
        text: The program.
        as_on_a_card: Use the kernels of a card, with small tiles, instead of the device's.

    Raises:
        Unsupported: Torch rejects the program, or `compare` excludes it.
        Mismatch: Numbers differ, or the device raises anything but a refusal.
    """
    if text.special and re.search(r"(std|var)_mean\(", str(text)):
        raise Unsupported("torch's running mean turns an infinite mean into NaN")
    program = make(text.module())
    return compare_class(
        device, program, shape=text.shape, seed=text.seed, layers=text.layers,
        special=text.special, as_on_a_card=as_on_a_card,
    )  # fmt: skip


def compare_class(
    device: Device,
    program: type[nn.Module],
    *,
    shape: tuple[int, ...],
    seed: int,
    layers: int = 0,
    special: str = "",
    as_on_a_card: bool = False,
) -> str:
    """Compare like `compare`, but take the program as a class."""
    module = Model(program, layers, seed)
    weights = torch.arange(MOST_ELEMENTS, dtype=torch.float32).mul(0.7).cos() + 0.3
    batches = [data_of(shape, seed + more, special) | {"weights": weights} for more in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            blocks = cut_into_blocks(module)
            for batch in batches:
                loss_of(module, batch).backward()
        except Exception as error:
            raise Unsupported(str(error)) from error
        module.zero_grad()
        return _run_comparison(device, module, blocks, batches, as_on_a_card=as_on_a_card)


def _templates(device: Device, *, as_on_a_card: bool) -> Templates:
    """Return the device's templates, or a card's with small tiles, whose shaders compile
    quickly."""
    if as_on_a_card:
        return Templates(cooperative=True, matmul=small_tiles, bindings=16)
    return Templates(not device.adapter.software, MatmulTuner(device).shader)


def _run_comparison(
    device: Device,
    module: nn.Module,
    blocks: Any,
    batches: Sequence[Mapping[str, torch.Tensor]],
    *,
    as_on_a_card: bool,
) -> str:
    template = _templates(device, as_on_a_card=as_on_a_card)
    try:
        compiled = CompiledProgram(
            device, Trainable(blocks, module, loss_of), template, adds_on_device=True
        )
        with contextlib.closing(compiled):
            batch_list = [
                Batch({n: value.numpy() for n, value in one.items()}, 1.0) for one in batches
            ]
            capture = compiled.capture(batch_list[0])
            compiled.use_capture(batch_list[0], capture)
            for number, batch in enumerate(batches):
                actual = compiled.gradients_of(batch_list[number], number)
                _check(module, batch, actual, capture, number)
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


def _check(
    module: nn.Module,
    batch: Mapping[str, torch.Tensor],
    actual: Mapping[str, Any],
    capture: Any,
    seed: int,
) -> None:
    names = [name for name in actual if name]
    values = named_tensors(module)
    seeds = torch.from_numpy(seed_words(seed, capture.seeds).view(np.int32).copy())
    perturbed_values = [values, *(perturb(values, number) for number in (1, 2))]
    steps = [HostStep(module, loss_of, each, names, capture.calls) for each in perturbed_values]
    inputs = [{**batch, "x": x} for x in _perturbed_inputs(batch["x"])]
    expected, *others = (
        step.run(comparison, seeds) for step, comparison in zip(steps, inputs, strict=True)
    )
    scale = max(_size(value) for value in expected[1:])
    exact: list[torch.Tensor] | None = None
    for index, name in enumerate(["", *names]):
        reference = expected[index].flatten().double().numpy()
        neighbors = [other[index].flatten().double().numpy() for other in others]
        floor = 1e-3 * scale if index else 0.0
        comparison = (name or "the loss", actual[name].astype(np.float64), reference)
        try:
            _check_one(*comparison, neighbors, floor)
        except Mismatch:
            # Float64 shows torch's own rounding error, for programs that torch can compute in it.
            with contextlib.suppress(RuntimeError):
                exact = exact or _in_float64(module, batch, names, capture, seeds)
            if exact is None:
                raise
            _check_one(*comparison, [*neighbors, exact[index].flatten().numpy()], floor)
        if not np.isfinite(reference).all() and not index:
            return  # a non-finite loss ends the step: its gradients do not matter


def _in_float64(
    module: nn.Module,
    batch: Mapping[str, torch.Tensor],
    names: Sequence[str],
    capture: Any,
    seeds: torch.Tensor,
) -> list[torch.Tensor]:
    values = named_tensors(module)
    float64_by_id = {id(value): _to_float64(value) for value in values.values()}
    doubles = {name: float64_by_id[id(value)] for name, value in values.items()}
    step = HostStep(module, loss_of, doubles, names, capture.calls)
    results = step.run({name: _to_float64(value) for name, value in batch.items()}, seeds)
    return [value.double() for value in results]


def _to_float64(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def _perturbed_inputs(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the input, and copies that differ in the last bits, to bound the effect of rounding."""
    yield x
    for seed in range(2):
        yield x * (1 + 3e-7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


def _size(value: torch.Tensor) -> float:
    finite = value[torch.isfinite(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _check_one(
    name: str, actual: Any, reference: Any, neighbors: Sequence[Any], floor: float
) -> None:
    with np.errstate(all="ignore"):
        if any((np.isfinite(one) != np.isfinite(reference)).any() for one in neighbors):
            return  # torch itself is at a boundary
        rounding_error = max(np.nanmax(np.abs(one - reference), initial=0.0) for one in neighbors)
        finite = np.isfinite(reference)
        size = max(np.max(np.abs(reference[finite]), initial=0.0), floor)
        allowed = RELATIVE_TOLERANCE * size + _ROUNDINGS * rounding_error + 1e-6
        same = not np.isfinite(actual[~finite]).any()  # infinite or NaN: both end the step
        distance = np.abs(actual[finite] - reference[finite])
    if not same or not (distance <= allowed).all():
        raise Mismatch(
            f"{name}: torch gives {_few(reference)}, the device {_few(actual)} "
            f"(allowed {allowed:.2g})"
        )


def _few(values: Any) -> str:
    return np.array2string(values[:8], precision=6, max_line_width=200).replace("\n", "")


def repeat(program: type[nn.Module], **options: Any) -> None:
    """Compare a reproduced program again, and print the result."""
    from backends.wgpu.device.adapters import adapters

    available = adapters()
    assert not isinstance(available, str), available
    device = Device(available[0])
    try:
        sys.stdout.write(f"{compare_class(device, program, **options)}\n")
    finally:
        device.close()
