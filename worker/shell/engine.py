"""The device thread: builds the task, computes subtrees, applies steps, one action at a time.

All slow work runs here, outside the event loop that serves the network. Results go through `emit`,
which is called in this thread, in that of the digest and in that of the device watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from backends.base import progress
from backends.base.interface import (
    Backend,
    Batch,
    BlockGradient,
    CounterMismatch,
    CoupledLossProgram,
    GradientStream,
    InPlaceProgram,
    Leaf,
    Loss,
    Program,
    Trainable,
)
from backends.base.subtree_gradients import sum_rounded_on_host
from protocol.base.errors import (
    NO_MEMORY,
    DataError,
    DeviceError,
    MainMemoryTooSmall,
    RunFailed,
    SamestepError,
    ScriptMissing,
    SubnormalsFlushed,
    describe_error,
    describe_raised,
)
from protocol.base.fields import cut_text
from protocol.exact.inner_phases import InnerPhaseOrder, Steps, order_of_steps
from protocol.exact.kernels.library import use_threads
from protocol.exact.reduction.tree import Subtree
from protocol.exact.reduction.tree_sum import tree_sum
from protocol.exact.replica import Replica
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.exact.subnormals import check_subnormals
from protocol.machine.allocator import give_back_freed_memory
from protocol.machine.machine import Machine
from protocol.machine.memory import describe_shortage
from protocol.machine.processor import usable_cores
from protocol.machine.trace import Tracer, now_us
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from worker.logic import actions as act
from worker.logic.events import (
    Applied,
    BlockSum,
    BuildFailed,
    Built,
    DeviceFailed,
    FilesNeeded,
    InitialParameters,
    InnerStateNeeded,
    MicrobatchRows,
    PartEvaluated,
    ReplicaReleased,
    StepId,
    SubtreeDone,
    TaskRefused,
    WeightsTaken,
)
from worker.shell.counter_check import CounterCheck
from worker.shell.coupled_step import CoupledStep, check_embeddings
from worker.shell.device_watch import DeviceWatch
from worker.shell.example_batches import (
    evaluation_per_shape,
    microbatch_per_shape,
    report_samples,
)
from worker.shell.hashed_replica import HashedReplica, copy_state
from worker.shell.hidden_state_check import ReplayCheck, refuse_unstable_batch
from worker.shell.inner_phases import InnerPhases
from worker.shell.numerics_profile import (
    library_versions,
    loss_version,
    numerics_digest,
    probe_digest,
    rows_probe,
)
from worker.tasks.base.task import DrawsBatches, ReadsFiles, Task

if TYPE_CHECKING:
    from worker.tasks.checks.additivity import SumTrial

SUM_TRIAL_STEP: Final = 2
"""After this step, each worker repeats once the check that the loss is a sum over samples, at the
trained weights; a worker that joins later repeats it after its first step."""
_STEPS_AHEAD: Final = 8
"""Files of this many upcoming steps are requested in advance."""
_NEVER_HANG: Final = ("cpu", "scripted")
_END_TIMEOUT_S: Final = 10.0
_OVER: Final = object()
"""Marks the end of an inner phase's events."""
_CHECKED_STEPS: Final = 2
"""In this many first steps, a user's loss over all samples is computed twice and compared."""
_UPDATE_THREAD: Final = "the worker's thread that applies updates"


Release = Callable[[], None]
"""Function that the engine's thread calls when it no longer needs the arrays of an action."""


def _release_nothing() -> None:
    pass


def _describe_build_failure(run_id: str, spec: RunSpec, error: Exception) -> BuildFailed:
    """Convert an exception of a task or a library; lack of memory is local to this machine."""
    reason = describe_error(error)
    if reason == type(error).__name__:  # no message: name the line that raised it
        reason = describe_raised(error)
    text = f"the task {spec.task!r} cannot be built: {reason}"
    if reason == NO_MEMORY:
        return BuildFailed(run_id, RunFailed(f"{text}{describe_shortage(error)}"), is_local=True)
    return BuildFailed(run_id, DataError(text))


def _numerics_traits(backend: Backend, job: _Job) -> dict[str, str]:
    """Return everything that decides a gradient's bits besides the probe."""
    subnormals = {"subnormals": "kept" if job.keeps_subnormals else "flushed"}
    module = job.task.trainable.module
    if job.spec.arithmetic.is_canonical:
        return {"arithmetic": str(job.spec.arithmetic), **loss_version(module)}
    versions = {**library_versions(module), **loss_version(module)}
    return {**backend.numerics_profile(job.spec.threads), **versions, **subnormals}


