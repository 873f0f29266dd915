"""The eager backend: torch's own autograd on a `cpu`, `cuda` or `mps` device.

One persistent device thread runs forward and backward; a hook on every trainable tensor hands
finished blocks out while earlier blocks are still in backward. What makes the bits repeatable is
in `backends.eager.numerics`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.autograd.graph import increment_version

from backends.base.additivity import LossTrial, measured, refuse_unlike_halves
from backends.base.interface import (
    Array,
    Batch,
    BlockGradient,
    Captured,
    DeviceInfo,
    Loss,
    LossRaised,
    Program,
    Sums,
    Trainable,
)
from backends.base.node_stream import BlockParts, HostSummedProgram, Microbatch, check_sizes
from backends.base.outside_table import index_outside
from backends.base.trainable_checks import (
    has_accumulated_hook,
    refuse_gradients_across_samples,
    refuse_running_statistics,
    trained_parameters,
)
from backends.eager import numerics
from backends.eager.block_order import BlockOrder, unused_parameters
from backends.eager.inner_steps import EagerInnerSteps
from backends.eager.narrow_linear import narrow_frozen_base
from protocol.base.errors import NO_MEMORY, DataError, SamestepError, in_words, raised_words
from protocol.exact.absent import absent, mark_absent, present
from protocol.spec.manifest import Block
from protocol.spec.run_spec import OptimizerSpec

T = TypeVar("T")


class EagerBackend:
    """One torch device."""

    def __init__(self, kind: Literal["cpu", "cuda", "mps"], index: int = 0) -> None:
        numerics.make_deterministic()
        self.device = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
        self._index = index

    @property
    def info(self) -> DeviceInfo:
        """Name and, for a CUDA device, memory."""
        memory_bytes = 0
        if self.device.type == "cuda":
            memory_bytes = int(torch.cuda.get_device_properties(self.device).total_memory)
        name = numerics.device_name(self.device)
        return DeviceInfo(self.device.type, name, True, "", self._index, memory_bytes)

    def signature(self, threads: int) -> Mapping[str, str]:
        """See `numerics.signature`."""
        return numerics.signature(self.device, threads)

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        others: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """Take over the module: move it to the device and hook its parameters.

        Raises:
            SamestepError: A tensor is missing or not float32, a buffer changes in forward, or the
                loss does not add up over samples.
        """
        del others, evaluations  # a new shape takes no time
        if trainable.arithmetic.is_canonical:
            raise SamestepError(
                f"the run's arithmetic is canonical, which torch on {self.device.type} does not "
                "compute; take the card through its Vulkan driver: worker --backend vulkan"
            )
        program = self._program(trainable)
        try:
            if trainable.rows is None:
                program.check(example)
            else:
                program.rows(example)
        except BaseException:
            program.close()
            raise
        return program

    def _program(self, trainable: Trainable) -> EagerProgram:
        return EagerProgram(self.device, trainable)


class EagerProgram(HostSummedProgram):
    """A torch module with its device thread."""

    _shares = True

    def __init__(self, device: torch.device, trainable: Trainable) -> None:
        if trainable.module is None or trainable.loss is None:
            raise SamestepError(f"the {device.type} backend needs a torch module and a loss")
        super().__init__(trainable.blocks)
        self._device = device
        self._module: torch.nn.Module = trainable.module
        self._loss: Callable[[Any, Mapping[str, Any]], Any] = trainable.loss
        self._evaluate = trainable.evaluate
        self._rows = trainable.rows
        self._in_evaluation_mode = trainable.in_evaluation
        self._seed = trainable.seed
        self._precision = trainable.precision
        self._parameters = trained_parameters(self._module, self._blocks)
        self._order: BlockOrder | None = None
        self._abandoned = threading.Event()
        self._find_unused = False
        self._all_keep_subnormals: bool | None = None
        self._keeps_gradients = False
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        narrow_frozen_base(self._module, trainable.base_dtype, device)
        self._place(self._module)
        self._hooked = [p for p in self._parameters.values() if has_accumulated_hook(p)]
        self._hooks = self._hook()
        numerics.use_threads(trainable.threads)
        self._thread = ThreadPoolExecutor(
            1, "device", partial(_enter_device_thread, device, trainable.threads)
        )

    def _load(self, parameters: list[Array]) -> None:
        self._thread.submit(self._copy_in, parameters).result()

    def share(self, parameters: list[Array]) -> None:
        """See `backends.base.interface.ComputesInPlace`; a card and a group have their own."""
        check_sizes(parameters, self._blocks)
        if self._device.type == "cpu" and self._shares:
            self._thread.submit(self._share, parameters).result()

    def _begin(self, leaf: int, batch: Batch, seed: int) -> Microbatch:
        del leaf
        abandoned = threading.Event()
        out: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        running = self._thread.submit(self._microbatch, batch, seed, out.put, abandoned)
        running.add_done_callback(out.put)

        def stop() -> None:
            abandoned.set()
            running.cancel()
            wait([running])

        return Microbatch(_items(out, abandoned), stop)

    def evaluate(self, batch: Batch) -> Sums:
        """Evaluation sums of one batch.

        Raises:
            SamestepError: The task has no evaluation.
        """
        if self._evaluate is None:
            raise SamestepError("this task has no evaluation")
        return self._thread.submit(self._in_evaluation, self._evaluate, batch).result()

    def rows(self, batch: Batch) -> Captured:
        """What is kept of one microbatch.

        Raises:
            SamestepError: The task captures nothing.
        """
        if self._rows is None:
            raise SamestepError("this task captures nothing")
        return self._thread.submit(self._in_evaluation, self._rows, batch).result()

    def keeps_subnormals(self) -> bool:
        """In the device thread; in those that share its loops, as it was at the start."""
        return self._thread.submit(self._keeps_subnormals).result()

    def inner_steps(self, optimizer: OptimizerSpec) -> EagerInnerSteps:
        """Steps that leave parameters and moments on the device."""
        return EagerInnerSteps(self, self._parameters, self._blocks, optimizer, self._thread)

    def close(self) -> None:
        """End the device thread and let go of the module."""
        self._abandoned.set()
        self._thread.shutdown(cancel_futures=True)
        for hook in self._hooks:
            hook.remove()

    def check(self, example: Batch) -> None:
        """Refuse what cannot be trained exactly; also the first, slow, run of the model."""
        self._thread.submit(self._check, example).result()

    def _place(self, module: torch.nn.Module) -> None:
        numerics.own_storage(module, self._device)

    def _hook(self) -> list[torch.utils.hooks.RemovableHandle]:
        hooks = []
        for number, block in enumerate(self._blocks):
            for tensor in block.tensors:
                hook = partial(self._gradient_ready, number, tensor.name)
                register = self._parameters[tensor.name].register_post_accumulate_grad_hook
                hooks.append(register(hook))  # type: ignore[no-untyped-call]
        owned = {id(parameter) for parameter in self._parameters.values()}
        for module in self._module.modules():
            own = module.parameters(recurse=False)
            if any(id(parameter) in owned for parameter in own):
                hooks.append(module.register_forward_pre_hook(self._forward_reached))
        return hooks

    # What follows runs in the device thread, hooks on CUDA in autograd's.

    def load_blocks(self, parameters: list[Array]) -> None:
        """See `backends.eager.inner_steps.Accumulates`."""
        check_sizes(parameters, self._blocks)
        self._copy_in(parameters)

    def accumulate(self, batch: Batch, seed: int) -> torch.Tensor:
        """See `backends.eager.inner_steps.Accumulates`."""
        self._abandoned = threading.Event()
        self._module.train()
        numerics.seed_everything(seed)
        self._keeps_gradients = True
        try:
            loss = self._loss_of(self._on_device(batch))
            if loss.requires_grad:  # not so for a microbatch without tokens
                with self._each_microbatch_alone():
                    loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        finally:
            self._keeps_gradients = False

    @contextmanager
    def _each_microbatch_alone(self) -> Iterator[None]:
        """The user's own hooks on what is accumulated see one microbatch, as in `_microbatch`."""
        earlier = [parameter.grad for parameter in self._hooked]
        for parameter in self._hooked:
            parameter.grad = None
        yield
        for parameter, sum_before in zip(self._hooked, earlier, strict=True):
            now = parameter.grad
            if sum_before is not None:
                parameter.grad = sum_before if now is None else _added(sum_before, now)

    def _keeps_subnormals(self) -> bool:
        if self._all_keep_subnormals is None:
            all_keep = numerics.keeps_subnormals(self._device, in_every_thread=True)
            self._all_keep_subnormals = all_keep
        # A card's arithmetic does not change; to ask it in every step would make it wait.
        here = torch.device("cpu")
        alone = numerics.keeps_subnormals(here, in_every_thread=False)
        return self._all_keep_subnormals and (alone or self._device.type != "cpu")

    def _gradient_ready(self, number: int, name: str, parameter: torch.Tensor) -> None:
        self._stop_if_abandoned()
        if parameter.grad is None:
            raise SamestepError(
                f"expected the gradient of {name!r} where its hook found it, got none: let the "
                "hook leave it there, optimizer steps are the coordinator's"
            )
        if self._keeps_gradients:
            return
        gradient, parameter.grad = parameter.grad, None
        if self.loss_scale != 1.0:
            # Exact: it is a power of two. Not in place: what flows on may have the same memory.
            gradient = gradient * (1.0 / self.loss_scale)
        if self._order is not None:
            self._order.add(number, name, gradient)

    def _forward_reached(self, module: torch.nn.Module, inputs: Any) -> None:
        del module, inputs
        self._stop_if_abandoned()

    def _stop_if_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise _Abandoned

    def _copy_in(self, parameters: list[Array]) -> None:
        with torch.no_grad():
            for target, source in self._pairs(parameters):
                if target.data_ptr() == source.data_ptr():
                    increment_version(target)  # what keeps something that follows from it sees it
                else:
                    target.copy_(source)

    def _share(self, parameters: list[Array]) -> None:
        for target, source in self._pairs(parameters):
            # Where a tensor begins can decide the bits of a product.
            if source.data_ptr() % numerics.ALIGNMENT_BYTES == 0:
                target.data = source

    def _pairs(self, parameters: list[Array]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each trainable tensor, and what is given for it."""
        for block, values in zip(self._blocks, parameters, strict=True):
            for tensor, place in block.slices():
                source = torch.from_numpy(values[place].reshape(tensor.shape))
                yield self._parameters[tensor.name], source

    def _microbatch(
        self, batch: Batch, seed: int, put: Callable[[_Item], None], abandoned: threading.Event
    ) -> Loss:
        self._abandoned = abandoned
        self._module.train()
        numerics.seed_everything(seed)
        try:
            loss = self._users_loss(batch)
            if loss.dim():
                raise SamestepError(f"expected a loss that is one sum, got shape {loss.shape}")
            unused: frozenset[str] = frozenset()
            if self._find_unused:
                unused = unused_parameters(loss, self._parameters)
            self._order = BlockOrder(self._blocks, partial(self._emit, put), unused)
            if loss.requires_grad:  # not so for a microbatch without tokens
                scaled = loss if self.loss_scale == 1.0 else loss * self.loss_scale
                scaled.backward()  # type: ignore[no-untyped-call]
            self._order.flush()
            return Loss(float(loss.detach()), batch.weight)
        finally:
            self._order = None
            for parameter in self._parameters.values():
                parameter.grad = None

    def _users_loss(self, batch: Batch) -> torch.Tensor:
        arrays = self._on_device(batch)
        try:
            return self._loss_of(arrays)
        except (SamestepError, _Abandoned, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if in_words(error) == NO_MEMORY or "CUDA" in str(error):
                raise  # the device's own
            if outside := index_outside(error, arrays):
                raise LossRaised(outside.text, batch, outside.row) from error
            raise LossRaised(
                f"the model or its loss raised {raised_words(error)}", batch
            ) from error

    def _emit(
        self, put: Callable[[_Item], None], number: int, parts: list[torch.Tensor | None]
    ) -> None:
        """Hand a block to the receiver; from CUDA it is copied beside the running backward."""
        block = self._blocks[number]
        sized = list(zip(block.tensors, parts, strict=True))
        if self._copies is None:
            host_parts = (
                absent(tensor.elements) if part is None else present(part.cpu().numpy())
                for tensor, part in sized
            )
            put(BlockParts(number, tuple(host_parts)))
            return
        unreached = frozenset(tensor.name for tensor, part in sized if part is None)
        flat = torch.cat(
            [
                torch.zeros(tensor.elements, device=self._device) if part is None else part
                for tensor, part in sized
            ]
        )
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            host.copy_(flat, non_blocking=True)
            flat.record_stream(self._copies)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copies)
        put(_Copied(number, block, unreached, host, copied))

    def _in_evaluation(self, measure: Callable[[Any, Any], T], batch: Batch) -> T:
        self._abandoned = threading.Event()
        self._module.eval()
        arrays = self._on_device(batch)

        def once() -> T:
            numerics.seed_everything(self._seed)
            with self._computing():
                return measure(self._module, arrays)

        try:
            return measured(once)
        except (IndexError, RuntimeError) as error:
            if "CUDA" in str(error) or (outside := index_outside(error, arrays)) is None:
                raise
            raise DataError(outside.text) from error

    def _loss_of(self, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss's sum in float32; backward computes in the types that forward used."""
        with self._computing():
            loss: torch.Tensor = self._loss(self._module, arrays)
        return loss.float() if loss.dtype in {torch.bfloat16, torch.float16} else loss

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Half precision where torch holds it safe, if asked for; reductions stay in float32.

        Raises:
            SamestepError: What is trained is not what it was: it may be the replica's own memory.
        """
        half = torch.float16 if self._precision == "float16" else torch.bfloat16
        before = self._versions()
        with torch.autocast(self._device.type, half, enabled=self._precision != "float32"):
            yield
        for name, version in self._versions().items():
            if version != before[name]:
                raise _changed_in_forward(name)

    def _versions(self) -> dict[str, int]:
        """They count changes in place."""
        return {name: value._version for name, value in self._parameters.items()}  # noqa: SLF001

    def _on_device(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The arrays as tensors with aligned storage of their own."""
        return {name: torch.tensor(a, device=self._device) for name, a in batch.arrays.items()}

    def _check(self, example: Batch) -> None:
        refuse_running_statistics(self._module, self._in_evaluation_mode)
        refuse_gradients_across_samples(self._module)
        before = {name: value.clone() for name, value in self._module.named_buffers()}
        trained = {name: _sum_of_bits(value) for name, value in self._parameters.items()}
        self._module.train()
        numerics.seed_everything(self._seed)
        loss = self._loss_of(self._on_device(example))
        self._find_unused = bool(unused_parameters(loss, self._parameters))
        for name, weights in self._parameters.items():
            if _sum_of_bits(weights) != trained[name]:  # by `.data`, which has no version
                raise _changed_in_forward(name)
        for name, value in self._module.named_buffers():
            if name not in before or not torch.equal(before[name], value):
                raise SamestepError(
                    f"the buffer {name!r} changes in forward, which no replica could follow; "
                    "use a layer without running state, an embedding without max_norm, or a plain "
                    "attribute for what follows from shapes alone"
                )
        self._refuse_loss_that_does_not_add_up(example)

    def _refuse_loss_that_does_not_add_up(self, example: Batch) -> None:
        """Where all arrays have samples first, the loss of halves must add to the whole."""
        counts = {len(array) if array.ndim else 0 for array in example.arrays.values()}
        samples = counts.pop() if len(counts) == 1 else 0
        if samples < 2:
            return
        arrays, half = self._on_device(example), samples // 2
        halves = [
            {name: a[part] for name, a in arrays.items()}
            for part in (slice(0, half), slice(half, samples))
        ]
        self._module.train()
        trial = LossTrial(self._module, lambda _, given: self._loss_of(given), {})
        refuse_unlike_halves(trial, arrays, halves, samples)


def _added(sum_before: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A sparse one is no place to add a dense one to."""
    return gradient + sum_before if sum_before.is_sparse else sum_before + gradient


def _sum_of_bits(values: torch.Tensor) -> int:
    return int(values.detach().view(torch.int32).sum())


def _changed_in_forward(name: str) -> SamestepError:
    return SamestepError(
        f"{name!r}, which is trained, is changed by the model's own code in forward or evaluation, "
        "which no other replica could follow; compute with a changed copy of it"
    )


class _Abandoned(Exception):
    """Ends forward or backward of a microbatch that nobody wants any more."""


class _Copied(NamedTuple):
    """A block on its way from a card to the host.

    Attributes:
        number: The block's.
        block: Of the manifest.
        unreached: Its tensors without a gradient.
        host: All gradients, flat, once `copied` has happened.
    """

    number: int
    block: Block
    unreached: frozenset[str]
    host: torch.Tensor
    copied: torch.cuda.Event


_Item = BlockParts | _Copied | Future[Loss]


def _items(
    out: queue.SimpleQueue[_Item], abandoned: threading.Event
) -> Iterator[BlockParts | BlockGradient | Loss]:
    """What the device thread puts out; its errors are raised here."""
    while not abandoned.is_set():
        item = out.get()
        if abandoned.is_set():
            return
        if isinstance(item, Future):
            yield item.result()
            return
        if isinstance(item, BlockParts):
            yield item
        else:
            item.copied.synchronize()
            gradient = mark_absent(item.block, item.host.numpy(), item.unreached)
            yield BlockGradient(item.number, gradient)


def _enter_device_thread(device: torch.device, threads: int) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    numerics.use_threads(threads)
