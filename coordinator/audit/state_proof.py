"""Every step whose gradients are kept, taken again, and its digests held against the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from coordinator.audit.history import History
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.log.log_index import LoggedStep, LogIndex, read_averages
from coordinator.storage.log.log_reader import scan_log
from coordinator.storage.log.log_records import Array
from coordinator.storage.log.replay import take
from coordinator.storage.states.checkpoint import Checkpoint
from coordinator.storage.states.saved_state import load_replica
from protocol.base.errors import SamestepError
from protocol.exact.digest import averages_digest, block_digest
from protocol.exact.replica import Replica
from protocol.exact.update import global_norm, square_sum, step_scalars
from protocol.spec.manifest import Manifest

Progress = Callable[[int, int], None]
"""Called with the steps that were looked at, and how many there are."""


class StateProof:
    """The replay of what is kept, from the oldest checkpoint on.

    Attributes:
        faults: What differs, step by step.
        taken: The steps that were taken again.
        history: What the journal says.
        since: How many of them after the checkpoint that the last state is taken from.
        replica: The last state; None without any checkpoint that is whole.
    """

    def __init__(
        self,
        directory: RunDirectory,
        run: StoredRun,
        manifest: Manifest,
        history: History,
        progress: Progress,
    ) -> None:
        self.since = 0
        self.taken: set[int] = set()
        self.faults: list[str] = []
        self.replica: Replica | None = None
        self._log = directory.log
        self._run = run
        self._manifest = manifest
        self.history = history
        self._progress = progress

    @property
    def steps(self) -> int:
        """How many steps were taken again."""
        return len(self.taken)

    @property
    def reached_end(self) -> bool:
        """Whether the last state is that after the newest commit."""
        return self.replica is not None and self.replica.step == len(self.history.commits)

    def replay(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Take every step again; where the log has a gap, go on from the next checkpoint.

        Args:
            checkpoints: Those that are whole, by step.
        """
        try:
            scan = scan_log(self._log, self._run.run_id, self._manifest)
            index = scan.index
            saved = max((c.info.step for c in checkpoints), default=0)
            self._compare_lengths(index, saved)
            if self.history.end is not None:
                # A run that has ended has no step whose sync had not.
                self.faults += [f"{cut}; bring it back from a copy" for cut in scan.cuts]
            for number, checkpoint in enumerate(checkpoints, 1):
                following = checkpoints[number:]
                until = min([c.info.step for c in following], default=len(self.history.commits))
                self._from(checkpoint, index, min(until, len(self.history.commits)))
            self._compare_end()
            if checkpoints:
                self._find_gap(index, saved)
            self._read_others(index)
        except SamestepError as error:
            self.faults.append(str(error))

    def _from(self, checkpoint: Checkpoint, index: LogIndex, until: int) -> None:
        """Go on from the replica if it is as far as the checkpoint, else from the checkpoint."""
        info = checkpoint.info
        if self.replica is None or self.replica.step < info.step:
            self.replica = load_replica(checkpoint, self._manifest, self._run.spec.update)
            self.since = 0
        elif self.replica.state_digest() != info.state_digest:
            self.faults.append(f"the replay does not lead to the checkpoint of step {info.step}")
        for logged in index.following(self.replica.step):
            if logged.step >= until:
                break
            averages = read_averages(logged, self._manifest.blocks)
            if averages is None and logged.record.commit.scalars is not None:
                break
            differences = [
                *self._between_log_and_journal(self.replica, logged),
                *self._between_gradients_and_commit(logged, averages),
            ]
            self.faults += [f"step {logged.step}: {what}" for what in differences]
            take(self.replica, logged.record, averages)
            self.taken.add(logged.step)
            self.since += 1
            self._progress(logged.step + 1, len(self.history.commits))

    def _between_log_and_journal(self, replica: Replica, logged: LoggedStep) -> Iterator[str]:
        record, commit = logged.record, logged.record.commit
        told = self.history.commit_of(logged.step)
        assert told is not None
        older = told.rate is None  # or a skipped step
        rate = None if older or commit.scalars is None else commit.scalars.learning_rate
        for name, mine, theirs in (
            ("epoch", commit.epoch, told.epoch),
            ("attempt", commit.attempt, told.attempt),
            ("count of updates", record.optimizer_step, told.optimizer_step),
            ("skip", commit.scalars is None, told.skipped),
            ("digest of averages", commit.averages_digest, told.averages_digest),
            ("loss", None if told.skipped else commit.loss, told.loss),
            ("norm", record.norm, told.norm),
            ("digest of own states", record.own_digest, told.own_digest),
            ("rate", rate, told.rate),
        ):
            if mine != theirs:
                yield f"the log has {name} {mine}, the journal {theirs}"
        state = replica.state_digest()
        figures = self.history.figures.get(logged.step)
        for name, known, found in (
            ("log says that the state", record.state_before, state),
            ("journal says that the state", told.state_before, state),
            ("figures in the journal say that the state", figures and figures.state_digest, state),
        ):
            if known is not None and known != found:
                yield f"the {name} before had digest {known}, the replay has {found}"

    def _between_gradients_and_commit(
        self, logged: LoggedStep, averages: Sequence[Array] | None
    ) -> Iterator[str]:
        commit, spec = logged.record.commit, self._run.spec
        if averages is None or commit.scalars is None:
            return
        blocks = zip(self._manifest.blocks, averages, strict=True)
        if averages_digest(block_digest(*block) for block in blocks) != commit.averages_digest:
            yield "the averaged gradients have not the digest in the commit"
        norm = global_norm([square_sum(average) for average in averages])
        updates = logged.record.optimizer_step
        if logged.record.norm not in {None, norm}:
            yield f"the commit has norm {logged.record.norm}, the averaged gradients {norm}"
        steps = spec.steps_with(self._manifest.train_samples)
        expected = step_scalars(
            spec.update, updates, commit.step, steps, norm, loss_scale=commit.scalars.loss_scale
        )
        if commit.scalars != expected:
            yield "the scalars of the update do not follow from run spec and gradients"

    def _compare_lengths(self, index: LogIndex, saved: int) -> None:
        """Log and checkpoints reach as far as the journal, which is written last."""
        told, last = len(self.history.commits), -1 if index.last is None else index.last
        kept = max(saved, last + 1)
        if told > kept + 1:  # the newest step's records may be a torn tail
            self.faults.append(
                f"the journal tells of {told} steps, {str(self._log)!r} and the checkpoints of "
                f"{kept}; bring the log back from a copy"
            )
        extra = sum(1 for _ in index.following(told))
        if extra > 1:
            # One may be missing: a crash between the log's sync and the journal's.
            self.faults.append(f"the log has {extra} commits that the journal has not")

    def _find_gap(self, index: LogIndex, saved: int) -> None:
        """The newest checkpoint leads to the log's last step."""
        reached = saved + sum(1 for _ in index.following(saved))
        if index.last is not None and index.last >= reached:
            self.faults.append(
                f"the log's steps up to {index.last} follow no checkpoint that is here: the "
                f"newest, of step {saved}, leads to step {reached} alone; bring back a later one "
                "from a copy"
            )

    def _read_others(self, index: LogIndex) -> None:
        """Gradients that follow no checkpoint are at least what was written."""
        for step in (s for steps in index.ranges() for s in steps if s not in self.taken):
            read_averages(next(index.following(step)), self._manifest.blocks)

    def _compare_end(self) -> None:
        end = self.history.end
        if self.replica is None or end is None or not self.reached_end:
            return
        figures = self.history.figures.get(self.replica.step)
        for what, told in (
            ("the run ended with", end[1].state_digest),
            ("the last figures are of", figures and figures.state_digest),
        ):
            if told is not None and told != self.replica.state_digest():
                self.faults.append(f"{what} state {told}, the replay with another")