def _plan_samples(order: SampleOrder, action: act.Compute) -> Sequence[Sequence[int]]:
    """Return the samples of each microbatch of a step.

    Raises:
        DataError: The coordinator has planned another number of microbatches.
    """
    step, samples = action.step_id.step, order.microbatches(action.step_id.step)
    if len(samples) != action.microbatches:
        raise DataError(
            f"step {step}: expected {len(samples)} microbatches, got a plan of "
            f"{action.microbatches}; make sure that coordinator and worker read the same data"
        )
    return samples


def trainable_of(task: Task, spec: RunSpec) -> Trainable:
    """Return a task's trainable, completed with settings of the run spec."""
    trainable = replace(task.trainable, arithmetic=spec.arithmetic, unit=spec.batch.unit)
    if (coupled := trainable.coupled) is None:
        return trainable
    samples = min(spec.batch.samples, task.manifest.epoch_samples)
    return replace(trainable, coupled=replace(coupled, samples=samples))


def _check_manifest(spec: RunSpec, manifest: Manifest) -> None:
    if manifest.embeddings is not None:
        check_embeddings(spec, manifest.embeddings)
    changing_blocks = [block for block in manifest.blocks if not block.is_trained]
    if changing_blocks and spec.replicas is not None:
        raise DataError(
            "expected layers without running state in a run with replicas, got "
            f"{changing_blocks[0].tensors[0].name!r}, which changes in forward, differently in "
            "each replica; remove replicas, or replace the layer"
        )


def _coupled_program(job: _Job) -> CoupledLossProgram:
    assert isinstance(job.program, CoupledLossProgram), "the build refuses other programs"
    return job.program


def _start_gradients(job: _Job, leaves: Sequence[Leaf]) -> GradientStream:
    if job.spec.exchange.precision == "bfloat16":
        return sum_rounded_on_host(job.program, leaves, len(job.task.manifest.blocks))
    return job.program.gradients(leaves)


def _build_batch(task: Task, samples: Sequence[int], seed: int) -> Batch:
    if isinstance(task, DrawsBatches):
        return task.drawn_batch(samples, seed)
    return task.batch(samples)


def _make_sum_trial(task: Task, spec: RunSpec) -> SumTrial | None:
    if not spec.is_user_task or spec.batch.unit == "microbatch":
        return None
    from worker.tasks.checks.additivity import sum_trial_of  # noqa: PLC0415 -- imports torch

    return sum_trial_of(task)


def _make_replay_check(
    spec: RunSpec, task: Task, program: Program, example: Batch, order: SampleOrder
) -> ReplayCheck | None:
    """Return the check for hidden state; None for a scripted device, which computes nothing."""
    if task.trainable.module is None:
        return None
    if isinstance(task, ReadsFiles):  # the task's samples are fetched later
        return ReplayCheck(spec, task, program, example, [lambda: example])
    first_batch = partial(_build_first_batch, spec, task, order, 0)
    return ReplayCheck(
        spec, task, program, example, [first_batch, _choose_unseen_batch(spec, task, order)]
    )


def _choose_unseen_batch(spec: RunSpec, task: Task, order: SampleOrder) -> Callable[[], Batch]:
    """Return a function that builds a microbatch of samples that no trial has computed yet.

    A task with state per sample has no state for these samples yet. If the data set is too small,
    the function builds its last microbatch.
    """
    used_samples = {0, 1, *order.microbatches(0)[0]}  # the build computed a loss on these
    steps = sorted({0, 1 % order.steps_per_epoch, order.steps_per_epoch - 1})
    candidates = [(step, n) for step in steps for n in range(len(order.microbatches(step)))]
    step, number = next(
        (c for c in candidates if used_samples.isdisjoint(order.microbatches(c[0])[c[1]])),
        candidates[-1],
    )
    samples = order.microbatches(step)[number]
    return partial(_build_batch, task, samples, microbatch_seed(spec.seed, step, number))


def _build_first_batch(spec: RunSpec, task: Task, order: SampleOrder, step: int) -> Batch:
    """Build the first microbatch of a step."""
    return _build_batch(task, order.microbatches(step)[0], microbatch_seed(spec.seed, step, 0))


class _DeviceRefusal(Exception):
    """The device refuses the task."""

    def __init__(self, error: SamestepError) -> None:
        self.error = error


class BackendFactory(Protocol):
    """Creates the backend and the tasks; imports torch and other libraries only when called."""

    def backend(self) -> Backend:
        """Return the device that this engine owns."""

    def task(self, spec: RunSpec) -> Task:
        """Build the task of a run spec."""


