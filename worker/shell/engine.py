"""The device's thread: builds the task, computes nodes, applies steps; one job after the other.

Everything that takes time happens here, away from the network. Results come back through `emit`,
which is called in this thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from backends.base.interface import (
    Array,
    Backend,
    Batch,
    BlockGradient,
    ComputesInPlace,
    Leaf,
    Loss,
    NodeGradients,
    Program,
)
from backends.base.node_stream import rounded_by_microbatch
from protocol.base.errors import (
    NO_MEMORY,
    DataError,
    MainMemoryTooSmall,
    RunFailed,
    SamestepError,
    ScriptMissing,
    SubnormalsFlushed,
    in_words,
    raised_words,
)
from protocol.base.fields import cut_text
from protocol.exact.replica import PartKind, Replica, StatePart
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.exact.stretches import Steps, StretchOrder, order_of_steps
from protocol.exact.subnormals import check_subnormals
from protocol.exact.tree import Node
from protocol.exact.tree_sum import tree_sum
from protocol.exact.update import StepScalars
from protocol.host.machine import Machine
from protocol.host.memory import figures_of
from protocol.host.trace import Tracer, now_us
from protocol.spec.idle_keys import TASK_SECTIONS
from protocol.spec.run_spec import RunSpec
from worker.logic import actions as act
from worker.logic.events import (
    Applied,
    BlockSum,
    BuildFailed,
    Built,
    DeviceFailed,
    Event,
    FilesWanted,
    MicrobatchRows,
    NodeDone,
    PartEvaluated,
    StateCopied,
    StepAttempt,
    StretchStateWanted,
    TaskRefused,
)
from worker.shell.batch_shapes import evaluation_of_each_shape, microbatch_of_each_shape
from worker.shell.replay import ReplayCheck, refuse_unsteady_batch
from worker.shell.samples_named import samples_named
from worker.shell.signature import library_versions, probe_digest, rows_probe, signature_digest
from worker.shell.stretches import Bytes, Stretches
from worker.tasks.base import DrawsBatches, ReadsFiles, Task

if TYPE_CHECKING:
    from worker.tasks.additivity import SumTrial

TRIED_AGAIN_AT_STEP: Final = 2
"""What a task keeps to, as its loss being a sum, is tried again after this step, or after the first
one that this worker takes, if that is later: at the weights of then."""
_STEPS_AHEAD: Final = 8
"""So far ahead of a step the files of the next ones are asked for."""
_APPLIES: Final = "the worker's thread that applies updates"


Taken = Callable[[], None]
"""Called in the engine's thread when it needs no more of what it was given."""


def _nobody_waits() -> None:
    pass


def _build_failed(run_id: str, spec: RunSpec, error: Exception) -> BuildFailed:
    """What a task or a library under it raised; another machine may have the memory."""
    words = in_words(error)
    if words == type(error).__name__:  # it has no text: at least where
        words = raised_words(error)
    told = f"the task {spec.task!r} cannot be built: {words}"
    if words == NO_MEMORY:
        return BuildFailed(run_id, RunFailed(f"{told}{figures_of(error)}"), own=True)
    return BuildFailed(run_id, DataError(told))


def _traits(backend: Backend, job: _Job) -> dict[str, str]:
    """What decides a gradient's bits, beside the probe."""
    kept = {"subnormals": "kept" if job.keeps_subnormals else "flushed"}
    if job.spec.arithmetic.is_canonical:
        return {"arithmetic": str(job.spec.arithmetic)}
    versions = library_versions(job.task.trainable.module)
    return {**backend.signature(job.spec.threads), **versions, **kept}


def _gradients(job: _Job, leaves: Sequence[Leaf]) -> NodeGradients:
    if job.spec.exchange.precision == "bfloat16":
        return rounded_by_microbatch(job.program, leaves, len(job.task.manifest.blocks))
    return job.program.gradients(leaves)


def _batch(task: Task, samples: Sequence[int], seed: int) -> Batch:
    if isinstance(task, DrawsBatches):
        return task.drawn_batch(samples, seed)
    return task.batch(samples)


def _trial_of(task: Task, spec: RunSpec) -> SumTrial | None:
    if spec.task in TASK_SECTIONS:
        return None
    from worker.tasks.additivity import sum_trial_of  # noqa: PLC0415 -- imports torch

    return sum_trial_of(task)


