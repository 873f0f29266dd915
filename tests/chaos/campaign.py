"""Run real processes with a plan of faults, and prove that the result did not change."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from coordinator.service.events import EventLoopBlocked
from protocol.spec.run_spec import LogMode
from tests.chaos.plan import Fault, FaultType, Size, draw_faults, run_document
from tests.chaos.processes import Coordinator, Stuck, Worker
from tests.processes import run_to_end

WORKERS: Final = 3
MICROBATCH_MS: Final = 20.0
"""With twelve microbatches and three workers, a step takes 80 ms plus the exchange."""
_LEAVE_S: Final = 10.0


@dataclass(slots=True)
class Outcome:
    """The measurements and results of a campaign.

    Attributes:
        seconds: Seconds from each fault to the next commit, by type.
        slowest: The slowest of these: seconds, type of fault, next committed step.
        step_s: Median time between commits without a fault between them.
        steps: Steps committed.
        repeated_commits: Commits of steps that had already been reported as committed.
        starts: Starts of the coordinator.
        interrupted_checkpoints: Kills before a checkpoint was complete.
        owner_assignments: Number of times that chunks were assigned to owners.
        loop_held_ms: Longest processor time for which a coordinator's event loop was blocked; 0 if
            it never exceeded the limit.
        wall_s: Time from the first commit to the end of the run.
        weights_digest: Weights digest of the result.
        audit: Last line of the audit's output.
    """

    seconds: dict[FaultType, list[float]] = field(default_factory=dict)
    slowest: tuple[float, str, int] = (0.0, "", 0)
    step_s: float = 0.0
    steps: int = 0
    repeated_commits: int = 0
    starts: int = 0
    interrupted_checkpoints: int = 0
    owner_assignments: int = 0
    wall_s: float = 0.0
    loop_held_ms: float = 0.0
    weights_digest: str = ""
    audit: str = ""


def run_campaign(
    directory: Path,
    seed: int,
    size: Size,
    log: LogMode = "full",
    *,
    keep_log: bool = False,
    fresh: bool = True,
    sharded: bool = False,
) -> Outcome:
    """Run once undisturbed (one worker, a star) and once with all faults; compare, and audit.

    Without `fresh`, processes are forked from one that has imported everything, which is faster.

    Raises:
        AssertionError: The results differ, or the run does not continue.
    """
    directory.mkdir(parents=True, exist_ok=True)
    spec = directory / "run.yaml"
    document = run_document(seed, size, log, keep_log=keep_log)
    spec.write_text(json.dumps(document))  # JSON is YAML
    baseline = _run_baseline(directory / "calm", spec, fresh=fresh)
    document = run_document(seed, size, log, keep_log=keep_log, sharded=sharded)
    spec.write_text(json.dumps(document))
    with Coordinator(
        directory / "chaos", ["--run", str(spec), "--expect-workers", str(WORKERS)], fresh=fresh
    ) as coordinator:
        campaign = _Campaign(coordinator, fresh=fresh)
        with campaign.workers_running():
            for fault in draw_faults(seed, size):
                campaign.apply(fault)
            campaign.end()
        outcome = campaign.outcome
        assert outcome.steps == size.steps
        assert outcome.repeated_commits == 0 or log == "checkpoint", "a committed step was lost"
        outcome_with_faults = _result(coordinator.run)
        for key in ("outcome", "steps", "losses", "weights_digest", "metrics", "exactness"):
            assert outcome_with_faults.get(key) == baseline.get(key), (
                f"{key} differs from the undisturbed run's"
            )
        outcome.weights_digest = outcome_with_faults["weights_digest"]
        outcome.audit = _audit(coordinator.run)
    return outcome


def _run_baseline(directory: Path, spec: Path, *, fresh: bool) -> dict[str, Any]:
    """Run without faults, with one worker that computes in no time: speed affects no bit."""
    arguments = ["--run", str(spec), "--expect-workers", "1"]
    with Coordinator(directory, arguments, fresh=fresh) as coordinator:
        worker = Worker(coordinator.address, "alone", "scripted:0", directory, fresh=fresh)
        try:
            end = coordinator.wait_for("the end", _is_end, patience_s=1800.0)
            assert end.fields["outcome"] == "finished", coordinator.describe_failure("not finished")
            assert coordinator.wait_for_exit() == 0
            assert worker.wait() == 0, worker.output_end()
        finally:
            worker.kill()
        return _result(coordinator.run)


class _Campaign:
    """The processes of a run, and the faults applied to them."""

    def __init__(self, coordinator: Coordinator, *, fresh: bool) -> None:
        self.coordinator = coordinator
        self._fresh = fresh
        self.outcome = Outcome()
        self._workers: dict[str, Worker] = {}
        self._leaving_workers: list[Worker] = []
        self._timers: list[threading.Timer] = []
        self._fault_intervals: list[tuple[float, float]] = []

    @contextmanager
    def workers_running(self) -> Iterator[None]:
        """Start the workers, and end all of them at the end of the context."""
        try:
            for number in range(WORKERS):
                self._start_worker(f"w{number}")
            yield
        finally:
            for timer in self._timers:
                timer.cancel()
            for worker in (*self._workers.values(), *self._leaving_workers):
                worker.kill()

    def apply(self, fault: Fault) -> None:
        """Apply the fault when it is due, and wait for the next commit."""
        start = len(self.coordinator.events)
        if self.coordinator.step < fault.after_step:
            self.coordinator.wait_for(
                f"step {fault.after_step}",
                lambda event: (
                    event.name == "committed" and event.fields["step"] + 1 >= fault.after_step
                ),
                since=max(0, start - 1),
            )
        self._check_workers()
        time.sleep(fault.delay_s)  # no event marks the middle of a step
        at_s, start = self._inject(fault)
        commit = self.coordinator.commit_after(at_s, start)
        self.outcome.seconds.setdefault(fault.fault_type, []).append(commit.at_s - at_s)
        self.outcome.slowest = max(
            self.outcome.slowest,
            (commit.at_s - at_s, fault.fault_type.value, commit.fields["step"]),
        )
        self._fault_intervals.append((at_s, commit.at_s))

    def end(self) -> None:
        """Wait for the end of the run, check all exit codes, and complete the outcome."""
        end = self.coordinator.wait_for("the end", _is_end, patience_s=120.0)
        assert end.fields["outcome"] == "finished", self.coordinator.describe_failure(
            "not finished"
        )
        assert self.coordinator.wait_for_exit() == 0
        for timer in self._timers:
            timer.join()
        for worker in (*self._workers.values(), *self._leaving_workers):
            code = _wait_for_leave(worker)
            assert _has_left_cleanly(worker, code), f"{worker.name}, {code}: {worker.output_end()}"
        self._measure(end.at_s)

    def _inject(self, fault: Fault) -> tuple[float, int]:
        """Apply the fault; return its time, and the event index to search from."""
        coordinator = self.coordinator
        match fault.fault_type:
            case FaultType.COORDINATOR | FaultType.CHECKPOINT | FaultType.BOTH:
                event_count = len(coordinator.events)
                if fault.fault_type is FaultType.CHECKPOINT:
                    self._ask_for_checkpoint(fault)
                at_s = coordinator.kill()
                if fault.fault_type is FaultType.BOTH:
                    self._replace(self._pick(fault))
                if fault.fault_type is FaultType.CHECKPOINT and not any(
                    event.name == "checkpoint" for event in coordinator.events[event_count:]
                ):
                    self.outcome.interrupted_checkpoints += 1
                start = len(coordinator.events)
                coordinator.start()
                return at_s, start
            case FaultType.WORKER:
                start = len(coordinator.events)
                return self._replace(self._pick(fault)), start
            case FaultType.STALL | FaultType.LONG_STALL:
                return self._stall(self._pick(fault), fault.stall_s)
            case FaultType.DRAIN:
                worker = self._pick(fault)
                at_s, start = time.time(), len(coordinator.events)
                worker.drain()
                self._leaving_workers.append(worker)
                self._start_worker(worker.name)
                return at_s, start

    def _ask_for_checkpoint(self, fault: Fault) -> None:
        try:
            self.coordinator.ask("POST", "/checkpoint")
        except OSError as error:
            raise Stuck(self.coordinator.describe_failure(f"no answer: {error}")) from None
        time.sleep(fault.delay_s / 10)  # no event marks a half-written file

    def _stall(self, worker: Worker, stall_s: float) -> tuple[float, int]:
        at_s, start = time.time(), len(self.coordinator.events)
        worker.stop()
        timer = threading.Timer(stall_s, worker.resume)
        timer.start()
        self._timers = [timer, *(t for t in self._timers if t.is_alive())]
        return at_s, start

    def _pick(self, fault: Fault) -> Worker:
        """Return a worker that is not stopped, possibly a starting one."""
        running_workers = [worker for worker in self._workers.values() if not worker.stopped]
        candidates = running_workers or list(self._workers.values())
        return candidates[int(fault.victim * len(candidates))]

    def _replace(self, worker: Worker) -> float:
        at_s = worker.kill()
        self._start_worker(worker.name)
        return at_s

    def _start_worker(self, name: str) -> None:
        backend = f"scripted:{MICROBATCH_MS:g}"
        coordinator = self.coordinator
        self._workers[name] = Worker(
            coordinator.address, name, backend, coordinator.directory, fresh=self._fresh
        )

    def _check_workers(self) -> None:
        """Check that no worker has ended by itself, and that drained workers have left cleanly."""
        for worker in self._workers.values():
            assert worker.code is None, f"{worker.name} has ended: {worker.output_end()}"
        for worker in self._leaving_workers:
            has_left_cleanly = worker.code is None or _has_left_cleanly(worker, worker.code)
            assert has_left_cleanly, f"{worker.name} left with {worker.code}: {worker.output_end()}"
        self._leaving_workers = [worker for worker in self._leaving_workers if worker.code is None]

    def _measure(self, end_s: float) -> None:
        commits = [event for event in self.coordinator.events if event.name == "committed"]
        steps = [event.fields["step"] for event in commits]
        outcome = self.outcome
        outcome.steps = steps[-1] + 1
        outcome.repeated_commits = len(steps) - len(set(steps))
        outcome.starts = self.coordinator.incarnation
        outcome.owner_assignments = sum(
            event.name == "owners" and bool(event.fields["owners"])
            for event in self.coordinator.events
        )
        outcome.wall_s = end_s - commits[0].at_s
        gaps = [
            (a.at_s, b.at_s)
            for a, b in pairwise(commits)
            if b.fields["step"] == a.fields["step"] + 1
        ]
        pauses_ms = [
            e.fields["held_ms"] for e in self.coordinator.events if e.name == EventLoopBlocked.name
        ]
        outcome.loop_held_ms = max(pauses_ms, default=0.0)
        quiet_gaps = _undisturbed_gaps(gaps, self._fault_intervals)
        outcome.step_s = median(quiet_gaps) if quiet_gaps else math.nan


def _has_left_cleanly(worker: Worker, code: int) -> bool:
    """Return whether a worker with this exit code has left cleanly. A worker without output may
    have received the signal before its handler was installed."""
    return code == 0 or (code == -signal.SIGTERM and not worker.output_end())


def _wait_for_leave(worker: Worker) -> int:
    """Wait for the worker's exit code. A worker that has just started may not have met the
    coordinator and must be drained."""
    try:
        return worker.wait(_LEAVE_S)
    except Stuck:
        worker.drain()
        return worker.wait()


def _undisturbed_gaps(
    gaps: list[tuple[float, float]], disturbances: list[tuple[float, float]]
) -> list[float]:
    """Return the lengths of gaps that overlap no disturbance; both lists are sorted."""
    quiet_gaps, index = [], 0
    for start, end in gaps:
        while index < len(disturbances) and disturbances[index][1] <= start:
            index += 1
        if index == len(disturbances) or disturbances[index][0] >= end:
            quiet_gaps.append(end - start)
    return quiet_gaps


def _is_end(event: Any) -> bool:
    return bool(event.name == "run_ended")


def _result(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "result.json").read_text())
    return document


def _audit(run: Path) -> str:
    """Return the last line of the audit.

    Raises:
        AssertionError: The run is not sound.
    """
    completed = run_to_end("coordinator", "audit", str(run))
    assert completed.returncode == 0, f"{completed.stdout[-3000:]}\n{completed.stderr[-3000:]}"
    return completed.stdout.strip().splitlines()[-1]


def fault_table(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows: faults by type, and seconds to the next commit."""
    head = ["fault", "times", "median s", "worst s"]
    seconds: Mapping[FaultType, list[float]] = outcome.seconds
    rows = [
        [fault_type.value, str(len(seconds[fault_type])),
         f"{median(seconds[fault_type]):.2f}", f"{max(seconds[fault_type]):.2f}"]
        for fault_type in FaultType
        if fault_type in seconds
    ]  # fmt: skip
    return head, rows
