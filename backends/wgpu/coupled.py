"""A loss over all samples of a step (`backends.base.coupled_loss`) on a compiled device.

Two programs. One is the training step of a microbatch, whose plan brings back the embeddings
before anything of its backward begins. The first pass of a step runs this plan up to there, so
both passes have the same kernels and the same bits, also where a driver contracts or reorders.

The other is the loss itself, over the rows of all samples, with its gradients by them and by the
parameters that it reads. It is lowered like a model's step and computed by every device for
itself. The alternative is to compute it on the host, which every device has: native arithmetic
would then depend on two machines, and canonical arithmetic on C that the device's own kernels
already equal bit for bit; and the host would compute N x N scores while a card waits. What it
costs is that a batch_loss must be traceable, as a model must be.

Every microbatch has the same arrays, so that one plan does for all: where the gradient by the
loss's own parameters is carried by the first microbatch alone, the others carry zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from backends.base.coupled_loss import changeable, check_losses
from backends.base.interface import (
    EMBEDDING_GRADIENT,
    PARAMETER_GRADIENT,
    Array,
    Batch,
    CoupledLoss,
    StepLoss,
)
from backends.wgpu.capture.attention import Fuses
from backends.wgpu.capture.capture import Capture, capture_coupled
from backends.wgpu.capture.host_run import HostStep
from backends.wgpu.device.packing import from_words, seed_words
from backends.wgpu.graph.table_parts import Tables
from backends.wgpu.parity import ROUNDINGS, TOLERANCE, difference, perturbed
from protocol.base.errors import SamestepError
from protocol.exact.embedding_rows import Rows, join_fields, split_fields

_PATTERN: Final = 7
_NOISE: Final = 0.125
"""Of embeddings that a comparison makes up of a microbatch's."""
_TORCH: Final = {"float32": torch.float32, "int64": torch.int64}


