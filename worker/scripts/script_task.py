"""Convert a `samestep.Task` to a worker's task (`worker.tasks.base.task.Task`)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.data import TensorDataset, default_collate

from backends.base import draws
from backends.base.device_errors import is_machine_specific
from backends.base.interface import Array, Batch, CoupledLoss, Sums, Trainable
from backends.base.step_buffers import StepBuffers, buffer_blocks, find_changed_tensors
from backends.checks.additivity import call_under_no_grad, seed_generators
from backends.checks.outside_table import TableLookups, find_failing_index
from backends.checks.trainable_checks import own_buffers, refuse_shared_memory
from backends.losses.coupled_loss import backward_loss
from protocol.base import limits
from protocol.base.errors import DataError, SamestepError, describe_raised
from protocol.exact.digest import digest_arrays
from protocol.spec.cross_check import CrossCheck
from protocol.spec.manifest import Block, Manifest, Metric
from protocol.spec.run_spec import RunSpec
from worker.models.blocks import cut_by_size
from worker.models.initial_values import InitialValues
from worker.scripts.checks import (
    check_draws,
    check_loss,
    check_metric,
    check_metrics,
    check_precision,
    check_reproducible,
    check_weight,
    has_parameter,
    missing_gradient_error,
    number_of,
)
from worker.scripts.coupling import check_embedded, coupled_loss
from worker.scripts.data_digest import DataDigest, data_digest
from worker.scripts.evaluation_sets import EvaluationSets
from worker.scripts.nested_batches import Arrays, NestedBatches
from worker.scripts.own_generators import ReadingGenerators
from worker.scripts.samplers import sampling_of
from worker.scripts.user_task import UserTask
from worker.tasks.base.evaluation_modes import parts_in_evaluation, put_in_evaluation
from worker.tasks.checks.additivity import NotASum, SumTrial, on_device, preserve_modes
from worker.tasks.checks.reachable_state import (
    find_changed_state,
    reachable_state,
    reachable_tensors,
    refuse_changes,
)
from worker.tasks.checks.script_constants import script_constants

_CHECKED_SAMPLES: Final = 64
"""Number of samples that are checked, spread evenly over the data set."""
_CPU: Final = torch.device("cpu")
_DRAW_CHECK_S: Final = 1.0
_FIELDS: Final = fields(UserTask)
_BATCH_SOURCES: Final = ("train", "held_out", "collate")
"""Fields of the user's task that are used to build a batch."""
_COMPUTING_FIELDS: Final = (
    "module", "loss", "weight", "metrics", "evaluate", "embed", "batch_loss",
)  # fmt: skip
"""Fields of the user's task that compute losses and metrics from a batch."""
_COUNTS: Final = "samestep.counted"
"""Name of an extra array of an evaluation batch: its weight and its number of samples."""


