"""The audit of a run's directory: what can be proved from what was kept, and what not.

It only reads. It needs no run in progress, no worker, no model and no data: the journal, the
checkpoints, the log that is left and the result are held against each other, and every step whose
gradients are still there is taken again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coordinator.audit.coverage import cover_samples
from coordinator.audit.history import History, read_history
from coordinator.audit.recomputed import Asked, Recomputed
from coordinator.audit.state_proof import Progress, StateProof
from coordinator.capture.captured_files import first_lost_step
from coordinator.disk.canonical_json import json_digest
from coordinator.disk.claim import EPOCH_FILE, stored_epoch
from coordinator.run.outputs.own_state import own_state_lengths
from coordinator.storage.directory.journal import Verified, verify_journal
from coordinator.storage.directory.run_directory import RESULT_REMEDY, RunDirectory, StoredRun
from coordinator.storage.kept_files import changed_files, check_bound, file_digest, known_epoch
from coordinator.storage.states.checkpoint import (
    Checkpoint,
    checkpoint_steps,
    find_checkpoint,
    load_tensors,
    read_metrics,
)
from coordinator.storage.states.own_files import own_fault, own_steps
from protocol.base.errors import SamestepError, StorageFailed, UsageError
from protocol.exact.digest import weights_digest
from protocol.spec.manifest import RESERVED, Manifest

Check = Literal[
    "journal", "head", "files", "inputs", "coverage", "checkpoints", "replicas", "digests",
    "recomputed", "result",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing that was looked at, and what came of it."""

    check: Check
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok ' if self.ok else 'BAD'}  {self.check:<12} {self.text}"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """All findings, in the order in which they were made."""

    directory: Path
    findings: tuple[AuditFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing bad was found."""
        return all(finding.ok for finding in self.findings)

    def lines(self) -> list[str]:
        """For people: one line for each finding, and a last one that sums up."""
        bad = sum(not finding.ok for finding in self.findings)
        verdict = "sound" if self.ok else f"{bad} of {len(self.findings)} findings are bad"
        return [*(str(f) for f in self.findings), f"{str(self.directory)!r}: {verdict}"]


@dataclass(slots=True)
class _Evidence:
    """What the checks look at."""

    directory: RunDirectory
    verified: Verified
    history: History
    run: StoredRun
    manifest: Manifest | None
    result: dict[str, Any] | None
    findings: list[AuditFinding]

    def note(self, check: Check, *, ok: bool, text: str) -> None:
        self.findings.append(AuditFinding(check, ok, text))


def _silent(done: int, total: int) -> None:
    """Nobody looks on."""


def audit(path: Path, progress: Progress = _silent, asked: Asked | None = None) -> AuditResult:
    """Audit the run in a directory.

    Args:
        path: The directory.
        progress: Hears how many steps were taken again, of how many.
        asked: Which steps to compute again, and how.

    Raises:
        UsageError: There is no run there, or it has not begun.
        StorageFailed: A file cannot be read.
        StorageDamaged: `run.json`, the manifest or `result.json` is none, or there is no journal.
    """
    directory = RunDirectory(path)
    run = directory.read_run()
    if run is None:
        raise UsageError(f"expected a run in {str(path)!r}, found no run.json")
    check_bound(directory)
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
        proof = _check_states(evidence, evidence.manifest, progress, asked)
        _check_result(evidence, evidence.manifest, proof)
    return AuditResult(path, tuple(evidence.findings))


def _check_journal(evidence: _Evidence) -> None:
    verified, history = evidence.verified, evidence.history
    if verified.bad_line is not None:
        text = (
            f"journal.jsonl: line {verified.bad_line} is bad: {verified.reason}; what follows it "
            "is not used; bring it back from a copy"
        )
        evidence.note("journal", ok=False, text=text)
    else:
        text = f"{len(verified.entries)} lines, each bound to the one before, head {verified.head}"
        evidence.note("journal", ok=True, text=text)
    for fault in history.faults:
        evidence.note("journal", ok=False, text=fault)
    if history.resumed:
        text = f"resumed {history.resumed} times; {history.void} commits were taken back and redone"
        evidence.note("journal", ok=True, text=text)


def _check_head(evidence: _Evidence) -> None:
    """A chain cannot show that its end was cut off; the result can."""
    result, history = evidence.result, evidence.history
    if evidence.verified.bad_line is not None:
        return
    if result is None:
        ended = history.end is not None
        text = "the run has not ended: nothing shows yet whether the journal's end is there"
        if ended:
            text = "the journal says the run ended, and there is no result.json; "
            text += "bring it back from a copy, or --resume: it is written anew"
        evidence.note("head", ok=not ended, text=text)
        return
    named = result.get("journal_head")
    if named == evidence.verified.head:
        evidence.note("head", ok=True, text="result.json names the journal's last line")
    elif any(entry.hash == named for entry in evidence.verified.entries):
        text = "the journal goes on after the line that result.json names as its last"
        evidence.note("head", ok=False, text=text)
    else:
        text = f"result.json names a last line {named!r} that is not there: the end was cut off"
        evidence.note("head", ok=False, text=text)


def _check_files(evidence: _Evidence) -> None:
    """The small files that a restart reads, the epoch, and whatever else lies there."""
    directory, told = evidence.directory, evidence.history.files
    if told is None and evidence.verified.bad_line is not None:
        return  # what the journal would say of them is lost
    try:
        changed = changed_files(directory, told)
    except StorageFailed as error:
        changed = [(Path(error.path), f"it cannot be read: {error.reason}")]
    listed = directory.files_file
    was_there = told is not None and None not in told.digests.get(listed.name, (None,))
    if was_there and not listed.exists():
        changed.append((listed, "it is missing; a resumed run finds the files anew"))
    for path, reason in changed:
        evidence.note("files", ok=False, text=f"{str(path)!r}: {reason}")
    if not changed:
        named = ", ".join(sorted(told.digests)) if told is not None else "run.json, manifest.json"
        older = "" if told is not None else " (of an older release: it tells of no others)"
        evidence.note("files", ok=True, text=f"{named} are what the journal says{older}")
    try:
        epoch, known = stored_epoch(directory.path), known_epoch(directory)
        text = f"{EPOCH_FILE} says {epoch}, journal and log tell of {known}"
        if epoch < known:
            text += "; the next start writes it anew"
        evidence.note("files", ok=epoch >= known, text=text)
    except SamestepError as error:
        evidence.note("files", ok=False, text=str(error))
    if directory.set_aside.exists():
        text = (
            "set-aside holds what came after checkpoints that the run went back to: not looked at"
        )
        evidence.note("files", ok=True, text=text)
    export = evidence.manifest.export.directory if evidence.manifest is not None else ""
    others = [p.name for p in directory.path.iterdir() if p.name not in RESERVED | {export}]
    if others:
        text = f"not the run's, and not looked at: {', '.join(sorted(others))}"
        evidence.note("files", ok=True, text=text)


def _check_captured(evidence: _Evidence, manifest: Manifest) -> None:
    """Rows are durable before their commit: none may be missing, finished or not."""
    committed = len(evidence.history.commits)
    directory = evidence.directory.path
    try:
        lost = first_lost_step(directory, manifest, evidence.run.spec, committed)
    except StorageFailed as error:
        evidence.note("files", ok=False, text=str(error))
        return
    text = f"the logits of all {committed} committed steps are there"
    if lost < committed:
        text = (
            f"of {committed} committed steps the logits of step {lost} are in no file: bring the "
            "files back from a copy, or capture anew into a new directory"
        )
    evidence.note("files", ok=lost == committed, text=text)


def _check_inputs(evidence: _Evidence) -> None:
    history, run, manifest = evidence.history, evidence.run, evidence.manifest
    told = history.run
    same = told is not None and told.spec == run.document and told.run_id == run.run_id
    text = "run.json is what the journal says" if same else "run.json is not what the journal says"
    evidence.note("inputs", ok=same, text=text)
    if manifest is None and history.manifest is None:
        evidence.note("inputs", ok=True, text="no worker was ever ready: there is no manifest")
        return
    digest = manifest.digest() if manifest is not None else None
    settled = history.manifest.manifest_digest if history.manifest is not None else None
    if digest != settled or manifest is None:
        text = "manifest.json is not the one that the journal names"
        evidence.note("inputs", ok=False, text=text)
        return
    digests = ", ".join(f"{name} {value}" for name, value in sorted(manifest.digests.items()))
    evidence.note("inputs", ok=True, text=f"data and model as the manifest has them: {digests}")


def _check_coverage(evidence: _Evidence, manifest: Manifest) -> None:
    history = evidence.history
    coverage = cover_samples(
        history, evidence.run.spec, manifest.train_samples, manifest.row_groups
    )
    for fault in coverage.faults:
        evidence.note("coverage", ok=False, text=fault)
    for number, (covered, samples, skipped) in enumerate(coverage.epochs):
        text = f"epoch {number}: {covered} of {samples} samples covered exactly once"
        if skipped:
            text += f", {skipped} of them in steps that were skipped"
        ok = covered == samples or number == len(coverage.epochs) - 1
        evidence.note("coverage", ok=ok, text=text)
    if coverage.unplanned:
        text = f"{coverage.unplanned} commits were taken over from the gradient log after a crash"
        evidence.note("coverage", ok=True, text=f"{text}, without their plans")


def _check_states(
    evidence: _Evidence, manifest: Manifest, progress: Progress, asked: Asked | None
) -> StateProof:
    root, run_id = evidence.directory.checkpoints, evidence.run.run_id
    whole: list[Checkpoint] = []
    for step in checkpoint_steps(root):
        try:
            checkpoint = find_checkpoint(root, step, run_id, manifest)
        except SamestepError as error:
            evidence.note("checkpoints", ok=False, text=str(error))
            continue
        _check_checkpoint(evidence, checkpoint)
        whole.append(checkpoint)
    if not whole and evidence.history.commits:
        text = f"expected a whole checkpoint in {str(root)!r}, found none"
        evidence.note("checkpoints", ok=False, text=f"{text}; bring one back from a copy")
    _check_own_states(evidence, manifest)
    proof = StateProof(evidence.directory, evidence.run, manifest, evidence.history, progress)
    proof.replay(whole)
    for fault in proof.faults:
        evidence.note("digests", ok=False, text=fault)
    total = len(evidence.history.commits)
    text = f"{proof.steps} of {total} steps taken again from the log, every digest compared"
    if proof.steps < total:
        text += "; of the others no gradients are kept"
    evidence.note("digests", ok=not proof.faults, text=text)
    if asked is not None:
        recomputed = Recomputed(evidence.directory, evidence.run, manifest, whole, proof)
        _check_recomputed(evidence, recomputed, asked)
    return proof


def _check_recomputed(evidence: _Evidence, recomputed: Recomputed, asked: Asked) -> None:
    """What is recomputed from the state before a step is what was committed."""
    recomputed.compare(asked)
    for fault in recomputed.faults:
        evidence.note("recomputed", ok=False, text=fault)
    total, could, done = len(evidence.history.commits), recomputed.could, recomputed.steps
    text = f"{len(done)} of {total} steps computed again on this CPU, every bit compared: "
    text += ", ".join(map(str, done)) or "none"
    if len(done) < asked.steps and len(could) < total:
        text += "; before the others no state is kept (checkpoint.keep_log=true keeps them all)"
    evidence.note("recomputed", ok=bool(done) and not recomputed.faults, text=text)


def _check_own_states(evidence: _Evidence, manifest: Manifest) -> None:
    """What replicas have of their own is what the commit that led there names."""
    directory, spec = evidence.directory, evidence.run.spec
    lengths, commits = own_state_lengths(spec, manifest), evidence.history.commits
    if not lengths:
        return
    there = own_steps(directory.replicas)
    every, newest = spec.checkpoint.every, len(commits)
    saved = {s for s in checkpoint_steps(directory.checkpoints) if every and s % every == 0}
    for step in sorted({*there, *saved, newest} - {0}):
        if step > newest:
            text = f"{directory.own_file(step).name}: no line of the journal leads there: "
            evidence.note("replicas", ok=True, text=f"{text}not looked at")
            continue
        told = commits[step - 1][1].own_digest
        try:
            fault = own_fault(directory.own_file(step), lengths, told)
        except StorageFailed as error:
            fault = str(error)
        text = f"step {step}: the replicas' own states are those that its commit names, {told}"
        if fault:
            text = f"{str(directory.own_file(step))!r}: {fault}; bring it back from a copy"
        evidence.note("replicas", ok=not fault, text=text)
    others = [step for step in range(1, newest) if step not in {*there, *saved}]
    if others:
        text = f"of {len(others)} of {newest} rounds no own states are kept: not looked at"
        evidence.note("replicas", ok=True, text=text)


def _check_checkpoint(evidence: _Evidence, checkpoint: Checkpoint) -> None:
    """Its state and its figures are those in the journal."""
    history, info = evidence.history, checkpoint.info
    told, step = history.checkpoints.get(info.step), info.step
    text, ok = f"step {step}: files whole, state {info.state_digest}", True
    if told is None and history.end is None and step > max(history.checkpoints, default=-1):
        text += "; the journal has no line of it yet: the coordinator ended in between"
    elif told is None or told.state_digest != info.state_digest:
        text, ok = (
            f"step {step}: its state {info.state_digest} is not the one in the journal",
            False,
        )
    evidence.note("checkpoints", ok=ok, text=text)
    try:
        kept = read_metrics(evidence.directory.checkpoints, step)
    except SamestepError as error:
        evidence.note("checkpoints", ok=False, text=str(error))
        return
    figures = history.figures.get(step)
    if kept is None or (figures is None and history.end is None):
        return
    told_figures = {} if figures is None else figures.metrics
    if kept.figures != {name: v for name, v in told_figures.items() if v is not None}:
        text = f"step {step}: its figures {kept.figures} are not those in the journal"
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
            said = {name: value for name, value in result.items() if name != "journal_head"}
            claims["content of digest"] = (json_digest(said), end.result_digest)
    for name, (claimed, told) in claims.items():
        if claimed != told:
            text = f"result.json says {name} {claimed!r:.80}, the journal {told!r:.80}"
            evidence.note("result", ok=False, text=text)
    if proof.replica is not None and proof.reached_end:
        reached = proof.replica.weights_digest()
        same = reached == digest
        way = "reached by replay" if proof.since else "are those of the last checkpoint"
        text = f"weights {reached} {way}"
        if not same:
            text += f", but result.json says {digest}"
        evidence.note("result", ok=same, text=text)
    if manifest.capture is None:
        _check_export(evidence, manifest, digest)
    _check_exported_files(evidence, result.get("exported"))


def _check_exported_files(evidence: _Evidence, exported: object) -> None:
    """Labels, tokenizer and configuration decide what the trained tensors are good for."""
    if not isinstance(exported, dict):
        text = "of what was exported only the weights are looked at: an older release wrote it"
        evidence.note("result", ok=True, text=text)
        return
    changed = 0
    for name, told in sorted(exported.items()):
        path, text = evidence.directory.path / str(name), ""
        try:
            found = file_digest(path) if path.is_file() else None
        except StorageFailed as error:
            text = str(error)
        else:
            what = "is missing" if found is None else "is not what was written"
            text = f"{str(path)!r} {what}; {RESULT_REMEDY}" if found != told else ""
        if text:
            changed += 1
            evidence.note("result", ok=False, text=text)
    if not changed:
        text = f"{len(exported)} exported files are as they were written"
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
        found = weights_digest({names[name]: values for name, values in tensors.items()})
    except (SamestepError, KeyError, AssertionError) as error:
        text = f"{str(path)!r} is not the trained model: {error}; {RESULT_REMEDY}"
        evidence.note("result", ok=False, text=text)
        return
    same = found == digest
    text = f"{export.directory}/{export.weights_file} has the digest {found}"
    if not same:
        text += f", but result.json says {digest}"
    evidence.note("result", ok=same, text=text)
