"""How workers are admitted to a run: on what terms, whom it refuses, and the state they get.

Pure. The first ready worker settles manifest, signature and initial state. State 0 comes from one
worker, chunk by chunk, into the coordinator's replica; whoever starts in another state is seeded
from there. So all start with the same bits even if their own random initialization differs.
"""

from __future__ import annotations

from typing import Final

from coordinator.run.outputs.actions import (
    Action,
    DigestReplica,
    Dismiss,
    FillReplica,
    Follow,
    Replay,
    Report,
    Seed,
    Send,
)
from coordinator.run.outputs.facts import WorkerLate, WorkerRefused
from coordinator.run.outputs.restart import Terms
from coordinator.run.workers.agreement import Agreement
from coordinator.run.workers.leases import Leases
from coordinator.run.workers.membership import Member, Membership, MemberState
from protocol.base import limits
from protocol.base.errors import ExitCode, OutOfPlace
from protocol.exact.update import Array
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import Exactness
from protocol.wire.messages import (
    DoorOpen,
    Drain,
    Linked,
    LinkTraffic,
    Message,
    Ready,
    StateChunk,
    StateRequest,
    Unlinked,
    Unready,
)

_EXPECTED_CHUNK_MS: Final = limits.LIVENESS_TIMEOUT_MS
"""How long a chunk of the state may take, whatever the network: the state may be large."""


