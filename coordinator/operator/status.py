"""The status document: phase, step, workers, and what the run waits for.

Pure: it reads the service's objects and returns plain values.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.run.planner import busy_share
from coordinator.run.progress import Progress
from coordinator.run.run import Run, RunPhase
from coordinator.run.workers.membership import COMPUTING, MemberState
from coordinator.service.execution import Execution
from coordinator.service.service import Service
from protocol import __version__
from protocol.base.address import format_address
from protocol.spec.unit import unit_text

Stage = Literal["compute", "up", "reduce", "down", "disk"]
"""The stages of a step: gradients are computed; sums are sent; sums are added; averages and commit
are sent back and applied; the commit is written."""


def status_document(service: Service, now_s: float) -> dict[str, Any]:
    """Return the document of `GET /status`.

    Args:
        service: The service.
        now_s: The service's monotonic clock.
    """
    execution = service.current or service.finished
    awaited_workers: tuple[str, ...] = ()
    document: dict[str, Any] = {
        "version": __version__,
        "phase": "idle",
        "reason": _idle_reason(service),
        "expect_workers": service.settings.expect_workers,
        "able_workers": len(able_workers(service)),
        "encryption": "none (--plaintext)" if service.settings.plaintext else "TLS 1.3",
        "address": format_address(*service.address),
        "event_loop": {
            "longest_hold_ms": round(service.loop_watch.longest_hold_ms, 1),
            "longest_delay_ms": round(service.loop_watch.longest_delay_ms, 1),
        },
        "secrets": service.secrets_troubles,
        "coming_and_going": [
            str(event)
            for name, event in sorted(service.flap_detector.reported.items())
            if name not in service.sessions or not service.sessions[name].has_stepped
        ],
        "queued_runs": [instance.stored.run_id for instance in service.queue],
        "step": 0,
        "steps": 0,
        "loss": None,
        "weights_digest": None,
        "exact": None,
        "view": 0,
    }
    if execution is not None:
        document |= _run_part(execution)
        pace = pace_of(execution, now_s)
        document |= dataclasses.asdict(pace) if pace is not None else {}
        document["pace"] = str(pace) if pace is not None else ""
        if execution is service.current:
            waiting = waited_for_now(service)
            document["waiting_for"], document["stage"] = waiting.words, waiting.stage
            awaited_workers = waiting.workers
    document["workers"] = [
        _worker_part(service, name, now_s) | {"waited_for": name in awaited_workers}
        for name in sorted(service.sessions)
    ]
    return document


def _run_part(execution: Execution) -> dict[str, Any]:
    run = execution.run
    loss = run.losses[-1] if run.losses else None
    outcome = execution.outcome
    return {
        "run_id": run.run_id,
        "task": run.spec.task,
        "replicas": run.spec.replicas.count if run.spec.replicas is not None else None,
        "phase": outcome.outcome if outcome is not None else run.phase.value,
        "reason": outcome.reason if outcome is not None else run.reason,
        "step": run.steps_committed,
        "steps": run.known_steps,
        "epochs": run.epochs,
        "attempt": run.progress.attempt if run.progress is not None else 0,
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "weights_digest": execution.weights_digest,
        "exact": not run.progress.is_mixed if run.progress is not None else None,
        "exactness": run.spec.exactness,
        "unit": unit_text(run.spec.batch, run.manifest),
        "view": run.members.view,
        "directory": str(execution.directory),
        "checkpoint": run.checkpoints.saved_step,
        "catching_up": run.progress.agreement.is_catching_up if run.progress is not None else False,
        "eval": {name: v if math.isfinite(v) else None for name, v in run.metrics.items()},
        "balance": _balance(run),
        "result": execution.result or None,
        "exchange": _exchange(run),
    }


def _exchange(run: Run) -> dict[str, Any] | None:
    """Return the topology of the exchange, the reason for it, and each owner's share."""
    if run.progress is None:
        return None
    mesh = run.progress.mesh
    topology = "sharded" if mesh.table.has_peers else "star"
    return {"way": topology, "reason": mesh.reason, "owners": mesh.owned_shares()}


def _links(run: Run, name: str) -> dict[str, dict[str, float]]:
    """Return a worker's links to others with their speed and traffic."""
    assert run.progress is not None
    mesh = run.progress.mesh
    traffic = mesh.traffic.get(name, {})
    return {
        peer: {"mbit": round(mbit, 1), "bytes_sent": bytes_sent, "bytes_received": received}
        for peer, mbit in sorted(mesh.links.get(name, {}).items())
        for bytes_sent, received in [traffic.get(peer, (0, 0))]
    }