class ScriptTask:
    """A `worker.tasks.base.task.Task` whose batches may be random (`DrawsBatches`).

    Attributes:
        user: The task that the user's `build` returned.
        cross_check: What this script reads and computes now.
        sampled_digests: Digests of the data sets that are not read completely, and how much was
            read; by name in the manifest. Tensors are read completely.

    Args:
        user: The task that the user's `build` returned, checked.
        spec: The run spec.
        digests: Digests of the script and of modules that it imports from its folder.
        device: The device that tests the loss; the module is on the CPU before and after.
        earlier_cross_check: For an edited script, the manifest's `cross_check` of the run that it
            resumes; None: this task's.

    Raises:
        DataError: The task cannot be trained; the error says what to write instead.
        RuntimeError: The device has too little memory for the test, or fails.
    """

    def __init__(
        self,
        user: UserTask,
        spec: RunSpec,
        digests: Mapping[str, str],
        device: torch.device = _CPU,
        earlier_cross_check: CrossCheck | None = None,
    ) -> None:
        self.user = user
        self._device = device
        self._nested = NestedBatches()
        self._evaluation_layers = parts_in_evaluation(user.module)
        self._requires_grad = [(n, p, p.requires_grad) for n, p in user.module.named_parameters()]
        user_objects = self.user_objects()
        self._generators = ReadingGenerators({name: user_objects[name] for name in _BATCH_SOURCES})
        self._takes_seed = user.collate is not None and has_parameter(user.collate, "seed")
        self._seed = spec.seed
        self._part_samples = spec.batch.microbatch
        self._evaluation_sets = EvaluationSets(user.held_out, self._part_samples)
        self._evaluate_names = self._set_metric_names = tuple[str, ...]()
        self._is_microbatch_unit = user.unit == "microbatch"
        self._check_shared_memory()
        self._check_reads()
        self._coupled: CoupledLoss | None = None
        with on_device(user.module, device):
            if user.embed is not None:
                self._coupled = self._coupled_loss(self._step_sizes(spec))
            buffers = self._buffer_blocks() if self._is_microbatch_unit else ()
            self._check_training(StepBuffers(user.module, buffers))
            self._check_evaluation()
            self.cross_check = self._collect_cross_check()
            data = self._data_digests(spec.options.get("read"))
            if frozen := _FrozenTensors(user.module):
                data["frozen_weights"] = digest_arrays(frozen)
            self.manifest = Manifest(
                blocks=(*buffers, *cut_by_size(user.module, limits.SCRIPT_BLOCK_ELEMENTS)),
                train_samples=len(user.train),
                sampling=sampling_of(user.sampler, len(user.train)),
                evaluation_parts=self._evaluation_sets.assigned_parts(at_once=bool(user.evaluate)),
                metrics=self._metrics(),
                digests={**data, **digests},
                notes={"buffers_averaged": sum(len(b.tensors) for b in buffers)} if buffers else {},
                embeddings=None if self._coupled is None else self._coupled.layout,
                cross_check=earlier_cross_check or self.cross_check,
            )
            self.trainable = self._make_trainable(spec)
            self._initial_values = InitialValues(self._parameters())
            self._sum_trial = None if self._is_microbatch_unit else SumTrial(self, device)
            self._refuse_coupled_samples()

    def _make_trainable(self, spec: RunSpec) -> Trainable:
        user = self.user
        return Trainable(
            blocks=self.manifest.blocks,
            module=user.module,
            loss=self._loss,
            coupled=self._coupled,
            evaluate=self._evaluate,
            unit=user.unit,
            seed=spec.seed,
            threads=spec.threads,
            precision=check_precision(spec.options.get("precision", "float32")),
            keeps_module=True,
            evaluation_parts=frozenset(self._evaluation_layers),
        )

    def _refuse_coupled_samples(self) -> None:
        if self._sum_trial is None:
            return
        try:
            self._sum_trial.check()
        except NotASum as error:
            if self._coupled is None:
                raise
            raise DataError(
                "expected each row of embed's result to depend only on its own sample, got rows "
                "that depend on other samples: leave out means over the batch and layers across "
                "it, and compare samples in batch_loss"
            ) from error

    def _metrics(self) -> tuple[Metric, ...]:
        quotients = map(_quotient, self._evaluation_sets.metrics(("loss", *self.user.metrics)))
        return (*quotients, *map(_joint_metric, self._evaluate_names))

    def _data_digests(self, parts: Mapping[str, int] | None) -> dict[str, str]:
        """Compute the digests of the data sets, by name in the manifest.

        Args:
            parts: Microbatches to read of each data set; without an entry, as many as time allows.
                None: compute the digests of earlier releases, for runs that they started.
        """
        self.sampled_digests: dict[str, DataDigest] = {}
        digests = {}
        evaluation_sets = {
            evaluation_set.label(): evaluation_set.data
            for evaluation_set in self._evaluation_sets.sets
        }
        for name, data in {"data": self.user.train, **evaluation_sets}.items():
            if type(data) is TensorDataset or parts is None:
                digests[name] = _data_digest(self, data)
            else:
                self.sampled_digests[name] = data_digest(
                    data, self._collate, self._part_samples, parts.get(name)
                )
                digests[name] = self.sampled_digests[name].digest
        return digests

    def initial_parameters(self) -> list[Array]:
        """Return the module's initial parameters, one flat float32 array per block."""
        return self._initial_values.read()

    def batch(self, samples: Sequence[int]) -> Batch:
        """Build a microbatch, with the run's seed for random collators."""
        return self.drawn_batch(samples, self._seed)

    def drawn_batch(self, samples: Sequence[int], seed: int) -> Batch:
        """See `worker.tasks.base.task.DrawsBatches`."""
        batch = self._collate(self.user.train, samples, seed)
        return Batch(self._nested.flatten(batch), self._weight(batch, len(samples)))

    def evaluation_batch(self, part: int) -> Batch:
        """Build one part of the held-out samples: as many as a microbatch, in order.

        With `evaluate` there is a single part; `_evaluate` builds its batches.
        """
        if self.user.evaluate is not None:
            return Batch({_COUNTS: np.zeros(2)}, 0.0)
        return self._evaluation_part(part)

    def _evaluation_part(self, part: int) -> Batch:
        number, rows = self._evaluation_sets.index_of(part), self._evaluation_sets.rows(part)
        data = self._evaluation_sets.sets[number].data
        batch = self._collate(data, rows, draws.derive_key(self._seed, part))
        weight = self._weight(batch, len(rows))
        # The length encodes the number of the set, as a compiled program sees only shapes.
        counts = np.array([weight, len(rows), *([0] * number)])
        return Batch({**self._nested.flatten(batch), _COUNTS: counts}, weight)

    def user_objects(self) -> dict[str, object]:
        """See `worker.tasks.base.task.HasUserObjects`."""
        return {task_field.name: getattr(self.user, task_field.name) for task_field in _FIELDS}

    def trained_tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return the tensors that training or forward changes, by name, as float32."""
        tensors_by_name = self._tensors_by_name()
        tensors = (t for block in self.manifest.blocks for t in block.tensors)
        return {t.name: tensors_by_name[t.name].detach().float().cpu().numpy() for t in tensors}

    def _tensors_by_name(self) -> dict[str, torch.Tensor]:
        module = self.user.module
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def load(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Load these tensors into the module, on the CPU and in evaluation mode."""
        self.user.module.cpu().eval()
        tensors_by_name = self._tensors_by_name()
        with torch.no_grad():
            for name, values in tensors.items():
                tensors_by_name[name].copy_(torch.from_numpy(values))

    def _parameters(self) -> list[Array]:
        tensors_by_name = self.trained_tensors()
        return [
            np.concatenate([np.ravel(tensors_by_name[tensor.name]) for tensor in block.tensors])
            for block in self.manifest.blocks
        ]

    def _step_sizes(self, spec: RunSpec) -> list[int]:
        """Return the samples of a full step, and of an epoch's last step if the run reaches it."""
        data = self.user.train
        sampling = sampling_of(self.user.sampler, len(data))
        epoch_samples = len(data) if sampling is None else sampling.draws
        full_size, last_size = (
            min(spec.batch.samples, epoch_samples),
            epoch_samples % spec.batch.samples,
        )
        reaches_last = spec.steps_with(epoch_samples) >= -(-epoch_samples // spec.batch.samples)
        return (
            [full_size, last_size]
            if last_size and last_size < full_size and reaches_last
            else [full_size]
        )

    def _coupled_loss(self, sizes: Sequence[int]) -> CoupledLoss:
        """Build the user's loss over all samples of a step, and test it for these step sizes.

        The test runs in evaluation mode, in which forward does not change statistics.
        """
        batch = self._collate(self.user.train, self._samples_from(0), 1)
        arrays, module = self._on_device(self._nested.flatten(batch)), self.user.module
        errors = _user_errors("embed, or batch_loss,", {})
        with preserve_modes(module), seed_generators(0, self._device), errors:
            module.eval()
            return coupled_loss(self.user, self._embed, arrays, sizes)

    def _embed(self, module: Any, arrays: Mapping[str, Any]) -> Any:
        assert self.user.embed is not None
        return self._call_with_batch(self.user.embed, module, arrays)

    def _loss(self, module: Any, arrays: Mapping[str, Any]) -> Any:
        """Compute the user's loss, or the loss of embeddings (`backends.losses.coupled_loss`)."""
        if self._coupled is not None:
            return backward_loss(self._coupled, module, arrays)
        return self._call_with_batch(self.user.loss, module, arrays)

    def _call_with_batch(self, function: Any, module: Any, arrays: Mapping[str, Any]) -> Any:
        """Call a function of the user with a batch in training.

        Layers that stay in evaluation mode are set to it first, because backends put the whole
        module into training mode before each call.
        """
        put_in_evaluation(module, self._evaluation_layers)
        with self._nested.rebuild(arrays) as batch:
            result = function(module, batch)
        for name, parameter, was_trainable in self._requires_grad:
            if parameter.requires_grad is not was_trainable:
                raise DataError(
                    f"expected requires_grad to stay as build set it, got {name!r} "
                    f"{'frozen' if was_trainable else 'unfrozen'} during training: set "
                    "requires_grad only in build, and call fit again to train other parameters"
                )
        return result

    def _evaluate(self, module: Any, arrays: Mapping[str, Any]) -> Sums:
        if self.user.evaluate is None:
            return self._sums_of(module, arrays)
        if get_proxy_mode() is not None:
            raise SamestepError(
                "expected a task without evaluate on this device, which records and compiles the "
                "evaluation: use metrics instead, or evaluate on cpu or cuda"
            )
        device, totals = arrays[_COUNTS].device, dict[str, float]()
        for part in range(self._evaluation_sets.parts):
            for name, value in self._sums_of(module, self._evaluation_arrays(device, part)).items():
                totals[name] = totals.get(name, 0.0) + value
        return totals | self._joint_metrics(
            module, device, [evaluation_set.parts for evaluation_set in self._evaluation_sets.sets]
        )

    def _evaluation_arrays(self, device: torch.device, part: int) -> dict[str, torch.Tensor]:
        arrays = self._evaluation_part(part).arrays
        return {name: torch.tensor(values).to(device) for name, values in arrays.items()}

    def _joint_metrics(
        self, module: Any, device: torch.device, parts: Sequence[Iterable[int]]
    ) -> dict[str, float]:
        """Call the user's `evaluate` for these parts of each held-out set."""
        assert self.user.evaluate is not None

        def batches(number: int) -> Iterator[Any]:
            for part in parts[number]:
                arrays = self._evaluation_arrays(device, part)
                del arrays[_COUNTS]
                with self._nested.rebuild(arrays) as batch:
                    yield batch

        metrics: dict[str, float] = {}
        with _user_errors("evaluate", {}), torch.no_grad():
            for number, evaluation_set in enumerate(self._evaluation_sets.sets):
                returned_value = self.user.evaluate(module, batches(number))
                set_metrics = check_metrics(returned_value, self._set_metric_names)
                self._set_metric_names = tuple(sorted(set_metrics))
                metrics |= {
                    evaluation_set.metric(name): value for name, value in set_metrics.items()
                }
        return metrics

    def _sums_of(self, module: Any, arrays: Mapping[str, Any]) -> Sums:
        batch_arrays = dict(arrays)
        weight, samples, *zeros = batch_arrays.pop(_COUNTS).tolist()
        total = self._measure(
            "the loss of held-out samples", self._evaluation_loss, module, batch_arrays
        )
        if self._is_microbatch_unit and self._coupled is None:  # a mean
            total *= weight
        quotients: dict[str, tuple[float, float]] = {"loss": (total, weight)}
        for name, metric in self.user.metrics.items():
            value = self._measure(f"the metric {name!r}", metric, module, batch_arrays)
            numerator, denominator = check_metric(name, metric, value)
            quotients[name] = numerator, samples if denominator is None else denominator
        sums = {
            f"{name}{suffix}": 0.0
            for name in self._evaluation_sets.metrics((*quotients,))
            for suffix in ("", " of")
        }
        for name, (numerator, denominator) in quotients.items():
            full_name = self._evaluation_sets.sets[len(zeros)].metric(name)
            sums |= {full_name: numerator, f"{full_name} of": denominator}
        return sums

    def _evaluation_loss(self, module: Any, batch: Any) -> float:
        """Compute the loss of a held-out batch; a coupled loss treats it as a whole step."""
        if self.user.embed is None:
            assert self.user.loss is not None
            return number_of(self.user.loss(module, batch))
        assert self.user.batch_loss is not None
        fields = check_embedded(self.user.embed(module, batch))
        return number_of(self.user.batch_loss(module, fields).sum())

    def _measure(
        self,
        description: str,
        measure: Callable[[Any, Any], Any],
        module: Any,
        arrays: Mapping[str, Any],
    ) -> Any:
        batch_arrays: dict[str, Any] = {}

        def measure_copy() -> Any:
            batch_arrays.update(_copy_arrays(arrays))
            with self._nested.rebuild(batch_arrays) as batch:
                return measure(module, batch)

        with _user_errors(description, batch_arrays):
            return call_under_no_grad(measure_copy)

    def _weight(self, batch: object, samples: int) -> float:
        if self.user.weight is None:
            return float(samples)
        try:
            weight = self.user.weight(batch)
        except Exception as error:
            raise DataError(f"weight raised {describe_raised(error)}") from error
        return check_weight(weight)

    def _collate(
        self,
        data: Any,
        samples: Sequence[int],
        seed: int,
        generator_positions: list[object] | None = None,
    ) -> Any:
        """Build a batch of samples; append the generators' positions after the read, if wanted."""
        collate = self.user.collate
        if collate is None and type(data) is TensorDataset:  # a subclass may read differently
            rows = torch.as_tensor(samples, dtype=torch.int64)
            return [tensor[rows] for tensor in data.tensors]
        try:
            with self._generators.seeded(seed):
                items = _items(data, samples)
                if collate is None:
                    batch = default_collate(items)
                else:
                    batch = collate(items, seed=seed) if self._takes_seed else collate(items)
                if generator_positions is not None:
                    generator_positions.append(self._generators.positions())
                return batch
        except Exception as error:
            numbers = ", ".join(map(str, samples))
            raise DataError(
                f"cannot build a batch of samples {numbers}: the data set or the collator raised "
                f"{describe_raised(error)}"
            ) from error

    @property
    def sum_trial(self) -> SumTrial | None:
        """See `worker.tasks.checks.additivity.HasSumTrial`."""
        return self._sum_trial

    def _check_shared_memory(self) -> None:
        module = self.user.module
        trained_parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        reachable = reachable_tensors(self.user_objects())
        try:
            refuse_shared_memory(module, trained_parameters, reachable)
        except SamestepError as error:
            raise DataError(str(error)) from None

    def _check_reads(self) -> None:
        """Read samples twice with the same seed, before any other read."""
        samples = self._samples_from(0)
        check_draws(samples, *self._read_twice(samples, 1))
        self._check_other_draws()

    def _check_training(self, buffers: StepBuffers) -> None:
        data, samples = self.user.train, self._samples_from(0)
        batch = self._nested.flatten(self._collate(data, samples, 1))
        self._check_weights()
        losses, states = [], []
        for _ in range(2):
            self._weight(self._collate(data, samples, 1), len(samples))
            with buffers.restore_afterwards():
                losses.append(self._first_loss(self._on_device(batch)).detach())
            states.append(reachable_state(self.user_objects()))
        check_reproducible(losses[0], losses[1], find_changed_state(states[0], states[1]))
        refuse_changes(states[0], states[1])

    def _samples_from(self, start: int) -> list[int]:
        """Return samples for testing a loss: a microbatch if that is the unit, else two samples."""
        total = len(self.user.train)
        count = self._part_samples if self._is_microbatch_unit else min(2, total)
        return [(start + number) % total for number in range(count)]

    def _buffer_blocks(self) -> tuple[Block, ...]:
        """Return the blocks of buffers that forward changes, found by a call or by layer type.

        Raises:
            DataError: A buffer's type cannot be exchanged, or the loss raises.
        """
        module = self.user.module
        statistics = {
            buffer
            for name, layer in module.named_modules()
            if getattr(layer, "track_running_stats", False) and name not in self._evaluation_layers
            for buffer in own_buffers(name, layer)
        }

        def forward() -> None:
            batch = self._nested.flatten(self._collate(self.user.train, self._samples_from(0), 1))
            self._loss_of_first_samples(module, self._on_device(batch))

        with preserve_modes(module), seed_generators(0, self._device):
            module.train()
            changed_buffers = find_changed_tensors(module, forward)
        names = dict.fromkeys([*changed_buffers, *sorted(statistics)])
        return buffer_blocks(module, [*names], limits.SCRIPT_BLOCK_ELEMENTS)

    def _read_twice(self, samples: Sequence[int], seed: int) -> tuple[list[Arrays], list[object]]:
        """Build the batch of some samples twice; return the arrays and generator positions."""
        generator_positions: list[object] = []
        batches = [
            self._collate(self.user.train, samples, seed, generator_positions) for _ in range(2)
        ]
        return [self._nested.flatten(batch) for batch in batches], generator_positions

    def _check_other_draws(self) -> None:
        """Read more samples twice, for a limited time."""
        data, deadline_s = self.user.train, time.monotonic() + _DRAW_CHECK_S
        if type(data) is TensorDataset and self.user.collate is None:
            return
        count = min(len(data), _CHECKED_SAMPLES)
        for number in (index * len(data) // count for index in range(count)):
            try:
                batches, generator_positions = self._read_twice([number], number)
            except SamestepError:
                continue  # the error is reported when the sample is needed
            check_draws([number], batches, generator_positions)
            if time.monotonic() > deadline_s:
                return

    def _first_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of the first samples, after checking that some sample has a gradient."""
        with seed_generators(0, self._device):
            loss = check_loss(self._loss_of_first_samples(self.user.module, batch))
        if loss.requires_grad:
            return loss
        count = min(len(self.user.train), _CHECKED_SAMPLES)
        for index in range(count):
            start = index * len(self.user.train) // count
            samples = self._samples_from(start) if self._is_microbatch_unit else [start]
            sample_batch = self._collate(self.user.train, samples, 1)
            with seed_generators(0, self._device):
                sample_loss = self._loss_of_first_samples(
                    self.user.module, self._on_device(self._nested.flatten(sample_batch))
                )
            if check_loss(sample_loss).requires_grad:
                return loss
        raise missing_gradient_error()

    def _check_evaluation(self) -> None:
        """Evaluate the first batch of each held-out set."""
        user = self.user
        if user.held_out is None:
            if user.metrics or user.evaluate:
                name = f"the metric {next(iter(user.metrics))!r}" if user.metrics else "evaluate"
                raise DataError(
                    f"expected held_out for {name}, got none: pass held_out, or leave out "
                    f"{'metrics' if user.metrics else 'evaluate'}"
                )
            return
        sets = len(self._evaluation_sets.sets)
        # Each metric of each set has two sums, like the loss.
        max_metrics = limits.EVALUATION_SUMS // 2 // sets - 1
        if len(user.metrics) > max_metrics:
            scope = f" for each of {sets} held-out sets" if sets > 1 else ""
            raise DataError(
                f"expected at most {max(0, max_metrics)} metrics{scope}, got {len(user.metrics)}"
            )
        with preserve_modes(user.module), torch.no_grad(), seed_generators(0, self._device):
            user.module.eval()
            for evaluation_set in self._evaluation_sets.sets:
                part = self._evaluation_part(evaluation_set.parts.start)
                self._sums_of(user.module, self._on_device(part.arrays))
            if user.evaluate is not None:
                self._evaluate_names = self._joint_metric_names()

    def _joint_metric_names(self) -> tuple[str, ...]:
        """Return the names of `evaluate`'s metrics, from the first samples or else from all.

        Raises:
            DataError: The metrics cannot be used.
        """
        module, device = self.user.module, self._device
        all_parts = [evaluation_set.parts for evaluation_set in self._evaluation_sets.sets]
        count = -(-_CHECKED_SAMPLES // self._part_samples)
        first_parts = [parts[:count] for parts in all_parts]
        try:
            metrics = self._joint_metrics(module, device, first_parts)
        except DataError:
            if first_parts == all_parts:
                raise
            self._set_metric_names = ()
            metrics = self._joint_metrics(module, device, all_parts)
        quotient_names = set(self._evaluation_sets.metrics(("loss", *self.user.metrics)))
        if duplicates := sorted(quotient_names & metrics.keys()):
            raise DataError(
                f"evaluate: expected names that metrics and loss do not have, got {duplicates[0]!r}"
            )
        max_metrics = limits.EVALUATION_SUMS - 2 * len(quotient_names)
        if len(metrics) > max_metrics:
            raise DataError(f"evaluate: expected at most {max_metrics} metrics, got {len(metrics)}")
        return tuple(sorted(metrics))

    def _collect_cross_check(self) -> CrossCheck:
        """Collect what the script reads and computes, to compare with other workers."""
        objects = self.user_objects()
        constants = script_constants({name: objects[name] for name in _COMPUTING_FIELDS})
        return CrossCheck(constants=constants, first_loss=self._first_evaluation_loss())

    def _first_evaluation_loss(self) -> float | None:
        """Compute the loss per sample of the first samples in evaluation mode.

        Returns:
            None if the loss depends on random draws, is not finite, or fails in evaluation mode.
        """
        module, samples = self.user.module, self._samples_from(0)
        arrays = self._nested.flatten(self._collate(self.user.train, samples, 1))
        losses = []
        try:
            for seed in range(2):
                device_arrays = self._on_device(arrays)
                with preserve_modes(module), torch.no_grad(), seed_generators(seed, self._device):
                    module.eval()
                    with self._nested.rebuild(device_arrays) as batch:
                        losses.append(self._evaluation_loss(module, batch))
        except Exception as error:
            if is_machine_specific(error):
                raise
            return None  # training mode was tested before
        loss = losses[0] / (1 if self._is_microbatch_unit else len(samples))
        return loss if losses[0] == losses[1] and math.isfinite(loss) else None

    def _check_weights(self) -> None:
        """Check that some samples, or microbatches if that is the unit, have a weight above 0."""
        data = self.user.train
        count = min(len(data), _CHECKED_SAMPLES) if self.user.weight is not None else 0
        for index in range(count):
            start = index * len(data) // count
            samples = self._samples_from(start) if self._is_microbatch_unit else [start]
            if self._weight(self._collate(data, samples, 1), len(samples)):
                return
        if count:
            unit = "microbatches" if self._is_microbatch_unit else "samples"
            raise DataError(
                f"expected weight to return a number above 0, got 0 for each of {count} {unit}: "
                "no sample would be trained; return the number of samples or tokens that count"
            )

    def _loss_of_first_samples(self, module: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        copied_batch = _copy_arrays(batch)
        try:
            with TableLookups(copied_batch) if self._device != _CPU else contextlib.nullcontext():
                return self._loss(module, copied_batch)
        except DataError:
            raise
        except Exception as error:
            if is_machine_specific(error):
                raise
            if index_error := find_failing_index(error, copied_batch):
                raise DataError(f"the loss of the first samples: {index_error.text}") from error
            raise DataError(
                f"the loss of the first samples raised {describe_raised(error)}"
            ) from error

    def _on_device(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(values, device=self._device) for name, values in arrays.items()}


def _copy_arrays(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy arrays for user code that may change its batch in place."""
    return {name: values.clone() for name, values in arrays.items()}


@contextlib.contextmanager
def _user_errors(description: str, arrays: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Convert errors of user code to a DataError; out of memory is the device's error."""
    try:
        yield
    except SamestepError:
        raise
    except Exception as error:
        if is_machine_specific(error):
            raise
        if index_error := find_failing_index(error, arrays):
            raise DataError(f"{description}: {index_error.text}") from error
        raise DataError(f"{description} raised {describe_raised(error)}") from error


class _FrozenTensors(Mapping[str, NDArray[Any]]):
    """Frozen parameters and buffers, which must be the same on every worker.

    bfloat16 becomes float32 on access, one tensor at a time.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors = dict(module.named_buffers())
        self._tensors |= {n: p for n, p in module.named_parameters() if not p.requires_grad}

    def __getitem__(self, name: str) -> NDArray[Any]:
        tensor = self._tensors[name].detach().cpu()
        return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _quotient(name: str) -> Metric:
    return Metric(name=name, numerator={name: 1.0}, denominator={f"{name} of": 1.0})


def _joint_metric(name: str) -> Metric:
    return Metric(name=name, numerator={name: 1.0})


def _items(data: Any, samples: Sequence[int]) -> list[Any]:
    read_many = getattr(data, "__getitems__", None)
    if read_many:  # as torch's DataLoader does
        return list(read_many(list(samples)))
    return [data[number] for number in samples]


def _data_digest(task: ScriptTask, data: Any) -> str:
    """Digest all tensors of a TensorDataset; digest other data sets as earlier releases did.

    Earlier releases used `_CHECKED_SAMPLES` samples and the number of all samples.
    """
    if type(data) is TensorDataset:
        tensors_for_numpy = [t.float() if t.dtype == torch.bfloat16 else t for t in data.tensors]
        tensors = [tensor.detach().contiguous().numpy() for tensor in tensors_for_numpy]
        return digest_arrays({str(number): array for number, array in enumerate(tensors)})
    count = min(len(data), _CHECKED_SAMPLES)
    arrays: dict[str, NDArray[Any]] = {"samples": np.array(len(data))}
    for index in range(count):
        number = index * len(data) // count
        batch = task._collate(data, [number], number)  # noqa: SLF001 -- of this module
        arrays |= {f"{number} {n}": a for n, a in task._nested.flatten(batch).items()}  # noqa: SLF001
    return digest_arrays(arrays)
