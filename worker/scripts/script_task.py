"""Makes a worker's task, `worker.tasks.base.task.Task`, of a `samestep.Task`."""

from __future__ import annotations

import contextlib
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
from backends.base.additivity import measured, seeded
from backends.base.coupled_loss import backward_loss
from backends.base.device_errors import concerns_device
from backends.base.interface import Array, Batch, CoupledLoss, Sums, Trainable
from backends.base.outside_table import TableLookups, index_outside
from backends.base.step_buffers import StepBuffers, buffer_blocks, changed_by
from backends.base.trainable_checks import own_buffers, refuse_shared_memory
from protocol.base import limits
from protocol.base.errors import DataError, SamestepError, describe_error, describe_raised
from protocol.exact.digest import digest_arrays
from protocol.spec.manifest import Block, Manifest, Metric
from protocol.spec.run_spec import RunSpec
from worker.models.blocks import cut_by_size
from worker.scripts.checks import (
    check_draws,
    check_figures,
    check_loss,
    check_metric,
    check_precision,
    check_reproducible,
    check_weight,
    no_gradient,
    number_of,
    takes,
)
from worker.scripts.coupling import check_embedded, coupled_loss
from worker.scripts.data_digest import DataDigest, data_digest
from worker.scripts.held_out import HeldOut
from worker.scripts.nested_batches import Arrays, NestedBatches
from worker.scripts.own_generators import ReadingGenerators
from worker.scripts.samplers import sampling_of
from worker.scripts.user_task import UserTask
from worker.tasks.base.evaluation_modes import parts_in_evaluation, put_in_evaluation
from worker.tasks.checks.additivity import NotASum, SumTrial, on_device, preserve_modes
from worker.tasks.checks.reachable_state import (
    moved_state,
    reachable_state,
    reached_tensors,
    refuse_changes,
)

_CHECKED_SAMPLES: Final = 64
"""Samples that are checked, evenly spread over the data set."""
_CPU: Final = torch.device("cpu")
_CHECK_DRAWS_FOR_S: Final = 1.0
_ROOTS: Final = fields(UserTask)
_READ: Final = ("train", "held_out", "collate")
"""What takes part in making a batch."""
_COUNTED: Final = "samestep.counted"
"""Name of an extra array of an evaluation batch: its weight and its number of samples."""


