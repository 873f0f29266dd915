"""A task compiled for a target: a Vulkan device, or the CPU in canonical arithmetic.

There is one plan per batch shape; all plans share one set of weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from backends.base.interface import (
    Array,
    Batch,
    BlockGradient,
    CaptureResult,
    Leaf,
    Loss,
    LossFailed,
    StepLoss,
    Sums,
    Trainable,
)
from backends.base.subtree_gradients import Microbatch, SubtreeGradients, sum_on_host
from backends.checks.additivity import call_under_no_grad
from backends.checks.outside_table import find_failing_index
from backends.checks.trainable_checks import (
    refuse_gradient_hooks,
    refuse_gradients_across_samples,
    refuse_running_statistics,
    refuse_sparse_gradients,
    trained_parameters,
)
from backends.losses.coupled_loss import is_carried_gradient, with_backward_loss
from backends.wgpu.capture.additivity import refuse_non_additive_loss
from backends.wgpu.capture.capture import SCALE, Capture, capture_forward, capture_step
from backends.wgpu.capture.model_proxy import ModelProxy
from backends.wgpu.capture.substitution import named_tensors
from backends.wgpu.coupled import CoupledCapture, CoupledParity
from backends.wgpu.device.packing import from_words, pack, seed_words, tensor_words
from backends.wgpu.device.running import (
    PlacedPlan,
    RunningPlan,
    Submission,
    empty_submissions,
    make_submissions,
)
from backends.wgpu.device.sum_stack import (
    Sources,
    SumStack,
    additions_for_leaf,
    largest_level_count,
)
from backends.wgpu.device.target import Buffer, ComputeTarget
from backends.wgpu.device.weights import Weights
from backends.wgpu.graph.integer_bounds import IntegerBounds
from backends.wgpu.graph.table_indices import OutsideTable, TableIndices
from backends.wgpu.lowering.estimate import (
    Estimate,
    estimate,
    has_room,
    refuse_insufficient_memory,
)
from backends.wgpu.lowering.lowered_plan import lower_to_plan
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.lowering.microbatching import enlarge_for_microbatches
from backends.wgpu.lowering.plan import Plan
from backends.wgpu.subtree_sum import sum_on_device
from backends.wgpu.weights.split_tables import split_tables
from protocol.base.errors import DataError, DeviceError, SamestepError
from protocol.base.limits import MICROBATCHES_PER_STEP, byte_size
from protocol.exact.embedding_rows import Rows, split_fields
from protocol.exact.reduction.absent import absent_gradient, mark_absent
from protocol.exact.subnormals import subnormals_are_kept
from protocol.machine.allocator import give_back_freed_memory
from protocol.spec.manifest import Block

T = TypeVar("T")

_REASON_CHARACTERS: Final = 400
"""Longest quotation of a third-party error message."""
CANONICAL_TABLE_BYTES: Final = 2**27
"""Largest table part in canonical arithmetic, where parts must not depend on the device; every
adapter can bind it."""


class CompiledProgram:
    """A torch module captured for a target. See `backends.base.interface.Program`.

    Args:
        device: The device to run on.
        trainable: The task.
        options: Options of kernel generation for the device.
        adds_on_device: Whether the device may add subtree sums, because its additions are exact.
        largest_bytes: Largest size of a buffer; by default the device's limit.

    Attributes:
        estimates: Estimated memory of each plan so far.
        parity: Description of the comparison with torch; empty before the comparison.
    """

    def __init__(
        self,
        device: ComputeTarget,
        trainable: Trainable,
        options: KernelOptions,
        *,
        adds_on_device: bool,
        largest_bytes: int | None = None,
    ) -> None:
        self._options = options
        self._blocks = trainable.blocks
        self._trained_names = [tensor.name for block in self._blocks for tensor in block.tensors]
        self._coupled = self._coupled_capture(trainable)
        if self._coupled is not None:
            trainable = with_backward_loss(trainable, self._coupled.observe)
        if trainable.module is None or trainable.loss is None:
            raise SamestepError(
                "the vulkan backend needs a torch module and a loss, got a task without them; use "
                "a cpu or cuda worker"
            )
        self._device = device
        self._trainable = trainable
        self._loss = trainable.loss
        self._largest_bytes = largest_bytes or device.largest_buffer_bytes
        table_bytes = CANONICAL_TABLE_BYTES if options.canonical else self._largest_bytes
        if trainable.capture_rows is None:
            trained_parameters(
                trainable.module, trainable.blocks
            )  # refuses other types than float32
        self._weights = Weights(device, trainable, table_bytes)
        self._slots: list[Buffer] = []
        self._output_sizes = [self._gradient_sizes(block) for block in self._blocks]
        self._embedded: list[Rows] = []
        sizes = [[4 * elements for elements in sizes] for sizes in reversed(self._output_sizes)]
        pairs = options.bindings // 2 if options.microbatches > 1 else 1
        self._sums = (
            SumStack(device, sizes, 1 << pairs.bit_length() - 1) if adds_on_device else None
        )
        self._sum_submissions: dict[Any, tuple[Submission, ...]] = {}
        self._absent_gradient: Buffer | None = None
        self._keeps_sums_on_device = False
        """Whether the subtree in progress keeps its sums on the device."""
        self._plans: dict[Any, PlacedPlan] = {}
        self._captures: dict[Any, Capture] = {}
        """Captures without a plan yet, by shapes."""
        self._temporary_plan: PlacedPlan | None = None
        """The last plan made by `run_once`."""
        self._current_run: RunningPlan | None = None
        self._lock = threading.RLock()
        self.estimates: list[Estimate] = []
        self.parity = ""
        self.loss_scale = 1.0

    def _coupled_capture(self, trainable: Trainable) -> CoupledCapture | None:
        if trainable.coupled is None or trainable.module is None:
            return None
        fuses = self._options.fuses
        return CoupledCapture(trainable.coupled, trainable.module, self._trained_names, fuses)

    @property
    def memory(self) -> str:
        """The largest estimate, and the device's memory if known."""
        largest_estimate = max(self.estimates, key=lambda estimate: estimate.total)
        memory_bytes = self._device.adapter.memory_bytes
        return (
            f"{largest_estimate} of {byte_size(memory_bytes)}"
            if memory_bytes
            else str(largest_estimate)
        )

    def check(self, example: Batch) -> None:
        """Compile a training step for batches of this shape.

        Raises:
            SamestepError: The step cannot be captured, an operator has no rule, or the step does
                not fit in the device's memory.
        """
        _refuse_wide_inputs(example)
        refuse_sparse_gradients(self._weights.module)
        refuse_gradient_hooks(trained_parameters(self._weights.module, self._blocks))
        refuse_running_statistics(self._weights.module, self._trainable.evaluation_parts)
        refuse_gradients_across_samples(self._weights.module)
        capture, arrays = self._take_capture(example), _copy_to_tensors(example)
        own_arrays = {name: x for name, x in arrays.items() if not is_carried_gradient(name)}
        refuse_non_additive_loss(
            self._weights.module, self._loss, own_arrays, capture.model_results
        )
        self._plans[_shapes(example)] = self._place_step(capture)

    def make_value_reader(self) -> Callable[[], dict[str, torch.Tensor]]:
        """Return a function that gives the module's current tensors as uploaded to the device,
        under all their names; see `Weights.make_value_reader`."""
        return self._weights.make_value_reader(named_tensors(self._weights.module))

    def capture(self, batch: Batch, *, closes_layers: bool = True) -> Capture:
        """Capture a step of the module in its current form; `closes_layers` as for
        `capture_step`."""
        module, fuses = self._weights.module, self._options.fuses
        tensors = named_tensors(module)
        trained_names = [name for name in self._trained_names if name in tensors]
        arrays = _copy_to_tensors(batch)
        is_float16 = self._options.is_float16
        fields = tuple if self._coupled is None else self._coupled.take_observed_fields
        return capture_step(
            module,
            self._loss,
            trained_names,
            arrays,
            fuses,
            closes_layers=closes_layers,
            is_float16=is_float16,
            fields=fields,
        )

    def use_capture(self, batch: Batch, capture: Capture) -> None:
        """Use this capture for batches of the same shapes."""
        self._captures[_shapes(batch)] = capture

    def gradients_of(self, batch: Batch, seed: int) -> dict[str, Array]:
        """Compute one microbatch; return gradients by name, and the loss under ""."""
        results: dict[str, Array] = {}
        for item in self.gradients([(batch, seed)]):
            if isinstance(item, BlockGradient):
                slices = self._blocks[item.block].slices()
                results |= {tensor.name: item.values[slice_] for tensor, slice_ in slices}
            elif isinstance(item, Loss):
                results[""] = np.array([item.loss_sum], np.float32)
        return results

    def gradients_once(self, capture: Capture, batch: Batch, seed: int) -> dict[str, Array]:
        """Compute one microbatch as `gradients_of`, with a temporary capture."""
        tensors = named_tensors(self._weights.module)
        trained_names = [name for name in self._trained_names if name in tensors]
        counts = [len(self._weights.tables.get(name, "1")) for name in trained_names]
        flat = self.run_once(capture, batch, seed, trained_names)
        ends = np.cumsum([1, *counts])
        results = {}
        for name, start, end in zip(["", *trained_names], [0, *ends], ends, strict=False):
            parts = [part for part in flat[start:end] if part is not None]
            results[name] = (
                np.concatenate(parts) if parts else np.zeros(tensors[name].numel(), "f4")
            )
        return results

    def run_once(
        self, capture: Capture, batch: Batch, seed: int, trained_names: Sequence[str] = ()
    ) -> list[Array | None]:
        """Run a temporary capture; return each output, flat, or None for zeros.

        `trained_names` as in `split_tables`.
        """
        with self._lock:
            if self._temporary_plan is None or self._temporary_plan.capture is not capture:
                parts = sum(len(self._weights.tables.get(name, "1")) - 1 for name in trained_names)
                groups = [list(range(len(capture.outputs) + parts))]
                self._temporary_plan = self._place_plan(capture, groups, trained_names)
                self.estimates.pop()
            placed_plan = self._temporary_plan
            words = self._pack_upload(placed_plan, batch.arrays, seed)
            arrays = RunningPlan(
                self._device, placed_plan.submissions[1], placed_plan.upload, words
            ).next()
        assert arrays is not None
        results = iter(arrays)
        return [None if output is None else next(results) for output in placed_plan.plan.outputs]

    def warm_up(self, batch: Batch) -> None:
        """Run a microbatch of another shape once: drivers compile shaders on first use."""
        for _ in self.gradients([(batch, 0)]):
            pass

    def load(self, parameters: list[Array]) -> None:
        """Upload new values; see `Program.load`.

        Raises:
            SamestepError: The arrays do not fit the blocks.
        """
        with self._lock:
            self._weights.load(parameters)

    def gradients(self, leaves: Sequence[Leaf]) -> SubtreeGradients:
        """Compute a subtree; sum on the device if the subtree has several microbatches, and the
        device's additions are exact and its memory suffices."""
        self._keeps_sums_on_device = False
        leaves = self._complete_leaves(leaves)
        if self._sums is None or len(leaves) == 1:
            return self.sum_on_host(leaves)
        levels = largest_level_count(len(leaves))
        sum_bytes = max(levels * self._sums.level_bytes, self._sums.reserved_bytes)
        if not has_room(self.estimates, sum_bytes, self._device.adapter.memory_bytes):
            return self.sum_on_host(leaves)
        self._sums.reserve(levels)
        self._keeps_sums_on_device = True
        start = partial(self._start_group, self._sums, leaves)
        shapes = {_shapes(batch): batch for batch, _ in leaves if not _is_empty(batch)}
        mark_absent = partial(self._mark_absent, list(shapes.values()))
        groups, read_embeddings = self._group_leaves(leaves), partial(self._read_embeddings, leaves)
        return sum_on_device(leaves, groups, start, mark_absent, len(self._blocks), read_embeddings)

    def sum_on_host(self, leaves: Sequence[Leaf]) -> SubtreeGradients:
        """Compute a subtree, and always sum on the host."""
        leaves = self._complete_leaves(leaves)
        return sum_on_host(leaves, self._begin_microbatch, len(self._blocks))

    def _begin_microbatch(self, leaf: int, batch: Batch, seed: int) -> Microbatch:
        del leaf
        if _is_empty(batch):
            return Microbatch(self._absent_gradients(batch), lambda: None)
        with self._lock:
            placed_plan = self._step_plan(batch)
            words = self._pack_batch(placed_plan, batch, seed)
            run = RunningPlan(self._device, placed_plan.submissions[1], placed_plan.upload, words)
            self._current_run = run
        return Microbatch(self._results(placed_plan, run, batch), run.stop)

    def complete_batch(self, batch: Batch) -> Batch:
        """Return a microbatch with all arrays of a training step; see
        `CoupledCapture.complete_batch`."""
        return batch if self._coupled is None else self._coupled.complete_batch(batch)

    def _complete_leaves(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        if self._coupled is None:
            return leaves
        return [(self._coupled.complete_batch(batch), seed) for batch, seed in leaves]

    def embed(self, leaves: Sequence[Leaf]) -> Generator[Rows, None, None]:
        """See `backends.base.interface.CoupledLossProgram`: runs the plan of a training step up to
        the embeddings."""
        coupled, leaves = self._require_coupled(), self._complete_leaves(leaves)
        for group in self._group_leaves(leaves):
            with self._lock:
                placed_plan = self._step_plan(leaves[group.start][0])
                parts = self._submissions_for(placed_plan, len(group))
                first_parts = [*takewhile(lambda part: not part.is_last, parts)]
                words = np.concatenate([self._pack_batch(placed_plan, *leaves[n]) for n in group])
                run = RunningPlan(
                    self._device, parts[: len(first_parts) + 1], placed_plan.upload, words
                )
                self._current_run = run
            arrays = run.next()
            if arrays is None:
                return
            yield from coupled.read_rows(placed_plan.capture, arrays, len(group))

    def step_loss(self, rows: Rows, seed: int) -> StepLoss:
        """See `backends.base.interface.CoupledLossProgram`: runs a separate plan."""
        coupled, samples = self._require_coupled(), len(rows)
        fields = split_fields(coupled.coupled.layout, rows)
        with self._lock:
            key = ("step loss", samples)
            if key not in self._plans:
                capture = coupled.take_capture(samples)
                parts = sum(len(self._weights.tables.get(n, "1")) - 1 for n in self._trained_names)
                groups = [list(range(len(capture.outputs) + parts))]
                self._plans[key] = self._place_plan(capture, groups, self._trained_names)
            placed_plan = self._plans[key]
            words = self._pack_upload(placed_plan, fields, seed)
            arrays = RunningPlan(
                self._device, placed_plan.submissions[1], placed_plan.upload, words
            ).next()
        assert arrays is not None
        results = iter(arrays)
        outputs = [None if output is None else next(results) for output in placed_plan.plan.outputs]
        return coupled.build_step_loss(outputs, samples, self._weights.tables)

    def take_embeddings(self) -> list[Rows]:
        """See `backends.base.interface.CoupledLossProgram`."""
        embedded, self._embedded = self._embedded, []
        return embedded

    def step_loss_parity(self) -> CoupledParity | None:
        """Return the comparison of a coupled loss with torch's; call before weights are
        uploaded."""
        return (
            None
            if self._coupled is None
            else CoupledParity(self._coupled, self.make_value_reader()())
        )

    def _require_coupled(self) -> CoupledCapture:
        assert self._coupled is not None, "only tasks with a coupled loss have embeddings"
        return self._coupled

    @property
    def _embedding_segments(self) -> int:
        """Number of segments before a step's blocks: 1 if it has embeddings."""
        return int(self._coupled is not None)

    def _read_embeddings(self, leaves: Sequence[Leaf], run: RunningPlan, group: range) -> bool:
        """Read the embeddings of a group; return whether the subtree continues."""
        if self._coupled is None:
            return True
        arrays = run.next()
        if arrays:
            capture = self._step_plan(leaves[group.start][0]).capture
            self._embedded += self._coupled.read_rows(capture, arrays, len(group))
        return arrays is not None

    def evaluate(self, batch: Batch) -> Sums:
        """Return evaluation sums; the model's forward runs on the device, the sums on the host.

        Raises:
            SamestepError: The task has no evaluation, or the evaluation reads more of the model
                than the outputs of a call.
        """
        if self._trainable.evaluate is None:
            raise SamestepError("this task has no evaluation")
        return self._evaluate(self._trainable.evaluate, batch)

    def capture_rows(self, batch: Batch) -> CaptureResult:
        """Return the captured rows of a microbatch; as in `evaluate`, only forward runs on the
        device.

        Raises:
            SamestepError: The task captures nothing, or reads more of the model than the outputs
                of a call.
        """
        if self._trainable.capture_rows is None:
            raise SamestepError("this task captures nothing")
        return self._evaluate(self._trainable.capture_rows, batch)

    def _evaluate(self, function: Callable[[Any, Mapping[str, Any]], T], batch: Batch) -> T:
        module = ModelProxy(self._weights.module, self.forward)
        arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
        try:
            return call_under_no_grad(lambda: function(module, arrays))
        except (IndexError, RuntimeError) as error:
            if (bad_index := find_failing_index(error, arrays)) is None:
                raise
            raise DataError(bad_index.text) from error

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the module's outputs in evaluation mode, with tensors on the host."""
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise SamestepError(
                "expected evaluation metrics computed from the model's outputs, got a derivative "
                "with respect to its inputs, which the vulkan backend supports in training only; "
                "remove that metric, or use a cpu or cuda worker"
            )
        key = (str(structure), tuple(_leaf_key(leaf) for leaf in leaves))
        arrays = {str(i): x.numpy() for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        with self._lock:
            if key not in self._plans:
                fuses = self._options.fuses
                is_float16 = self._options.is_float16
                capture = capture_forward(
                    self._weights.module, args, kwargs, fuses, is_float16=is_float16
                )
                self._plans[key] = self._place_plan(capture, [list(range(len(capture.outputs)))])
            placed_plan = self._plans[key]
            words = self._pack_upload(placed_plan, arrays, 0)
            results = RunningPlan(
                self._device, placed_plan.submissions[1], placed_plan.upload, words
            ).next()
        assert results is not None
        assert placed_plan.capture.results is not None
        specs = [spec for spec in placed_plan.capture.outputs if spec is not None]
        tensors = [
            from_words(result, spec.shape, spec.dtype)
            for result, spec in zip(results, specs, strict=True)
        ]
        return pytree.tree_unflatten(tensors, placed_plan.capture.results)

    def keeps_subnormals(self) -> bool:
        """Whether the host keeps subnormals; the device's behavior is part of its numerics
        profile."""
        return subnormals_are_kept()

    def close(self) -> None:
        """Abandon running work and free the device's memory; the device stays open."""
        with self._lock:
            if self._current_run is not None:
                self._current_run.stop()
            self._plans.clear()
            self._temporary_plan = None
            self._sum_submissions.clear()
            self._slots.clear()
            self._sums = self._absent_gradient = None
            self._weights.free()

    def _group_leaves(self, leaves: Sequence[Leaf]) -> list[range]:
        """Group adjacent microbatches of one shape that are computed together, up to the plan's
        limit."""
        groups: list[range] = []
        for leaf, (batch, _) in enumerate(leaves):
            placed = self._plans.get(_shapes(batch))
            room = placed.plan.microbatch_limit if placed else 1
            last_group = groups[-1] if groups else range(0)
            if 0 < len(last_group) < room and _shapes(leaves[last_group.start][0]) == _shapes(
                batch
            ):
                groups[-1] = range(last_group.start, leaf + 1)
            else:
                groups.append(range(leaf, leaf + 1))
        return groups

    def _start_group(self, sums: SumStack, leaves: Sequence[Leaf], group: range) -> RunningPlan:
        """Start a group of microbatches, which are added to the subtree's sums in order."""
        first_batch = leaves[group.start][0]
        with self._lock:
            placed_plan = None if _is_empty(first_batch) else self._step_plan(first_batch)
            merges = tuple(additions_for_leaf(leaf, len(leaves)) for leaf in group)
            shapes = None if placed_plan is None else _shapes(first_batch)
            key = (shapes, merges, group.start == 0, merges[-1].is_last and len(leaves))
            if key not in self._sum_submissions:
                microbatches = len(group)
                first_segments = self._embedding_segments
                segments = len(self._blocks) + first_segments
                parts = (
                    empty_submissions(segments)
                    if placed_plan is None
                    else self._submissions_for(placed_plan, microbatches)
                )
                sources = self._sources(placed_plan, microbatches)
                self._sum_submissions[key] = tuple(
                    sums.append_additions(parts, sources, group.start, len(leaves), first_segments)
                )
            if placed_plan is None:
                self._current_run = RunningPlan(self._device, self._sum_submissions[key])
            else:
                uploads = [self._pack_batch(placed_plan, *leaves[n]) for n in group]
                words = np.concatenate(uploads)
                self._current_run = RunningPlan(
                    self._device, self._sum_submissions[key], placed_plan.upload, words
                )
            self._keeps_sums_on_device = not merges[-1].is_last
            return self._current_run

    def _submissions_for(
        self, placed_plan: PlacedPlan, microbatches: int
    ) -> tuple[Submission, ...]:
        """Return the submissions for this number of microbatches."""
        if microbatches not in placed_plan.submissions:
            per_microbatch = self._field_outputs
            parts = make_submissions(
                placed_plan.plan, placed_plan.buffers, self._device, microbatches, per_microbatch
            )
            placed_plan.submissions[microbatches] = tuple(parts)
        return placed_plan.submissions[microbatches]

    def _sources(self, placed_plan: PlacedPlan | None, microbatches: int) -> Sources:
        """Return the buffers of the results; gradients of unreached tensors are absent."""
        gradients = []
        for microbatch in range(microbatches):
            outputs = [
                placed_plan.output(number, microbatch) if placed_plan else None
                for number in range(1, 1 + sum(map(len, self._output_sizes)))
            ]
            gradient_buffers = [
                self._absent_buffer() if buffer is None else buffer for buffer in outputs
            ]
            gradients.append(
                [
                    [gradient_buffers[o - 1] for o in self._block_outputs(n)]
                    for n in self._backward_order()
                ]
            )
        loss = placed_plan.plan.outputs[0] if placed_plan else None
        if placed_plan is None or loss is None:
            return Sources(gradients, self._device.buffer(4))
        stride = placed_plan.plan.strides[loss] if placed_plan.plan.strides else 0
        return Sources(gradients, placed_plan.buffers[loss], stride)

    def _absent_buffer(self) -> Buffer:
        """Return absent values as long as the largest gradient, allocated on first use."""
        if self._absent_gradient is None:
            largest_elements = max(elements for sizes in self._output_sizes for elements in sizes)
            self._absent_gradient = self._device.buffer(4 * largest_elements)
            self._device.upload(
                self._absent_gradient, absent_gradient(largest_elements).view(np.uint32)
            )
        return self._absent_gradient

    def _backward_order(self) -> Sequence[int]:
        """Return blocks in backward order."""
        return range(len(self._blocks) - 1, -1, -1)

    def _results(
        self, placed_plan: PlacedPlan, run: RunningPlan, batch: Batch
    ) -> Iterator[BlockGradient | Loss]:
        loss = 0.0
        if not self._read_embeddings([(batch, 0)], run, range(1)):
            return
        for number in self._backward_order():
            arrays = run.next()
            if arrays is None:
                return
            if number == 0:
                loss = float(arrays.pop()[0])
            yield BlockGradient(number, self._block_gradient(placed_plan.plan, number, arrays))
        yield Loss(loss, batch.weight)

    def _block_gradient(self, plan: Plan, number: int, arrays: Sequence[Array]) -> Array:
        """Return a block's gradient; parts of unreached tensors are absent."""
        remaining = iter(arrays)
        parts = [
            np.zeros(elements, np.float32) if plan.outputs[output] is None else next(remaining)
            for elements, output in zip(
                self._output_sizes[number], self._block_outputs(number), strict=True
            )
        ]
        values = np.concatenate(parts) if len(parts) > 1 else np.array(parts[0])
        return mark_absent(self._blocks[number], values, self._unreached_tensors(plan, number))

    def _mark_absent(self, batches: Sequence[Batch], number: int, values: Array) -> Array:
        """Return a block's sum over a subtree; parts of tensors that no batch reaches are absent.

        Args:
            batches: One batch of each shape in the subtree.
            number: The block's number.
            values: The block's sum.
        """
        block = self._blocks[number]
        unreached = {tensor.name for tensor in block.tensors}
        for batch in batches:
            unreached &= self._unreached_tensors(self._step_plan(batch).plan, number)
        return mark_absent(block, values, unreached)

    def _unreached_tensors(self, plan: Plan, number: int) -> set[str]:
        """Return the block's tensors that have no gradient in a step.

        The graph, and so this set, is the same for every microbatch of the plan's shapes.
        """
        outputs = iter(self._block_outputs(number))
        unreached = set()
        for tensor in self._blocks[number].tensors:
            parts = [next(outputs) for _ in self._weights.tables.get(tensor.name, "1")]
            if all(plan.outputs[output] is None for output in parts):
                unreached.add(tensor.name)
        return unreached

    def _block_outputs(self, number: int) -> range:
        """Return the numbers of the outputs that are a block's gradients; output 0 is the loss."""
        first_output = 1 + sum(map(len, self._output_sizes[:number]))
        return range(first_output, first_output + len(self._output_sizes[number]))

    @property
    def _field_outputs(self) -> range:
        """Numbers of the outputs that are embeddings."""
        first_output = 1 + sum(map(len, self._output_sizes))
        fields = 0 if self._coupled is None else len(self._coupled.coupled.layout.fields)
        return range(first_output, first_output + fields)

    def _gradient_sizes(self, block: Block) -> list[int]:
        """Return the size of each gradient output of a block: of a tensor, or of each of its
        parts."""
        tables = self._weights.tables
        sizes = []
        for tensor in block.tensors:
            parts = tables.get(tensor.name)
            columns = tensor.shape[-1] if tensor.shape else 1
            sizes += [part.rows * columns for part in parts] if parts else [tensor.elements]
        return sizes

    def _absent_gradients(self, batch: Batch) -> Iterator[BlockGradient | Loss]:
        for number in self._backward_order():
            yield BlockGradient(number, absent_gradient(self._blocks[number].elements))
        yield Loss(0.0, batch.weight)

    def _pack_batch(self, placed_plan: PlacedPlan, batch: Batch, seed: int) -> NDArray[np.uint32]:
        """Return the upload of a microbatch of a subtree.

        Raises:
            LossFailed: The device cannot compute with the batch's values.
        """
        try:
            return self._pack_upload(placed_plan, batch.arrays, seed)
        except OutsideTable as error:
            raise LossFailed(str(error), batch, error.row) from error
        except DataError as error:
            raise LossFailed(str(error), batch) from error

    def _pack_upload(
        self, placed_plan: PlacedPlan, arrays: Mapping[str, NDArray[Any]], seed: int
    ) -> NDArray[np.uint32]:
        """Pack the upload of a microbatch."""
        plan, capture = placed_plan.plan, placed_plan.capture
        if SCALE in capture.arrays:
            scale = np.array([self.loss_scale, 1.0 / self.loss_scale], np.float32)
            arrays = {**arrays, SCALE: scale}
        placed_plan.table_indices.refuse_indices_outside(arrays)
        placed_plan.integer_bounds.refuse_overflow(arrays)
        words = seed_words(seed, capture.seeds)
        return pack(capture.arrays, plan.upload_offsets, plan.words, arrays, words)

    def _step_plan(self, batch: Batch) -> PlacedPlan:
        shapes = _shapes(batch)
        if shapes not in self._plans:
            self._plans[shapes] = self._place_step(self._take_capture(batch))
        return self._plans[shapes]

    def _take_capture(self, batch: Batch) -> Capture:
        return self._captures.pop(_shapes(batch), None) or self.capture(batch)

    def _place_step(self, capture: Capture) -> PlacedPlan:
        groups = [list(self._block_outputs(n)) for n in self._backward_order()]
        groups[-1].append(0)  # the loss is read back with the last block
        if self._coupled is not None:
            groups.insert(0, [*self._field_outputs])
        return self._place_plan(
            capture, groups, self._trained_names, limit=self._options.microbatches
        )

    def _place_plan(
        self,
        capture: Capture,
        groups: Sequence[Sequence[int]],
        trained_names: Sequence[str] = (),
        limit: int = 1,
    ) -> PlacedPlan:
        """Lower and plan a capture and allocate its buffers, for at most `limit` microbatches that
        run together."""
        base, constants = self._weights.base, self._weights.constants
        integer_bounds = IntegerBounds(capture.graph, capture.arrays)
        table_indices = TableIndices(capture.graph, capture.arrays)
        split_tables(capture, self._weights.tables, trained_names)
        with _explain_failure("generate kernels for this model"):
            plan = lower_to_plan(capture, base, constants, self._options, groups)
        if self._sums is not None:
            plan = enlarge_for_microbatches(plan, limit, self._has_room)
        self.estimates.append(estimate(plan, self._weights.nbytes()))
        adapter, largest_bytes = self._device.adapter, self._largest_bytes
        refuse_insufficient_memory(
            self.estimates, adapter.memory_bytes, largest_bytes, adapter.name
        )
        self._make_room()
        upload = self._device.buffer(4 * plan.words * plan.microbatch_limit)
        buffers = self._assign_buffers(plan, upload)
        give_back_freed_memory()  # of the host's copy of the uploaded weights
        with _explain_failure("compile a kernel of this model"):
            parts = tuple(make_submissions(plan, buffers, self._device))
        return PlacedPlan(
            plan, capture, upload, tuple(buffers), integer_bounds, table_indices, {1: parts}
        )

    def _has_room(self, plan: Plan) -> bool:
        """Whether memory suffices for a plan and for the sums of a step's microbatches."""
        assert self._sums is not None
        memory = estimate(plan, self._weights.nbytes())
        sums = largest_level_count(MICROBATCHES_PER_STEP) * self._sums.level_bytes
        largest_slot = max(plan.slots, default=0)
        memory_bytes = self._device.adapter.memory_bytes
        return largest_slot <= self._largest_bytes and has_room([memory], sums, memory_bytes)

    def _make_room(self) -> None:
        """Free the memory of subtree sums if a new plan needs it."""
        adapter, sum_bytes = self._device.adapter, self._sums.reserved_bytes if self._sums else 0
        if self._sums is None or has_room(self.estimates, sum_bytes, adapter.memory_bytes):
            return
        if self._keeps_sums_on_device:
            raise DeviceError(
                adapter.name,
                "a microbatch of a new shape needs the memory that holds the sums of the current "
                "subtree; lower batch.microbatch or data.max_tokens",
            )
        self._sums.release()
        self._sum_submissions.clear()

    def _assign_buffers(self, plan: Plan, upload: Buffer) -> list[Buffer]:
        slots = self._take_slots(plan.slots)
        buffers = []
        for location in plan.locations:
            if location.is_upload:
                buffers.append(upload)
            elif location.tensor:
                buffers.append(self._weights.buffer(location.tensor))
            elif location.constant is not None:
                words = tensor_words(location.constant, keeps_float16=self._options.is_float16)
                buffers.append(self._device.buffer(words.nbytes))
                self._device.upload(buffers[-1], words)
            else:
                buffers.append(slots[location.slot])
        return buffers

    def _take_slots(self, sizes: Sequence[int]) -> list[Buffer]:
        """Allocate a plan's slots. Plans never run concurrently, so they share the slots'
        buffers."""
        free = sorted(self._slots, key=lambda buffer: buffer.nbytes)
        slots: dict[int, Buffer] = {}
        for slot in sorted(range(len(sizes)), key=lambda slot: -sizes[slot]):
            fitting_buffers = [b for b in free if sizes[slot] <= b.nbytes <= 2 * sizes[slot]]
            if fitting_buffers:
                slots[slot] = fitting_buffers[0]
                free.remove(fitting_buffers[0])
            else:
                slots[slot] = self._device.buffer(sizes[slot])
                self._slots.append(slots[slot])
        return [slots[slot] for slot in range(len(sizes))]


@contextmanager
def _explain_failure(task: str) -> Iterator[None]:
    """Context in which any exception becomes a SamestepError, so that an unforeseen model does not
    end the worker.

    Raises:
        SamestepError: One line, for any exception.
    """
    try:
        yield
    except SamestepError:
        raise
    except Exception as error:
        reason = _shorten(" ".join(str(error).split()))
        raise SamestepError(
            f"the vulkan backend cannot {task}: {type(error).__name__}: {reason}; use a cpu or "
            "cuda worker for this model"
        ) from error


def _shorten(text: str) -> str:
    """Keep the beginning, which names the location, and the end, which has the driver's reason."""
    return (
        text
        if len(text) <= _REASON_CHARACTERS
        else f"{text[: _REASON_CHARACTERS // 3]} ... {text[-2 * _REASON_CHARACTERS // 3 :]}"
    )


def _copy_to_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Copy a batch into tensors: a loss may change its batch in place."""
    return {name: torch.tensor(array) for name, array in batch.arrays.items()}


def _shapes(batch: Batch) -> Any:
    return tuple((name, a.shape, str(a.dtype)) for name, a in sorted(batch.arrays.items()))


def _refuse_wide_inputs(batch: Batch) -> None:
    for name, array in batch.arrays.items():
        if array.dtype.kind == "c" or (array.dtype.kind == "f" and array.dtype.itemsize > 4):
            raise SamestepError(
                f"expected float32 or integers in the batch's input {name!r}, got {array.dtype}; "
                "cast it with .float() where the batch is made"
            )


def _is_empty(batch: Batch) -> bool:
    """Whether the batch has no samples."""
    return any(array.shape[:1] == (0,) for array in batch.arrays.values())


def _leaf_key(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return repr(leaf)
