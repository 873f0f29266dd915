"""How workers get into a run: what the first settles, whom it refuses, and the state they get.

Pure.
"""

from __future__ import annotations

from coordinator.run.actions import Action, Dismiss, Follow, Replay, Seed, Send
from coordinator.run.agreement import Agreement
from coordinator.run.membership import Member, Membership, MemberState
from coordinator.run.terms import Terms
from protocol.base.errors import ExitCode
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import Exactness
from protocol.wire.messages import Drain, Message, Ready, StateRequest, Unready


class Admission:
    """The first ready worker's manifest, signature and initial state, and the way to state 0.

    Attributes:
        state_known: Whether the coordinator's replica has state 0.
    """

    def __init__(
        self, run_id: str, exactness: Exactness, members: Membership, manifest: Manifest
    ) -> None:
        self.state_known = False
        self._run_id = run_id
        self._exactness = exactness
        self._members = members
        self._manifest = manifest
        self._manifest_digest = manifest.digest()
        self._signature: str | None = None
        self._initial_digest = ""
        self._uploader: str | None = None
        self._asked: set[str] = set()

    def settle(self, first: Ready) -> None:
        """The first ready worker settles signature and initial state."""
        if self._signature is None:
            self._signature = first.signature
            self._initial_digest = self._initial_digest or first.initial_digest

    def resume(self, terms: Terms | None, initial_digest: str | None) -> None:
        """The state is known, and so is what was settled before a restart.

        Args:
            terms: None if nobody had computed.
            initial_digest: Of state 0, where that is known without them.
        """
        self.state_known = True
        if terms is None:
            self._initial_digest = initial_digest or ""
        else:
            self._signature, self._initial_digest = terms.signature, terms.initial_digest

    def terms(self, signatures: set[str], *, mixed: bool) -> Terms:
        """What a restart needs to know, with the signatures of all that have computed."""
        assert self._signature is not None
        return Terms(
            signature=self._signature,
            initial_digest=self._initial_digest,
            signatures=tuple(sorted(signatures)),
            mixed=mixed,
        )

    def refusal(self, manifest: Manifest, ready: Ready) -> str:
        """Why a worker can't take part; empty if it can."""
        if manifest.digest() != self._manifest_digest:
            ours, theirs = self._manifest.digests, manifest.digests
            keys = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
            what = ", ".join(keys) or "model shape, sample counts or metrics"
            return f"expected the same {what} as the run's first worker, got another digest"
        if self._exactness == "require" and ready.signature != self._signature:
            return (
                "the run requires exactness and this worker's numeric signature is another: "
                f"{ready.signature_text}"
            )
        known = self._initial_digest
        if self._exactness == "require" and known and ready.initial_digest != known:
            return "the run requires exactness and this worker's initial weights are others"
        return ""

    def was_asked(self, worker: str) -> bool:
        """Whether the worker was ever to send state 0."""
        return worker in self._asked

    def awaits(self, worker: str) -> bool:
        """Whether state 0 is to come from this worker."""
        return self._uploader == worker and not self.state_known

    def state_loaded(self, digest: str) -> list[Action]:
        """The replica has state 0, with this digest.

        Returns:
            Nothing if it is accepted; else the sender is dismissed, and another will be asked.
        """
        sender = self._members.get(self._uploader) if self._uploader is not None else None
        if sender is not None and sender.initial_digest != digest:
            reason = "the state it sent is not the one whose digest it announced"
            return [Dismiss(sender.name, reason, ExitCode.MISMATCH)]
        self.state_known = True
        # Whoever sent it may not start like the first: those who did may have left.
        self._initial_digest = digest
        return []

    def request_state(self) -> list[Action]:
        """Ask one ready worker for state 0, unless one is asked already."""
        ready = self._members.names(MemberState.READY)
        if self._uploader is not None or self.state_known or not ready:
            return []
        alike = {member.name for member in self._members if self.starts_alike(member)}
        self._uploader = next((name for name in ready if name in alike), ready[0])
        self._asked.add(self._uploader)
        return [Send(self._uploader, StateRequest(run_id=self._run_id))]

    def lost(self, worker: str) -> list[Action]:
        """A worker has left; if it was to send state 0, another is asked."""
        if worker != self._uploader or self.state_known:
            return []
        self._uploader = None
        return self.request_state()

    def starts_alike(self, member: Member) -> bool:
        """Whether the worker's own initial state is the run's."""
        return member.initial_digest == self._initial_digest

    def admit_ready(self) -> list[Action]:
        """Let every ready worker in: at once, or once it has loaded state 0."""
        actions: list[Action] = []
        for name in self._members.names(MemberState.READY):
            member = self._members.get(name)
            assert member is not None
            if self.starts_alike(member):
                self._members.activate(member)
                actions.append(Follow(name, 0))
            else:
                member.state = MemberState.LOADING
                actions.append(Seed(name))
        return actions

    def take_in(self, member: Member, step: int, agreement: Agreement) -> list[Action]:
        """A worker is ready while the run goes on: see what its state lacks.

        Args:
            member: The worker; active afterwards if its state is that after `step` steps.
            step: Steps committed.
            agreement: Knows the digests of the newest states.
        """
        known = agreement.digest(member.step)
        trusted = agreement.catching_up and known is None
        if member.step == step and (member.state_digest == known or trusted):
            # What is taken on trust is compared once the coordinator's replica is there.
            if trusted:
                agreement.owe(member.name)
                agreement.answer(member.name, step, member.state_digest)
            self._members.activate(member)
            return [Follow(member.name, step)]
        member.state = MemberState.LOADING
        if 0 < member.step < step and known in (None, member.state_digest):
            member.replaying = True
            to_compare = member.state_digest if known is None else None
            return [Replay(member.name, member.step, to_compare)]
        return [Seed(member.name)]


def is_stale(member: Member, message: Message, run_id: str) -> bool:
    """Whether the worker sent it before it heard of this run, as all that comes before `Ready`."""
    if isinstance(message, Ready | Unready):
        return message.run_id != run_id
    return member.state is MemberState.PREPARING and not isinstance(message, Drain)
