"""A `samestep.Task` as the worker's own kind of task: `worker.tasks.base.Task`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset, default_collate

from backends.base import draws
from backends.base.additivity import measured, seeded
from backends.base.interface import Array, Batch, Sums, Trainable
from backends.base.outside_table import index_outside
from backends.base.trainable_checks import refuse_shared_memory
from protocol.base import limits
from protocol.base.errors import DataError, SamestepError, in_words, raised_words
from protocol.exact.digest import digest_arrays
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import RunSpec
from samestep.data_digest import DataDigest, data_digest
from samestep.nested import NestedBatches
from samestep.refusals import (
    check_loss,
    check_metric,
    check_precision,
    check_weight,
    no_gradient,
    number_of,
    refuse_own_draws,
    takes,
)
from samestep.user_task import UserTask
from worker.models.blocks import cut_by_size
from worker.tasks.additivity import SumTrial, modes_kept
from worker.tasks.modes import parts_in_evaluation, put_in_evaluation
from worker.tasks.reachable_state import (
    moved_state,
    reachable_state,
    reached_tensors,
    refuse_changes,
)

_LOOKED_AT: Final = 64
"""Samples of a data set whose digest is taken, evenly spread; of tensors all are."""
_ROOTS: Final = fields(UserTask)
_COUNTED: Final = "samestep.counted"
"""Beside a held-out batch's arrays: its weight, and how many samples it has."""