class ScriptTask:
    """See `worker.tasks.base.task.Task`; batches may be drawn, as `DrawsBatches` says.

    Attributes:
        user: The task that the user's `build` returned.
        read: How much of each data set was read for its digest; plain tensors are read whole.

    Args:
        user: The task that the user's `build` returned, checked.
        spec: The run spec.
        digests: Digests of the script and of modules that it imports from its folder.
        device: Where the loss is tried; the module is on the CPU before and after.

    Raises:
        DataError: It cannot be trained; says what to write instead.
        RuntimeError: The device has too little memory for the trial, or fails.
    """

    def __init__(
        self,
        user: UserTask,
        spec: RunSpec,
        digests: Mapping[str, str],
        device: torch.device = _CPU,
    ) -> None:
        self.user = user
        self._device = device
        self._nested = NestedBatches()
        self._kept_in_evaluation = parts_in_evaluation(user.module)
        self._requires_grad = [(n, p, p.requires_grad) for n, p in user.module.named_parameters()]
        roots = self.user_objects()
        self._generators = ReadingGenerators({name: roots[name] for name in _READ})
        self._takes_seed = user.collate is not None and takes(user.collate, "seed")
        self._seed = spec.seed
        self._part_samples = spec.batch.microbatch
        self._held_out = HeldOut(user.held_out, self._part_samples)
        self._figures: tuple[str, ...] = ()
        self._figures_of_a_set: tuple[str, ...] = ()
        self._takes_whole = user.unit == "microbatch"
        self._check_shared_memory()
        self._check_reads()
        self._coupled: CoupledLoss | None = None
        with on_device(user.module, device):
            if user.embed is not None:
                self._coupled = self._coupled_loss(self._step_sizes(spec))
            buffers = self._buffer_blocks() if self._takes_whole else ()
            self._check_training(StepBuffers(user.module, buffers))
            self._check_evaluation()
            data = self._data_digests(spec.options.get("read"))
            if frozen := _FrozenTensors(user.module):
                data["frozen_weights"] = digest_arrays(frozen)
            self.manifest = Manifest(
                blocks=(*buffers, *cut_by_size(user.module, limits.SCRIPT_BLOCK_ELEMENTS)),
                train_samples=len(user.train),
                sampling=sampling_of(user.sampler, len(user.train)),
                evaluation_parts=self._held_out.evaluation_parts(at_once=bool(user.evaluate)),
                metrics=self._metrics(),
                digests={**data, **digests},
                notes={"buffers_averaged": sum(len(b.tensors) for b in buffers)} if buffers else {},
                embeddings=None if self._coupled is None else self._coupled.layout,
            )
            self.trainable = Trainable(
                blocks=self.manifest.blocks,
                module=user.module,
                loss=self._loss,
                coupled=self._coupled,
                evaluate=self._evaluate,
                unit=user.unit,
                seed=spec.seed,
                threads=spec.threads,
                precision=check_precision(spec.options.get("precision", "float32")),
                given_back=True,
                in_evaluation=frozenset(self._kept_in_evaluation),
            )
            self._initial = self._parameters()
            self._sum_trial = None if self._takes_whole else SumTrial(self, device)
            self._refuse_what_is_no_sum()

    def _refuse_what_is_no_sum(self) -> None:
        if self._sum_trial is None:
            return
        try:
            self._sum_trial.check()
        except NotASum as error:
            if self._coupled is None:
                raise
            raise DataError(
                "expected each row that embed makes to depend on its own sample alone, got rows "
                "that depend on others of their batch: leave out means over the batch and layers "
                "across it, and compare samples in batch_loss"
            ) from error

    def _metrics(self) -> tuple[Metric, ...]:
        quotients = map(_quotient, self._held_out.metrics(("loss", *self.user.metrics)))
        return (*quotients, *map(_figure, self._figures))

    def _data_digests(self, parts: Mapping[str, int] | None) -> dict[str, str]:
        """Digests of the data sets by their name in the manifest.

        Args:
            parts: Microbatches to read of each data set; without an entry as many as time allows.
                None: take the digests of runs that an earlier release started.
        """
        self.read: dict[str, DataDigest] = {}
        found = {}
        held_out = {each.label(): each.data for each in self._held_out.sets}
        for name, data in {"data": self.user.train, **held_out}.items():
            if type(data) is TensorDataset or parts is None:
                found[name] = _data_digest(self, data)
            else:
                self.read[name] = data_digest(
                    data, self._collate, self._part_samples, parts.get(name)
                )
                found[name] = self.read[name].digest
        return found

    def initial_parameters(self) -> list[Array]:
        """The module's initial parameters, one flat float32 array per block."""
        return [values.copy() for values in self._initial]

    def batch(self, samples: Sequence[int]) -> Batch:
        """A microbatch, with the run's seed for random collators."""
        return self.drawn_batch(samples, self._seed)

    def drawn_batch(self, samples: Sequence[int], seed: int) -> Batch:
        """See `worker.tasks.base.task.DrawsBatches`."""
        batch = self._collate(self.user.train, samples, seed)
        return Batch(self._nested.flatten(batch), self._weight(batch, len(samples)))

    def evaluation_batch(self, part: int) -> Batch:
        """One part of the held-out samples: as many as a microbatch, in order.

        With `evaluate` there is one part; its batches are made where they are evaluated.
        """
        if self.user.evaluate is not None:
            return Batch({_COUNTED: np.zeros(2)}, 0.0)
        return self._held_out_batch(part)

    def _held_out_batch(self, part: int) -> Batch:
        number, rows = self._held_out.index_of(part), self._held_out.rows(part)
        data = self._held_out.sets[number].data
        batch = self._collate(data, rows, draws.key_of(self._seed, part))
        weight = self._weight(batch, len(rows))
        # The length tells the set: a compiled program is one for each shape.
        counted = np.array([weight, len(rows), *([0] * number)])
        return Batch({**self._nested.flatten(batch), _COUNTED: counted}, weight)

    def user_objects(self) -> dict[str, object]:
        """See `worker.tasks.base.task.HasUserObjects`."""
        return {each.name: getattr(self.user, each.name) for each in _ROOTS}

    def trained(self) -> dict[str, NDArray[np.float32]]:
        """The module's current tensors by name, float32: trained, or changed by forward."""
        named = self._named()
        tensors = (t for block in self.manifest.blocks for t in block.tensors)
        return {t.name: named[t.name].detach().float().cpu().numpy() for t in tensors}

    def _named(self) -> dict[str, torch.Tensor]:
        module = self.user.module
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def load(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Load these tensors into the module, on the CPU and in evaluation mode."""
        self.user.module.cpu().eval()
        named = self._named()
        with torch.no_grad():
            for name, values in tensors.items():
                named[name].copy_(torch.from_numpy(values))

    def _parameters(self) -> list[Array]:
        named = self.trained()
        return [
            np.concatenate([np.ravel(named[tensor.name]) for tensor in block.tensors])
            for block in self.manifest.blocks
        ]

    def _step_sizes(self, spec: RunSpec) -> list[int]:
        """Samples of a full step, and of an epoch's last one if the run gets there."""
        data = self.user.train
        sampling = sampling_of(self.user.sampler, len(data))
        epoch = len(data) if sampling is None else sampling.draws
        full, rest = min(spec.batch.samples, epoch), epoch % spec.batch.samples
        reached = spec.steps_with(epoch) >= -(-epoch // spec.batch.samples)
        return [full, rest] if rest and rest < full and reached else [full]

    def _coupled_loss(self, sizes: Sequence[int]) -> CoupledLoss:
        """The user's loss over all samples of a step, tried for a full step and an epoch's last.

        In evaluation mode, where forward changes no statistics.
        """
        batch = self._collate(self.user.train, self._samples_from(0), 1)
        arrays, module = self._on_device(self._nested.flatten(batch)), self.user.module
        errors = _user_errors("embed, or batch_loss,", {})
        with preserve_modes(module), seeded(0, self._device), errors:
            module.eval()
            return coupled_loss(self.user, self._embed, arrays, sizes)

    def _embed(self, module: Any, arrays: Mapping[str, Any]) -> Any:
        assert self.user.embed is not None
        return self._of_batch(self.user.embed, module, arrays)

    def _loss(self, module: Any, arrays: Mapping[str, Any]) -> Any:
        """The user's loss, or that of its embeddings (`backends.base.coupled_loss`)."""
        if self._coupled is not None:
            return backward_loss(self._coupled, module, arrays)
        return self._of_batch(self.user.loss, module, arrays)

    def _of_batch(self, function: Any, module: Any, arrays: Mapping[str, Any]) -> Any:
        """What a function of the user makes of a batch in training; backends put the whole module
        into training mode before each call."""
        put_in_evaluation(module, self._kept_in_evaluation)
        with self._nested.rebuild(arrays) as batch:
            loss = function(module, batch)
        for name, parameter, trained in self._requires_grad:
            if parameter.requires_grad is not trained:
                raise DataError(
                    f"expected requires_grad to stay as build set it, got {name!r} "
                    f"{'frozen' if trained else 'unfrozen'} during training: set requires_grad "
                    "only in build, and call fit again to train other parameters"
                )
        return loss

    def _evaluate(self, module: Any, arrays: Mapping[str, Any]) -> Sums:
        if self.user.evaluate is None:
            return self._sums_of(module, arrays)
        if get_proxy_mode() is not None:
            raise SamestepError(
                "expected a task without evaluate for this device, which records what it computes: "
                "give metrics instead, or evaluate on cpu or cuda"
            )
        device, totals = arrays[_COUNTED].device, dict[str, float]()
        for part in range(self._held_out.parts):
            for name, value in self._sums_of(module, self._on(device, part)).items():
                totals[name] = totals.get(name, 0.0) + value
        return totals | self._figures_of(
            module, device, [each.parts for each in self._held_out.sets]
        )

    def _on(self, device: torch.device, part: int) -> dict[str, torch.Tensor]:
        arrays = self._held_out_batch(part).arrays
        return {name: torch.tensor(values).to(device) for name, values in arrays.items()}

    def _figures_of(
        self, module: Any, device: torch.device, parts: Sequence[Iterable[int]]
    ) -> dict[str, float]:
        """What the user's `evaluate` makes of these parts of each held-out set."""
        assert self.user.evaluate is not None

        def batches(number: int) -> Iterator[Any]:
            for part in parts[number]:
                arrays = self._on(device, part)
                del arrays[_COUNTED]
                with self._nested.rebuild(arrays) as batch:
                    yield batch

        found: dict[str, float] = {}
        with _user_errors("evaluate", {}), torch.no_grad():
            for number, each in enumerate(self._held_out.sets):
                figures = self.user.evaluate(module, batches(number))
                own = check_figures(figures, self._figures_of_a_set)
                self._figures_of_a_set = tuple(sorted(own))
                found |= {each.metric(name): value for name, value in own.items()}
        return found

    def _sums_of(self, module: Any, arrays: Mapping[str, Any]) -> Sums:
        given = dict(arrays)
        weight, samples, *zeros = given.pop(_COUNTED).tolist()
        total = self._measure("the loss of held-out samples", self._loss_of_held_out, module, given)
        if self._takes_whole and self._coupled is None:  # a mean
            total *= weight
        own: dict[str, tuple[float, float]] = {"loss": (total, weight)}
        for name, metric in self.user.metrics.items():
            value = self._measure(f"the metric {name!r}", metric, module, given)
            above, below = check_metric(name, metric, value)
            own[name] = above, samples if below is None else below
        sums = {
            f"{name}{of}": 0.0 for name in self._held_out.metrics((*own,)) for of in ("", " of")
        }
        for name, (above, below) in own.items():
            shown = self._held_out.sets[len(zeros)].metric(name)
            sums |= {shown: above, f"{shown} of": below}
        return sums

    def _loss_of_held_out(self, module: Any, batch: Any) -> float:
        """With a loss over a step: of this batch as if it were one."""
        if self.user.embed is None:
            assert self.user.loss is not None
            return number_of(self.user.loss(module, batch))
        assert self.user.batch_loss is not None
        fields = check_embedded(self.user.embed(module, batch))
        return number_of(self.user.batch_loss(module, fields).sum())

    def _measure(
        self, what: str, measure: Callable[[Any, Any], Any], module: Any, arrays: Mapping[str, Any]
    ) -> Any:
        own: dict[str, Any] = {}

        def once() -> Any:
            own.update(_copied(arrays))
            with self._nested.rebuild(own) as batch:
                return measure(module, batch)

        with _user_errors(what, own):
            return measured(once)

    def _weight(self, batch: object, samples: int) -> float:
        if self.user.weight is None:
            return float(samples)
        try:
            given = self.user.weight(batch)
        except Exception as error:
            raise DataError(f"weight raised {describe_raised(error)}") from error
        return check_weight(given)

    def _collate(
        self, data: Any, samples: Sequence[int], seed: int, ends: list[object] | None = None
    ) -> Any:
        """Make a batch of samples; where the generators end is added to `ends`."""
        collate = self.user.collate
        if collate is None and type(data) is TensorDataset:  # a subclass may read otherwise
            rows = torch.as_tensor(samples, dtype=torch.int64)
            return [tensor[rows] for tensor in data.tensors]
        try:
            with self._generators.seeded(seed):
                items = _items(data, samples)
                if collate is None:
                    batch = default_collate(items)
                else:
                    batch = collate(items, seed=seed) if self._takes_seed else collate(items)
                if ends is not None:
                    ends.append(self._generators.positions())
                return batch
        except Exception as error:
            shown = ", ".join(map(str, samples))
            raise DataError(
                f"samples {shown} make no batch: the data set or the collator raised "
                f"{describe_error(error)}"
            ) from error

    @property
    def sum_trial(self) -> SumTrial | None:
        """See `worker.tasks.checks.additivity.HasSumTrial`."""
        return self._sum_trial

    def _check_shared_memory(self) -> None:
        module = self.user.module
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        reached = reached_tensors(self.user_objects())
        try:
            refuse_shared_memory(module, trained, reached)
        except SamestepError as error:
            raise DataError(str(error)) from None

    def _check_reads(self) -> None:
        """Read samples twice with the same seed, before anything else reads them."""
        first = self._samples_from(0)
        check_draws(first, *self._read_twice(first, 1))
        self._check_other_draws()

    def _check_training(self, buffers: StepBuffers) -> None:
        data, first = self.user.train, self._samples_from(0)
        batch = self._nested.flatten(self._collate(data, first, 1))
        self._check_weight_of_data()
        losses, kept = [], []
        for _ in range(2):
            self._weight(self._collate(data, first, 1), len(first))
            with buffers.restored():
                losses.append(self._first_loss(self._on_device(batch)).detach())
            kept.append(reachable_state(self.user_objects()))
        check_reproducible(losses[0], losses[1], moved_state(kept[0], kept[1]))
        refuse_changes(kept[0], kept[1])

    def _samples_from(self, start: int) -> list[int]:
        """Samples to try a loss on: a microbatch of them if that is the unit, else two."""
        total = len(self.user.train)
        count = self._part_samples if self._takes_whole else min(2, total)
        return [(start + number) % total for number in range(count)]

    def _buffer_blocks(self) -> tuple[Block, ...]:
        """Divide what forward changes: seen on the first samples, or known of a layer.

        Raises:
            DataError: Its type cannot be exchanged, or the loss raises.
        """
        module = self.user.module
        statistics = {
            each
            for name, layer in module.named_modules()
            if getattr(layer, "track_running_stats", False) and name not in self._kept_in_evaluation
            for each in own_buffers(name, layer)
        }

        def forward() -> None:
            batch = self._nested.flatten(self._collate(self.user.train, self._samples_from(0), 1))
            self._loss_of_first_samples(module, self._on_device(batch))

        with preserve_modes(module), seeded(0, self._device):
            module.train()
            changed = changed_by(module, forward)
        names = dict.fromkeys([*changed, *sorted(statistics)])
        return buffer_blocks(module, [*names], limits.SCRIPT_BLOCK_ELEMENTS)

    def _read_twice(self, samples: Sequence[int], seed: int) -> tuple[list[Arrays], list[object]]:
        """Make the batch of some samples twice, and note where the generators end."""
        ends: list[object] = []
        batches = [self._collate(self.user.train, samples, seed, ends) for _ in range(2)]
        return [self._nested.flatten(batch) for batch in batches], ends

    def _check_other_draws(self) -> None:
        """Read more samples twice, for a limited time."""
        data, until_s = self.user.train, time.monotonic() + _CHECK_DRAWS_FOR_S
        if type(data) is TensorDataset and self.user.collate is None:
            return
        count = min(len(data), _CHECKED_SAMPLES)
        for number in (index * len(data) // count for index in range(count)):
            try:
                batches, ends = self._read_twice([number], number)
            except SamestepError:
                continue  # reported when it is to be computed
            check_draws([number], batches, ends)
            if time.monotonic() > until_s:
                return

    def _first_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of the first samples; some sample must give a gradient."""
        with seeded(0, self._device):
            loss = check_loss(self._loss_of_first_samples(self.user.module, batch))
        if loss.requires_grad:
            return loss
        count = min(len(self.user.train), _CHECKED_SAMPLES)
        for index in range(count):
            start = index * len(self.user.train) // count
            samples = self._samples_from(start) if self._takes_whole else [start]
            one = self._collate(self.user.train, samples, 1)
            with seeded(0, self._device):
                other = self._loss_of_first_samples(
                    self.user.module, self._on_device(self._nested.flatten(one))
                )
            if check_loss(other).requires_grad:
                return loss
        raise no_gradient()

    def _check_evaluation(self) -> None:
        """Evaluate the first held-out batch."""
        user = self.user
        if user.held_out is None:
            if user.metrics or user.evaluate:
                named = f"the metric {next(iter(user.metrics))!r}" if user.metrics else "evaluate"
                raise DataError(
                    f"{named} has nothing to measure: give held_out, or leave out "
                    f"{'metrics' if user.metrics else 'evaluate'}"
                )
            return
        sets = len(self._held_out.sets)
        # Each metric of each set has two sums, and so has the loss.
        most = limits.EVALUATION_SUMS // 2 // sets - 1
        if len(user.metrics) > most:
            each = f" for each of {sets} held-out sets" if sets > 1 else ""
            raise DataError(
                f"expected at most {max(0, most)} metrics{each}, got {len(user.metrics)}"
            )
        with preserve_modes(user.module), torch.no_grad(), seeded(0, self._device):
            user.module.eval()
            for held_out in self._held_out.sets:
                first = self._held_out_batch(held_out.parts.start)
                self._sums_of(user.module, self._on_device(first.arrays))
            if user.evaluate is not None:
                self._figures = self._names_of_figures()

    def _names_of_figures(self) -> tuple[str, ...]:
        """The metrics that `evaluate` returns: of the first samples, or if it needs more, of all.

        Raises:
            DataError: They cannot be used.
        """
        module, device = self.user.module, self._device
        every = [each.parts for each in self._held_out.sets]
        count = -(-_CHECKED_SAMPLES // self._part_samples)
        first = [parts[:count] for parts in every]
        try:
            found = self._figures_of(module, device, first)
        except DataError:
            if first == every:
                raise
            self._figures_of_a_set = ()
            found = self._figures_of(module, device, every)
        own = set(self._held_out.metrics(("loss", *self.user.metrics)))
        if both := sorted(own & found.keys()):
            raise DataError(
                f"evaluate: expected other names than those of metrics and loss, got {both[0]!r}"
            )
        room = limits.EVALUATION_SUMS - 2 * len(own)
        if len(found) > room:
            raise DataError(f"evaluate: expected at most {room} metrics, got {len(found)}")
        return tuple(sorted(found))

    def _check_weight_of_data(self) -> None:
        """See that some of the checked samples (or microbatches, if that is the unit) have a weight
        above 0."""
        data = self.user.train
        count = min(len(data), _CHECKED_SAMPLES) if self.user.weight is not None else 0
        for index in range(count):
            start = index * len(data) // count
            samples = self._samples_from(start) if self._takes_whole else [start]
            if self._weight(self._collate(data, samples, 1), len(samples)):
                return
        if count:
            what = "microbatches" if self._takes_whole else "samples"
            raise DataError(
                f"expected weight to give a number above 0, got 0 for each of {count} {what}: "
                "nothing would be trained; give the number of samples or tokens that count"
            )

    def _loss_of_first_samples(self, module: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        own = _copied(batch)
        try:
            with TableLookups(own) if self._device != _CPU else contextlib.nullcontext():
                return self._loss(module, own)
        except DataError:
            raise
        except Exception as error:
            if concerns_device(error):
                raise
            if outside := index_outside(error, own):
                raise DataError(f"the loss of the first samples: {outside.text}") from error
            raise DataError(
                f"the loss of the first samples raised {describe_raised(error)}"
            ) from error

    def _on_device(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(values, device=self._device) for name, values in arrays.items()}


def _copied(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For code that may change its batch in index, where the arrays are used again."""
    return {name: values.clone() for name, values in arrays.items()}


@contextlib.contextmanager
def _user_errors(what: str, arrays: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Convert errors of user code to a DataError; out of memory is the device's error."""
    try:
        yield
    except SamestepError:
        raise
    except Exception as error:
        if concerns_device(error):
            raise
        if outside := index_outside(error, arrays):
            raise DataError(f"{what}: {outside.text}") from error
        raise DataError(f"{what} raised {describe_raised(error)}") from error


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


def _figure(name: str) -> Metric:
    return Metric(name=name, numerator={name: 1.0})


def _items(data: Any, samples: Sequence[int]) -> list[Any]:
    read_many = getattr(data, "__getitems__", None)
    if read_many:  # as torch's own loader does
        return list(read_many(list(samples)))
    return [data[number] for number in samples]


def _data_digest(task: ScriptTask, data: Any) -> str:
    """Digest of all tensors of a TensorDataset; of other data sets as earlier releases took it.

    That is `_CHECKED_SAMPLES` samples and the number of all samples.
    """
    if type(data) is TensorDataset:
        wide = [t.float() if t.dtype == torch.bfloat16 else t for t in data.tensors]
        tensors = [tensor.detach().contiguous().numpy() for tensor in wide]
        return digest_arrays({str(number): each for number, each in enumerate(tensors)})
    count = min(len(data), _CHECKED_SAMPLES)
    arrays: dict[str, NDArray[Any]] = {"samples": np.array(len(data))}
    for index in range(count):
        number = index * len(data) // count
        batch = task._collate(data, [number], number)  # noqa: SLF001 -- of this module
        arrays |= {f"{number} {n}": a for n, a in task._nested.flatten(batch).items()}  # noqa: SLF001
    return digest_arrays(arrays)
