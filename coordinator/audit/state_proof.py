"""Replay every step whose gradients are in the log, and compare the digests with the journal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from coordinator.audit.history import History
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.log.log_index import LoggedStep, LogIndex, apply_logged_step, read_averages
from coordinator.storage.log.log_reader import scan_log
from coordinator.storage.log.log_records import Array
from coordinator.storage.states.checkpoint import Checkpoint
from coordinator.storage.states.checkpoint_state import load_replica
from protocol.base.errors import SamestepError
from protocol.exact.digest import averages_digest, block_digest
from protocol.exact.parameter_groups import ClippedGroups
from protocol.exact.plateau import Plateau
from protocol.exact.replica import Replica
from protocol.exact.update import step_scalars
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import parse_run_spec_bytes

Progress = Callable[[int, int], None]
"""Called with the number of checked steps, and the total."""


class StateProof:
    """Replays the logged steps, from the oldest checkpoint on.

    Attributes:
        faults: The differences, step by step.
        replayed_steps: The steps that were replayed.
        history: The content of the journal.
        steps_since_checkpoint: How many steps were replayed on top of the checkpoint from which the
            last state was computed.
        replica: The last state; None without an intact checkpoint.
    """

    def __init__(
        self,
        directory: RunDirectory,
        run: StoredRun,
        manifest: Manifest,
        history: History,
        progress: Progress,
    ) -> None:
        self.steps_since_checkpoint = 0
        self.replayed_steps: set[int] = set()
        self.faults: list[str] = []
        self.replica: Replica | None = None
        self._log = directory.log
        self._run = run
        self._manifest = manifest
        self.history = history
        self._progress = progress
        figures = {step: record.metric_values for step, record in history.evaluations.items()}
        self._specs = [
            (first_step, spec, Plateau(spec.step_optimizer, figures))
            for first_step, document in history.specs
            for spec in [parse_run_spec_bytes(json.dumps(document).encode())]
        ]

    @property
    def steps(self) -> int:
        """How many steps were replayed."""
        return len(self.replayed_steps)

    @property
    def reached_end(self) -> bool:
        """Whether the last state is the one after the newest commit."""
        return self.replica is not None and self.replica.step == len(self.history.commits)

    def replay(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Replay every step; after a gap in the log, continue from the next checkpoint.

        Args:
            checkpoints: The intact checkpoints, in the order of their steps.
        """
        try:
            scan = scan_log(self._log, self._run.run_id, self._manifest)
            index = scan.index
            newest_checkpoint = max((c.info.step for c in checkpoints), default=0)
            self._compare_lengths(index, newest_checkpoint)
            if self.history.end is not None:
                # A run that has ended has no step whose sync was interrupted.
                self.faults += [f"{tail}; restore it from a copy" for tail in scan.torn_tails]
            for number, checkpoint in enumerate(checkpoints, 1):
                later_checkpoints = checkpoints[number:]
                end = min(
                    [c.info.step for c in later_checkpoints], default=len(self.history.commits)
                )
                self._replay_from(checkpoint, index, min(end, len(self.history.commits)))
            self._compare_end()
            if checkpoints:
                self._find_gap(index, newest_checkpoint)
            self._check_remaining(index)
        except SamestepError as error:
            self.faults.append(str(error))

    def _replay_from(self, checkpoint: Checkpoint, index: LogIndex, end: int) -> None:
        """Replay steps below `end` from the replica if it has reached the checkpoint, else from the
        checkpoint."""
        info = checkpoint.info
        if self.replica is None or self.replica.step < info.step:
            self.replica = load_replica(checkpoint, self._manifest, self._run.spec.step_optimizer)
            self.steps_since_checkpoint = 0
        elif not self.replica.has_digest(info.state_digest):
            self.faults.append(
                f"replaying the steps does not lead to the checkpoint of step {info.step}"
            )
        for logged_step in index.steps_from(self.replica.step):
            if logged_step.step >= end:
                break
            averages = read_averages(logged_step, self._manifest.blocks)
            if averages is None and logged_step.record.commit.scalars is not None:
                break
            differences = [
                *self._compare_log_and_journal(self.replica, logged_step),
                *self._compare_gradients_and_commit(logged_step, averages),
            ]
            self.faults += [f"step {logged_step.step}: {difference}" for difference in differences]
            apply_logged_step(self.replica, logged_step.record, averages)
            self.replayed_steps.add(logged_step.step)
            self.steps_since_checkpoint += 1
            self._progress(logged_step.step + 1, len(self.history.commits))

    def _compare_log_and_journal(self, replica: Replica, logged_step: LoggedStep) -> Iterator[str]:
        record, commit = logged_step.record, logged_step.record.commit
        journal_commit = self.history.commit_of(logged_step.step)
        assert journal_commit is not None
        # None in a skipped step, and in the journal of an older release.
        has_no_rate = journal_commit.rate is None
        rate = None if has_no_rate or commit.scalars is None else commit.scalars.learning_rate
        for name, logged_value, recorded_value in (
            ("term", commit.term, journal_commit.term),
            ("attempt", commit.attempt, journal_commit.attempt),
            ("count of updates", record.optimizer_step, journal_commit.optimizer_step),
            ("skip", commit.scalars is None, journal_commit.skipped),
            ("digest of averages", commit.averages_digest, journal_commit.averages_digest),
            ("loss", None if journal_commit.skipped else commit.loss, journal_commit.loss),
            ("norm", record.norm, journal_commit.norm),
            ("digest of per-replica state", record.own_digest, journal_commit.own_digest),
            ("embeddings", record.embedded, journal_commit.embedded),
            ("rate", rate, journal_commit.rate),
        ):
            if logged_value != recorded_value:
                yield f"the log has {name} {logged_value}, the journal {recorded_value}"
        figures = self.history.evaluations.get(logged_step.step)
        for name, digest in (
            ("log says", record.state_before),
            ("journal says", journal_commit.state_before),
            ("metrics in the journal say", figures.state_digest if figures else None),
        ):
            if digest is not None and not replica.has_digest(digest):
                yield (
                    f"the {name} that the state before this step had digest {digest}; replaying "
                    f"the steps gives {replica.state_digest()}"
                )

    def _compare_gradients_and_commit(
        self, logged_step: LoggedStep, averages: Sequence[Array] | None
    ) -> Iterator[str]:
        commit = logged_step.record.commit
        if averages is None or commit.scalars is None:
            return
        _, spec, plateau = next(
            entry for entry in reversed(self._specs) if entry[0] <= logged_step.step
        )
        blocks = list(zip(self._manifest.blocks, averages, strict=True))
        if averages_digest(block_digest(*block) for block in blocks) != commit.averages_digest:
            yield "the digest of the averaged gradients differs from that in the commit"
        norms = ClippedGroups(spec.step_optimizer).norms_of(self._manifest.blocks, averages)
        updates = logged_step.record.optimizer_step
        if logged_step.record.norm not in {None, norms.whole}:
            norm = logged_step.record.norm
            yield f"the commit has norm {norm}, the averaged gradients {norms.whole}"
        steps = spec.steps_with(self._manifest.epoch_samples)
        expected = step_scalars(
            spec.step_optimizer, updates, commit.step, steps, norms,
            loss_scale=commit.scalars.loss_scale, rate_factor=plateau.factor_at(commit.step),
        )  # fmt: skip
        if commit.scalars != expected:
            yield "the scalars of the update do not follow from run spec and gradients"

    def _compare_lengths(self, index: LogIndex, newest_checkpoint: int) -> None:
        """Check that log and checkpoints have all steps of the journal, which is written last."""
        journal_steps = len(self.history.commits)
        logged_steps = 0 if index.last_step is None else index.last_step + 1
        stored_steps = max(newest_checkpoint, logged_steps)
        if journal_steps > stored_steps + 1:  # the newest step's records may be a torn tail
            self.faults.append(
                f"the journal has {journal_steps} steps, {str(self._log)!r} and the checkpoints "
                f"have {stored_steps}; restore the log from a copy"
            )
        extra = sum(1 for _ in index.steps_from(journal_steps))
        if extra > 1:
            # The journal may lack one commit: after a crash between the log's sync and its own.
            self.faults.append(f"the log has {extra} commits that the journal lacks")

    def _find_gap(self, index: LogIndex, newest_checkpoint: int) -> None:
        """Check that the newest checkpoint leads to the log's last step."""
        last_step = newest_checkpoint + sum(1 for _ in index.steps_from(newest_checkpoint))
        if index.last_step is not None and index.last_step >= last_step:
            self.faults.append(
                f"the log has steps up to {index.last_step}, but no checkpoint before them: the "
                f"newest, of step {newest_checkpoint}, leads only to step {last_step}; "
                "restore a later one from a copy"
            )

    def _check_remaining(self, index: LogIndex) -> None:
        """Check the hashes of logged gradients that were not replayed."""
        for step in (
            s for steps in index.step_ranges() for s in steps if s not in self.replayed_steps
        ):
            read_averages(next(index.steps_from(step)), self._manifest.blocks)

    def _compare_end(self) -> None:
        end = self.history.end
        if self.replica is None or end is None or not self.reached_end:
            return
        figures = self.history.evaluations.get(self.replica.step)
        for description, recorded_digest in (
            ("the run ended with", end[1].state_digest),
            ("the last metrics are of", figures.state_digest if figures else None),
        ):
            if recorded_digest is not None and not self.replica.has_digest(recorded_digest):
                self.faults.append(
                    f"{description} state {recorded_digest}; replaying the steps gives "
                    f"{self.replica.state_digest()}"
                )
