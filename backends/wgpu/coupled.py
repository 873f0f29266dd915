"""A loss over all samples of a step (`backends.losses.coupled_loss`) on a compiled device.

There are two plans. The first is the training step of a microbatch, which reads back the embeddings
before backward begins. The first pass of a step runs this plan up to that point, so both passes
have the same kernels and the same bits, even if a driver contracts or reorders. The second plan is
the loss over the rows of all samples, with its gradients with respect to the rows and to the
parameters that it reads. It is lowered like a model's step, and every device computes it. On the
host, the result of native arithmetic would also depend on the host's processor, and a card would
wait for N x N scores. Therefore a batch_loss must be traceable, like a model.

Every microbatch has the same arrays, so that one plan serves all: the first microbatch carries the
gradients of the loss's own parameters, and the others carry zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from backends.base.interface import (
    EMBEDDING_GRADIENT,
    PARAMETER_GRADIENT,
    Array,
    Batch,
    CoupledLoss,
    StepLoss,
)
from backends.losses.coupled_loss import check_losses, copy_for_in_place_changes
from backends.wgpu.capture.attention import AttentionPolicy
from backends.wgpu.capture.capture import Capture, capture_coupled
from backends.wgpu.capture.host_run import HostStep
from backends.wgpu.device.packing import from_words, seed_words
from backends.wgpu.graph.table_parts import Tables
from backends.wgpu.parity import ROUNDINGS, TOLERANCE, difference, perturb
from protocol.base.errors import SamestepError
from protocol.exact.embedding_rows import Rows, join_fields, split_fields

_PATTERN_LENGTH: Final = 7
_NOISE: Final = 0.125
"""Relative noise of the embeddings that the comparison derives from one microbatch."""
_TORCH_DTYPES: Final = {"float32": torch.float32, "int64": torch.int64}


@dataclass(slots=True)
class CoupledCapture:
    """Captures of a program's coupled loss.

    Attributes:
        coupled: The loss.
        module: The model, on the host.
        trained_names: Names of the trainable tensors, in the order of the step's outputs.
        fuses: See `capture_step`.
        observed_fields: The fields that the loss has computed in the current trace.
    """

    coupled: CoupledLoss
    module: torch.nn.Module
    trained_names: Sequence[str]
    fuses: AttentionPolicy
    observed_fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _captures: dict[int, Capture] = field(default_factory=dict)
    _read_parameters: tuple[str, ...] | None = None

    def observe(self, fields: Mapping[str, torch.Tensor]) -> None:
        """See `backends.losses.coupled_loss.with_backward_loss`."""
        self.observed_fields = fields

    def take_observed_fields(self) -> list[torch.Tensor]:
        """Return the fields of the loss that was just traced, in the order of the layout."""
        fields, self.observed_fields = self.observed_fields, {}
        return (
            [fields[field_spec.name] for field_spec in self.coupled.layout.fields] if fields else []
        )

    @property
    def embedding_names(self) -> list[str]:
        """Names of the fields that have gradients."""
        return [
            field_spec.name
            for field_spec in self.coupled.layout.fields
            if field_spec.dtype == "float32"
        ]

    def take_capture(self, samples: int) -> Capture:
        """Return the capture over `samples` samples, and remove it from this object, because
        planning changes the capture."""
        capture = self.capture(samples)
        del self._captures[samples]
        return capture

    def capture(self, samples: int) -> Capture:
        """Return the capture of the loss over `samples` samples; capture it if necessary.

        Raises:
            SamestepError: The loss cannot be traced, or is not one loss for each sample.
        """
        if samples not in self._captures:
            self._captures[samples] = self._capture_losses(samples)
        return self._captures[samples]

    def _capture_losses(self, samples: int) -> Capture:
        arrays = {
            field_spec.name: torch.zeros(
                (samples, *field_spec.shape), dtype=_TORCH_DTYPES[field_spec.dtype]
            )
            for field_spec in self.coupled.layout.fields
        }
        losses = self._make_checked_loss(samples)
        return capture_coupled(self.module, losses, self.trained_names, arrays, self.fuses)

    def _make_checked_loss(self, samples: int) -> Any:
        def losses(module: Any, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
            sample_losses = self.coupled.loss(module, fields)
            check_losses(sample_losses, samples)
            assert isinstance(sample_losses, torch.Tensor)
            return sample_losses

        return losses

    def loss_parameters(self, samples: int) -> tuple[str, ...]:
        """Return the names of the trainable tensors that the loss itself reads.

        Args:
            samples: Number of samples of a step, used if the loss does not declare it.
        """
        if self._read_parameters is None:
            capture = self.capture(self.coupled.samples or samples)
            gradients = capture.outputs[1 : 1 + len(self.trained_names)]
            pairs = zip(self.trained_names, gradients, strict=True)
            self._read_parameters = tuple(name for name, gradient in pairs if gradient is not None)
        return self._read_parameters

    def complete_batch(self, batch: Batch) -> Batch:
        """Return a microbatch with all arrays of a training step.

        If the batch has no gradients of embeddings, as in a probe of the device, a pattern replaces
        them.
        """
        samples = len(next(iter(batch.arrays.values())))
        parameters = dict(self.module.named_parameters())
        shapes = {
            EMBEDDING_GRADIENT + field_spec.name: (samples, *field_spec.shape)
            for field_spec in self.coupled.layout.fields
            if field_spec.dtype == "float32"
        }
        has_gradients = not batch.arrays.keys().isdisjoint(shapes)
        for name in self.loss_parameters(samples):
            shapes[PARAMETER_GRADIENT + name] = tuple(parameters[name].shape)
        fill = np.zeros if has_gradients else _pattern
        missing_arrays = {
            name: fill(shape, np.float32)
            for name, shape in shapes.items()
            if name not in batch.arrays
        }
        return Batch({**batch.arrays, **missing_arrays}, batch.weight) if missing_arrays else batch

    def read_rows(
        self, capture: Capture, arrays: Sequence[Array], microbatches: int
    ) -> Iterator[Rows]:
        """Yield the rows of each microbatch from the outputs of a plan's first segment."""
        layout = self.coupled.layout
        specs = capture.outputs[-len(layout.fields) :]
        for number in range(microbatches):
            fields = {
                field_spec.name: from_words(
                    arrays[position * microbatches + number], spec.shape, spec.dtype
                ).numpy()
                for position, (field_spec, spec) in enumerate(
                    zip(layout.fields, specs, strict=True)
                )
                if spec is not None
            }
            yield join_fields(layout, fields)

    def build_step_loss(
        self, arrays: Sequence[Array | None], samples: int, tables: Tables
    ) -> StepLoss:
        """Return losses and gradients from the outputs of the loss's plan, in order."""
        losses, *gradient_arrays = arrays
        assert losses is not None
        remaining = iter(gradient_arrays)
        shapes = {name: value.shape for name, value in self.module.named_parameters()}
        parameter_gradients = {}
        for name in self.trained_names:
            parts = [next(remaining) for _ in tables.get(name, "1")]
            present_parts = [part for part in parts if part is not None]
            if present_parts:
                parameter_gradients[name] = np.concatenate(present_parts).reshape(shapes[name])
        embedding_gradients = {}
        for field_spec in self.coupled.layout.fields:
            if field_spec.dtype == "float32":
                gradient, shape = next(remaining), (samples, *field_spec.shape)
                embedding_gradients[field_spec.name] = (
                    np.zeros(shape, np.float32) if gradient is None else gradient.reshape(shape)
                )
        return StepLoss(losses, embedding_gradients, parameter_gradients)