def _balance(run: Run) -> float | None:
    division = run.progress.division if run.progress is not None else None
    speeds = run.members.speeds()
    if not division or set(speeds) != set(division):
        return None
    return round(busy_share(division, speeds), 3)


def _worker_part(service: Service, name: str, now_s: float) -> dict[str, Any]:
    session = service.sessions[name]
    hello = session.hello
    part: dict[str, Any] = {
        "name": name,
        "duty": hello.duty,
        "backend": hello.backend,
        "device": "",
        "devices": hello.devices,
        "address": session.channel.peer,
        "state": "idle",
        "bytes_received": session.channel.bytes_received,
        "bytes_sent": session.channel.bytes_sent,
        "last_seen_s": round(now_s - session.channel.last_received_s, 1),
    }
    run = service.current.run if service.current is not None else None
    if run is not None and name in run.unfit:  # so it is not a member
        part |= {"state": "cannot take part", "cannot": run.unfit[name]}
    member = run.members.get(name) if run is not None else None
    if run is not None and member is not None:
        round_ = run.progress.round if run.progress is not None else None
        share = round_.shares.get(name) if round_ is not None else None
        speed = member.ms_per_microbatch
        part |= {
            "state": member.state.value,
            "late": member.is_late,
            "aside_until": member.aside_until if run.steps_committed < member.aside_until else None,
            "backend": member.backend or hello.backend,
            "device": member.device,
            "left_out": member.exclusion_reason,
            "signature": member.numerics_profile[:12],
            "signature_text": member.numerics_text,
            "microbatches_of_step": share.microbatches if share is not None else 0,
            "microbatches": member.microbatches,
            "inner_phase": _inner_phase(run, name),
            "ms_per_microbatch": round(speed, 2) if speed is not None else None,
            "links": _links(run, name) if run.progress is not None else {},
        }
    return part


def _idle_reason(service: Service) -> str:
    if service.disk_trouble:
        return f"the next run waits: {service.disk_trouble}"
    return "no run was submitted"


def able_workers(service: Service) -> list[str]:
    """Return the members that train and can take part in the run, each repeated for every
    device."""
    return _able_workers(
        service.current.run if service.current is not None else None, service.trainers
    )


def _able_workers(run: Run | None, present: list[str]) -> list[str]:
    if run is None:
        return present
    able_names = []
    for name, devices in Counter(present).items():
        if name not in run.unfit:
            member = run.members.get(name)
            is_known = member is not None and member.state is not MemberState.PREPARING
            able_names += [name] * (run.members.devices(name) if is_known else devices)
    return able_names


def _cannot(run: Run) -> str:
    """List connected workers and devices that take no part, with the reasons."""
    reasons = {m.name: m.exclusion_reason for m in run.members if m.exclusion_reason}
    sentences = [f"{name} cannot take part: {reason}" for name, reason in sorted(run.unfit.items())]
    return "".join(
        f"; {sentence}" for sentence in [*sentences, *map(": ".join, sorted(reasons.items()))]
    )