def _replay(
    spec: RunSpec, task: Task, program: Program, example: Batch, order: SampleOrder
) -> ReplayCheck | None:
    """Nothing moves where nothing is computed."""
    if task.trainable.module is None:
        return None
    if isinstance(task, ReadsFiles):  # samples come later
        return ReplayCheck(spec, task, program, example, [lambda: example])
    first = partial(_first_batch, spec, task, order, 0)
    return ReplayCheck(spec, task, program, example, [first, _unseen_batch(spec, task, order)])


def _unseen_batch(spec: RunSpec, task: Task, order: SampleOrder) -> Callable[[], Batch]:
    """Makes a microbatch of samples that no trial has computed, where there is one: what is kept
    by sample is not there yet."""
    seen = {0, 1, *order.microbatches(0)[0]}  # the first samples of the data are tried with a loss
    steps = sorted({0, 1 % order.steps_per_epoch, order.steps_per_epoch - 1})
    places = [(step, n) for step in steps for n in range(len(order.microbatches(step)))]
    step, number = next(
        (each for each in places if seen.isdisjoint(order.microbatches(each[0])[each[1]])),
        places[-1],
    )
    samples = order.microbatches(step)[number]
    return partial(_batch, task, samples, microbatch_seed(spec.seed, step, number))


def _first_batch(spec: RunSpec, task: Task, order: SampleOrder, step: int) -> Batch:
    """The first microbatch of a step."""
    return _batch(task, order.microbatches(step)[0], microbatch_seed(spec.seed, step, 0))


class _Unfit(Exception):
    """The device refuses the task."""

    def __init__(self, error: SamestepError) -> None:
        self.error = error


class Toolbox(Protocol):
    """Where backend and task come from; both import what they need only when asked."""

    def backend(self) -> Backend:
        """The device this engine owns."""

    def task(self, spec: RunSpec) -> Task:
        """The task of a run spec."""


@dataclass(slots=True)
class _Job:
    """A built task: kept between runs of the same spec, for it takes seconds to build."""

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
    asked: set[str] = field(default_factory=set)
    """Files that will be needed soon and were asked for."""
    fresh: bool = True
    """Whether the replica is in the initial state still."""
    whole: bool = True
    """Whether the replica is in one state: not while another's is being loaded."""
    stretches: Stretches | None = None
    """Of a run with replicas."""
    loaded: bool = True
    """Whether the device has the replica's parameters: a stretch leaves its own there."""
    averaged: bool = False
    """Whether the device has the average that an optimizer keeps, to measure it."""
    trial: SumTrial | None = None
    """Of the loss, until it has been tried again."""
    replay: ReplayCheck | None = None
    """Compares what the task computes with what it computed first; None for a scripted device."""
    fault: DataError | None = None
    """Why the task cannot be trained, where that was found after some steps."""