def _pattern(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return small numbers of both signs that are exact in float32."""
    flat = np.arange(int(np.prod(shape))) % _PATTERN_LENGTH - _PATTERN_LENGTH // 2 + 0.5
    return flat.astype(dtype).reshape(shape)


class StepLossProgram(Protocol):
    """The method of a program that is compared with torch."""

    def step_loss(self, rows: Rows, seed: int) -> StepLoss:
        """See `backends.base.interface.CoupledLossProgram`."""


class CoupledParity:
    """Checks before a run that the device computes a step's loss as torch does.

    It compares as many rows as a step has: repetitions of one microbatch's rows with noise. It must
    be constructed before the program moves the module's weights off the host.

    Args:
        coupled: The loss.
        values: Values of the module's tensors.
    """

    def __init__(self, coupled: CoupledCapture, values: Mapping[str, torch.Tensor]) -> None:
        self._coupled = coupled
        self._values = values

    def check(self, program: StepLossProgram, embedded: Rows, seed: int) -> None:
        """Compare with torch.

        Args:
            program: The compiled program.
            embedded: The rows of a microbatch.
            seed: Seed of the loss's random draws.

        Raises:
            SamestepError: The device's results differ from torch's.
        """
        samples = self._coupled.coupled.samples or len(embedded)
        fields = self._add_noise(embedded, samples)
        rows = join_fields(self._coupled.coupled.layout, fields)
        capture = self._coupled.capture(samples)
        expected = self._torch_gradients(capture, fields, seed)
        name, distance = difference(expected, _gradients_by_quantity(program.step_loss(rows, seed)))
        if distance <= TOLERANCE:
            return
        repeated_distance, *rounding_distances = (
            difference(expected, self._torch_gradients(capture, fields, seed, rounding))[1]
            for rounding in range(3)
        )
        if repeated_distance == 0.0 and distance <= ROUNDINGS * max(rounding_distances):
            return
        quantity = name or "the losses"
        raise SamestepError(
            f"expected {quantity} of batch_loss within {TOLERANCE:g} of torch's, got a difference "
            f"of {distance:.1e} on this device; use a cpu or cuda worker for this loss"
        )

    def _add_noise(self, embedded: Rows, samples: int) -> dict[str, NDArray[Any]]:
        layout, rng = self._coupled.coupled.layout, np.random.default_rng(samples)
        numbers = np.arange(samples) % len(embedded)
        fields = split_fields(layout, embedded[numbers])
        for name in self._coupled.embedding_names:
            noise = 1 + _NOISE * rng.standard_normal(fields[name].shape)
            fields[name] = (fields[name] * noise).astype(np.float32)
        return fields

    def _torch_gradients(
        self, capture: Capture, fields: Mapping[str, NDArray[Any]], seed: int, rounding: int = 0
    ) -> dict[str, Array]:
        """Compute the loss on the host, with the program's draws; `rounding` perturbs the inputs'
        last bits.
        """
        coupled = self._coupled
        arrays = {name: torch.from_numpy(np.array(values)) for name, values in fields.items()}
        if rounding:
            rounded_inputs = perturb(
                {field_name: arrays[field_name] for field_name in coupled.embedding_names}, rounding
            )
            arrays |= rounded_inputs
        gradients: dict[str, torch.Tensor] = {}
        losses: list[torch.Tensor] = []

        def total(module: Any, batch_fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
            inputs = {
                field_name: x.requires_grad_(field_name in coupled.embedding_names)
                for field_name, x in batch_fields.items()
            }
            sample_losses = coupled.coupled.loss(module, copy_for_in_place_changes(inputs))
            embeddings = [inputs[name] for name in coupled.embedding_names]
            loss_sum: torch.Tensor = sample_losses.float().sum()
            # None if the loss does not read an embedding
            embedding_gradients_or_none: list[Any] = [
                *torch.autograd.grad(loss_sum, embeddings, retain_graph=True, allow_unused=True)
            ]
            for name, value, gradient in zip(
                coupled.embedding_names, embeddings, embedding_gradients_or_none, strict=True
            ):
                gradients[name] = torch.zeros_like(value) if gradient is None else gradient
            losses.append(sample_losses.detach().float())
            return loss_sum

        names = coupled.loss_parameters(len(next(iter(arrays.values()))))
        step = HostStep(coupled.module, total, self._values, names, capture.calls)
        seed_tensor = torch.from_numpy(seed_words(seed, capture.seeds).view(np.int32).copy())
        _, *parameter_tensors = step.run(arrays, seed_tensor)
        parameter_gradients = dict(
            zip(
                names,
                (parameter_tensor.numpy() for parameter_tensor in parameter_tensors),
                strict=True,
            )
        )
        embedding_gradients = {name: gradient.numpy() for name, gradient in gradients.items()}
        return _gradients_by_quantity(
            StepLoss(losses[0].numpy(), embedding_gradients, parameter_gradients)
        )


def _gradients_by_quantity(step_loss: StepLoss) -> dict[str, Array]:
    """Return flat losses (key "") and gradients by the names that errors show."""
    by_quantity = {"": step_loss.losses}
    by_quantity |= {
        f"the gradient by {name!r}": gradient
        for name, gradient in step_loss.embedding_gradients.items()
    }
    by_quantity |= {
        f"the gradient by {name!r}": gradient
        for name, gradient in step_loss.parameter_gradients.items()
    }
    return {name: value.reshape(-1) for name, value in by_quantity.items()}