@dataclass(slots=True)
class _Job:
    """A built task, reused by the next run of the same spec: building takes seconds."""

    spec: RunSpec
    inputs: str | None
    task: Task
    program: Program
    replica: Replica
    order: Steps
    initial_digest: str
    probe_digest: str
    keeps_subnormals: bool
    run_id: str = ""
    requested_files: set[str] = field(default_factory=set)
    """Files of the next steps that were already requested."""
    uses_group_replica: bool = False
    """Whether the replica belongs to a device group, whose engine changes it."""
    is_initial: bool = True
    """Whether the replica still holds the initial state."""
    is_complete: bool = True
    """False while another replica's state is being loaded chunk by chunk."""
    inner_phases: InnerPhases | None = None
    """Set in a run with replicas."""
    coupled_step: CoupledStep | None = None
    """The loss of the current attempt, if it couples all samples of a step."""
    has_weights_loaded: bool = True
    """Whether the device has the replica's parameters; after an inner phase it has others."""
    has_average_loaded: bool = False
    """Whether the device has the averaged parameters that evaluation uses."""
    counters: CounterCheck = field(default_factory=lambda: CounterCheck(()))
    """The counters that forward changes."""
    trial: SumTrial | None = None
    """The check that the loss is a sum; None after its repetition."""
    replay: ReplayCheck | None = None
    """The check for hidden state; None for a scripted device."""
    error: DataError | None = None
    """Why the task cannot be trained, if a check after some steps failed."""


