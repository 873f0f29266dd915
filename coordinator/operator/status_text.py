"""Format the status document as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.base import limits
from protocol.base.limits import byte_size


def summary(document: dict[str, Any]) -> str:
    """Return one line, for `systemctl status`."""
    parts = [document["phase"]]
    if document.get("run_id"):
        parts.append(f"run {document['run_id']} step {_step(document)}")
    parts.append(f"{document['able_workers']} of {document['expect_workers']} workers")
    waiting = f"; waiting for {document['waiting_for']}" if document.get("waiting_for") else ""
    encryption = "; NOT ENCRYPTED" if document["encryption"] != "TLS 1.3" else ""
    return ", ".join(parts) + waiting + encryption


def _step(document: dict[str, Any]) -> str:
    """Format the number of committed steps, and the total if known."""
    total = "" if document["steps"] is None else f" of {document['steps']}"
    epochs = f" ({document['epochs']})" if document.get("epochs") else ""
    return f"{document['step']}{total}{epochs}"


def _digest_of(document: dict[str, Any]) -> str:
    return "result" if document["result"] else f"checkpoint after step {document['checkpoint']}"


def status_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of `coordinator status`."""
    reason = f" ({document['reason']})" if document.get("reason") else ""
    yield f"phase    {document['phase']}{reason}"
    if document.get("run_id"):
        loss = document["loss"]
        yield f"run      {document['run_id']}: {document['task']}"
        loss_text = f"loss {loss}" if loss is not None else "no loss"
        yield f"step     {_step(document)}, {loss_text}"
        if document.get("pace"):
            yield f"pace     {document['pace']}"
        if document["weights_digest"] is not None:
            yield f"digest   {document['weights_digest']} (weights, {_digest_of(document)})"
        exactness = {True: "exact", False: "mixed", None: "not known yet"}[document["exact"]]
        yield f"numbers  {exactness} (exactness: {document['exactness']})"
        yield f"unit     {document['unit']}"
        checkpoint = document["checkpoint"]
        saved = "no checkpoint yet" if checkpoint is None else f"checkpoint after step {checkpoint}"
        yield f"files    {document['directory']}, {saved}"
    if document.get("queued_runs"):
        yield f"queued   {', '.join(document['queued_runs'])}"
    if document.get("waiting_for"):
        stage = f" ({document['stage']})" if document.get("stage") else ""
        yield f"waiting  for {document['waiting_for']}{stage}"
    exchange = document.get("exchange")
    if exchange and exchange["reason"]:
        yield f"exchange {exchange['reason']}"
    if document["encryption"] != "TLS 1.3":
        yield f"NOT ENCRYPTED: {document['encryption']}"
    for line in document["coming_and_going"]:
        yield f"again    {line}"
    for trouble in document["secrets"]:
        yield f"secrets  {trouble}"
    workers, expected = document["workers"], document["expect_workers"]
    evaluator_count = sum(worker["duty"] == "evaluate" for worker in workers)
    evaluators_text = f" and {evaluator_count} to evaluate" if evaluator_count else ""
    workers_text = f"{document['able_workers']} of {expected} expected{evaluators_text}"
    yield f"workers  {workers_text}, view {document['view']}"
    for worker in workers:
        yield from _worker_lines(document, worker)


def _worker_lines(document: dict[str, Any], worker: dict[str, Any]) -> Iterator[str]:
    speed = worker.get("ms_per_microbatch")
    unit = "round of a replica" if document.get("replicas") else "microbatch"
    pace = f", {speed:g} ms/{unit}" if speed is not None else ""
    share = worker.get("microbatches_of_step")
    work = f", {share} microbatches of this step" if share is not None else ""
    if document.get("replicas") and share is not None:
        work = _inner_phase(worker, share)
    if worker["duty"] == "evaluate":
        work = ", duty: evaluate"
    device = f" on {worker['device']}" if worker["device"] else ""
    state = f"{worker['state']}, LATE" if worker.get("late") else worker["state"]
    if worker.get("aside_until"):
        state = f"set aside until step {worker['aside_until']}, too often LATE"
    if worker["last_seen_s"] * 1000 > limits.LIVENESS_TIMEOUT_MS:
        state += ", SILENT"
    traffic = _traffic(worker)
    yield (f"  {worker['name']}: {state}{device}{work}{pace}, seen {worker['last_seen_s']:g} s ago")
    if traffic:
        yield f"    {traffic}"


def _inner_phase(worker: dict[str, Any], share: int) -> str:
    """Format the work of a worker in a run with replicas."""
    if not share:
        return ", standing by: other workers have all replicas"
    phase = worker.get("inner_phase")
    if phase is None:
        return f", has computed its {share} of the replicas"
    return f", replica {phase['replica']}: step {phase['inner_step']} of {phase['inner_steps']}"


def _traffic(worker: dict[str, Any]) -> str:
    """Format a worker's links with speed and traffic; empty without links."""
    links = worker.get("links") or {}
    parts = [
        f"{peer} {link['mbit']:g} Mbit/s, {byte_size(link['bytes_sent'])} out, "
        f"{byte_size(link['bytes_received'])} in"
        for peer, link in links.items()
    ]
    return f"links: {'; '.join(parts)}" if parts else ""
