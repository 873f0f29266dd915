"""The job that simulated clusters train: scripted gradients, and the results of the undisturbed
run.

The reference is deliberately naive: a recursive sum over all microbatches in order, without
workers, messages or rounds. Gradients depend on the parameters, so they reveal wrong weights;
weights and losses are not integers, so they reveal the order of additions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from backends.base.interface import (
    EMBEDDING_GRADIENT,
    PARAMETER_GRADIENT,
    Array,
    Batch,
    StepLoss,
    Trainable,
)
from coordinator.capture.captured_files import CapturedFiles
from protocol.datasets.logits_file import record_dtype
from protocol.exact.digest import weights_digest
from protocol.exact.embedding_rows import join_fields, split_fields
from protocol.exact.reduction.absent import absent_gradient
from protocol.exact.reduction.average import average as scale_to_average
from protocol.exact.reduction.average import square_sum
from protocol.exact.reduction.tree import Subtree
from protocol.exact.replica import MISSED_UPDATES, Replica
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.exact.update import StepScalars, global_norm, step_scalars
from protocol.spec.manifest import (
    Block,
    CaptureLayout,
    EmbeddingField,
    EmbeddingLayout,
    Export,
    Manifest,
    Metric,
    TensorSpec,
)
from protocol.spec.run_spec import LogMode, UserTaskRun
from protocol.spec.sections.checkpoint import CheckpointSpec
from protocol.spec.sections.exchange import ExchangeSpec, Precision, Topology
from protocol.spec.sections.optimizer import Adamw, Momentum
from protocol.spec.sections.tasks import BatchSpec
from tests.reference_bfloat16 import round_to_bfloat16

STEPS = 4
MANY_STEPS = 40
PARTS = 3
MAX_MICROBATCHES = 13
LAYOUT = CaptureLayout(tokens=3, vocabulary=9, top_k=2)
"""Layout of captured rows, in jobs that capture."""
EMBEDDINGS = EmbeddingLayout(
    fields=(
        EmbeddingField(name="embedding", dtype="float32", shape=(2,)),
        EmbeddingField(name="sample", dtype="int64"),
    )
)
"""Layout of the rows that the loss of a whole step reads, in jobs with such a loss."""
Rows = NDArray[np.uint8]
COVERAGE = 2
"""Number of the block that counts microbatches: its gradient is 1 at the microbatch's index."""

LAYER = 1
"""Number of the block with an expert: a tensor that few microbatches reach, and in some steps none.
"""
_BLOCKS: tuple[tuple[str, str, dict[str, tuple[int, ...]]], ...] = (
    ("embedding", "non_block", {"embedding": (5,)}),
    ("layer.0", "block", {"layer.0": (2, 4), "layer.0.expert": (3,)}),
    ("coverage", "block", {"coverage": (MAX_MICROBATCHES,)}),
)
_BUFFER_BLOCKS: tuple[tuple[str, str, dict[str, tuple[int, ...]]], ...] = (
    ("buffers", "buffers", {"statistics": (3,)}),
    ("counters", "counters", {"counter": (2,)}),
)
"""Blocks that forward changes and no optimizer updates, in jobs with buffers."""
EXPERT = slice(8, 11)
"""Position of the expert in its block."""
_BATCHES = ((1, 13, 30), (1, 8, 40), (2, 11, 25), (1, 5, 12), (1, 2, 9), (3, 3, 7), (1, 12, 12))
"""Samples per microbatch, per step and in total; the last step of an epoch may be smaller."""
_OPTIMIZERS = (
    Adamw(name="adamw", lr=0.01, weight_decay=0.1, clip_norm=0.5, schedule="linear"),
    Momentum(name="momentum", lr=0.05),
)
_LOG_MODES: tuple[tuple[LogMode, int], ...] = (
    ("full", 0), ("full", 2), ("checkpoint", 1), ("checkpoint", 3), ("full", 1), ("checkpoint", 0),
)  # fmt: skip
"""Log mode and steps between checkpoints."""
_EXCHANGES = (
    ExchangeSpec(),
    ExchangeSpec(precision="bfloat16"),
    ExchangeSpec(precision="bfloat16", averages="bfloat16"),
    ExchangeSpec(averages="bfloat16"),
)
_DOUBLE_CHECKS = (2, 4, 256)
"""Steps per double check: in one of them, a subtree is computed twice."""
VARIANTS = len(_BATCHES) * len(_OPTIMIZERS) * len(_LOG_MODES)