class Engine:
    """Owns the device. Its methods must be called from a single thread other than the engine's.

    Args:
        factory: Creates the backend and the tasks.
        emit: Receives each `Event`, or each `GroupReport` of a device in a group; called in the
            engine's threads.
        tracer: Records when each piece of work ran.
        machine: Threads and clock.
        in_group: Whether the device belongs to a group, whose devices share one replica.
        on_progress: Called with each progress line while a task is prepared.

    Attributes:
        preparing: The last progress line; empty while no task is prepared.
    """

    def __init__(
        self,
        factory: BackendFactory,
        emit: Callable[[Any], None],
        tracer: Tracer | None = None,
        machine: Machine | None = None,
        *,
        in_group: bool = False,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self._factory = factory
        self._emit = emit
        self._tracer = tracer
        self._machine = machine or Machine()
        self._job: _Job | None = None
        self._generation = 0
        self._cancelled: set[tuple[StepId, Subtree]] = set()
        self._current_generation = 0
        """The generation of the action that is running."""
        self._in_group = in_group
        self._replica = HashedReplica(
            self._machine,
            lambda step, digest: emit(Applied(step, digest)),
            lambda error: emit(DeviceFailed(error)),
        )
        self._on_progress = on_progress
        self.preparing = ""
        self._watch = DeviceWatch(self._report_hang)
        self._device_name = "of this worker"
        """The name in reports of a hang; replaced when the device is open."""
        self._is_open = False
        self._thread = self._machine.device_thread("engine")

    @property
    def is_hanging(self) -> bool:
        """Whether the device has not answered for much longer than its answers took before."""
        return self._watch.is_hanging

    @property
    def devices(self) -> int:
        """Number of devices that compute."""
        return 1

    def do(
        self, action: act.DeviceAction | act.GroupOrder, release: Release = _release_nothing
    ) -> None:
        """Queue an action of the session, or of the group this device belongs to.

        Args:
            action: The action; `CancelWork` and `CancelSubtree` take effect at once.
            release: Called once the action's arrays are no longer needed, in the engine's thread;
                for a cancellation at once.
        """
        match action:
            case act.CancelWork():
                self._generation += 1
                self._cancelled = set()
                release()
            case act.CancelSubtree():
                self._cancelled = {*self._cancelled, (action.step_id, action.subtree)}
                release()
            case _:
                generation = self._generation
                self._thread.submit(lambda: self._work(action, generation, release))

    def close(self) -> bool:
        """Abandon all work and end the thread.

        Returns:
            Whether the thread ended within 10 s; the device's current work cannot be interrupted.
        """
        self.do(act.CancelWork())
        self._thread.submit(self._release_device)
        has_ended = self._thread.close(_END_TIMEOUT_S)
        self._watch.close()
        self._replica.close()
        return has_ended

    # In the engine's thread.

    def _work(self, action: Any, generation: int, release: Release) -> Iterator[None]:
        self._current_generation = generation
        try:
            yield from self._HANDLERS[type(action)](self, action) or ()
        except CounterMismatch as error:
            self._refuse_task(self._require_job(), error)
        except Exception as error:  # noqa: BLE001 -- the session must learn of every failure
            self._emit(DeviceFailed(error))
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 -- a run waits for ever if this thread ends
            reason = f"the task's code raised {describe_raised(error)}, which ends a program"
            self._emit(DeviceFailed(DataError(f"{reason}: return, or raise an ordinary error")))
        finally:
            release()

    def _set_preparing(self, text: str) -> None:
        self._watch.restart_limit()
        self.preparing = text
        if self._on_progress is not None:
            self._on_progress(text)

    def _report_hang(self, reason: str) -> None:
        self._emit(DeviceFailed(DeviceError(self._device_name, reason)))

    def _open(self, action: act.OpenDevice) -> None:
        del action
        if self._is_open:
            return
        self._watch.start()
        with self._watch.preparing("it is opened"):
            info = self._factory.backend().info
        self._is_open, self._device_name = True, f"{info.backend} {info.index}"
        if info.backend in _NEVER_HANG:
            self._watch.close()

    def _release_device(self) -> Iterator[None]:
        """Leave the trained weights in the caller's module and release the device."""
        job = self._job
        if job is not None:
            try:
                if not job.uses_group_replica:
                    self._load_trained(job)
            except Exception as error:  # noqa: BLE001 -- as in _work
                self._emit(DeviceFailed(error))
            finally:
                job.program.close()
        yield from ()

    def _build(self, action: act.Build) -> None:
        """Build the task, or reuse the task of the same spec.

        The replica is reset, unless the action asks to keep its state of this run.
        """
        run_id, spec, previous = action.run_id, action.spec, self._job
        if previous is not None and previous.run_id == run_id and previous.error is not None:
            # The coordinator restarted the run before it saw the report; the steps are the same.
            self._emit(BuildFailed(run_id, previous.error))
            return
        try:
            with progress.report_to(self._set_preparing):
                job = self._prepare_job(spec, action.inputs)
        except _DeviceRefusal as refusal:
            self._emit(BuildFailed(run_id, refusal.error, is_local=True))
            return
        except SamestepError as error:
            is_local = isinstance(error, DeviceError | MainMemoryTooSmall | ScriptMissing)
            self._emit(BuildFailed(run_id, error, is_local=is_local))
            return
        except Exception as error:  # noqa: BLE001 -- a bad run spec must not end the worker
            self._emit(_describe_build_failure(run_id, spec, error))
            return
        self._replica.await_digest()
        if not self._in_group:
            use_threads(min(spec.threads, usable_cores()))
        if job.uses_group_replica:
            job.has_weights_loaded = job.has_average_loaded = False  # the group sends weights
        elif not (job.is_initial or self._may_keep_state(action, job)):
            self._replica.reset(job.replica, job.task.initial_parameters())
            self._load(job)
            job.is_complete = job.is_initial = True
            if job.inner_phases is not None:
                job.inner_phases.forget()
        if job.inner_phases is not None:
            job.inner_phases.coordinator_restarted()
        job.run_id = run_id
        job.requested_files.clear()
        if job.replay is not None:
            job.replay.begin_again()
        backend = self._factory.backend()
        traits = _numerics_traits(backend, job)
        parity = job.program.parity
        traits_text = [f"probe {job.probe_digest[:12]}", *([parity] if parity else [])]
        traits_text += [f"{key} {value}" for key, value in sorted(traits.items())]
        self._emit(
            Built(
                run_id=run_id,
                manifest=job.task.manifest,
                initial_digest=job.initial_digest,
                step=job.replica.step,
                state_digest="" if job.uses_group_replica else job.replica.state_digest(),
                numerics_profile=numerics_digest(traits, job.probe_digest),
                numerics_text=cut_text(", ".join(traits_text)),
                backend=cut_text(backend.info.backend, 64),
                device=cut_text(backend.info.name, 64),
                memory=job.program.memory,
                parity=parity,
            )
        )

    @staticmethod
    def _may_keep_state(action: act.Build, job: _Job) -> bool:
        return action.keep_state and job.run_id == action.run_id and job.is_complete

    def _prepare_job(self, spec: RunSpec, inputs: str | None) -> _Job:
        job = self._job
        if job is not None and (job.spec, job.inputs) == (spec, inputs) and job.error is None:
            return job
        if self._job is not None:
            self._job.program.close()
            self._job = None
        task = self._factory.task(spec)
        manifest = task.manifest
        order = order_of_steps(spec, manifest.train_samples, manifest.row_groups, manifest.sampling)
        _check_manifest(spec, manifest)
        batches = order.order if isinstance(order, InnerPhaseOrder) else order
        if not isinstance(task, ReadsFiles):  # the task's samples are fetched later
            refuse_unstable_batch(spec, task, lambda: _build_first_batch(spec, task, batches, 0))
        trial = _make_sum_trial(task, spec)
        check_subnormals(_UPDATE_THREAD)
        example, *other_examples = microbatch_per_shape(task, batches)
        evaluations = evaluation_per_shape(task)
        with self._watch.preparing("it compiles the task and computes its first microbatches"):
            program = self._compile(spec, task, [example, *other_examples], evaluations)
            replica = Replica(manifest.blocks, spec.step_optimizer)
            initial_parameters = task.initial_parameters()
            program.load(initial_parameters)
            progress.report("computing the first microbatches")
            captures = manifest.capture is not None
            probe = (rows_probe if captures else probe_digest)(program, [example, *other_examples])
            keeps_subnormals = program.keeps_subnormals()
            try:
                replay = _make_replay_check(spec, task, program, example, batches)
            except SamestepError:
                program.close()
                raise
        replica.load_parameters(initial_parameters)
        del initial_parameters
        # The device needs a separate copy of the parameters if evaluation loads averages, an inner
        # phase changes them, or a group's replica changes while the device computes.
        needs_copy = self._in_group or replica.has_averaged_weights or spec.replicas
        if isinstance(program, InPlaceProgram) and not needs_copy:
            program.share(replica.parameters)
        initial_digest = replica.initial_digest()
        self._job = _Job(
            spec, inputs, task, program, replica, order, initial_digest, probe, keeps_subnormals,
            counters=CounterCheck(manifest.blocks), trial=trial,
        )  # fmt: skip
        self._job.replay = replay
        self._job.counters.begin_step(replica)
        if isinstance(order, InnerPhaseOrder):
            self._job.inner_phases = InnerPhases(spec, manifest.blocks, program, order, task.batch)
        give_back_freed_memory()  # steps do not fill the gaps that loading and the trials leave
        return self._job

    def _compile(
        self, spec: RunSpec, task: Task, batches: Sequence[Batch], evaluations: Sequence[Batch]
    ) -> Program:
        """Compile the task for a microbatch of each shape.

        Raises:
            _DeviceRefusal: The device does not support the task.
        """
        example, *other_examples = batches
        progress.report(f"compiling for {self._factory.backend().info.name}")
        try:
            trainable = trainable_of(task, spec)
            backend = self._factory.backend()
            program = backend.compile(trainable, example, other_examples, evaluations)
        except SamestepError as error:
            raise _DeviceRefusal(error) from error
        if task.manifest.embeddings is not None and not isinstance(program, CoupledLossProgram):
            program.close()
            raise _DeviceRefusal(
                DeviceError(
                    self._factory.backend().info.name,
                    "expected a device that computes a loss over all samples of a step, got one "
                    "that does not; start the worker with --backend cpu, cuda or vulkan",
                )
            )
        return program

    def _compute(self, action: act.Compute) -> Iterator[None]:
        step_id, subtree = action.step_id, action.subtree
        if self._is_cancelled(step_id, subtree):
            return
        job = self._require_job()
        if isinstance(job.order, InnerPhaseOrder):
            yield from self._compute_inner_phase(job, action)
            return
        start_s, start_us = self._machine.now_s(), now_us()
        samples = _plan_samples(job.order, action)
        if self._request_files(job, action, samples):
            return
        if job.has_average_loaded:
            self._load(job)
        seeds = [microbatch_seed(job.spec.seed, step_id.step, leaf) for leaf in range(*subtree)]
        batches = [
            _build_batch(job.task, samples[leaf], seed)
            for leaf, seed in zip(range(*subtree), seeds, strict=True)
        ]
        leaves = list(zip(batches, seeds, strict=True))
        if job.task.manifest.capture is not None:
            yield from self._capture(action, batches, start_s)
            return
        if step_id.phase == "embeddings":
            work = self._embed(action, leaves, start_s)
        else:
            job.program.loss_scale = step_id.loss_scale
            if (coupled := self._coupled_step(job, step_id)) is not None:
                leaves = coupled.leaves(subtree, leaves)
            work = self._compute_gradients(action, leaves, start_s)
        batches = [batch for batch, _ in leaves]
        with report_samples(step_id.step, batches, [samples[leaf] for leaf in range(*subtree)]):
            yield from work
        if self._tracer is not None:
            self._tracer.span(f"subtree {subtree}", "subtrees", start_us, step=step_id.step)

    def _compute_gradients(
        self, action: act.Compute, leaves: Sequence[Leaf], start_s: float
    ) -> Iterator[None]:
        """Compute the gradient sums of a subtree, and its loss."""
        step_id, subtree, job = action.step_id, action.subtree, self._require_job()
        weight = tree_sum([batch.weight for batch, _ in leaves])  # known before the backward
        leaf, since_us = subtree.lo, now_us()
        loss: Loss | None = None
        stream = _start_gradients(job, leaves)
        for item in self._watch.await_each(stream):
            yield  # the device computes; other work may run
            if self._is_cancelled(step_id, subtree):
                with self._watch.awaiting():
                    stream.close()
                return
            if isinstance(item, Loss):
                loss = item
                continue
            if self._tracer is not None:
                self._tracer.span(
                    f"backward block {item.block}", "device", since_us,
                    step=step_id.step, microbatch=leaf, block=item.block,
                )  # fmt: skip
                since_us = now_us()
            if isinstance(item, BlockGradient):
                job.counters.record_changes(step_id.step, item.block, item.values, weight)
                self._emit(BlockSum(step_id, subtree, item.block, item.values, weight))
            leaf += item.block == 0
        assert loss is not None
        unlike_microbatches: tuple[int, ...] = ()
        if (coupled := job.coupled_step) is not None:
            loss = coupled.loss(subtree, weight)
            unlike_microbatches = coupled.unlike_microbatches(
                subtree, _coupled_program(job).take_embeddings()
            )
        elapsed_ms = (self._machine.now_s() - start_s) * 1e3
        self._emit(SubtreeDone(step_id, subtree, loss, elapsed_ms, unlike_microbatches))

    def _embed(self, action: act.Compute, leaves: Sequence[Leaf], start_s: float) -> Iterator[None]:
        """Compute the embeddings of a subtree's microbatches."""
        step_id, subtree = action.step_id, action.subtree
        program = _coupled_program(self._require_job())
        number = subtree.lo
        with closing(program.embed(leaves)) as embeddings:
            for rows in self._watch.await_each(embeddings):
                yield  # the device computes; other work may run
                if self._is_cancelled(step_id, subtree):
                    return
                self._emit(MicrobatchRows(step_id, subtree, number, rows))
                number += 1
        loss = Loss(0.0, tree_sum([batch.weight for batch, _ in leaves]))
        self._emit(SubtreeDone(step_id, subtree, loss, (self._machine.now_s() - start_s) * 1e3))

    def _load_embeddings(self, action: act.LoadEmbeddings) -> None:
        job = self._require_job()
        assert isinstance(job.order, SampleOrder), "the build refuses a coupled loss with replicas"
        sizes = job.order.microbatch_sizes(action.step_id.step)
        job.coupled_step = CoupledStep(
            _coupled_program(job), action.step_id, action.rows, sizes, job.spec.seed
        )
        if job.spec.is_user_task and action.step_id.step < _CHECKED_STEPS:
            try:
                job.coupled_step.check()
            except DataError as error:
                job.error = error
                self._emit(TaskRefused(job.run_id, error))

    def _coupled_step(self, job: _Job, step_id: StepId) -> CoupledStep | None:
        """Return the loss of the attempt, if it couples all samples of the step."""
        if job.task.manifest.embeddings is None:
            return None
        coupled = job.coupled_step
        assert coupled is not None, "the session loads embeddings before it asks for gradients"
        assert coupled.step_id == step_id, "the session loads embeddings of the same attempt"
        _coupled_program(job).take_embeddings()  # drop embeddings of an abandoned subtree
        return coupled

    def _compute_inner_phase(self, job: _Job, action: act.Compute) -> Iterator[None]:
        """Compute all inner steps of one replica, which is a leaf in a run with replicas."""
        step_id, microbatches, subtree = action.step_id, action.microbatches, action.subtree
        inner_phases, order, replica = job.inner_phases, job.order, subtree.lo
        assert inner_phases is not None
        assert isinstance(order, InnerPhaseOrder)
        if (microbatches, subtree.leaves) != (order.replicas, 1):
            raise DataError(f"expected one of {order.replicas} replicas, got {subtree}")
        if self._request_inner_phase_files(job, order, step_id, subtree):
            return
        if inner_phases.needs_state(step_id, replica):
            with_carried = not inner_phases.has_carried_state(step_id.step, replica)
            self._emit(InnerStateNeeded(step_id, microbatches, subtree, with_carried))
            return
        start_us = now_us()
        work = inner_phases.compute(step_id, subtree, job.replica, self._machine.now_s)
        job.has_weights_loaded = False
        while True:
            with self._watch.awaiting(with_data=True):
                event = next(work, _OVER)
            if event is _OVER:
                break
            if event is not None:
                self._emit(event)
                continue
            yield  # the device computes; other work may run
            if self._is_cancelled(step_id, subtree):
                with self._watch.awaiting():
                    work.close()
                return
        if self._tracer is not None:
            self._tracer.span(f"replica {replica}", "subtrees", start_us, step=step_id.step)

    def _request_inner_phase_files(
        self, job: _Job, order: InnerPhaseOrder, step_id: StepId, subtree: Subtree
    ) -> bool:
        if not isinstance(job.task, ReadsFiles):
            return False
        parts = (
            part
            for inner in range(order.inner_steps)
            for part in order.microbatches(step_id.step, subtree.lo, inner)
        )
        missing_files = job.task.missing([sample for part in parts for sample in part])
        if missing_files:
            self._emit(FilesNeeded(missing_files, for_subtree=(step_id, order.replicas, subtree)))
        return bool(missing_files)

    def _load_inner_state(self, action: act.LoadInnerState) -> None:
        """Load the coordinator's state of an inner phase; see `InnerPhases.load`."""
        inner_phases = self._require_job().inner_phases
        assert inner_phases is not None, "requested only in a run with replicas"
        inner_phases.load(
            action.step_id,
            action.replica,
            action.inner,
            action.content,
            with_carried=action.with_carried,
        )

    def _request_files(
        self, job: _Job, action: act.Compute, samples: Sequence[Sequence[int]]
    ) -> bool:
        """Request missing files of a subtree and of the next steps.

        Returns:
            Whether the subtree must wait; it does not wait for files of the next steps.
        """
        step_id, subtree = action.step_id, action.subtree
        if not isinstance(job.task, ReadsFiles):
            return False
        subtree_samples = [sample for leaf in range(*subtree) for sample in samples[leaf]]
        missing_files = job.task.missing(subtree_samples)
        if missing_files:
            self._emit(
                FilesNeeded(missing_files, for_subtree=(step_id, action.microbatches, subtree))
            )
        assert isinstance(job.order, SampleOrder)
        steps = job.spec.steps_with(job.task.manifest.epoch_samples)
        for step in range(step_id.step + 1, min(step_id.step + _STEPS_AHEAD, steps)):
            samples_ahead = [sample for part in job.order.microbatches(step) for sample in part]
            new_files = set(job.task.missing(samples_ahead)) - job.requested_files
            if new_files:
                job.requested_files |= new_files
                self._emit(FilesNeeded(tuple(sorted(new_files))))
        return bool(missing_files)

    def _capture(
        self, action: act.Compute, batches: Sequence[Batch], start_s: float
    ) -> Iterator[None]:
        """Compute rows and losses of a subtree in a run that only captures logits."""
        step_id, subtree = action.step_id, action.subtree
        job, losses = self._require_job(), []
        for leaf, batch in zip(range(*subtree), batches, strict=True):
            with self._watch.awaiting():
                captured = job.program.capture_rows(batch)
            yield  # the device computes; other work may run
            if self._is_cancelled(step_id, subtree):
                return
            losses.append(captured.loss_sum)
            self._emit(MicrobatchRows(step_id, subtree, leaf, captured.rows))
        weight = tree_sum([batch.weight for batch in batches])
        zeros = [np.zeros(block.elements, np.float32) for block in job.task.manifest.blocks]
        for number, values in enumerate(zeros):
            self._emit(BlockSum(step_id, subtree, number, values, weight))
        loss = Loss(tree_sum(losses), weight)
        self._emit(SubtreeDone(step_id, subtree, loss, (self._machine.now_s() - start_s) * 1e3))

    def _is_cancelled(self, step_id: StepId, subtree: Subtree) -> bool:
        return self._current_generation != self._generation or (step_id, subtree) in self._cancelled

    # The replica, which belongs to this engine or to its device group.

    def _apply(self, action: act.Apply) -> None:
        """Apply the step, or skip it if the action has no scalars."""
        job, start_us = self._require_job(), now_us()
        self._check_subnormals(job)
        job.is_initial = False
        self._replica.change(job.replica, action)
        action.averages.clear()  # their memory serves the checks that follow
        has_hidden_state = self._follow_step(
            job, None if action.scalars is None else action.attempt
        )
        if self._tracer is not None:
            self._tracer.span("apply step", "device", start_us, step=job.replica.step)
        if has_hidden_state:
            return
        self._replica.start_hashing(job.replica)
        self._retry_sum_trial(job)

    def _check_subnormals(self, job: _Job) -> None:
        with self._watch.awaiting():
            keeps_subnormals = job.program.keeps_subnormals()
        if keeps_subnormals != job.keeps_subnormals:
            # The numerics profile is from the build; model code can change its thread later.
            raise SubnormalsFlushed("since the run began, a thread that computes gradients")

    def _follow_step(self, job: _Job, attempt: int | None) -> bool:
        """Follow a step of the replica; return whether training changed hidden state.

        Args:
            job: The built task.
            attempt: The committed attempt; None if the step was skipped.
        """
        job.coupled_step = None
        if attempt is not None:
            try:
                job.counters.check(job.replica)
            except DataError as error:
                self._refuse_task(job, error)
            self._load(job)
        job.counters.begin_step(job.replica)
        if job.inner_phases is not None:
            if attempt is None:
                job.inner_phases.forget()
            else:
                job.inner_phases.end_round(StepId(job.replica.step - 1, attempt))
        return self._has_hidden_state_changed(job)

    def _load_chunk(self, action: act.LoadChunk) -> None:
        """Copy a chunk of another replica's state into this one."""
        job = self._require_job()
        job.is_complete = job.is_initial = False
        if job.inner_phases is not None:
            job.inner_phases.forget()
        self._replica.change(job.replica, action)

    def _restore(self, action: act.Restore) -> None:
        """Finish loading: every chunk of the state has arrived."""
        job = self._require_job()
        self._replica.change(job.replica, action)
        job.is_complete = True
        self._load(job)
        self._replica.start_hashing(job.replica)

    def _copy_state(self, action: act.CopyState) -> None:
        del action
        self._emit(copy_state(self._require_job().replica))

    def _read_initial(self, action: act.ReadInitial) -> None:
        del action
        self._emit(InitialParameters(self._require_job().task.initial_parameters()))

    def _attach(self, action: act.AttachReplica) -> None:
        """Read the group's replica from now on, in memory that its processes share."""
        job = self._require_job()
        arrays, blocks = action.arrays, job.task.manifest.blocks
        job.replica = Replica(
            blocks, job.spec.step_optimizer, lambda kind, block: arrays[kind][block]
        )
        job.uses_group_replica = True
        job.replica.set_counters(action.step, action.optimizer_step)
        if action.was_reset and job.inner_phases is not None:
            job.inner_phases.forget()
        self._load(job)
        self._report_weights_taken(job)

    def _take_weights(self, action: act.TakeWeights) -> None:
        job, start_us = self._require_job(), now_us()
        self._check_subnormals(job)
        job.replica.set_counters(action.step, action.optimizer_step)
        if action.committed_attempt is None:
            if job.inner_phases is not None:
                job.inner_phases.forget()
            self._load(job)
        else:
            has_hidden_state = self._follow_step(
                job, action.committed_attempt if action.committed_attempt >= 0 else None
            )
            if not has_hidden_state:
                self._retry_sum_trial(job)
        if self._tracer is not None:
            self._tracer.span("take weights", "device", start_us, step=job.replica.step)
        self._report_weights_taken(job)

    def _report_weights_taken(self, job: _Job) -> None:
        keeps_reading = job.replica.has_averaged_weights or job.inner_phases is not None
        self._emit(WeightsTaken(job.replica.step, keeps_reading))

    def _release(self, action: act.ReleaseReplica) -> None:
        del action
        self._emit(ReplicaReleased())

    def _retry_sum_trial(self, job: _Job) -> None:
        """Check once more that the loss is a sum over samples, now at the trained weights."""
        if job.trial is None or job.replica.step < SUM_TRIAL_STEP:
            return
        trial, job.trial = job.trial, None
        try:
            trial.check_after_steps(job.replica.step, job.replica.parameters)
        except DataError as error:
            self._refuse_task(job, error)

    def _refuse_task(self, job: _Job, error: DataError) -> None:
        job.error = error
        self._emit(TaskRefused(job.run_id, error))

    def _has_hidden_state_changed(self, job: _Job) -> bool:
        """Return whether training changed anything besides the replica; checks only some steps."""
        if job.error is not None:
            return True
        if job.replay is None or not job.replay.is_due(job.replica.step):
            return False
        try:
            with self._watch.preparing("it computes a microbatch again"):
                job.replay.check(job.replica.parameters, reads_replica=not job.uses_group_replica)
        except DataError as error:
            self._refuse_task(job, error)
        return job.error is not None

    def _load(self, job: _Job) -> None:
        with self._watch.awaiting():
            job.program.load(job.replica.parameters)
        job.counters.begin_step(job.replica)
        job.has_weights_loaded = True
        job.has_average_loaded = False

    def _load_trained(self, job: _Job) -> None:
        """Load the optimizer's averaged parameters, if it has any, for evaluation."""
        if job.replica.has_averaged_weights and not job.has_average_loaded:
            self._replica.await_digest()
            with self._watch.awaiting():
                job.program.load(job.replica.trained_weights())
            job.has_average_loaded = True

    def _evaluate(self, action: act.Evaluate) -> None:
        """Evaluate one part of the evaluation data, unless it was cancelled."""
        step, part = action.step, action.part
        if self._current_generation != self._generation:
            return
        job = self._require_job()
        if isinstance(job.task, ReadsFiles) and (missing_files := job.task.missing_of_part(part)):
            self._emit(FilesNeeded(missing_files, for_part=(step, part)))
            return
        if not job.has_weights_loaded:
            self._load(job)
        self._load_trained(job)
        batch = job.task.evaluation_batch(part)
        with self._watch.awaiting():
            sums = job.program.evaluate(batch)
        self._emit(PartEvaluated(step, part, dict(sums)))

    def _require_job(self) -> _Job:
        assert self._job is not None, "the session asks for work only after Built"
        return self._job

    _HANDLERS: Final[dict[type[Any], Callable[[Engine, Any], Iterator[None] | None]]] = {
        act.OpenDevice: _open,
        act.Build: _build,
        act.Compute: _compute,
        act.LoadInnerState: _load_inner_state,
        act.LoadEmbeddings: _load_embeddings,
        act.Evaluate: _evaluate,
        # For an engine with its own replica.
        act.Apply: _apply,
        act.LoadChunk: _load_chunk,
        act.Restore: _restore,
        act.CopyState: _copy_state,
        # For a device that reads the group's replica.
        act.ReadInitial: _read_initial,
        act.AttachReplica: _attach,
        act.TakeWeights: _take_weights,
        act.ReleaseReplica: _release,
    }