class Admission:
    """The terms that workers are admitted on, and the way to state 0.

    Attributes:
        state_known: Whether the coordinator's replica has state 0.
        upload: Number of the upload that counts; each worker that is asked begins another.
        uploader: Who is to send state 0.
    """

    def __init__(
        self, run_id: str, exactness: Exactness, members: Membership, manifest: Manifest
    ) -> None:
        self.state_known = False
        self.upload = 0
        self._run_id = run_id
        self._exactness = exactness
        self._members = members
        self._manifest = manifest
        self._manifest_digest = manifest.digest()
        self._resumed = False
        self._signature: str | None = None
        self._first_device = ""
        self._initial_digest = ""
        self.uploader: str | None = None
        self._uploaded = False
        self._asked: set[str] = set()
        self._lease = Leases()

    # Terms.

    def first_ready(self, message: Ready) -> None:
        """The first ready worker settles signature and initial state; later ones change nothing."""
        if self._signature is None:
            self._signature = message.signature
            self._first_device = f" than that of {message.device}, {message.backend}"
            self._initial_digest = self._initial_digest or message.initial_digest

    def resume(self, terms: Terms | None, initial_digest: str | None) -> None:
        """The state is known, and so is what was settled before a restart.

        Args:
            terms: None if nobody had computed.
            initial_digest: Of state 0, where that is known without them.
        """
        self.state_known = self._resumed = True
        if terms is None:
            self._initial_digest = initial_digest or ""
        else:
            self._signature, self._initial_digest = terms.signature, terms.initial_digest

    def terms(self, signatures: set[str], *, mixed: bool) -> Terms:
        """What a restart needs to know, with the signatures of all that have computed."""
        assert self._signature is not None, "whoever has computed was ready before"
        return Terms(
            signature=self._signature,
            initial_digest=self._initial_digest,
            signatures=tuple(sorted(signatures)),
            mixed=mixed,
        )

    def refusal(self, manifest: Manifest, ready: Ready, *, evaluates: bool = False) -> str:
        """Why a worker can't take part; empty if it can. No bit of an evaluator's is committed."""
        if manifest.digest() != self._manifest_digest:
            ours, theirs = self._manifest.digests, manifest.digests
            keys = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
            what = ", ".join(keys) or "model shape, sample counts or metrics"
            if self._resumed:
                return (
                    f"expected the {what} that the run was begun with, got another digest: bring "
                    "that back, or begin a new run"
                )
            return f"expected the same {what} as the run's first worker, got another digest"
        if evaluates:
            return ""
        if self._exactness == "require" and ready.signature != self._signature:
            return (
                f"the run requires exactness and this worker's numeric signature ({ready.device}, "
                f"{ready.backend}) is another{self._first_device}: take devices of one kind, "
                "arithmetic: canonical, or exactness: prefer; it is "
                f"{ready.signature_text}"
            )
        known = self._initial_digest
        if self._exactness == "require" and known and ready.initial_digest != known:
            return "the run requires exactness and this worker's initial weights are others"
        return ""

    # State 0.

    def request_state(self) -> list[Action]:
        """Ask one ready worker for state 0, unless one is asked already."""
        ready = self._members.names(MemberState.READY)
        if self.uploader is not None or self.state_known or not ready:
            return []
        return self._ask(ready)

    def _ask(self, ready: list[str]) -> list[Action]:
        # One that starts like the first, if there is one: then most need not be seeded.
        alike = {member.name for member in self._members if self.starts_alike(member)}
        worker = next((name for name in ready if name in alike), ready[0])
        self.uploader, self._uploaded = worker, False
        # The replica may still take an earlier upload: that digest must not count for this one.
        self.upload += 1
        self._asked.add(worker)
        self._lease.sign(worker)
        return [Send(worker, StateRequest(run_id=self._run_id))]

    def tick(self, now_ms: float) -> list[Action]:
        """Time goes on: a worker that sends no chunk for long is not waited for, if another that
        was not asked before can send the state."""
        self._lease.tick(now_ms)
        late = self.uploader
        if late is None or self._uploaded or not self._lease.is_over(late, _EXPECTED_CHUNK_MS):
            return []
        others = [n for n in self._members.names(MemberState.READY) if n not in self._asked]
        if not others:
            return []
        return [Report(WorkerLate(late, 0, "the initial state")), *self._ask(others)]

    def state_chunk(self, worker: str, message: StateChunk, values: Array) -> list[Action]:
        """A chunk of state 0; only those of the upload that counts are taken.

        Raises:
            OutOfPlace: The worker was never asked, or it is no chunk of parameters at step 0.
        """
        if worker not in self._asked:
            raise OutOfPlace("StateChunk was not asked for")
        if self.state_known or worker != self.uploader or self._uploaded:
            return []  # another sends it by now, or this one has sent it all
        if message.kind != "parameters" or message.step or message.optimizer_step:
            raise OutOfPlace("StateChunk: expected the parameters of step 0")
        self._uploaded = message.last
        self._lease.sign(worker)
        fill = FillReplica(message, values)
        return [fill, DigestReplica(self.upload)] if message.last else [fill]

    def state_loaded(self, upload: int, digest: str) -> list[Action]:
        """The replica has all of an upload's chunks, and this digest.

        It is accepted (`state_known`), or its sender is refused, and another will be asked.
        """
        if self.state_known or upload != self.upload or self.uploader is None:
            return []  # whoever sent it has left meanwhile
        sender = self._members.get(self.uploader)
        if sender is not None and sender.initial_digest != digest:
            reason = "the state it sent is not the one whose digest it announced"
            return refuse(sender.name, reason)
        self.state_known = True
        # Whoever sent it may not start like the first: those who did may have left.
        self._initial_digest = digest
        return []

    def lost(self, worker: str) -> list[Action]:
        """A worker has left; if it was to send state 0, another is asked."""
        if worker != self.uploader or self.state_known:
            return []
        # Half a state of one and half of another would be nobody's: the next one sends all of it.
        self.uploader = None
        return self.request_state()

    # The way in.

    def starts_alike(self, member: Member) -> bool:
        """Whether the worker's own initial state is the run's."""
        return member.initial_digest == self._initial_digest

    def admit_ready(self) -> list[Action]:
        """Training starts: let every ready worker in, at once or once it has loaded state 0."""
        actions: list[Action] = []
        for member in self._members:
            if member.state is not MemberState.READY:
                continue
            if self.starts_alike(member):
                # It has these very bits already: nothing to send, however large the model is.
                self._members.activate(member)
                actions.append(Follow(member.name, 0))
            else:
                member.state = MemberState.LOADING
                actions.append(seed(member))
        return actions

    def admit(self, member: Member, step: int, agreement: Agreement) -> list[Action]:
        """A worker is ready while the run goes on: see what its state lacks.

        Args:
            member: The worker; active afterwards if its state is that after `step` steps.
            step: Steps committed.
            agreement: Knows the digests of the newest states.
        """
        known = agreement.digest(member.step)  # None: too long ago, or the replica lags
        trusted = agreement.catching_up and known is None and not member.evaluates
        if member.step == step and member.state_digest == known and member.evaluates:
            member.follows()
            return [Follow(member.name, step)]
        if member.step == step and (member.state_digest == known or trusted):
            # After a restart a worker that kept its state goes on before the replica is back.
            # What is taken on trust is compared once the replica is there.
            if trusted:
                agreement.owe(member.name)
                agreement.answer(member.name, step, member.state_digest)
            self._members.activate(member)
            return [Follow(member.name, step)]
        member.state = MemberState.LOADING
        if 0 < member.step < step and known in (None, member.state_digest):
            # It has been in the run: what it missed is less than the whole state.
            member.gets_state()
            to_compare = member.state_digest if known is None else None
            return [Replay(member.name, member.step, to_compare)]
        return [seed(member)]


def seed(member: Member) -> Seed:
    """Have a worker sent the state; it takes part once `Run.replayed` says that it hears all."""
    member.gets_state()
    return Seed(member.name)


def refuse(worker: str, reason: str) -> list[Action]:
    """Send a worker away for good, since what it has is not the run's."""
    return [Report(WorkerRefused(worker, reason)), Dismiss(worker, reason, ExitCode.MISMATCH)]


def is_stale(member: Member, message: Message, run_id: str) -> bool:
    """Whether the worker sent it before it heard of this run, as all that comes before `Ready`."""
    if isinstance(message, Ready | Unready | StateChunk):
        return message.run_id != run_id
    if isinstance(message, DoorOpen | Linked | Unlinked | LinkTraffic) and message.run_id != run_id:
        return True
    unasked = member.state in (MemberState.IDLE, MemberState.PREPARING)
    return unasked and not isinstance(message, Drain)
