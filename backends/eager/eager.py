"""The eager backend: torch's own autograd on any device that torch supports (`torch_devices`).

One persistent device thread runs forward and backward; a hook on every trainable tensor emits
finished blocks while backward of earlier blocks still runs. `backends.eager.numerics` has the
settings that make the bits repeatable.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.graph import increment_version

from backends.base import device_errors
from backends.base.interface import (
    Array,
    Batch,
    BlockAdded,
    BlockGradient,
    CaptureResult,
    DeviceInfo,
    Leaf,
    Loss,
    LossFailed,
    Program,
    StepLoss,
    Sums,
    Trainable,
)
from backends.base.step_buffers import StepBuffers
from backends.base.subtree_gradients import (
    BlockParts,
    HostSummedProgram,
    Microbatch,
    SubtreeGradients,
    check_sizes,
)
from backends.checks.additivity import LossTrial, call_under_no_grad, refuse_unlike_halves
from backends.checks.outside_table import (
    TableLookup,
    TableLookups,
    find_failing_index,
    find_outside_index,
)
from backends.checks.trainable_checks import (
    WHOLE_MICROBATCH,
    has_accumulated_hook,
    refuse_gradients_across_samples,
    refuse_running_statistics,
    trained_blocks,
    trained_parameters,
)
from backends.eager import numerics, torch_devices
from backends.eager.block_order import BlockOrder, unused_parameters
from backends.eager.device_sums import BlockCopier, BlockCopy, SubtreeSums, join_parts
from backends.eager.inner_steps import EagerInnerSteps
from backends.eager.quantized_base import quantize_frozen_base
from backends.eager.quantized_linear import convert_again_in_backward
from backends.losses.coupled_loss import embed_batch, join_rows, step_loss, with_backward_loss
from protocol.base.errors import (
    NO_MEMORY,
    DataError,
    SamestepError,
    describe_error,
    describe_raised,
)
from protocol.exact.embedding_rows import Rows
from protocol.exact.reduction.absent import absent_gradient, mark_present
from protocol.spec.sections.model import BaseDtype
from protocol.spec.sections.optimizer import OptimizerSpec

P = ParamSpec("P")
T = TypeVar("T")


class EagerBackend:
    """One torch device."""

    def __init__(self, kind: str, index: int = 0) -> None:
        """Use the device of this kind and number.

        Args:
            kind: A row of `torch_devices.KINDS`.
            index: Number of the device among devices of this kind.
        """
        numerics.make_deterministic()
        self.device = torch_devices.torch_device(kind, index)
        with torch_devices.convert_device_errors(self.device):
            torch_devices.set_current(self.device)
        self._kind, self._index = kind, index

    @cached_property  # cached, since a hanging driver would block a later query
    def info(self) -> DeviceInfo:
        """The device's name and, if the device has its own memory, the memory's size."""
        name = torch_devices.device_name(self.device)
        memory = torch_devices.memory_bytes(self.device)
        return DeviceInfo(self._kind, name, True, "", self._index, memory)

    def numerics_profile(self, threads: int) -> Mapping[str, str]:
        """See `numerics.numerics_profile`."""
        return numerics.numerics_profile(self.device, threads)

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        other_batches: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """Take over the module: move it to the device and hook its parameters.

        Raises:
            SamestepError: A tensor is missing or not float32, a buffer changes in forward, or the
                loss does not add up over samples.
            DeviceError: The device fails, or has too little memory.
        """
        del other_batches, evaluations  # new shapes need no compilation
        torch_devices.release_memory(self.device)  # memory of the previous run
        if trainable.arithmetic.is_canonical:
            raise SamestepError(
                f"the run's arithmetic is canonical, which torch on {self.device.type} does not "
                "compute; take the card through its Vulkan driver: worker --backend vulkan"
            )
        with torch_devices.convert_device_errors(self.device, "the model with one microbatch"):
            program = self._build_program(trainable)
            try:
                if trainable.capture_rows is None:
                    program.check(example)
                else:
                    program.capture_rows(example)
            except BaseException:
                program.close()
                raise
        return program

    def _build_program(self, trainable: Trainable) -> EagerProgram:
        return EagerProgram(self.device, trainable)


class EagerProgram(HostSummedProgram):
    """A torch module with its device thread."""

    _can_share_parameters = True

    def __init__(self, device: torch.device, trainable: Trainable) -> None:
        trainable = with_backward_loss(trainable, self._store_fields)
        if trainable.module is None or trainable.loss is None:
            raise SamestepError(f"the {device.type} backend needs a torch module and a loss")
        super().__init__(trainable.blocks)
        self._device = device
        self._module: torch.nn.Module = trainable.module
        self._coupled = trainable.coupled
        self._fields: Mapping[str, torch.Tensor] | None = None
        self._embedded: list[Rows] = []
        self._loss: Callable[[Any, Mapping[str, Any]], Any] = trainable.loss
        self._evaluate = trainable.evaluate
        self._capture = trainable.capture_rows
        self._evaluation_parts = trainable.evaluation_parts
        self._unit = trainable.unit
        self._seed = trainable.seed
        self._precision = trainable.precision
        self._order: BlockOrder | None = None
        self._abandoned = threading.Event()
        self._has_unused_parameters = False
        self._every_thread_keeps_subnormals: bool | None = None
        self._keeps_gradients = False
        self._is_in_loss = False
        self._lookups: frozenset[TableLookup] = frozenset()
        self._copier: BlockCopier | None = None
        if torch_devices.kind_of(device).copies_asynchronously:
            self._copier = BlockCopier(device, self._blocks)
        # Before the move, after which no parameter shares memory with another.
        checked_names = trained_parameters(self._module, trained_blocks(self._blocks))
        self._quantize_base(self._module, trainable.base_dtype)
        if trainable.precision != "float32":
            convert_again_in_backward(self._module, device)
        name_groups = _names_by_parameter(self._module)
        self._move_to_device(self._module)
        if _names_by_parameter(self._module) != name_groups:
            raise SamestepError(
                f"expected tied parameters to stay tied, but moving the model to {device} has "
                "untied them; build it without tied parameters, or use --backend cpu"
            )
        # After the move: on some devices it creates new parameters, to which hooks must attach.
        moved_parameters = dict(self._module.named_parameters())
        self._parameters = {name: moved_parameters[name] for name in checked_names}
        self._buffers = StepBuffers(self._module, self._blocks)
        self._parameters_with_hooks = [
            p for p in self._parameters.values() if has_accumulated_hook(p)
        ]
        self._hooks = self._register_hooks()
        numerics.use_threads(trainable.threads)
        self._thread = _DeviceThread(device, trainable.threads)

    def _load(self, parameters: list[Array]) -> None:
        self._thread.submit(self._copy_in, parameters).result()

    def share(self, parameters: list[Array]) -> None:
        """See `backends.base.interface.InPlaceProgram`; cards and sharded models keep a copy
        instead."""
        check_sizes(parameters, self._blocks)
        if self._device.type == "cpu" and self._can_share_parameters:
            self._thread.submit(self._share, parameters).result()

    def gradients(self, leaves: Sequence[Leaf]) -> SubtreeGradients:
        """See `Program.gradients`; the device adds gradients itself if it copies asynchronously."""
        if self._copier is None:
            return super().gradients(leaves)
        sums = SubtreeSums(len(leaves), len(self._blocks), self._device)
        return SubtreeGradients(leaves, partial(self._begin, sums=sums))

    def _begin(
        self, leaf: int, batch: Batch, seed: int, sums: SubtreeSums | None = None
    ) -> Microbatch:
        abandoned = threading.Event()
        results: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        work = _Work(leaf, batch, seed, results.put, abandoned, sums)
        computation = self._thread.submit(self._compute_microbatch, work)
        computation.add_done_callback(results.put)
        copier = self._copier

        def stop() -> None:
            abandoned.set()
            computation.cancel()
            if copier is not None:
                copier.staging.wake()
            wait([computation])
            if copier is not None:
                copier.staging.release_all()

        return Microbatch(_results(results, abandoned, copier), stop)

    def evaluate(self, batch: Batch) -> Sums:
        """Compute evaluation sums of one batch.

        Raises:
            SamestepError: The task has no evaluation.
        """
        if self._evaluate is None:
            raise SamestepError("this task has no evaluation")
        return self._thread.submit(self._run_in_evaluation_mode, self._evaluate, batch).result()

    def capture_rows(self, batch: Batch) -> CaptureResult:
        """Capture one microbatch.

        Raises:
            SamestepError: The task captures nothing.
        """
        if self._capture is None:
            raise SamestepError("this task captures nothing")
        return self._thread.submit(self._run_in_evaluation_mode, self._capture, batch).result()

    def embed(self, leaves: Sequence[Leaf]) -> Generator[Rows, None, None]:
        """See `backends.base.interface.CoupledLossProgram`."""
        for batch, seed in leaves:
            yield self._thread.submit(self._embed, batch, seed).result()

    def step_loss(self, rows: Rows, seed: int) -> StepLoss:
        """See `backends.base.interface.CoupledLossProgram`."""
        return self._thread.submit(self._step_loss, rows, seed).result()

    def take_embeddings(self) -> list[Rows]:
        """See `backends.base.interface.CoupledLossProgram`."""
        embedded, self._embedded = self._embedded, []
        return embedded

    def keeps_subnormals(self) -> bool:
        """Check the device thread at each call, and the other computing threads at the first."""
        return self._thread.submit(self._keeps_subnormals).result()

    def inner_steps(self, optimizer: OptimizerSpec) -> EagerInnerSteps:
        """Return inner steps that keep parameters and moments on the device."""
        return EagerInnerSteps(self, self._parameters, self._blocks, optimizer, self._thread)

    def close(self) -> None:
        """End the device thread and remove all hooks from the module."""
        self._abandoned.set()
        self._thread.close()
        for hook in self._hooks:
            hook.remove()

    def check(self, example: Batch) -> None:
        """Refuse a module or loss that cannot be trained exactly; also warms up the model."""
        self._thread.submit(self._check, example).result()

    def _quantize_base(self, module: torch.nn.Module, base_dtype: BaseDtype) -> None:
        quantize_frozen_base(module, base_dtype, self._device)

    def _move_to_device(self, module: torch.nn.Module) -> None:
        numerics.move_to_own_storage(module, self._device)

    def _register_hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        hooks = []
        for number, block in enumerate(self._blocks):
            for tensor in block.tensors if block.is_trained else ():
                hook = partial(self._on_gradient, number, tensor.name)
                register = self._parameters[tensor.name].register_post_accumulate_grad_hook
                hooks.append(register(hook))  # type: ignore[no-untyped-call]
        trained_ids = {id(parameter) for parameter in self._parameters.values()}
        for module in self._module.modules():
            own_parameters = module.parameters(recurse=False)
            if any(id(parameter) in trained_ids for parameter in own_parameters):
                hooks.append(module.register_forward_pre_hook(self._on_forward))
        return hooks

    # The following methods run in the device thread; on CUDA, hooks run in autograd's thread.

    def load_blocks(self, parameters: list[Array]) -> None:
        """See `backends.eager.inner_steps.AccumulatingProgram`."""
        check_sizes(parameters, self._blocks)
        self._copy_in(parameters)

    def accumulate(self, batch: Batch, seed: int) -> torch.Tensor:
        """See `backends.eager.inner_steps.AccumulatingProgram`."""
        self._abandoned = threading.Event()
        self._module.train()
        numerics.seed_everything(seed, self._device)
        self._keeps_gradients = True
        try:
            loss = self._scale_mean(self._loss_of(self._copy_to_device(batch)), batch)
            if loss.requires_grad:  # False for a microbatch without tokens
                with self._hide_accumulated_gradients():
                    loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        finally:
            self._keeps_gradients = False

    @contextmanager
    def _hide_accumulated_gradients(self) -> Iterator[None]:
        """Context in which the user's hooks receive the gradient of one microbatch, as in
        `_compute_microbatch`."""
        accumulated_gradients = [parameter.grad for parameter in self._parameters_with_hooks]
        for parameter in self._parameters_with_hooks:
            parameter.grad = None
        yield
        for parameter, sum_before in zip(
            self._parameters_with_hooks, accumulated_gradients, strict=True
        ):
            gradient = parameter.grad
            if sum_before is not None:
                parameter.grad = (
                    sum_before if gradient is None else _add_gradients(sum_before, gradient)
                )

    def _keeps_subnormals(self) -> bool:
        if self._every_thread_keeps_subnormals is None:
            keeps = numerics.keeps_subnormals(self._device, in_every_thread=True)
            self._every_thread_keeps_subnormals = keeps
        # A card's arithmetic does not change; checking it at every step would stall it.
        cpu = torch.device("cpu")
        in_this_thread = numerics.keeps_subnormals(cpu, in_every_thread=False)
        return self._every_thread_keeps_subnormals and (
            in_this_thread or self._device.type != "cpu"
        )

    def _on_gradient(self, number: int, name: str, parameter: torch.Tensor) -> None:
        self._stop_if_abandoned()
        if parameter.grad is None:
            raise SamestepError(
                f"expected the gradient of {name!r} to remain after its hooks, got none: do not "
                "clear it in a hook; the optimizer is the coordinator's"
            )
        if self._is_in_loss:
            raise SamestepError(
                "expected a loss that is returned, got a call of backward() in it, at the gradient "
                f"of {name!r}: return the sum of all losses, and samestep calls backward()"
            )
        if self._keeps_gradients:
            return
        gradient, parameter.grad = parameter.grad, None
        if self.loss_scale != 1.0:
            # Exact, since the scale is a power of two. Not in place: autograd may still use this
            # memory.
            gradient = gradient * (1.0 / self.loss_scale)
        if self._order is not None:
            self._order.add(number, name, gradient)

    def _on_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        del module, inputs
        self._stop_if_abandoned()

    def _stop_if_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise _Abandoned

    def _copy_in(self, parameters: list[Array]) -> None:
        with torch.no_grad():
            for target, source in self._values_by_parameter(parameters):
                if target.data_ptr() == source.data_ptr():
                    # Caches keyed on the version must notice the change.
                    increment_version(target)
                else:
                    target.copy_(source)
        self._buffers.load(parameters)

    def _share(self, parameters: list[Array]) -> None:
        for target, source in self._values_by_parameter(parameters):
            # A tensor's alignment can affect the bits of a product.
            if source.data_ptr() % numerics.ALIGNMENT_BYTES == 0:
                target.data = source

    def _values_by_parameter(
        self, parameters: list[Array]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each trainable tensor and its new values."""
        for block, values in zip(self._blocks, parameters, strict=True):
            for tensor, slice_ in block.slices() if block.is_trained else ():
                source = _tensor_of(values[slice_].reshape(tensor.shape))
                yield self._parameters[tensor.name], source

    def _compute_microbatch(self, work: _Work) -> Loss | None:
        self._abandoned = work.abandoned
        can_retry = True
        with torch_devices.convert_device_errors(self._device, "one microbatch"):
            while True:
                try:
                    with self._buffers.restore_afterwards():
                        return self._forward_and_backward(work)
                except RuntimeError as error:
                    has_emitted = self._order is not None and self._order.has_emitted
                    if has_emitted or not can_retry or not device_errors.is_out_of_memory(error):
                        raise
                finally:
                    self._order = self._fields = None
                    for parameter in self._parameters.values():
                        parameter.grad = None
                # Try again: another program may have freed memory, or torch's cache was fragmented.
                torch_devices.release_memory(self._device)
                can_retry = False

    def _forward_and_backward(self, work: _Work) -> Loss | None:
        """Compute one microbatch; return the loss, or None if the loss is summed on the device."""
        self._module.train()
        numerics.seed_everything(work.seed, self._device)
        loss = self._call_user_loss(work.batch)
        if loss.dim():
            raise SamestepError(f"expected a loss that is one sum, got shape {loss.shape}")
        loss = self._scale_mean(loss, work.batch)
        unused_names: frozenset[str] = frozenset()
        if self._has_unused_parameters:
            unused_names = unused_parameters(loss, self._parameters)
        if work.sums is not None:
            work.sums.set_loss(work.leaf, loss, work.batch.weight)
        self._order = BlockOrder(self._blocks, partial(self._emit, work), unused_names)
        if loss.requires_grad:  # False for a microbatch without tokens
            scaled = loss if self.loss_scale == 1.0 else loss * self.loss_scale
            scaled.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:  # otherwise zeros would be sent in its place
                raise SamestepError(
                    f"expected the gradient of {name!r} at its hook, got none there: the model's "
                    f"code, or moving it to {self._device}, has replaced the tensor"
                )
        for number, name, change in self._buffers.changes(work.batch.weight):
            self._order.add(number, name, change)
        self._order.flush()
        if self._fields is not None:
            assert self._coupled is not None
            self._embedded.append(join_rows(self._coupled, self._fields))
        return None if work.sums is not None else Loss(float(loss.detach()), work.batch.weight)

    def _scale_mean(self, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss as a part of the step's sum: multiply a mean by the batch's weight."""
        is_sum = self._unit == "sample" or self._coupled is not None
        return loss if is_sum else loss * batch.weight

    def _store_fields(self, fields: Mapping[str, torch.Tensor]) -> None:
        self._fields = fields

    def _embed(self, batch: Batch, seed: int) -> Rows:
        """Compute the embeddings of one microbatch.

        The graph is built and dropped: without a graph torch may choose other kernels, and so other
        bits, than when it computes gradients.
        """
        coupled = self._coupled
        assert coupled is not None, "only tasks with a coupled loss have embeddings"
        self._abandoned = threading.Event()
        with (
            torch_devices.convert_device_errors(self._device, "one microbatch"),
            self._buffers.restore_afterwards(),
        ):
            self._module.train()
            numerics.seed_everything(seed, self._device)
            return join_rows(coupled, self._call_user(batch, self._embed_arrays))

    def _embed_arrays(self, arrays: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        assert self._coupled is not None
        with self._compute_context():
            return embed_batch(self._coupled, self._module, arrays)

    def _step_loss(self, rows: Rows, seed: int) -> StepLoss:
        coupled = self._coupled
        assert coupled is not None, "see _embed"
        self._abandoned = threading.Event()
        with (
            torch_devices.convert_device_errors(self._device, "the loss over a step"),
            self._buffers.restore_afterwards(),
        ):
            self._module.train()
            numerics.seed_everything(seed, self._device)
            try:
                return step_loss(coupled, self._module, self._parameters, rows, self._device)
            except (SamestepError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if describe_error(error) == NO_MEMORY or device_errors.is_machine_specific(error):
                    raise
                raise DataError(f"batch_loss raised {describe_raised(error)}") from error

    def _call_user_loss(self, batch: Batch) -> torch.Tensor:
        return self._call_user(batch, self._loss_of)

    def _call_user(self, batch: Batch, function: Callable[[dict[str, torch.Tensor]], T]) -> T:
        """Call the user's model or loss on a batch; errors refer to the batch."""
        arrays = self._copy_to_device(batch)
        try:
            return function(arrays)
        except (SamestepError, _Abandoned, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if device_errors.is_bad_index(error):
                raise LossFailed(
                    "the model, or its loss, looks up an index that its table does not have, which "
                    f"breaks {self._device} for this process; --backend cpu names the index",
                    batch,
                ) from error
            if describe_error(error) == NO_MEMORY or device_errors.is_machine_specific(error):
                raise  # an error of the device, not of the model
            if bad_index := find_failing_index(error, arrays):
                raise LossFailed(bad_index.text, batch, bad_index.row) from error
            raise LossFailed(
                f"the model or its loss raised {describe_raised(error)}", batch
            ) from error

    def _emit(self, work: _Work, number: int, parts: list[torch.Tensor | None]) -> None:
        """Pass a block's gradients to the receiver, or add them to the sums on the device."""
        block, sums = self._blocks[number], work.sums
        if sums is None or self._copier is None:
            host_parts = (
                absent_gradient(tensor.elements)
                if part is None
                else mark_present(part.cpu().numpy())
                for tensor, part in zip(block.tensors, parts, strict=True)
            )
            work.put(BlockParts(number, tuple(host_parts)))
            return
        total = sums.add(work.leaf, number, join_parts(block, parts, self._device))
        if total is None:
            work.put(BlockAdded(number))
            return
        is_last = number == 0
        values = sums.append_losses(total) if is_last else total
        copy = self._copier.copy(number, values, sums if is_last else None, work.abandoned.is_set)
        if copy is not None:
            work.put(copy)

    def _run_in_evaluation_mode(self, function: Callable[[Any, Any], T], batch: Batch) -> T:
        self._abandoned = threading.Event()
        self._module.eval()
        arrays = self._copy_to_device(batch)

        def attempt() -> T:
            numerics.seed_everything(self._seed, self._device)
            with self._compute_context():
                return function(self._module, arrays)

        with (
            torch_devices.convert_device_errors(self._device, "one microbatch of evaluation"),
            self._buffers.restore_afterwards(),
        ):
            try:
                return call_under_no_grad(attempt)
            except (IndexError, RuntimeError) as error:
                if device_errors.is_machine_specific(error):
                    raise
                if (bad_index := find_failing_index(error, arrays)) is None:
                    raise
                raise DataError(bad_index.text) from error

    def _loss_of(self, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss sum in float32; backward computes in the types that forward used."""
        with self._compute_context():
            loss: torch.Tensor = self._loss(self._module, arrays)
        return loss.float() if loss.dtype in {torch.bfloat16, torch.float16} else loss

    @contextmanager
    def _compute_context(self) -> Iterator[None]:
        """Context of a computation by the model; with half precision, autocast decides which
        operators use it, and reductions stay in float32.

        Raises:
            SamestepError: Forward has changed a trained tensor, whose memory the replica may
                share.
        """
        half_dtype = torch.float16 if self._precision == "float16" else torch.bfloat16
        versions_before = self._versions()
        self._is_in_loss = True
        try:
            with torch.autocast(
                self._device.type, half_dtype, enabled=self._precision != "float32"
            ):
                yield
        finally:
            self._is_in_loss = False
        for name, version in self._versions().items():
            if version != versions_before[name]:
                raise _error_of_changed_tensor(name)

    def _versions(self) -> dict[str, int]:
        """Return the parameters' version counters, which count changes in place."""
        return {name: value._version for name, value in self._parameters.items()}  # noqa: SLF001

    def _copy_to_device(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the batch's arrays as device tensors, each with its own aligned storage."""
        if self._copier is None:
            return {name: torch.tensor(a, device=self._device) for name, a in batch.arrays.items()}
        host = {name: torch.tensor(array) for name, array in batch.arrays.items()}
        if bad_index := find_outside_index(self._lookups, host):
            raise LossFailed(bad_index.text, batch, bad_index.row)
        return {
            name: values.pin_memory().to(self._device, non_blocking=True)
            for name, values in host.items()
        }

    def _check(self, example: Batch) -> None:
        with self._buffers.restore_afterwards():
            self._check_module(example)

    def _check_module(self, example: Batch) -> None:
        exchanged_buffers = {t.name for b in self._blocks if not b.is_trained for t in b.tensors}
        refuse_running_statistics(self._module, self._evaluation_parts, exchanged_buffers)
        if self._unit == "sample":
            refuse_gradients_across_samples(self._module)
        buffers_before = {name: value.clone() for name, value in self._module.named_buffers()}
        bits_before = {name: _bit_sum(value) for name, value in self._parameters.items()}
        self._module.train()
        numerics.seed_everything(self._seed, self._device)
        arrays = self._copy_to_device(example)
        lookups = None if self._copier is None else TableLookups(arrays)
        with nullcontext() if lookups is None else lookups:
            loss = self._loss_of(arrays)
        if lookups is not None:
            self._lookups = frozenset(lookups.lookups)
        unused_names = unused_parameters(loss, self._parameters)
        self._has_unused_parameters = bool(unused_names)
        if len(unused_names) == len(self._parameters) and example.weight:
            raise SamestepError(
                "expected a loss that depends on what is trained, got one that reaches no trained "
                "tensor; compute it from the module that the loss receives"
            )
        self._try_backward(loss)
        for name, weights in self._parameters.items():
            if _bit_sum(weights) != bits_before[name]:  # changed via `.data`
                raise _error_of_changed_tensor(name)
        for name, value in self._module.named_buffers():
            if name not in exchanged_buffers and not (
                name in buffers_before and torch.equal(buffers_before[name], value)
            ):
                raise SamestepError(
                    f"the buffer {name!r} changes in forward, so replicas would differ; "
                    "use a layer without running state, an embedding without max_norm, or a plain "
                    f"attribute for what follows from shapes alone, or {WHOLE_MICROBATCH}"
                )
        if self._unit == "sample":
            self._refuse_loss_not_additive(example)

    def _try_backward(self, loss: torch.Tensor) -> None:
        """Run backward once: torch refuses some nondeterministic operators only there."""
        if self._copier is None or not loss.requires_grad:
            return
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None

    def _refuse_loss_not_additive(self, example: Batch) -> None:
        """Check that the losses of a batch's halves add up, if samples are every array's first
        dimension."""
        counts = {len(array) if array.ndim else 0 for array in example.arrays.values()}
        samples = counts.pop() if len(counts) == 1 else 0
        if samples < 2:
            return
        arrays, half_count = self._copy_to_device(example), samples // 2
        halves = [
            {name: a[half_rows] for name, a in arrays.items()}
            for half_rows in (slice(0, half_count), slice(half_count, samples))
        ]
        self._module.train()
        trial = LossTrial(self._module, lambda _, trial_arrays: self._loss_of(trial_arrays), {})
        refuse_unlike_halves(trial, arrays, halves, samples)


def _add_gradients(sum_before: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Add gradients, either of which may be sparse: torch adds sparse to dense, not dense to
    sparse."""
    return gradient + sum_before if sum_before.is_sparse else sum_before + gradient


def _bit_sum(values: torch.Tensor) -> int:
    return int(values.detach().view(torch.int32).sum())


def _error_of_changed_tensor(name: str) -> SamestepError:
    return SamestepError(
        f"{name!r}, which is trained, is changed by the model's own code in forward or evaluation, "
        "so replicas would differ; change a copy of it instead"
    )


class _Abandoned(Exception):
    """Raised to end forward or backward of a microbatch that was canceled."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A microbatch to compute.

    Attributes:
        leaf: Number of the microbatch in the subtree.
        batch: The samples.
        seed: Seed of the microbatch's random draws.
        put: Receives the results.
        abandoned: Set once the microbatch is canceled.
        sums: Adds the gradients on the device; None to add them on the host.
    """

    leaf: int
    batch: Batch
    seed: int
    put: Callable[[_Item], None]
    abandoned: threading.Event
    sums: SubtreeSums | None


_Item = BlockParts | BlockAdded | BlockCopy | Future[Loss | None]


def _results(
    results: queue.SimpleQueue[_Item], abandoned: threading.Event, copier: BlockCopier | None
) -> Iterator[BlockParts | BlockAdded | BlockGradient | Loss]:
    """Yield the results of the device thread, and raise its errors."""
    while not abandoned.is_set():
        item = results.get()
        if abandoned.is_set():
            return
        if isinstance(item, Future):
            if (loss := item.result()) is not None:
                yield loss
            return
        if isinstance(item, BlockParts | BlockAdded):
            yield item
            continue
        assert copier is not None
        with torch_devices.convert_device_errors(copier.device):
            values, summed_loss = item.finish(copier.staging)
        if abandoned.is_set():
            return
        yield BlockGradient(item.block, values)
        if summed_loss is not None:
            yield summed_loss


def _names_by_parameter(module: torch.nn.Module) -> set[frozenset[str]]:
    """Return the set of names of each parameter; a tied parameter has several names."""
    names: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values()}


class _DeviceThread(Executor):
    """The only thread that gives the device work; errors of the device become `DeviceError`.

    A daemon: a call that hangs in a driver must not keep the process from ending.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device = device
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads,), daemon=True)
        self._thread.start()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((future, partial(function, *args, **kwargs)))
        return future

    def close(self) -> None:
        """End after the work in progress; queued work is dropped."""
        with suppress(queue.Empty):
            while True:
                if (item := self._work.get_nowait()) is not None:
                    item[0].cancel()
        self._work.put(None)
        self._thread.join()

    def _run(self, threads: int) -> None:
        begin: Callable[[], None] | None = partial(self._begin, threads)
        while (item := self._work.get()) is not None:
            future, function = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with torch_devices.convert_device_errors(self._device):
                    if begin is not None:
                        begin()
                        begin = None
                    result = function()
            except BaseException as error:  # noqa: BLE001 -- raised by the future
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, function

    def _begin(self, threads: int) -> None:
        torch_devices.set_current(self._device)
        numerics.use_threads(threads)


def _tensor_of(values: Array) -> torch.Tensor:
    """Return a tensor in the memory of an array; the array is read-only if devices share it."""
    if values.flags.writeable:
        return torch.from_numpy(values)
    with warnings.catch_warnings():
        # torch warns that the array is not writable; nothing writes to it.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(values)
