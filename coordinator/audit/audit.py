"""The audit of a run's directory: the proofs in its files, and the gaps in them.

It only reads. It needs no run in progress, no worker, no model and no data: journal, checkpoints,
log and result are compared with each other, and every step whose gradients are in the log is
replayed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coordinator.audit.coverage import cover_samples
from coordinator.audit.history import History, read_history
from coordinator.audit.recomputed import RecomputeCheck, RecomputeRequest
from coordinator.audit.state_proof import Progress, StateProof
from coordinator.capture.captured_files import find_first_lost_step
from coordinator.disk.canonical_json import json_digest
from coordinator.disk.directory_lock import stored_term, term_file_name
from coordinator.run.outputs.side_outputs import replica_state_sizes
from coordinator.storage.directory.journal import VerifiedJournal, verify_journal
from coordinator.storage.directory.run_directory import RESULT_REMEDY, RunDirectory, StoredRun
from coordinator.storage.file_digests import changed_files, check_journal, file_digest, known_term
from coordinator.storage.states.checkpoint import (
    Checkpoint,
    checkpoint_steps,
    find_checkpoint,
    load_tensors,
    read_metrics,
)
from coordinator.storage.states.replica_states import replica_state_steps, state_fault
from protocol.base.errors import SamestepError, StorageFailed, UsageError
from protocol.exact.digest import weights_digest
from protocol.spec.manifest import RESERVED_NAMES, Manifest
from protocol.spec.run_spec import parse_run_spec_bytes
from protocol.spec.spec_changes import changes_between, refused_change

Check = Literal[
    "journal", "head", "files", "inputs", "coverage", "checkpoints", "replicas", "digests",
    "recomputed", "result",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The result of one check."""

    check: Check
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok ' if self.ok else 'BAD'}  {self.check:<12} {self.text}"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """All findings, in order."""

    directory: Path
    findings: tuple[AuditFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(finding.ok for finding in self.findings)

    def lines(self) -> list[str]:
        """Return a line for each finding, and a summary."""
        failures = sum(not finding.ok for finding in self.findings)
        verdict = "sound" if self.ok else f"{failures} of {len(self.findings)} findings are bad"
        return [*(str(f) for f in self.findings), f"{str(self.directory)!r}: {verdict}"]


@dataclass(slots=True)
class _Evidence:
    """The content of a run's files, for the checks, and the findings so far."""

    directory: RunDirectory
    verified: VerifiedJournal
    history: History
    run: StoredRun
    manifest: Manifest | None
    result: dict[str, Any] | None
    findings: list[AuditFinding]

    def note(self, check: Check, *, ok: bool, text: str) -> None:
        self.findings.append(AuditFinding(check, ok, text))


def _show_no_progress(completed: int, total: int) -> None:
    """Show no progress."""


def audit(
    path: Path, progress: Progress = _show_no_progress, request: RecomputeRequest | None = None
) -> AuditResult:
    """Audit the run in a directory.

    Args:
        path: The directory.
        progress: Called with the number of replayed steps, and the total.
        request: How many steps to recompute, and the function that does it; None: no steps.

    Raises:
        UsageError: There is no run, or it has not begun.
        StorageFailed: A file cannot be read.
        StorageDamaged: `run.json`, the manifest or `result.json` is damaged, or the journal is
            missing.
    """
    directory = RunDirectory(path)
    run = directory.read_run()
    if run is None:
        raise UsageError(
            f"expected a run in {str(path)!r}, found no run.json; name a run's directory"
        )
    check_journal(directory)
    if not directory.journal.exists():
        raise UsageError(f"the run in {str(path)!r} has not begun: there is nothing to audit yet")
    verified = verify_journal(directory.journal)
    evidence = _Evidence(
        directory,
        verified,
        read_history(verified.entries),
        run,
        directory.read_manifest(),
        directory.read_result(),
        [],
    )
    _check_journal(evidence)
    _check_head(evidence)
    _check_files(evidence)
    _check_inputs(evidence)
    if evidence.manifest is not None:
        if evidence.manifest.capture is not None:
            _check_captured(evidence, evidence.manifest)
        _check_coverage(evidence, evidence.manifest)
        proof = _check_states(evidence, evidence.manifest, progress, request)
        _check_result(evidence, evidence.manifest, proof)
    return AuditResult(path, tuple(evidence.findings))


def _check_journal(evidence: _Evidence) -> None:
    verified, history = evidence.verified, evidence.history
    if verified.bad_line is not None:
        text = (
            f"journal.jsonl: line {verified.bad_line} is bad: {verified.reason}; later lines "
            "are not used; restore it from a copy"
        )
        evidence.note("journal", ok=False, text=text)
    else:
        text = (
            f"{len(verified.entries)} lines, each chained to the one before, head {verified.head}"
        )
        evidence.note("journal", ok=True, text=text)
    for fault in history.faults:
        evidence.note("journal", ok=False, text=fault)
    if history.resume_count:
        text = f"resumed {history.resume_count} times; {history.rolled_back_commits} commits were "
        text += "rolled back and redone"
        evidence.note("journal", ok=True, text=text)


def _check_head(evidence: _Evidence) -> None:
    """Compare the journal's last line with the result: a chain cannot show that its end was cut."""
    result, history = evidence.result, evidence.history
    if evidence.verified.bad_line is not None:
        return
    if result is None:
        has_ended = history.end is not None
        text = "the run has not ended: nothing proves yet that the journal's end is complete"
        if has_ended:
            text = "the journal says that the run ended, but there is no result.json; "
            text += "restore it from a copy, or --resume: it is written again"
        evidence.note("head", ok=not has_ended, text=text)
        return
    result_head = result.get("journal_head")
    if result_head == evidence.verified.head:
        evidence.note("head", ok=True, text="result.json names the journal's last line")
    elif any(entry.hash == result_head for entry in evidence.verified.entries):
        text = "the journal continues after the line that result.json names as its last"
        evidence.note("head", ok=False, text=text)
    else:
        text = f"result.json names a last line {result_head!r} that is missing: the end was cut off"
        evidence.note("head", ok=False, text=text)


def _check_files(evidence: _Evidence) -> None:
    """Check the small files that a restart reads, and the term; list other files."""
    directory, recorded_digests = evidence.directory, evidence.history.files
    if recorded_digests is None and evidence.verified.bad_line is not None:
        return  # the journal's record of the files' digests is lost
    try:
        changes = changed_files(directory, recorded_digests)
    except StorageFailed as error:
        changes = [(Path(error.path), f"it cannot be read: {error.reason}")]
    list_file = directory.files_file
    was_recorded = recorded_digests is not None and None not in recorded_digests.digests.get(
        list_file.name, (None,)
    )
    if was_recorded and not list_file.exists():
        changes.append((list_file, "it is missing; a resumed run hashes the files again"))
    for path, reason in changes:
        evidence.note("files", ok=False, text=f"{str(path)!r}: {reason}")
    if not changes:
        file_names = (
            ", ".join(sorted(recorded_digests.digests))
            if recorded_digests is not None
            else "run.json, manifest.json"
        )
        older = "" if recorded_digests is not None else " (an older release recorded no others)"
        evidence.note("files", ok=True, text=f"{file_names} are as recorded in the journal{older}")
    try:
        term, newest_term = stored_term(directory.path), known_term(directory)
        text = f"{term_file_name(directory.path)} has term {term}, journal and log {newest_term}"
        if term < newest_term:
            text += "; the next start writes it again"
        evidence.note("files", ok=term >= newest_term, text=text)
    except SamestepError as error:
        evidence.note("files", ok=False, text=str(error))
    if directory.set_aside.exists():
        text = "set-aside holds what rollbacks removed from the run: not checked"
        evidence.note("files", ok=True, text=text)
    export = evidence.manifest.export.directory if evidence.manifest is not None else ""
    others = [p.name for p in directory.path.iterdir() if p.name not in RESERVED_NAMES | {export}]
    if others:
        text = f"not files of the run, and not checked: {', '.join(sorted(others))}"
        evidence.note("files", ok=True, text=text)


def _check_captured(evidence: _Evidence, manifest: Manifest) -> None:
    """Check that no captured rows are missing: rows are durable before their step's commit."""
    commit_count = len(evidence.history.commits)
    directory = evidence.directory.path
    try:
        first_lost = find_first_lost_step(directory, manifest, evidence.run.spec, commit_count)
    except StorageFailed as error:
        evidence.note("files", ok=False, text=str(error))
        return
    text = f"the logits of all {commit_count} committed steps exist"
    if first_lost < commit_count:
        text = (
            f"of {commit_count} committed steps, the logits of step {first_lost} are missing: "
            "restore the files from a copy, or capture again into a new directory"
        )
    evidence.note("files", ok=first_lost == commit_count, text=text)


def _check_changes(evidence: _Evidence) -> None:
    """Note the changes of the run spec; only some keys may change in a run that has begun."""
    history = evidence.history
    if history.start is None:
        return
    spec = parse_run_spec_bytes(json.dumps(history.start.spec).encode())
    for record in history.changes:
        new = parse_run_spec_bytes(json.dumps(record.spec).encode())
        fault, changes_text = refused_change(spec, new), "; ".join(changes_between(spec, new))
        text = f"the run spec changed after {record.step} steps: {changes_text}"
        evidence.note("inputs", ok=not fault, text=f"{text}; {fault}" if fault else text)
        spec = new


def _check_inputs(evidence: _Evidence) -> None:
    history, run, manifest = evidence.history, evidence.run, evidence.manifest
    recorded_run = history.start
    is_same = (
        recorded_run is not None
        and history.spec == run.document
        and recorded_run.run_id == run.run_id
    )
    text = f"run.json {'is as recorded in' if is_same else 'differs from'} the journal"
    evidence.note("inputs", ok=is_same, text=text)
    _check_changes(evidence)
    if manifest is None and history.manifest is None:
        evidence.note("inputs", ok=True, text="no worker was ever ready: there is no manifest")
        return
    digest = manifest.digest() if manifest is not None else None
    journal_digest = history.manifest.manifest_digest if history.manifest is not None else None
    if digest != journal_digest or manifest is None:
        text = "manifest.json differs from the journal's digest"
        evidence.note("inputs", ok=False, text=text)
        return
    digests = ", ".join(f"{name} {value}" for name, value in sorted(manifest.digests.items()))
    evidence.note("inputs", ok=True, text=f"data and model according to the manifest: {digests}")


def _check_coverage(evidence: _Evidence, manifest: Manifest) -> None:
    history = evidence.history
    sampling = manifest.sampling
    coverage = cover_samples(
        history, evidence.run.spec, manifest.train_samples, manifest.row_groups, sampling
    )
    for fault in coverage.faults:
        evidence.note("coverage", ok=False, text=fault)
    for number, (used_once, samples, skipped) in enumerate(coverage.epochs):
        text = f"epoch {number}: {used_once} of {samples} samples covered exactly once"
        if sampling is not None:
            text = f"epoch {number}: {used_once} of {samples} draws {sampling} used exactly once, "
            text += "as redrawn from the seed"
        if skipped:
            text += f", {skipped} of them in steps that were skipped"
        ok = used_once == samples or number == len(coverage.epochs) - 1
        evidence.note("coverage", ok=ok, text=text)
    if coverage.unplanned:
        text = f"{coverage.unplanned} commits were recovered from the gradient log after a crash"
        evidence.note("coverage", ok=True, text=f"{text}, without their plans")


def _check_states(
    evidence: _Evidence, manifest: Manifest, progress: Progress, request: RecomputeRequest | None
) -> StateProof:
    root, run_id = evidence.directory.checkpoints, evidence.run.run_id
    intact: list[Checkpoint] = []
    for step in checkpoint_steps(root):
        try:
            checkpoint = find_checkpoint(root, step, run_id, manifest)
        except SamestepError as error:
            evidence.note("checkpoints", ok=False, text=str(error))
            continue
        _check_checkpoint(evidence, checkpoint)
        intact.append(checkpoint)
    if not intact and evidence.history.commits:
        text = f"expected an intact checkpoint in {str(root)!r}, found none"
        evidence.note("checkpoints", ok=False, text=f"{text}; restore one from a copy")
    _check_replica_states(evidence, manifest)
    proof = StateProof(evidence.directory, evidence.run, manifest, evidence.history, progress)
    proof.replay(intact)
    for fault in proof.faults:
        evidence.note("digests", ok=False, text=fault)
    total = len(evidence.history.commits)
    text = f"{proof.steps} of {total} steps replayed from the log, every digest compared"
    if proof.steps < total:
        text += "; the gradients of the other steps are not kept"
    evidence.note("digests", ok=not proof.faults, text=text)
    if request is not None:
        recomputed = RecomputeCheck(evidence.directory, evidence.run, manifest, intact, proof)
        _check_recomputed(evidence, recomputed, request)
    return proof


def _check_recomputed(
    evidence: _Evidence, recomputed: RecomputeCheck, request: RecomputeRequest
) -> None:
    """Check that recomputed steps equal the committed ones."""
    recomputed.compare(request)
    for fault in recomputed.faults:
        evidence.note("recomputed", ok=False, text=fault)
    total, candidates, steps = (
        len(evidence.history.commits),
        recomputed.candidates,
        recomputed.steps,
    )
    text = f"{len(steps)} of {total} steps recomputed on this CPU, every bit compared: "
    text += ", ".join(map(str, steps)) or "none"
    if len(steps) < request.steps and len(candidates) < total:
        text += "; the states before other steps are not kept (checkpoint.keep_log=true keeps all)"
    evidence.note("recomputed", ok=bool(steps) and not recomputed.faults, text=text)


def _check_replica_states(evidence: _Evidence, manifest: Manifest) -> None:
    """Check the per-replica state of each round against the digest in its commit."""
    directory, spec = evidence.directory, evidence.run.spec
    lengths, commits = replica_state_sizes(spec, manifest), evidence.history.commits
    if not lengths:
        return
    present = replica_state_steps(directory.replicas)
    every, newest = spec.checkpoint.every, len(commits)
    saved_steps = {s for s in checkpoint_steps(directory.checkpoints) if every and s % every == 0}
    for step in sorted({*present, *saved_steps, newest} - {0}):
        if step > newest:
            text = f"{directory.replica_state_file(step).name}: the journal has no such round: "
            evidence.note("replicas", ok=True, text=f"{text}not checked")
            continue
        digest = commits[step - 1][1].own_digest
        try:
            fault = state_fault(directory.replica_state_file(step), lengths, digest)
        except StorageFailed as error:
            fault = str(error)
        text = f"step {step}: the per-replica state has the digest in its commit, {digest}"
        if fault:
            text = f"{str(directory.replica_state_file(step))!r}: {fault}; restore it from a copy"
        evidence.note("replicas", ok=not fault, text=text)
    others = [step for step in range(1, newest) if step not in {*present, *saved_steps}]
    if others:
        text = f"the per-replica state of {len(others)} of {newest} rounds is not kept: not checked"
        evidence.note("replicas", ok=True, text=text)


def _check_checkpoint(evidence: _Evidence, checkpoint: Checkpoint) -> None:
    """Check a checkpoint's state and metrics against the journal."""
    history, info = evidence.history, checkpoint.info
    journal_record, step = history.checkpoints.get(info.step), info.step
    text, ok = f"step {step}: files intact, state {info.state_digest}", True
    if (
        journal_record is None
        and history.end is None
        and step > max(history.checkpoints, default=-1)
    ):
        text += "; the journal has no line for it: the coordinator ended before writing one"
    elif journal_record is None or journal_record.state_digest != info.state_digest:
        text, ok = (
            f"step {step}: its state {info.state_digest} differs from the journal's",
            False,
        )
    evidence.note("checkpoints", ok=ok, text=text)
    try:
        metrics = read_metrics(evidence.directory.checkpoints, step)
    except SamestepError as error:
        evidence.note("checkpoints", ok=False, text=str(error))
        return
    evaluation = history.evaluations.get(step)
    if metrics is None or (evaluation is None and history.end is None):
        return
    journal_values = {} if evaluation is None else evaluation.metrics
    if metrics.figures != {name: v for name, v in journal_values.items() if v is not None}:
        text = f"step {step}: its metrics {metrics.figures} differ from the journal's"
        evidence.note("checkpoints", ok=False, text=text)


def _check_result(evidence: _Evidence, manifest: Manifest, proof: StateProof) -> None:
    result, history = evidence.result, evidence.history
    if result is None:
        return
    digest = result.get("weights_digest")
    claims = {
        "steps": (result.get("steps"), len(history.commits)),
        "losses": (result.get("losses"), [commit.loss for _, commit in history.commits]),
    }
    if history.end is not None:
        end = history.end[1]
        claims["weights_digest"] = (digest, end.weights_digest)
        claims["outcome"] = (result.get("outcome"), end.outcome)
        if end.result_digest is not None:
            result_fields = {
                name: value for name, value in result.items() if name != "journal_head"
            }
            claims["content of digest"] = (json_digest(result_fields), end.result_digest)
    for name, (result_value, journal_value) in claims.items():
        if result_value != journal_value:
            text = (
                f"result.json says {name} {result_value!r:.80}, the journal {journal_value!r:.80}"
            )
            evidence.note("result", ok=False, text=text)
    if proof.replica is not None and proof.reached_end:
        replayed_digest = proof.replica.weights_digest()
        is_same = replayed_digest == digest
        source = (
            "reached by replay"
            if proof.steps_since_checkpoint
            else "are those of the last checkpoint"
        )
        text = f"weights {replayed_digest} {source}"
        if not is_same:
            text += f", but result.json says {digest}"
        evidence.note("result", ok=is_same, text=text)
    if manifest.capture is None:
        _check_export(evidence, manifest, digest)
    _check_exported_files(evidence, result.get("exported"))


def _check_exported_files(evidence: _Evidence, exported: object) -> None:
    """Check the exported files against the digests in `result.json`: labels, tokenizer and
    configuration give the weights their meaning."""
    if not isinstance(exported, dict):
        text = "only the weights of the exported files are checked: an older release wrote them"
        evidence.note("result", ok=True, text=text)
        return
    bad_files = 0
    for name, recorded_digest in sorted(exported.items()):
        path, text = evidence.directory.path / str(name), ""
        try:
            digest = file_digest(path) if path.is_file() else None
        except StorageFailed as error:
            text = str(error)
        else:
            fault = "is missing" if digest is None else "was changed"
            text = f"{str(path)!r} {fault}; {RESULT_REMEDY}" if digest != recorded_digest else ""
        if text:
            bad_files += 1
            evidence.note("result", ok=False, text=text)
    if not bad_files:
        text = f"{len(exported)} exported files are unchanged"
        evidence.note("result", ok=True, text=text)


def _check_export(evidence: _Evidence, manifest: Manifest, digest: object) -> None:
    export = manifest.export
    path = evidence.directory.path / export.directory / export.weights_file
    names = {
        export.names.get(tensor.name, tensor.name): tensor.name
        for block in manifest.blocks
        for tensor in block.tensors
    }
    try:
        tensors = load_tensors(path)
        export_digest = weights_digest({names[name]: values for name, values in tensors.items()})
    except (SamestepError, KeyError, AssertionError) as error:
        text = f"{str(path)!r} is not the trained model: {error}; {RESULT_REMEDY}"
        evidence.note("result", ok=False, text=text)
        return
    is_same = export_digest == digest
    text = f"{export.directory}/{export.weights_file} has the digest {export_digest}"
    if not is_same:
        text += f", but result.json says {digest}"
    evidence.note("result", ok=is_same, text=text)