class FittedTask:
    """See `worker.tasks.base.Task`; batches may be drawn, as `DrawsBatches` says.

    Attributes:
        user: What the user's `build` gave.
        read: What was read of each data set for its digest, but of plain tensors, which all were.

    Args:
        user: What the user's `build` gave, looked at.
        spec: The run.
        digests: Of the script, and of what it imports from beside it.

    Raises:
        DataError: It cannot be trained, and what to write instead.
    """

    def __init__(self, user: UserTask, spec: RunSpec, digests: Mapping[str, str]) -> None:
        self.user = user
        self._nested = NestedBatches()
        self._kept_in_evaluation = parts_in_evaluation(user.module)
        self._requires_grad = [(n, p, p.requires_grad) for n, p in user.module.named_parameters()]
        self._collate_takes_seed = user.collate is not None and takes(user.collate, "seed")
        self._seed = spec.seed
        self._part_samples = spec.batch.microbatch
        held_out = 0 if user.held_out is None else len(user.held_out)
        self._refuse_shared_memory()
        self._refuse_what_cannot_be_trained()
        self._refuse_what_cannot_be_measured()
        data = self._data_digests(spec.options.get("read"))
        if frozen := _frozen(user):
            data["frozen_weights"] = digest_arrays(frozen)
        self.manifest = Manifest(
            blocks=cut_by_size(user.module, limits.SMALL_CHUNK_ELEMENTS),
            train_samples=len(user.train),
            evaluation_parts=-(-held_out // self._part_samples),
            metrics=tuple(_metric(name) for name in ("loss", *user.metrics)),
            digests={**data, **digests},
        )
        self.trainable = Trainable(
            blocks=self.manifest.blocks,
            module=user.module,
            loss=self._loss,
            evaluate=self._evaluate,
            seed=spec.seed,
            threads=spec.threads,
            precision=check_precision(spec.options.get("precision", "float32")),
            given_back=True,
            in_evaluation=frozenset(self._kept_in_evaluation),
        )
        self._initial = self._parameters()
        self._sum_trial = SumTrial(self)
        self._sum_trial.refuse()

    def _data_digests(self, parts: Mapping[str, int] | None) -> dict[str, str]:
        """By name in the manifest; `parts` are to be read of each, as many as time allows where it
        does not say. None: of a run that an earlier release began."""
        self.read: dict[str, DataDigest] = {}
        found = {}
        for name, data in (("data", self.user.train), ("held_out", self.user.held_out)):
            if data is None:
                continue
            if type(data) is TensorDataset or parts is None:
                found[name] = _data_digest(self, data)
            else:
                self.read[name] = data_digest(
                    data, self._collated, self._part_samples, parts.get(name)
                )
                found[name] = self.read[name].digest
        return found

    def initial_parameters(self) -> list[Array]:
        """What the module was built with."""
        return [values.copy() for values in self._initial]

    def batch(self, samples: Sequence[int]) -> Batch:
        """A microbatch as it would be drawn from the run's seed."""
        return self.drawn_batch(samples, self._seed)

    def drawn_batch(self, samples: Sequence[int], seed: int) -> Batch:
        """See `worker.tasks.base.DrawsBatches`."""
        batch = self._collated(self.user.train, samples, seed)
        return Batch(self._nested.apart(batch), self._weight(batch, len(samples)))

    def evaluation_batch(self, part: int) -> Batch:
        """Held-out samples in their order, as many as a microbatch has."""
        lo = part * self._part_samples
        rows = range(lo, min(lo + self._part_samples, len(self.user.held_out)))
        batch = self._collated(self.user.held_out, rows, draws.key_of(self._seed, part))
        weight = self._weight(batch, len(rows))
        arrays = {**self._nested.apart(batch), _COUNTED: np.array([weight, len(rows)])}
        return Batch(arrays, weight)

    def user_objects(self) -> dict[str, object]:
        """See `worker.tasks.base.HasUserObjects`."""
        return {each.name: getattr(self.user, each.name) for each in _ROOTS}

    def trained(self) -> dict[str, NDArray[np.float32]]:
        """The module's trainable tensors as they are now, by name."""
        named = dict(self.user.module.named_parameters())
        tensors = (t for block in self.manifest.blocks for t in block.tensors)
        return {t.name: named[t.name].detach().cpu().numpy() for t in tensors}

    def load(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Give the module these values, on the CPU and in evaluation mode."""
        module = self.user.module.cpu().eval()
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, values in tensors.items():
                named[name].copy_(torch.from_numpy(values))

    def _parameters(self) -> list[Array]:
        named = self.trained()
        return [
            np.concatenate([np.ravel(named[tensor.name]) for tensor in block.tensors])
            for block in self.manifest.blocks
        ]

    def _loss(self, module: Any, arrays: Mapping[str, Any]) -> Any:
        """Of the user's; a backend has just put all of the module into training mode."""
        assert self.user.loss is not None
        put_in_evaluation(module, self._kept_in_evaluation)
        with self._nested.together(arrays) as batch:
            loss = self.user.loss(module, batch)
        for name, parameter, trained in self._requires_grad:
            if parameter.requires_grad is not trained:
                raise DataError(
                    f"expected what is trained to stay as build left it, got {name!r} "
                    f"{'frozen' if trained else 'unfrozen'} on the way: set requires_grad in build "
                    "alone, and begin another fit to train something else"
                )
        return loss

    def _evaluate(self, module: Any, arrays: Mapping[str, Any]) -> Sums:
        given = dict(arrays)
        weight, samples = given.pop(_COUNTED).tolist()
        assert self.user.loss is not None
        loss = self.user.loss
        total = self._measured(
            "the loss of held-out samples", lambda m, b: number_of(loss(m, b)), module, given
        )
        sums = {"loss": total, "loss of": weight}
        for name, metric in self.user.metrics.items():
            value = self._measured(f"the metric {name!r}", metric, module, given)
            above, below = check_metric(name, metric, value)
            sums |= {name: above, f"{name} of": samples if below is None else below}
        return sums

    def _measured(
        self, what: str, measure: Callable[[Any, Any], Any], module: Any, arrays: Mapping[str, Any]
    ) -> Any:
        own: dict[str, Any] = {}

        def once() -> Any:
            own.update(_copied(arrays))
            with self._nested.together(own) as batch:
                return measure(module, batch)

        with _told_as(what, own):
            return measured(once)

    def _weight(self, batch: object, samples: int) -> float:
        if self.user.weight is None:
            return float(samples)
        try:
            given = self.user.weight(batch)
        except Exception as error:
            raise DataError(f"weight raised {raised_words(error)}") from error
        return check_weight(given)

    def _collated(self, data: Any, samples: Sequence[int], seed: int) -> Any:
        collate = self.user.collate
        if collate is None and type(data) is TensorDataset:  # a subclass may read otherwise
            rows = torch.as_tensor(samples, dtype=torch.int64)
            return [tensor[rows] for tensor in data.tensors]
        try:
            with seeded(seed):
                items = _items(data, samples)
                if collate is None:
                    return default_collate(items)
                return collate(items, seed=seed) if self._collate_takes_seed else collate(items)
        except Exception as error:
            shown = ", ".join(map(str, samples))
            raise DataError(
                f"samples {shown} make no batch: the data set or the collator raised "
                f"{in_words(error)}"
            ) from error

    @property
    def sum_trial(self) -> SumTrial:
        """See `worker.tasks.additivity.HasSumTrial`."""
        return self._sum_trial

    def _refuse_shared_memory(self) -> None:
        module = self.user.module
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        reached = reached_tensors(self.user_objects())
        try:
            refuse_shared_memory(module, trained, reached)
        except SamestepError as error:
            raise DataError(str(error)) from None

    def _refuse_what_cannot_be_trained(self) -> None:
        data, two = self.user.train, [0, min(1, len(self.user.train) - 1)]
        drawn = [self._nested.apart(self._collated(data, two, seed)) for seed in (1, 1, 2)]
        digests = [digest_arrays(arrays) for arrays in drawn]
        if digests[0] != digests[1]:
            raise DataError(
                "the collator (or the data set) gives another batch for the same samples: draw "
                "from torch's, numpy's or Python's global generator, which are seeded for each "
                "microbatch, or give the collator a parameter seed"
            )
        self._refuse_no_weight()
        losses, kept = [], []
        for _ in range(2):
            self._weight(self._collated(data, two, 1), len(two))
            losses.append(self._first_loss(self._on_cpu(drawn[0])).detach())
            kept.append(reachable_state(self.user_objects()))
        refuse_own_draws(losses[0], losses[1], moved_state(kept[0], kept[1]))
        refuse_changes(kept[0], kept[1])

    def _first_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of the first samples; if nothing of them counts, others must, up to so many."""
        with seeded(0):
            loss = check_loss(self._tried(self.user.module, batch))
        if loss.requires_grad:
            return loss
        count = min(len(self.user.train), _LOOKED_AT)
        for place in range(count):
            one = self._collated(self.user.train, [place * len(self.user.train) // count], 1)
            with seeded(0):
                other = self._tried(self.user.module, self._on_cpu(self._nested.apart(one)))
            if check_loss(other).requires_grad:
                return loss
        raise no_gradient()

    def _refuse_what_cannot_be_measured(self) -> None:
        """By the first held-out batch."""
        user = self.user
        if user.held_out is None:
            if user.metrics:
                raise DataError(
                    f"the metric {next(iter(user.metrics))!r} has nothing to measure: give "
                    "held_out, or leave out metrics"
                )
            return
        most = limits.EVALUATION_SUMS // 2 - 1  # each has two sums, and so has the loss
        if len(user.metrics) > most:
            raise DataError(f"expected at most {most} metrics, got {len(user.metrics)}")
        with modes_kept(user.module), torch.no_grad(), seeded(0):
            user.module.eval()
            self._evaluate(user.module, self._on_cpu(self.evaluation_batch(0).arrays))

    def _refuse_no_weight(self) -> None:
        """Some samples of the data must count: those that are looked at, until one does."""
        data = self.user.train
        count = min(len(data), _LOOKED_AT) if self.user.weight is not None else 0
        for place in range(count):
            sample = place * len(data) // count
            if self._weight(self._collated(data, [sample], 1), 1):
                return
        if count:
            raise DataError(
                f"expected weight to give a number above 0, got 0 for each of {count} samples: "
                "nothing would be trained; give the number of samples or tokens that count"
            )

    def _tried(self, module: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        own = _copied(batch)
        try:
            return self._loss(module, own)
        except DataError:
            raise
        except Exception as error:
            if outside := index_outside(error, own):
                raise DataError(f"the loss of the first samples: {outside.text}") from error
            raise DataError(
                f"the loss of the first samples raised {raised_words(error)}"
            ) from error

    @staticmethod
    def _on_cpu(arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(values) for name, values in arrays.items()}


def _copied(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For code that may change its batch in place, where the arrays are used again."""
    return {name: values.clone() for name, values in arrays.items()}


@contextlib.contextmanager
def _told_as(what: str, arrays: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """What the user's own code raises is its fault, and not the device's; no memory is that's."""
    try:
        yield
    except (SamestepError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if outside := index_outside(error, arrays):
            raise DataError(f"{what}: {outside.text}") from error
        raise DataError(f"{what} raised {raised_words(error)}") from error


def _frozen(user: UserTask) -> dict[str, NDArray[Any]]:
    """What no update changes and everyone must have alike: frozen parameters, and buffers."""
    tensors = dict(user.module.named_buffers())
    tensors |= {n: p for n, p in user.module.named_parameters() if not p.requires_grad}
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
        for name, tensor in tensors.items()
    }


def _metric(name: str) -> Metric:
    return Metric(name=name, numerator={name: 1.0}, denominator={f"{name} of": 1.0})


def _items(data: Any, samples: Sequence[int]) -> list[Any]:
    at_once = getattr(data, "__getitems__", None)
    if at_once:  # as torch's own loader does
        return list(at_once(list(samples)))
    return [data[number] for number in samples]


def _data_digest(task: FittedTask, data: Any) -> str:
    """Of all tensors of a TensorDataset; of others so many samples, and how many there are: as
    runs that an earlier release began have it."""
    if type(data) is TensorDataset:
        wide = [t.float() if t.dtype == torch.bfloat16 else t for t in data.tensors]
        tensors = [tensor.detach().contiguous().numpy() for tensor in wide]
        return digest_arrays({str(number): each for number, each in enumerate(tensors)})
    count = min(len(data), _LOOKED_AT)
    arrays: dict[str, NDArray[Any]] = {"samples": np.array(len(data))}
    for place in range(count):
        number = place * len(data) // count
        batch = task._collated(data, [number], number)  # noqa: SLF001 -- its other half
        arrays |= {f"{number} {n}": a for n, a in task._nested.apart(batch).items()}  # noqa: SLF001
    return digest_arrays(arrays)