def _inner_phase(run: Run, worker: str) -> dict[str, int] | None:
    """Return a worker's progress in an inner phase; None outside such a phase."""
    round_ = run.progress.round if run.progress is not None else None
    progress = round_.inner_progress.get(worker) if round_ is not None else None
    replicas = run.spec.replicas
    if replicas is None or progress is None or round_ is None or not round_.pending(worker):
        return None
    replica, inner_step = progress
    return {"replica": replica, "inner_step": inner_step, "inner_steps": replicas.inner_steps}


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a run waits for; all attributes are empty if it waits for nothing.

    Attributes:
        words: Description for users.
        workers: The workers that the run waits for.
        stage: Stage of the step.
    """

    words: str = ""
    workers: tuple[str, ...] = ()
    stage: Stage | None = None


def _workers(names: Iterable[str], sentence: str, stage: Stage | None = None) -> Waiting:
    """Return a `Waiting` for these workers; `sentence` has {} in place of their names."""
    worker_names = tuple(names)
    return Waiting(sentence.format(", ".join(worker_names)), worker_names, stage)


def waited_for_now(service: Service) -> Waiting:
    """Return what the current run waits for, with the progress of preparing the task."""
    assert service.current is not None
    run = service.current.run
    waiting = waiting_for(run, service.trainers)
    preparing_names = set(run.members.names(MemberState.PREPARING))
    lines = {
        name: service.sessions[name].preparing
        for name in waiting.workers
        if name in preparing_names and name in service.sessions
    }
    progress = "; ".join(f"{name}: {line}" for name, line in lines.items() if line)
    return (
        dataclasses.replace(waiting, words=f"{waiting.words} ({progress})") if progress else waiting
    )


def waiting_for(run: Run, present: list[str]) -> Waiting:
    """Return what the run waits for right now; never a worker that only evaluates.

    Args:
        run: The run.
        present: The connected workers that train, each repeated for every device.
    """
    preparing = run.members.names(MemberState.PREPARING)
    cannot = _cannot(run)
    if run.phase is RunPhase.WAITING:
        ready_names = run.members.names(MemberState.READY)
        able_names = _able_workers(run, present)
        missing = run.expect_workers - len(able_names)
        if missing > 0:
            present_text = f"{len(able_names)} of {run.expect_workers} are connected"
            missing_text = "1 more worker" if missing == 1 else f"{missing} more workers"
            return Waiting(f"{missing_text}: {present_text}{cannot}")
        if preparing and sum(map(run.members.devices, ready_names)) < run.expect_workers:
            return _workers(preparing, "{} to build the task")
        uploader = run.run_parts.admission.uploader if run.run_parts is not None else None
        return _workers([str(uploader)], "{} to send the initial state")
    if run.phase is RunPhase.HALTED:
        return Waiting(f"an operator (continue, continue --skip-step, or give-up): {run.reason}")
    if run.phase is RunPhase.OVER:
        has_result = run.outcome != "failed"
        return Waiting("the disk to take the result") if has_result else Waiting()
    if not run.members.names(*COMPUTING):
        loading = [n for n in run.members.names(MemberState.LOADING) if n in present]
        no_worker = Waiting(
            f"a worker that can take part{cannot}" if cannot else "a worker: all have left"
        )
        return _workers(loading, "{} to load the state") if loading else no_worker
    evaluating = run.evaluation.awaited_workers() if run.evaluation is not None else []
    if evaluating:
        return _workers(evaluating, "{} to evaluate")
    return _waiting_in_step(run, run.progress) if run.progress is not None else Waiting()


def _waiting_in_step(run: Run, progress: Progress) -> Waiting:
    round_ = progress.round
    if progress.is_persisting:
        return Waiting(f"the disk to take the commit of step {progress.step}", (), "disk")
    unfinished_names = (
        [name for name in sorted(round_.shares) if round_.unfinished(name)] if round_ else []
    )
    if unfinished_names and round_ is not None:
        payload_kind = "gradients" if run.spec.replicas is None else "differences"
        computing = set(unfinished_names) & set(round_.computing_workers())
        owners = ", ".join(sorted(round_.peers.owners_lacking_sums()))
        if computing or not owners:
            return _workers(
                unfinished_names, f"{payload_kind} of {{}}", "compute" if computing else "up"
            )
        return _workers(unfinished_names, f"gradients of {{}} to reach {owners}", "up")
    if round_ is not None and round_.peers.outstanding_owners:
        return _workers(sorted(round_.peers.outstanding_owners), "averages of {}", "reduce")
    if round_ is not None and round_.is_summarizing:
        return Waiting("the coordinator to take the norm of the gradients", (), "reduce")
    if not progress.agreement.is_reached or (round_ is None and progress.agreement.is_catching_up):
        late_names = progress.agreement.awaited_workers or ["the coordinator's replica"]
        return _workers(late_names, "{} to apply the step", "down")
    step = 0 if run.checkpoints.saved_step is None else progress.step
    return Waiting(f"the disk to take the checkpoint of step {step}", (), "disk")


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed and time; `left_s`, the expected remaining time, is None before the first step."""

    elapsed_s: float
    samples_per_s: float
    left_s: float | None

    def __str__(self) -> str:
        remaining = (
            f", about {format_duration(self.left_s)} left" if self.left_s is not None else ""
        )
        rate = f"{self.samples_per_s:.{0 if self.samples_per_s >= 100 else 1}f}"
        return f"{rate} samples/s, {format_duration(self.elapsed_s)} elapsed{remaining}"


def pace_of(execution: Execution, now_s: float) -> Pace | None:
    """Return the pace; None before training begins, and after the run."""
    if execution.started_s is None or execution.outcome is not None:
        return None
    run = execution.run
    elapsed_s = max(now_s - execution.started_s, 1e-9)
    steps = run.steps_committed - execution.started_step
    left_s = elapsed_s * (run.steps - run.steps_committed) / steps if steps > 0 else None
    return Pace(elapsed_s, max(steps, 0) * run.spec.step_samples / elapsed_s, left_s)


def format_duration(seconds: float) -> str:
    """Format seconds as 41 s, 12:05 or 3:12:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