@dataclass(frozen=True)
class ExpectedStep:
    """The undisturbed run's state after a step, and the step's commit."""

    replica: Replica
    state_digest: str
    loss: float
    averages_digest: str
    scalars: StepScalars | None


class Job:
    """One of a few run specs with its scripted numbers; also a task for the worker's engine.

    Args:
        variant: Number of the run spec, below `VARIANTS`.
        steps: Steps of the run.
        topology: Topology of the exchange.
        captures: Whether the job captures rows, which depend only on the samples, and trains
            nothing.
        embeds: Whether the loss couples all samples of a step.
        buffers: Whether forward changes buffers.
    """

    def __init__(
        self,
        variant: int,
        steps: int = STEPS,
        topology: Topology = "star",
        *,
        captures: bool = False,
        embeds: bool = False,
        buffers: bool = False,
    ) -> None:
        mode, checkpoint_every = _LOG_MODES[variant // (len(_BATCHES) * len(_OPTIMIZERS))]
        variant %= len(_BATCHES) * len(_OPTIMIZERS)
        microbatch, samples, train_samples = _BATCHES[variant % len(_BATCHES)]
        optimizer = _OPTIMIZERS[variant // len(_BATCHES)]
        self.spec = UserTaskRun(
            task="tests.simulation.job:Job",
            steps=steps,
            batch=BatchSpec(samples=samples, microbatch=microbatch),
            optimizer=optimizer,
            exchange=_EXCHANGES[variant % len(_EXCHANGES)].model_copy(
                update={"topology": topology}
            ),
            evaluate_every=0 if captures else 2 if steps == STEPS else 7,
            log=mode,
            checkpoint=CheckpointSpec(
                every=checkpoint_every if steps == STEPS else 5 * checkpoint_every
            ),
            double_check_every=_DOUBLE_CHECKS[variant % len(_DOUBLE_CHECKS)],
        )
        self.blocks = tuple(
            Block.model_validate(
                {
                    "name": name,
                    "kind": kind,
                    "tensors": tuple(
                        TensorSpec(name=tensor, shape=shape) for tensor, shape in tensors.items()
                    ),
                }
            )
            for name, kind, tensors in (*_BLOCKS, *(_BUFFER_BLOCKS if buffers else ()))
        )
        ratio = Metric(name="ratio", numerator={"hits": 1.0}, denominator={"all": 1.0})
        self.manifest = Manifest(
            blocks=self.blocks,
            train_samples=train_samples,
            evaluation_parts=0 if captures else PARTS,
            metrics=() if captures else (ratio,),
            digests=dict.fromkeys(("base_weights", "vocabulary"), "a" * 64) if captures else {},
            export=Export(directory="logits" if captures else "model"),
            capture=LAYOUT if captures else None,
            embeddings=EMBEDDINGS if embeds else None,
        )
        self.manifest_document = self.manifest.to_bytes()
        self.order = SampleOrder(self.spec.seed, train_samples, self.spec.batch)
        self.captures = captures
        self.embeds = embeds
        self.steps = min(steps, self.order.steps_per_epoch) if captures else steps
        self.trainable = Trainable(blocks=self.blocks)
        self._expected_steps = _shared_steps(
            variant, steps, captures=captures, embeds=embeds, buffers=buffers
        )
        self._files: dict[tuple[bool, ...], dict[str, str]] = {}
        self._initial_replicas: dict[int, Replica] = {}
        self._coverage: dict[int, Array] = {}
        self._weights: dict[tuple[int, Subtree], float] = {}
        self._positions = {
            microbatch_seed(self.spec.seed, step, leaf): (step, leaf)
            for step in range(steps)
            for leaf in range(self.order.microbatch_count(step))
        }

    def step_and_microbatch(self, seed: int) -> tuple[int, int]:
        """Return step and microbatch of a seed; (0, 0) for the seed of a probe."""
        return self._positions.get(seed, (0, 0))

    def initial_parameters(self) -> list[Array]:
        """See `worker.tasks.base.task.Task`."""
        return self.initial()

    def user_objects(self) -> dict[str, object]:
        """Return no objects: there is no user code whose state could change."""
        return {}

    def batch(self, samples: Sequence[int]) -> Batch:
        """Return a batch that has only a weight, and in captures the samples."""
        arrays = {"sample_ids": np.asarray(samples, np.int64)} if self.captures else {}
        return Batch(arrays, _weight(samples))

    def rows(self, samples: Sequence[int]) -> Rows:
        """Return the captured rows of these samples, (samples, bytes per sample)."""
        records = np.zeros(len(samples), record_dtype(LAYOUT))
        records["sample_id"], records["rows"], records["loss_mask"] = samples, LAYOUT.tokens, 1
        for name in ("input_ids", "topk_ids", "topk_logits", "lse_1", "lse_T"):
            positions = np.arange(records[name][0].size).reshape(records[name].shape[1:])
            for record, sample in zip(records[name], samples, strict=True):
                record[...] = (positions * 3 + sample) % LAYOUT.vocabulary
        return records.view(np.uint8).reshape(len(samples), LAYOUT.sample_bytes)

    def files(self, skips: tuple[bool, ...]) -> dict[str, str]:
        """Return the digests of the files that the undisturbed capture writes."""
        if skips not in self._files:
            with tempfile.TemporaryDirectory() as name:
                captured_files = CapturedFiles(
                    Path(name), self.manifest, self.spec, 0, lambda: None
                )
                for step, is_skipped in enumerate(skips):
                    samples = [] if is_skipped else self.order.microbatches(step)
                    captured_files.store_step(
                        step, [self.rows(microbatch).reshape(-1) for microbatch in samples]
                    )
                self._files[skips] = captured_files.finish(is_complete=True)
                captured_files.close()
        return self._files[skips]

    def evaluation_batch(self, part: int) -> Batch:
        """See `worker.tasks.base.task.Task`."""
        return Batch({}, float(part))

    def replica(self, flavor: int = 0) -> Replica:
        """Return a new replica in the initial state of the task."""
        if flavor not in self._initial_replicas:
            self._initial_replicas[flavor] = Replica(self.blocks, self.spec.step_optimizer)
            self._initial_replicas[flavor].load_parameters(self.initial(flavor))
        return self._initial_replicas[flavor].copy()

    def initial(self, flavor: int = 0) -> list[Array]:
        """Return the parameters at step 0, which depend on the flavor."""
        return [
            _noise(flavor, 0, 0, index, block.elements).copy()
            for index, block in enumerate(self.blocks)
        ]

    def embedding_rows(self, parameters: list[Array], step: int, microbatch: int) -> Rows:
        """Return the embeddings of one microbatch."""
        samples = np.asarray(self.order.microbatches(step)[microbatch], np.int64)
        weights = parameters[0][:2] + parameters[1][:2]
        factors = (samples % 5 + 1).astype(np.float32)[:, None] / np.float32(3)
        fields = {"embedding": weights[None] * factors, "sample": samples}
        return join_fields(EMBEDDINGS, fields)

    def step_loss(self, rows: Rows) -> StepLoss:
        """Return the loss over a whole step, which depends on the order of its samples."""
        fields = split_fields(EMBEDDINGS, rows)
        embeddings, samples = fields["embedding"], fields["sample"]
        running_sum = np.zeros(2, np.float32)
        gradients = np.empty_like(embeddings)
        for number, gradient in enumerate(embeddings):
            gradients[number] = gradient + running_sum + np.float32(samples[number] % 3)
            running_sum = running_sum * np.float32(0.75) + gradient
        losses = (embeddings * gradients).sum(axis=1)
        return StepLoss(losses, {"embedding": gradients}, {"embedding": np.resize(running_sum, 5)})

    def _loss_of_step(self, parameters: list[Array], step: int) -> tuple[StepLoss, list[slice]]:
        """Return the loss of a step, and the rows of each microbatch."""
        count = self.order.microbatch_count(step)
        parts = [self.embedding_rows(parameters, step, leaf) for leaf in range(count)]
        row_ends = np.cumsum([len(part) for part in parts]).tolist()
        slices = [slice(end - len(part), end) for end, part in zip(row_ends, parts, strict=True)]
        return self.step_loss(np.concatenate(parts)), slices

    def step_loss_gradient(self, arrays: Mapping[str, NDArray[Any]], block: int) -> Array | float:
        """Return what the loss over a whole step adds to a microbatch's gradient of a block."""
        step_loss_gradient = arrays.get(EMBEDDING_GRADIENT + "embedding")
        if step_loss_gradient is None or block == COVERAGE or not self.blocks[block].is_trained:
            return 0.0
        parameter_gradient = arrays.get(PARAMETER_GRADIENT + "embedding")
        gradient = np.resize(
            step_loss_gradient.sum(axis=0), self.blocks[block].elements
        ) * np.float32(0.25)
        return gradient if block or parameter_gradient is None else gradient + parameter_gradient

    def gradient(
        self,
        parameters: list[Array],
        step: int,
        microbatch: int,
        block: int,
        arrays: Mapping[str, NDArray[Any]] | None = None,
    ) -> Array:
        """Return the gradient sum of one block over one microbatch."""
        if self.captures:
            return np.zeros(self.blocks[block].elements, np.float32)
        if block == COVERAGE:
            values = np.zeros(MAX_MICROBATCHES, np.float32)
            values[microbatch] = 1
            return values
        noise = _noise(1000 + step, microbatch, 0, block, self.blocks[block].elements)
        weight = np.float32(self.weight(step, microbatch))
        if self.blocks[block].kind == "counters":
            return np.full(noise.shape, weight)
        if self.blocks[block].kind == "buffers":
            return (noise - parameters[block]) * np.float32(0.25) * weight
        values = noise + parameters[block] * np.float32(0.125)
        values = (values + self.step_loss_gradient(arrays or {}, block)).astype(np.float32)
        if block == LAYER and not reaches(step, microbatch):
            values[EXPERT] = absent_gradient(EXPERT.stop - EXPERT.start)
        return values

    def _gradient_of(
        self, parameters: list[Array], step: int, block: int, microbatch: int
    ) -> Array:
        return self.gradient(parameters, step, microbatch, block)

    def _gradient_with_step_loss(
        self,
        arrays: Sequence[Mapping[str, NDArray[Any]]],
        parameters: list[Array],
        step: int,
        block: int,
        microbatch: int,
    ) -> Array:
        return self.gradient(parameters, step, microbatch, block, arrays[microbatch])

    def weight(self, step: int, microbatch: int) -> float:
        """Return the weight of a microbatch."""
        return _weight(self.order.microbatches(step)[microbatch])

    def subtree_weight(self, step: int, subtree: Subtree) -> float:
        """Return the weight of a subtree, along the tree."""
        if (step, subtree) not in self._weights:
            self._weights[step, subtree] = along_tree(
                subtree.leaves, lambda leaf: self.weight(step, subtree.lo + leaf)
            )
        return self._weights[step, subtree]

    def loss(self, parameters: list[Array], step: int, microbatch: int) -> float:
        """Return the loss sum of one microbatch."""
        if self.captures:
            return self.captured_loss(self.order.microbatches(step)[microbatch])
        return float(parameters[0][0]) + (step * 3 + microbatch) / 7

    def captured_loss(self, samples: Sequence[int]) -> float:
        """Return the loss sum over these samples of a capture."""
        return float(sum(samples)) / 7

    def sums(self, parameters: list[Array], part: int) -> dict[str, float]:
        """Return the evaluation sums of one part."""
        return {"hits": float(parameters[1][part]) / 3, "all": part + 1.0}

    def metric(self, replica: Replica) -> float:
        """Return the metric of these weights."""
        hits, total = 0.0, 0.0
        for part in range(PARTS):
            part_sums = self.sums(replica.parameters, part)
            hits += part_sums["hits"]
            total += part_sums["all"]
        return hits / total

    def total_weight(self, step: int) -> float:
        """Return the weight of a whole step, along the tree."""
        return self.subtree_weight(step, Subtree(0, self.order.microbatch_count(step)))

    def coverage(self, step: int) -> Array | None:
        """Return the average of the block that counts microbatches."""
        if step not in self._coverage:
            expected = np.zeros(MAX_MICROBATCHES, np.float32)
            if not self.captures and (total := self.total_weight(step)):
                expected[: self.order.microbatch_count(step)] = np.float32(1 / total)
                expected = _rounded(expected, self.spec.exchange.averages)
            self._coverage[step] = expected
        return self._coverage[step]

    def _check_unreached(self, before: Replica, after: Replica) -> None:
        """Check that a step leaves parameters unchanged that no microbatch reached, as torch
        does."""
        count = self.order.microbatch_count(before.step)
        if self.captures or any(reaches(before.step, leaf) for leaf in range(count)):
            return
        values_after = {(part.kind, part.block): part.values for part in after.parts()}
        for part in before.parts():
            if part.block == LAYER and part.kind != MISSED_UPDATES:
                is_unchanged = (
                    values_after[part.kind, LAYER][EXPERT].tobytes()
                    == part.values[EXPERT].tobytes()
                )
                assert is_unchanged, (
                    f"step {before.step}: an expert that no microbatch reached has changed"
                )

    def _check_buffers(
        self, before: Replica, after: Replica, averages: list[Array], *, counts: bool
    ) -> None:
        """Check that buffers changed by forward's mean change, and that no optimizer updated
        them."""
        for block in range(len(_BLOCKS), len(self.blocks)):
            change = averages[block]
            if self.blocks[block].kind == "counters":
                change = np.full(change.shape, np.float32(counts))
            expected = before.parameters[block] + change
            assert after.parameters[block].tobytes() == expected.tobytes(), (
                "a buffer has another value"
            )
            for part in after.parts():
                if part.block == block and part.kind != "parameters":
                    assert not part.values.any(), "a buffer has a moment"

    def undisturbed(self, skips: tuple[bool, ...], flavor: int = 0) -> ExpectedStep:
        """Return the undisturbed run after `len(skips)` steps; True in `skips` means a skipped
        step."""
        key = (*skips, bool(flavor))
        if key not in self._expected_steps:
            self._expected_steps[key] = self._compute_steps(skips, flavor)
        return self._expected_steps[key]

    def _compute_steps(self, skips: tuple[bool, ...], flavor: int) -> ExpectedStep:
        if not skips:
            replica = self.replica(flavor)
            return ExpectedStep(replica, replica.state_digest(), 0.0, "", None)
        return self.step_from(self.undisturbed(skips[:-1], flavor).replica, skip=skips[-1])

    def step_from(self, before: Replica, *, skip: bool) -> ExpectedStep:
        """Compute one more step of the undisturbed run, from any state."""
        replica = before.copy()
        if skip:
            replica.skip()
            return ExpectedStep(replica, replica.state_digest(), float("nan"), "0" * 64, None)
        step, count = replica.step, self.order.microbatch_count(replica.step)
        parameters, total = replica.parameters, self.total_weight(replica.step)
        averages = []
        arrays: list[Mapping[str, NDArray[Any]]] = [{}] * count
        if self.embeds:
            loss_of_step, slices = self._loss_of_step(parameters, step)
            arrays = [
                loss_of_step.add_gradients_to(Batch({}, 1.0), part, is_first=not leaf).arrays
                for leaf, part in enumerate(slices)
            ]
        for block in range(len(self.blocks)):
            leaf = partial(self._gradient_with_step_loss, arrays, parameters, step, block)
            average = along_tree(count, leaf, self.spec.exchange.precision)
            scale_to_average(average, total, out=average)
            averages.append(_rounded(average, self.spec.exchange.averages))
        loss = along_tree(count, lambda m: self.loss(parameters, step, m))
        if self.embeds:
            loss = along_tree(count, lambda m: sum(loss_of_step.losses[slices[m]].tolist()))
        norm = global_norm(
            # the other blocks are buffers, which have no gradients
            [square_sum(array) for array in averages[: len(_BLOCKS)]]
        )
        scalars = step_scalars(
            self.spec.optimizer, replica.optimizer_step + 1, step, self.steps, norm
        )
        digests = [
            weights_digest({
                tensor.name: array[part].reshape(tensor.shape) for tensor, part in block.slices()
            })
            for block, array in zip(self.blocks, averages, strict=True)
        ]  # fmt: skip
        digest = blake3("".join(digests).encode()).hexdigest()
        replica.apply(averages, scalars)
        self._check_unreached(before, replica)
        self._check_buffers(before, replica, averages, counts=bool(total))
        mean_loss = loss / total if total else 0.0
        return ExpectedStep(replica, replica.state_digest(), mean_loss, digest, scalars)


def reaches(step: int, microbatch: int) -> bool:
    """Return whether a microbatch reaches the expert; in every third step none does."""
    return step % 3 != 1 and (step + microbatch) % 4 == 0


def _weight(samples: Sequence[int]) -> float:
    """Return the weight of samples; some have weight 0, like a microbatch without tokens."""
    return (samples[0] * 5 + 1) % 6 / 3


@cache
def _shared_steps(
    variant: int, steps: int, *, captures: bool, embeds: bool, buffers: bool
) -> dict[tuple[bool, ...], ExpectedStep]:
    """Return the cache of a variant's undisturbed run, which does not depend on the log mode."""
    del variant, steps, captures, embeds, buffers
    return {}


@cache
def job_of(
    variant: int,
    steps: int = STEPS,
    topology: Topology = "star",
    *,
    captures: bool = False,
    embeds: bool = False,
    buffers: bool = False,
) -> Job:
    """Return a job, the same object each time: many seeds share one computation of the undisturbed
    run, whose bits do not depend on the topology."""
    return Job(variant, steps, topology, captures=captures, embeds=embeds, buffers=buffers)


@cache
def _noise(a: int, b: int, c: int, d: int, elements: int) -> Array:
    values = np.random.default_rng((a, b, c, d)).standard_normal(elements)
    return values.astype(np.float32)


def _rounded(values: Any, precision: Precision) -> Any:
    return values if precision == "float32" else round_to_bfloat16(values)


def along_tree(count: int, leaf: Callable[[int], Any], precision: Precision = "float32") -> Any:
    """Sum the leaves by the recursive definition of the reduction tree."""

    def total(lo: int, hi: int) -> Any:
        if hi - lo == 1:
            return _rounded(leaf(lo), precision)
        split = 1
        while split * 2 < hi - lo:
            split *= 2
        return _rounded(total(lo, lo + split) + total(lo + split, hi), precision)

    return total(0, count)
