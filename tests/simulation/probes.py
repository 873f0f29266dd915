"""Checks of invariants inside the product.

Each probe wraps one method of the product and only reads: a violation is raised in the simulation,
not in the product, which would handle it as its own failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from coordinator.run.exchange.round import Round
from coordinator.run.inputs import Input, ReplicaLoaded, WorkerMessage
from coordinator.run.outputs.actions import Dismiss, Report
from coordinator.run.outputs.events import Committed
from coordinator.run.run import Run, RunPhase
from coordinator.run.workers.membership import COMPUTING, MemberState
from coordinator.service.coordinator_replica import CoordinatorReplica, ReplicaState
from coordinator.service.execution import Execution
from coordinator.service.subscribers import Subscribers
from coordinator.storage import run_storage
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.run_storage import RunStorage
from protocol.base import limits
from protocol.exact.reduction.tree import Subtree
from protocol.wire.messages import (
    Assign,
    AveragedGradient,
    Cancel,
    Commit,
    GradientPayload,
    Owners,
    StartRun,
    StepApplied,
    SubtreeLoss,
)
from protocol.wire.transport import Channel
from tests.simulation.job import COVERAGE
from tests.simulation.processes import CoordinatorProcess, WorkerProcess
from worker.logic.events import StepId
from worker.shell.client import Client
from worker.shell.file_fetcher import FileFetcher

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_MAX_STEPS_IN_MEMORY = 8
"""Limit of the steps whose broadcasts stay in memory."""


def check_invariant(run: Run) -> None:
    """Check the invariants of each phase between two inputs, as listed in `coordinator.run.run`."""
    progress = run.progress
    round_ = progress.round if progress is not None else None
    if run.phase is not RunPhase.WAITING and run.phase is not RunPhase.OVER:
        assert progress is not None
    match run.phase:
        case RunPhase.WAITING:
            assert round_ is None
            assert not run.members.names(*COMPUTING)
        case RunPhase.TRAINING:
            assert run.evaluation is None
        case RunPhase.EVALUATING:
            assert progress is not None
            assert run.evaluation is not None
            assert round_ is None
            assert not progress.is_persisting
        case RunPhase.HALTED:
            assert run.reason
        case RunPhase.OVER:
            assert run.outcome is not None


class Probes:
    """The probes of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._outstanding_subtrees: dict[str, set[Subtree]] = {}
        self._is_awaited = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the probes within a `with` block."""
        with ExitStack() as stack:
            for owner, name, before, after in (
                (GradientLog, "commit", self._before_sync, self._after_sync),
                (RunStorage, "commit", self._before_commit, None),
                (Subscribers, "broadcast", self._before_broadcast, None),
                (CoordinatorReplica, "_current_state", None, self._after_current_state),
                (run_storage, "write_checkpoint", None, self._after_checkpoint),
                (Execution, "_do", None, self._after_actions),
                (Run, "step", self._before_input, self._after_input),
                (Round, "take_surplus", self._before_surplus, self._after_surplus),
                (Client, "_transmit", self._before_transmit, None),
                (FileFetcher, "_store", None, self._after_store),
                (Client, "on_message", self._after_message, None),
                (Channel, "_refuse", self._after_refusal, None),
                (Channel, "send", None, self._after_send),
            ):
                probe = self._wrap(getattr(owner, name), before, after)
                stack.enter_context(mock.patch.object(owner, name, probe))
            yield

    def _wrap(
        self,
        original: Callable[..., Any],
        before: Callable[..., None] | None,
        after: Callable[..., None] | None,
    ) -> Callable[..., Any]:
        errors = self._cluster.clock.errors

        def check_before(*arguments: Any, **options: Any) -> Any:
            try:
                assert before is not None
                before(*arguments, **options)
            except Exception as error:  # noqa: BLE001 -- see `Cluster.check_product`
                errors.append(error)
            return check_after(*arguments, **options) if after else original(*arguments, **options)

        def check_after(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            try:
                assert after is not None
                after(result, *arguments, **options)
            except Exception as error:  # noqa: BLE001 -- see `Cluster.check_product`
                errors.append(error)
            return result

        return check_before if before is not None else check_after

    @property
    def _coordinator(self) -> CoordinatorProcess:
        current = self._cluster.clock.current
        assert isinstance(current, CoordinatorProcess)
        return current

    @property
    def _worker(self) -> WorkerProcess:
        current = self._cluster.clock.current
        assert isinstance(current, WorkerProcess)
        return current

    # Coordinator.

    def _before_commit(self, _storage: Any, record: Any, *_: Any) -> None:
        coordinator = self._coordinator
        self._cluster.on_commit(coordinator)
        execution = coordinator.execution
        progress = execution.run.progress if execution is not None else None
        if execution is None or progress is None or not progress.agreement.is_catching_up:
            return
        assert progress.round is not None
        if coordinator.trust[0] is not execution:
            coordinator.trust = execution, record.commit.step
        coordinator.ledger.record_trusted_commit(
            record, progress.round.averages, since=coordinator.trust[1]
        )

    def _before_sync(self, _log: Any, _record: Any) -> None:
        coordinator = self._coordinator
        action, coordinator.at_sync = coordinator.at_sync, None
        if action is not None:
            self._cluster.disk.kill_after(self._cluster.rng.choice((0, 1, 1, 1)), action)

    def _after_sync(self, _: None, _log: Any, record: Any) -> None:
        coordinator = self._coordinator
        execution = coordinator.execution
        self._cluster.disk.cancel_kill()
        if execution is None or not coordinator.alive:
            return
        coordinator.ledger.record_sync(record.commit)
        progress = execution.run.progress
        assert progress is not None
        coordinator.ledger.check_admission_record(
            set(progress.numerics_profiles), mixed=progress.is_mixed
        )

    def _before_broadcast(self, _subscribers: Any, message: Any, values: Any, *_: Any) -> None:
        coordinator = self._coordinator
        if isinstance(message, Commit):
            self._check_broadcast_commit(coordinator, message)
        elif isinstance(message, AveragedGradient) and message.block == COVERAGE:
            # Every microbatch is in the sum exactly once.
            job = coordinator.ledger.job
            chunk_part = job.blocks[COVERAGE].chunk_slice(message.chunk)
            expected = job.coverage(message.step)
            if expected is not None:
                is_equal = values.tobytes() == expected[chunk_part].tobytes()
                assert is_equal, "a microbatch is missing or counted twice"

    def _check_broadcast_commit(self, coordinator: CoordinatorProcess, commit: Commit) -> None:
        coordinator.ledger.check_commit(commit)
        execution = coordinator.execution
        assert execution is not None
        progress = execution.run.progress
        assert progress is not None
        if commit.step == 0 or progress.agreement.is_catching_up:
            return
        replica_state = execution.replica_state
        assert replica_state is not None
        assert replica_state.step == commit.step, "the replica has not agreed on the previous step"

    def _after_current_state(self, state: ReplicaState, _keeper: Any) -> None:
        coordinator = self._coordinator
        if coordinator.execution is None:
            return
        if not state.step and coordinator is not self._cluster.coordinator:
            return  # disconnected before it had a state: no worker uses its initial state
        coordinator.ledger.check_replica_state(state.step, state.state_digest)

    def _check_loaded_state(self, digest: str) -> None:
        job = self._coordinator.ledger.job
        initial = [job.undisturbed((), flavor).state_digest for flavor in (0, 1)]
        assert digest in initial, "no worker starts from this state 0"

    def _after_checkpoint(self, checkpoint: Any, *_: Any, losses: Any, **__: Any) -> None:
        ledger = self._coordinator.ledger
        ledger.check_checkpoint(checkpoint.info.step, checkpoint.info.state_digest)
        ledger.check_losses(losses)

    def _after_actions(self, _: None, execution: Execution, actions: Any) -> None:
        run = execution.run
        if any(isinstance(a, Report) and isinstance(a.event, Committed) for a in actions):
            dismissed = {action.worker for action in actions if isinstance(action, Dismiss)}
            all_dismissed = dismissed.issuperset(run.members.names(MemberState.DRAINING))
            assert all_dismissed, "a worker that owes nothing may not leave"
        if execution._closed:
            return
        assert len(run.losses) == run.steps_committed
        if run.phase in (RunPhase.WAITING, RunPhase.HALTED):
            assert run.reason, "a run that waits says why"
        else:
            assert run.phase is RunPhase.OVER or not run.reason
        tail = execution._subscribers._recent_frames
        if tail:
            assert tail[-1][0] - tail[0][0] <= _MAX_STEPS_IN_MEMORY, "old broadcasts stay in memory"

    def _before_input(self, run: Run, input_: Input) -> None:
        if isinstance(input_, ReplicaLoaded):
            self._check_loaded_state(input_.digest)
        elif isinstance(input_, WorkerMessage):
            self._before_message(run, input_.worker, input_.message)

    def _after_input(self, _: Any, run: Run, input_: Input) -> None:
        check_invariant(run)
        if isinstance(input_, WorkerMessage):
            self._check_arrived_subtree(run, input_.worker, input_.message)

    def _before_message(self, run: Run, worker: str, message: Any) -> None:
        progress = run.progress
        round_ = progress.round if progress is not None else None
        share = round_.shares.get(worker) if round_ is not None else None
        self._is_awaited = (
            isinstance(message, SubtreeLoss)
            and share is not None
            and message.subtree in share.outstanding_bits
        )

    def _check_arrived_subtree(self, run: Run, worker: str, message: Any) -> None:
        """Check that an arrived subtree counts, and that no other worker still has to compute
        it."""
        progress = run.progress
        if not isinstance(message, SubtreeLoss) or progress is None or progress.is_persisting:
            return
        step_id = {"term": message.term, "step": message.step, "attempt": message.attempt}
        round_ = progress.round
        if round_ is not None and run.phase is RunPhase.TRAINING and step_id == progress.step_id():
            # Two workers must deliver a double-checked subtree.
            double_checked = (
                round_.double_assignment[-1:]
                if round_.double_assignment and round_._awaits_double()
                else ()
            )
            for share in round_.shares.values():
                missing = all(
                    round_._missing_leaves(n)
                    for n in share.outstanding_bits
                    if n not in double_checked
                )
                assert missing, "Cancel is lost"
            if self._is_awaited and message.subtree not in round_.shares[worker].outstanding_bits:
                assert not round_._missing_leaves(message.subtree), (
                    "an arrived subtree is not counted"
                )

    def _before_surplus(self, round_: Round) -> None:
        self._outstanding_subtrees = {
            name: set(share.outstanding_bits) for name, share in round_.shares.items()
        }

    def _after_surplus(self, _: Any, round_: Round) -> None:
        for name, share in round_.shares.items():
            withdrawn_subtrees = self._outstanding_subtrees[name].difference(share.outstanding_bits)
            assert not any(round_._missing_leaves(subtree) for subtree in withdrawn_subtrees), (
                "a missing subtree is forgotten"
            )

    # Worker.

    def _after_message(self, client: Client, _channel: Any, received: Any) -> None:
        message, worker = received.message, self._worker
        if isinstance(message, StartRun):
            newest = worker.newest.get(message.run_id, 0)
            worker.newest[message.run_id] = max(newest, message.term)
            worker.canceled.clear()
        elif isinstance(message, Cancel) and client._session is not None:
            # Cancel may overtake a plan or an Assign, and then does not apply to their subtrees.
            task, step_id = client._session._task, (message.step, message.attempt)
            subtrees = task.subtrees if task.step_id == StepId(*step_id) else set()
            canceled = subtrees.intersection(Subtree(*subtree) for subtree in message.subtrees)
            worker.canceled.update((message.term, *step_id, subtree) for subtree in canceled)
        elif isinstance(message, Owners):  # a worker that kept sums sends them to new owners
            worker.canceled.clear()
        elif isinstance(message, Assign):  # repeated if an owner was lost that had its sums
            attempt = (message.term, message.step, message.attempt)
            worker.canceled.difference_update(
                (*attempt, Subtree(*subtree)) for subtree in message.subtrees
            )

    def _before_transmit(self, client: Client, action: Any) -> None:
        message, worker = action.message, self._worker
        session = client._session
        self._cluster.transmitted += 1
        if isinstance(message, GradientPayload | SubtreeLoss):
            subtree_id = (message.term, message.step, message.attempt, message.subtree)
            assert subtree_id not in worker.canceled, "a canceled subtree is sent"
            self._cluster.on_result_sent(worker)
        if isinstance(message, StepApplied) and session is not None:
            ledger = self._cluster.ledger(session.run_id)
            if ledger is not None and not worker.has_flipped_bit:
                ledger.check_worker_state(message.step, message.state_digest)
        if session is not None and session.run_id:
            newest = worker.newest.get(session.run_id, 0)
            assert session.term >= newest, "an older coordinator is obeyed"

    def _after_store(self, _event: Any, _fetcher: FileFetcher, _action: Any, _cache: Any) -> None:
        self._cluster.disturbances.on_chunk_fetched(self._worker)

    # Both sides.

    def _after_refusal(self, channel: Channel, error: Exception) -> None:
        if "an older coordinator must not continue it" not in str(error):
            raise AssertionError(f"{channel.connection.role} refuses: {error}")

    def _after_send(self, _: None, channel: Channel, _message: Any) -> None:
        assert channel.closed or channel.queued_bytes <= limits.SEND_QUEUE_BYTES