@dataclass(slots=True)
class CoupledCapture:
    """What a program captures of its coupled loss.

    Attributes:
        coupled: The loss.
        module: The model, on the host.
        trained: Names of the trainable tensors, in the order of the step's outputs.
        fuses: As for `capture_step`.
        observed: The fields that the loss being traced has computed.
    """

    coupled: CoupledLoss
    module: torch.nn.Module
    trained: Sequence[str]
    fuses: Fuses
    observed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _captures: dict[int, Capture] = field(default_factory=dict)
    _read: tuple[str, ...] | None = None

    def observe(self, fields: Mapping[str, torch.Tensor]) -> None:
        """See `backends.base.coupled_loss.with_backward_loss`."""
        self.observed = fields

    def take_observed(self) -> list[torch.Tensor]:
        """Return the fields of the loss that was just traced, in the order of the layout."""
        fields, self.observed = self.observed, {}
        return [fields[each.name] for each in self.coupled.layout.fields] if fields else []

    @property
    def embeddings(self) -> list[str]:
        """Names of the fields that have gradients."""
        return [each.name for each in self.coupled.layout.fields if each.dtype == "float32"]

    def take(self, samples: int) -> Capture:
        """Return the capture over so many samples for a plan, which changes it."""
        captured = self.capture(samples)
        del self._captures[samples]
        return captured

    def capture(self, samples: int) -> Capture:
        """Capture the loss over so many samples, unless that was done.

        Raises:
            SamestepError: It cannot be traced, or is not one loss for each sample.
        """
        if samples not in self._captures:
            self._captures[samples] = self._captured(samples)
        return self._captures[samples]

    def _captured(self, samples: int) -> Capture:
        arrays = {
            each.name: torch.zeros((samples, *each.shape), dtype=_TORCH[each.dtype])
            for each in self.coupled.layout.fields
        }
        losses = self._checked(samples)
        return capture_coupled(self.module, losses, self.trained, arrays, self.fuses)

    def _checked(self, samples: int) -> Any:
        def losses(module: Any, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
            found = self.coupled.loss(module, fields)
            check_losses(found, samples)
            assert isinstance(found, torch.Tensor)
            return found

        return losses

    def parameters(self, samples: int) -> tuple[str, ...]:
        """Return names of the trainable tensors that the loss itself reads.

        Args:
            samples: Of a step, where the loss does not say.
        """
        if self._read is None:
            captured = self.capture(self.coupled.samples or samples)
            gradients = captured.outputs[1 : 1 + len(self.trained)]
            pairs = zip(self.trained, gradients, strict=True)
            self._read = tuple(name for name, like in pairs if like is not None)
        return self._read

    def completed(self, batch: Batch) -> Batch:
        """Return a microbatch with all arrays of a training step.

        Without gradients of embeddings, as where a device is probed, a pattern stands in for them.
        """
        samples = len(next(iter(batch.arrays.values())))
        parameters = dict(self.module.named_parameters())
        shapes = {
            EMBEDDING_GRADIENT + each.name: (samples, *each.shape)
            for each in self.coupled.layout.fields
            if each.dtype == "float32"
        }
        carries = not batch.arrays.keys().isdisjoint(shapes)
        for name in self.parameters(samples):
            shapes[PARAMETER_GRADIENT + name] = tuple(parameters[name].shape)
        fill = np.zeros if carries else _pattern
        missing = {
            name: fill(shape, np.float32)
            for name, shape in shapes.items()
            if name not in batch.arrays
        }
        return Batch({**batch.arrays, **missing}, batch.weight) if missing else batch

    def rows(self, capture: Capture, arrays: Sequence[Array], microbatches: int) -> Iterator[Rows]:
        """Yield the rows of each microbatch of what a plan's first segment brings."""
        layout = self.coupled.layout
        likes = capture.outputs[-len(layout.fields) :]
        for number in range(microbatches):
            fields = {
                each.name: from_words(
                    arrays[place * microbatches + number], like.shape, like.dtype
                ).numpy()
                for place, (each, like) in enumerate(zip(layout.fields, likes, strict=True))
                if like is not None
            }
            yield join_fields(layout, fields)

    def step_loss(self, arrays: Sequence[Array | None], samples: int, tables: Tables) -> StepLoss:
        """Return the losses and gradients of what a plan of the loss gives, output by output."""
        losses, *rest = arrays
        assert losses is not None
        left = iter(rest)
        shapes = {name: value.shape for name, value in self.module.named_parameters()}
        of_parameters = {}
        for name in self.trained:
            parts = [next(left) for _ in tables.get(name, "1")]
            found = [part for part in parts if part is not None]
            if found:
                of_parameters[name] = np.concatenate(found).reshape(shapes[name])
        of_embeddings = {}
        for each in self.coupled.layout.fields:
            if each.dtype == "float32":
                gradient, shape = next(left), (samples, *each.shape)
                of_embeddings[each.name] = (
                    np.zeros(shape, np.float32) if gradient is None else gradient.reshape(shape)
                )
        return StepLoss(losses, of_embeddings, of_parameters)


def _pattern(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return small numbers of both signs, which float32 holds exactly."""
    flat = np.arange(int(np.prod(shape))) % _PATTERN - _PATTERN // 2 + 0.5
    return flat.astype(dtype).reshape(shape)


class ComputesLoss(Protocol):
    """What is asked of a program that is compared with torch."""

    def step_loss(self, rows: Rows, seed: int) -> StepLoss:
        """See `backends.base.interface.ComputesCoupledLoss`."""


class CoupledParity:
    """Whether the device computes a step's loss as torch does, asked before a run starts.

    Over as many rows as a step has: those of one microbatch, again and again, each time moved a
    little. Made before the program takes the module's weights.

    Args:
        coupled: The loss.
        values: Of each of the module's tensors.
    """

    def __init__(self, coupled: CoupledCapture, values: Mapping[str, torch.Tensor]) -> None:
        self._coupled = coupled
        self._values = values

    def check(self, program: ComputesLoss, embedded: Rows, seed: int) -> None:
        """Compare.

        Args:
            program: The compiled one.
            embedded: The rows of a microbatch.
            seed: Of the loss's draws.

        Raises:
            SamestepError: The device computes otherwise than torch.
        """
        samples = self._coupled.coupled.samples or len(embedded)
        fields = self._made_up(embedded, samples)
        rows = join_fields(self._coupled.coupled.layout, fields)
        capture = self._coupled.capture(samples)
        expected = self._of_torch(capture, fields, seed)
        name, apart = difference(expected, _named(program.step_loss(rows, seed)))
        if apart <= TOLERANCE:
            return
        again, *moved = (
            difference(expected, self._of_torch(capture, fields, seed, rounding))[1]
            for rounding in range(3)
        )
        if again == 0.0 and apart <= ROUNDINGS * max(moved):
            return
        what = name or "the losses"
        raise SamestepError(
            f"the device computes {what} of batch_loss otherwise than torch, by {apart:.1e} of its "
            f"norm where {TOLERANCE:g} is allowed; use a cpu or cuda worker for this loss"
        )

    def _made_up(self, embedded: Rows, samples: int) -> dict[str, NDArray[Any]]:
        layout, draws = self._coupled.coupled.layout, np.random.default_rng(samples)
        numbers = np.arange(samples) % len(embedded)
        fields = split_fields(layout, embedded[numbers])
        for name in self._coupled.embeddings:
            noise = 1 + _NOISE * draws.standard_normal(fields[name].shape)
            fields[name] = (fields[name] * noise).astype(np.float32)
        return fields

    def _of_torch(
        self, capture: Capture, fields: Mapping[str, NDArray[Any]], seed: int, rounding: int = 0
    ) -> dict[str, Array]:
        """The same on the host, with the program's draws; with `rounding` of rounded inputs."""
        coupled = self._coupled
        arrays = {name: torch.from_numpy(np.array(values)) for name, values in fields.items()}
        if rounding:
            moved = perturbed({n: arrays[n] for n in coupled.embeddings}, rounding)
            arrays |= moved
        gradients: dict[str, torch.Tensor] = {}
        losses: list[torch.Tensor] = []

        def total(module: Any, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
            own = {n: x.requires_grad_(n in coupled.embeddings) for n, x in given.items()}
            found = coupled.coupled.loss(module, changeable(own))
            wanted = [own[name] for name in coupled.embeddings]
            summed: torch.Tensor = found.float().sum()
            by_each: list[Any] = [  # None where the loss does not read one
                *torch.autograd.grad(summed, wanted, retain_graph=True, allow_unused=True)
            ]
            for name, value, gradient in zip(coupled.embeddings, wanted, by_each, strict=True):
                gradients[name] = torch.zeros_like(value) if gradient is None else gradient
            losses.append(found.detach().float())
            return summed

        names = coupled.parameters(len(next(iter(arrays.values()))))
        step = HostStep(coupled.module, total, self._values, names, capture.calls)
        words = torch.from_numpy(seed_words(seed, capture.seeds).view(np.int32).copy())
        _, *of_parameters = step.run(arrays, words)
        of_names = dict(zip(names, (each.numpy() for each in of_parameters), strict=True))
        of_embeddings = {name: gradient.numpy() for name, gradient in gradients.items()}
        return _named(StepLoss(losses[0].numpy(), of_embeddings, of_names))


def _named(found: StepLoss) -> dict[str, Array]:
    """Return losses and gradients, flat, by words for them; the losses as ""."""
    by_name = {"": found.losses}
    by_name |= {f"the gradient by {name!r}": x for name, x in found.embeddings.items()}
    by_name |= {f"the gradient by {name!r}": x for name, x in found.parameters.items()}
    return {name: value.reshape(-1) for name, value in by_name.items()}