class Engine:
    """Owns the device; call its methods from one other thread."""

    def __init__(
        self,
        toolbox: Toolbox,
        emit: Callable[[Event], None],
        tracer: Tracer | None = None,
        machine: Machine | None = None,
    ) -> None:
        self._toolbox = toolbox
        self._emit = emit
        self._tracer = tracer
        self._machine = machine or Machine()
        self._job: _Job | None = None
        self._generation = 0
        self._cancelled: set[tuple[StepAttempt, Node]] = set()
        self._digests = self._machine.thread("digest")
        self._digest: Future[None] | None = None
        self._thread = self._machine.device_thread("engine")

    @property
    def devices(self) -> int:
        """How many compute."""
        return 1

    def allocate(self, elements: int) -> Array:
        """Memory for averages: flat float32."""
        return np.empty(elements, np.float32)

    def do(self, action: act.DeviceAction, taken: Taken = _nobody_waits) -> None:
        """Do what the session asks of the device.

        Args:
            action: What.
            taken: Called in this object's thread once it needs no more of the values in it.
        """
        match action:
            case act.OpenDevice():
                self.open()
            case act.Build():
                self.build(action.run_id, action.spec, keep=action.keep, inputs=action.inputs)
            case act.Compute():
                self.compute(action.place, action.microbatches, action.node)
            case act.GiveStretch():
                self.give_stretch(
                    action.place, action.replica, action.inner, action.content, own=action.own
                )
            case act.CancelWork():
                self.cancel()
            case act.CancelNode():
                self.cancel_node(action.place, action.node)
            case act.Apply():
                self.apply(action.averages, action.scalars, taken, attempt=action.attempt)
            case act.LoadChunk():
                place = action.kind, action.block, action.chunk
                self.load_chunk(*place, action.values, taken)
            case act.Restore():
                self.restore(action.step, action.optimizer_step)
            case act.Evaluate():
                self.evaluate(action.step, action.part)
            case act.CopyState():
                self.copy_state()

    def open(self) -> None:
        """Open the device; gives DeviceFailed if it cannot be used."""
        self._submit(self._toolbox.backend)

    def build(
        self, run_id: str, spec: RunSpec, *, keep: bool = False, inputs: str | None = None
    ) -> None:
        """Build the task, or take the one that is there; gives Built or BuildFailed.

        The replica starts anew, unless it is to keep the state that it has of this run.
        """
        self._submit(lambda: self._build(run_id, spec, inputs, keep=keep))

    def compute(self, place: StepAttempt, microbatches: int, node: Node) -> None:
        """Compute a node unless cancelled before; gives its BlockSums, then NodeDone."""
        generation = self._generation
        self._submit(lambda: self._compute(generation, place, microbatches, node))

    def give_stretch(
        self, place: StepAttempt, replica: int, inner: int, content: Bytes, *, own: bool
    ) -> None:
        """What the coordinator knows of a stretch; see `Stretches.given`."""
        self._submit(lambda: self._give_stretch(place, replica, inner, content, own=own))

    def cancel(self) -> None:
        """Abandon the node in work and those that wait."""
        self._generation += 1
        self._cancelled = set()

    def cancel_node(self, place: StepAttempt, node: Node) -> None:
        """Abandon this node, and no other."""
        self._cancelled = {*self._cancelled, (place, node)}

    def apply(
        self,
        averages: list[Array],
        scalars: StepScalars | None,
        taken: Taken = _nobody_waits,
        *,
        attempt: int = 0,
    ) -> None:
        """Take the step, or skip it without scalars; gives Applied. Then `taken` is called."""
        self._submit(lambda: self._apply(averages, scalars, attempt), taken)

    def load_chunk(
        self, kind: PartKind, block: int, chunk: int, values: Array, taken: Taken = _nobody_waits
    ) -> None:
        """Take a chunk of another replica's state. Then `taken` is called, in this thread."""
        self._submit(lambda: self._load_chunk(kind, block, chunk, values), taken)

    def restore(self, step: int, optimizer_step: int) -> None:
        """All chunks are there; gives Applied."""
        self._submit(lambda: self._restore(step, optimizer_step))

    def evaluate(self, step: int, part: int) -> None:
        """Evaluate one held-out part unless cancelled before; gives PartEvaluated."""
        generation = self._generation
        self._submit(lambda: self._evaluate(generation, step, part))

    def copy_state(self) -> None:
        """Give StateCopied."""
        self._submit(self._copy_state)

    def close(self) -> None:
        """Abandon everything and end the thread."""
        self.cancel()
        self._submit(self._free)
        self._thread.close(10)
        self._digests.shutdown(wait=False, cancel_futures=True)

    # In the engine's thread.

    def _submit(self, work: Callable[[], object], done: Taken = _nobody_waits) -> None:
        self._thread.submit(lambda: self._guarded(work, done))

    def _guarded(self, work: Callable[[], object], done: Taken) -> Iterator[None]:
        try:
            pieces = work()
            if isinstance(pieces, Iterator):
                yield from pieces
        except Exception as error:  # noqa: BLE001 -- whatever it is, the shell must hear of it
            self._emit(DeviceFailed(error))
        finally:
            done()

    def _free(self) -> None:
        """Whoever made the task has its module back, with what was trained."""
        job = self._job
        if job is None:
            return
        try:
            self._load_trained(job)
        finally:
            job.program.close()

    def _build(self, run_id: str, spec: RunSpec, inputs: str | None, *, keep: bool) -> None:
        before = self._job
        if before is not None and before.run_id == run_id and before.fault is not None:
            # The coordinator began again before it heard of it; the steps taken are the same.
            self._emit(BuildFailed(run_id, before.fault))
            return
        try:
            job = self._job_for(spec, inputs)
        except _Unfit as unfit:
            self._emit(BuildFailed(run_id, unfit.error, own=True))
            return
        except SamestepError as error:
            own = isinstance(error, MainMemoryTooSmall | ScriptMissing)
            self._emit(BuildFailed(run_id, error, own=own))
            return
        except Exception as error:  # noqa: BLE001 -- a bad run must not end the worker
            self._emit(_build_failed(run_id, spec, error))
            return
        self._await_digest()
        if not (keep and job.run_id == run_id and job.whole) and not job.fresh:
            job.replica.reset(job.task.initial_parameters())
            self._load(job)
            job.whole = job.fresh = True
            if job.stretches is not None:
                job.stretches.forget()
        if job.stretches is not None:
            job.stretches.begun_again()
        job.run_id = run_id
        job.asked.clear()
        if job.replay is not None:
            job.replay.begin_again()
        backend = self._toolbox.backend()
        traits = _traits(backend, job)
        parity = job.program.parity
        found = [f"probe {job.probe_digest[:12]}", *([parity] if parity else [])]
        found += [f"{key} {value}" for key, value in sorted(traits.items())]
        self._emit(
            Built(
                run_id=run_id,
                manifest=job.task.manifest,
                initial_digest=job.initial_digest,
                step=job.replica.step,
                state_digest=job.replica.state_digest(),
                signature=signature_digest(traits, job.probe_digest),
                signature_text=cut_text(", ".join(found)),
                backend=cut_text(backend.info.backend, 64),
                device=cut_text(backend.info.name, 64),
                memory=job.program.memory,
                parity=parity,
            )
        )

    def _job_for(self, spec: RunSpec, inputs: str | None) -> _Job:
        job = self._job
        if job is not None and (job.spec, job.inputs) == (spec, inputs) and job.fault is None:
            return job
        if self._job is not None:
            self._job.program.close()
            self._job = None
        task = self._toolbox.task(spec)
        manifest = task.manifest
        order = order_of_steps(spec, manifest.train_samples, manifest.row_groups)
        batches = order.order if isinstance(order, StretchOrder) else order
        if not isinstance(task, ReadsFiles):  # samples come later
            refuse_unsteady_batch(spec, task, lambda: _first_batch(spec, task, batches, 0))
        trial = _trial_of(task, spec)
        check_subnormals(_APPLIES)
        example, *others = microbatch_of_each_shape(task, batches)
        evaluations = evaluation_of_each_shape(task)
        try:
            trainable = replace(task.trainable, arithmetic=spec.arithmetic)
            program = self._toolbox.backend().compile(trainable, example, others, evaluations)
        except SamestepError as error:
            raise _Unfit(error) from error
        replica, initial = Replica(manifest.blocks, spec.update), task.initial_parameters()
        program.load(initial)
        captures = manifest.capture is not None
        probe = (rows_probe if captures else probe_digest)(program, [example, *others])
        kept = program.keeps_subnormals()
        try:
            replay = _replay(spec, task, program, example, batches)
        except SamestepError:
            program.close()
            raise
        replica.load_parameters(initial)
        del initial
        # Evaluation loads averages, and a stretch loads its own: then they are two.
        if isinstance(program, ComputesInPlace) and not replica.averages and not spec.replicas:
            program.share(replica.parameters)
        start = replica.state_digest()
        self._job = _Job(
            spec, inputs, task, program, replica, order, start, probe, kept, trial=trial
        )
        self._job.replay = replay
        if isinstance(order, StretchOrder):
            self._job.stretches = Stretches(spec, manifest.blocks, program, order, task.batch)
        return self._job

    def _compute(
        self, generation: int, place: StepAttempt, microbatches: int, node: Node
    ) -> Iterator[None]:
        if self._is_cancelled(generation, place, node):
            return
        job = self._built()
        if isinstance(job.order, StretchOrder):
            yield from self._stretch(job, generation, place, microbatches, node)
            return
        start_s, start_us = self._machine.now_s(), now_us()
        samples = job.order.microbatches(place.step)
        if len(samples) != microbatches:
            raise DataError(
                f"the coordinator plans {microbatches} microbatches, this task has {len(samples)}"
            )
        if self._want_files(job, place, microbatches, node, samples):
            return
        if job.averaged:
            job.program.load(job.replica.parameters)
            job.averaged = False
        seeds = [microbatch_seed(job.spec.seed, place.step, leaf) for leaf in range(*node)]
        batches = [
            _batch(job.task, samples[leaf], seed)
            for leaf, seed in zip(range(*node), seeds, strict=True)
        ]
        weight = tree_sum([batch.weight for batch in batches])  # known before the backward
        if job.task.manifest.capture is not None:
            yield from self._capture(generation, place, node, batches, start_s)
            return
        job.program.loss_scale = place.loss_scale
        leaf, since_us = node.lo, now_us()
        loss: Loss | None = None
        leaves = list(zip(batches, seeds, strict=True))
        of = [samples[leaf] for leaf in range(*node)]
        with samples_named(place.step, batches, of):
            stream = _gradients(job, leaves)
            for item in stream:
                yield  # the device has computed
                if self._is_cancelled(generation, place, node):
                    stream.close()
                    return
                if isinstance(item, Loss):
                    loss = item
                    continue
                if self._tracer is not None:
                    self._tracer.span(
                        f"backward block {item.block}", "device", since_us,
                        step=place.step, microbatch=leaf, block=item.block,
                    )  # fmt: skip
                    since_us = now_us()
                if isinstance(item, BlockGradient):
                    self._emit(BlockSum(place, node, item.block, item.values, weight))
                leaf += item.block == 0
        assert loss is not None
        if self._tracer is not None:
            self._tracer.span(f"node {node}", "nodes", start_us, step=place.step)
        self._emit(NodeDone(place, node, loss, (self._machine.now_s() - start_s) * 1e3))

    def _stretch(
        self,
        job: _Job,
        generation: int,
        place: StepAttempt,
        microbatches: int,
        node: Node,
    ) -> Iterator[None]:
        """A node of a run with replicas: one of them, all of its inner steps."""
        stretches, order, replica = job.stretches, job.order, node.lo
        assert stretches is not None
        assert isinstance(order, StretchOrder)
        if (microbatches, node.leaves) != (order.replicas, 1):
            raise DataError(f"expected one of {order.replicas} replicas, got {node}")
        if self._want_files_of_stretch(job, order, place, node):
            return
        if stretches.lacks(place, replica):
            own = not stretches.has_own(place.step, replica)
            self._emit(StretchStateWanted(place, microbatches, node, own))
            return
        start_us = now_us()
        work = stretches.compute(place, node, job.replica, self._machine.now_s)
        job.loaded = False
        for told in work:
            if told is not None:
                self._emit(told)
                continue
            yield  # the device has computed
            if self._is_cancelled(generation, place, node):
                work.close()
                return
        if self._tracer is not None:
            self._tracer.span(f"replica {replica}", "nodes", start_us, step=place.step)

    def _want_files_of_stretch(
        self, job: _Job, order: StretchOrder, place: StepAttempt, node: Node
    ) -> bool:
        if not isinstance(job.task, ReadsFiles):
            return False
        parts = (
            part
            for inner in range(order.inner_steps)
            for part in order.microbatches(place.step, node.lo, inner)
        )
        missing = job.task.missing([sample for part in parts for sample in part])
        if missing:
            self._emit(FilesWanted(missing, for_node=(place, order.replicas, node)))
        return bool(missing)

    def _give_stretch(
        self, place: StepAttempt, replica: int, inner: int, content: Bytes, *, own: bool
    ) -> None:
        stretches = self._built().stretches
        assert stretches is not None, "asked for in a run with replicas alone"
        stretches.given(place, replica, inner, content, own=own)

    def _want_files(
        self,
        job: _Job,
        place: StepAttempt,
        microbatches: int,
        node: Node,
        samples: Sequence[Sequence[int]],
    ) -> bool:
        """Whether the node has to wait for files, which are asked for; so are those of the next
        steps."""
        if not isinstance(job.task, ReadsFiles):
            return False
        mine = [sample for leaf in range(*node) for sample in samples[leaf]]
        missing = job.task.missing(mine)
        if missing:
            self._emit(FilesWanted(missing, for_node=(place, microbatches, node)))
        assert isinstance(job.order, SampleOrder)
        steps = job.spec.steps_with(job.task.manifest.train_samples)
        for step in range(place.step + 1, min(place.step + _STEPS_AHEAD, steps)):
            coming = [sample for part in job.order.microbatches(step) for sample in part]
            soon = set(job.task.missing(coming)) - job.asked
            if soon:
                job.asked |= soon
                self._emit(FilesWanted(tuple(sorted(soon))))
        return bool(missing)

    def _capture(
        self,
        generation: int,
        place: StepAttempt,
        node: Node,
        batches: Sequence[Batch],
        start_s: float,
    ) -> Iterator[None]:
        """A node of a run that trains nothing: what is kept of each microbatch, and its loss."""
        job, losses = self._built(), []
        for leaf, batch in zip(range(*node), batches, strict=True):
            captured = job.program.rows(batch)
            yield  # the device has computed
            if self._is_cancelled(generation, place, node):
                return
            losses.append(captured.loss_sum)
            self._emit(MicrobatchRows(place, node, leaf, captured.rows))
        weight = tree_sum([batch.weight for batch in batches])
        zeros = [np.zeros(block.elements, np.float32) for block in job.task.manifest.blocks]
        for number, values in enumerate(zeros):
            self._emit(BlockSum(place, node, number, values, weight))
        loss = Loss(tree_sum(losses), weight)
        self._emit(NodeDone(place, node, loss, (self._machine.now_s() - start_s) * 1e3))

    def _is_cancelled(self, generation: int, place: StepAttempt, node: Node) -> bool:
        return generation != self._generation or (place, node) in self._cancelled

    def _apply(self, averages: list[Array], scalars: StepScalars | None, attempt: int) -> None:
        job, start_us = self._built(), now_us()
        self._await_digest()
        job.fresh = False
        if job.program.keeps_subnormals() != job.keeps_subnormals:
            # What a model's code does to its thread in the middle of a run no signature can say.
            raise SubnormalsFlushed("since the run began, a thread that computes gradients")
        if scalars is None:
            job.replica.skip()
            if job.stretches is not None:
                job.stretches.forget()
        else:
            job.replica.apply(averages, scalars)
            self._load(job)
            if job.stretches is not None:
                job.stretches.round_over(StepAttempt(job.replica.step - 1, attempt))
        if self._tracer is not None:
            self._tracer.span("apply step", "device", start_us, step=job.replica.step)
        if self._has_moved(job):
            return
        self._report_digest(job.replica)
        if job.replica.step >= TRIED_AGAIN_AT_STEP:
            self._try_again(job)

    def _try_again(self, job: _Job) -> None:
        """Once: whether the loss adds up over samples at the weights of now, too."""
        trial, job.trial = job.trial, None
        if trial is None:
            return
        try:
            trial.refuse_after_steps(job.replica.step, job.replica.parameters)
        except DataError as error:
            job.fault = error
            self._emit(TaskRefused(job.run_id, error))

    def _has_moved(self, job: _Job) -> bool:
        """Whether training moved more than the replica, where that is looked at after a step."""
        if job.replay is None or not job.replay.is_due(job.replica.step):
            return False
        try:
            job.replay.check(job.replica.parameters)
        except DataError as error:
            job.fault = error
            self._emit(TaskRefused(job.run_id, error))
        return job.fault is not None

    def _restore(self, step: int, optimizer_step: int) -> None:
        job = self._built()
        job.replica.restore(step, optimizer_step)
        if not optimizer_step:
            job.replica.clear_moments()
        job.whole = True
        self._load(job)
        self._report_digest(job.replica)

    def _load(self, job: _Job) -> None:
        job.program.load(job.replica.parameters)
        job.loaded = True
        job.averaged = False

    def _load_trained(self, job: _Job) -> None:
        """Where the optimizer averages, that is another than what gradients are taken at."""
        if job.replica.averages and not job.averaged:
            self._await_digest()
            job.program.load(job.replica.trained())
            job.averaged = True

    def _report_digest(self, replica: Replica) -> None:
        """Hash while the next step computes; the next change of the replica waits for it."""

        def work() -> None:
            try:
                self._emit(Applied(replica.step, replica.state_digest()))
            except Exception as error:  # noqa: BLE001 -- as in _guarded
                self._emit(DeviceFailed(error))

        self._digest = self._digests.submit(work)

    def _await_digest(self) -> None:
        if self._digest is not None:
            self._digest.result()
            self._digest = None

    def _load_chunk(self, kind: PartKind, block: int, chunk: int, values: Array) -> None:
        job = self._built()
        self._await_digest()
        job.whole = job.fresh = False
        if job.stretches is not None:
            job.stretches.forget()
        job.replica.load_piece(kind, block, chunk, values)

    def _evaluate(self, generation: int, step: int, part: int) -> None:
        if generation != self._generation:
            return
        job = self._built()
        if isinstance(job.task, ReadsFiles) and (missing := job.task.missing_of_part(part)):
            self._emit(FilesWanted(missing, for_part=(step, part)))
            return
        if not job.loaded:
            self._load(job)
        self._load_trained(job)
        sums = job.program.evaluate(job.task.evaluation_batch(part))
        self._emit(PartEvaluated(step, part, dict(sums)))

    def _copy_state(self) -> None:
        replica = self._built().replica
        parts = [
            StatePart(part.kind, part.block, part.values.copy())
            for part in replica.parts()
            if replica.optimizer_step or part.kind == "parameters"  # no update yet: moments are 0
        ]
        self._emit(StateCopied(parts, replica.step, replica.optimizer_step))

    def _built(self) -> _Job:
        assert self._job is not None, "the session asks for work only after Built"
        return self._job
