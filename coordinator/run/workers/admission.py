"""Admission of workers to a run: conditions, refusals, and the initial state.

Pure. The first ready worker settles manifest, numerics profile and initial state. One worker
uploads state 0, chunk by chunk, to the coordinator's replica, which seeds every worker that starts
in another state. So all start with the same bits even if their random initialization differs.
"""

from __future__ import annotations

from typing import Final

from coordinator.run.outputs.actions import (
    Action,
    DigestReplica,
    Dismiss,
    FillReplica,
    Replay,
    Report,
    Seed,
    Send,
    Subscribe,
)
from coordinator.run.outputs.events import WorkerLate, WorkerRefused
from coordinator.run.outputs.restart import AdmissionRecord
from coordinator.run.workers.membership import Member, Membership, MemberState
from coordinator.run.workers.state_agreement import Agreement
from coordinator.run.workers.stragglers import Leases
from protocol.base import limits
from protocol.base.errors import ExitCode, OutOfOrder
from protocol.exact.reduction.average import Array
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import Exactness
from protocol.wire.messages import (
    DeviceNote,
    Drain,
    Linked,
    LinkTraffic,
    Message,
    PeerPort,
    Ready,
    StateChunk,
    StateRequest,
    Unlinked,
    Unready,
)

_EXPECTED_CHUNK_MS: Final = limits.LIVENESS_TIMEOUT_MS
"""Expected time of a chunk of the state, even on a slow network; the lease is a multiple of it."""


class Admission:
    """The conditions of admission, and the upload of state 0.

    Attributes:
        has_state: Whether the coordinator's replica has state 0.
        upload: Number of the valid upload; each request to a worker begins a new upload.
        uploader: The worker that uploads state 0.
    """

    def __init__(
        self, run_id: str, exactness: Exactness, members: Membership, manifest: Manifest
    ) -> None:
        self.has_state = False
        self.upload = 0
        self._run_id = run_id
        self._exactness = exactness
        self._members = members
        self._manifest = manifest
        self._is_resumed = False
        self._numerics_profile: str | None = None
        self._first_device = ""
        self._initial_digest = ""
        self.uploader: str | None = None
        self._is_upload_complete = False
        self._requested: set[str] = set()
        self._lease = Leases()

    # Conditions.

    def take_first_ready(self, message: Ready) -> None:
        """Take numerics profile and initial digest from the first ready worker, and only from
        it."""
        if self._numerics_profile is None:
            self._numerics_profile = message.signature
            self._first_device = f" of {message.device}, {message.backend}"
            self._initial_digest = self._initial_digest or message.initial_digest

    def resume(self, record: AdmissionRecord | None, initial_digest: str | None) -> None:
        """Restore the conditions that were settled before a restart; the state is known.

        Args:
            record: The admission record; None if no worker had computed.
            initial_digest: Digest of state 0, if known without the record.
        """
        self.has_state = self._is_resumed = True
        if record is None:
            self._initial_digest = initial_digest or ""
        else:
            self._numerics_profile, self._initial_digest = record.signature, record.initial_digest

    def make_record(self, numerics_profiles: set[str], *, mixed: bool) -> AdmissionRecord:
        """Return the record for a restart, with the numerics profiles of all computing workers."""
        assert self._numerics_profile is not None, "a computing worker was ready before"
        return AdmissionRecord(
            signature=self._numerics_profile,
            initial_digest=self._initial_digest,
            signatures=tuple(sorted(numerics_profiles)),
            mixed=mixed,
        )

    def find_refusal(self, manifest: Manifest, ready: Ready, *, evaluates: bool = False) -> str:
        """Return why a worker cannot take part; empty if it can.

        Evaluators contribute no gradients, so only their manifest is compared.
        """
        if differences := self._manifest.differences(manifest):
            differing_items = ", ".join(differences)
            if self._is_resumed:
                return (
                    f"expected the {differing_items} that the run started with, got another "
                    "digest: restore it, or start a new run"
                )
            return (
                f"expected the same {differing_items} as the run's first worker, got another "
                "digest: use the same files and package versions on every machine"
            )
        if (cross_check := self._manifest.cross_check) is not None:
            origin = "when the run started" if self._is_resumed else "on the run's first worker"
            if difference := cross_check.describe_difference(manifest.cross_check, origin):
                return difference
        if evaluates:
            return ""
        if self._exactness == "require" and ready.signature != self._numerics_profile:
            return (
                f"exactness: require expects the run's numerics profile{self._first_device}, got "
                f"another of {ready.device}, {ready.backend}: use devices of one kind, or set "
                "arithmetic: canonical or exactness: prefer; this worker's profile: "
                f"{ready.signature_text}"
            )
        digest = self._initial_digest
        if self._exactness == "require" and digest and ready.initial_digest != digest:
            return (
                "exactness: require expects the run's initial weights, got others: use the same "
                "files and package versions on every machine, or set exactness: prefer, with which "
                "a worker receives the run's weights"
            )
        return ""

    # State 0.

    def request_state(self) -> list[Action]:
        """Request state 0 from one ready worker, unless one is uploading it."""
        ready_names = self._members.names(MemberState.READY)
        if self.uploader is not None or self.has_state or not ready_names:
            return []
        return self._request_from(ready_names)

    def _request_from(self, ready_names: list[str]) -> list[Action]:
        # Prefer a worker with the first worker's initial state: most workers then have it too.
        same_state_names = {
            member.name for member in self._members if self.has_initial_state(member)
        }
        worker = next((name for name in ready_names if name in same_state_names), ready_names[0])
        self.uploader, self._is_upload_complete = worker, False
        # The replica may still be receiving an earlier upload, whose digest is not this one's.
        self.upload += 1
        self._requested.add(worker)
        self._lease.renew(worker)
        return [Send(worker, StateRequest(run_id=self._run_id))]

    def tick(self, now_ms: float) -> list[Action]:
        """Request the state from another worker if the uploader is late and another is left."""
        self._lease.tick(now_ms)
        late_uploader = self.uploader
        if (
            late_uploader is None
            or self._is_upload_complete
            or not self._lease.has_expired(late_uploader, _EXPECTED_CHUNK_MS)
        ):
            return []
        others = [n for n in self._members.names(MemberState.READY) if n not in self._requested]
        if not others:
            return []
        return [
            Report(WorkerLate(late_uploader, 0, "the initial state")),
            *self._request_from(others),
        ]

    def take_state_chunk(self, worker: str, message: StateChunk, values: Array) -> list[Action]:
        """Copy a chunk of state 0 to the replica, if it belongs to the valid upload.

        Raises:
            OutOfOrder: The chunk was not requested, or is not a chunk of the parameters at step 0.
        """
        if worker not in self._requested:
            raise OutOfOrder("StateChunk was not requested")
        if self.has_state or worker != self.uploader or self._is_upload_complete:
            return []  # another worker is the uploader now, or this upload is complete
        if message.kind != "parameters" or message.step or message.optimizer_step:
            raise OutOfOrder("StateChunk: expected the parameters of step 0")
        self._is_upload_complete = message.last
        self._lease.renew(worker)
        fill = FillReplica(message, values)
        return [fill, DigestReplica(self.upload)] if message.last else [fill]

    def accept_upload(self, upload: int, digest: str) -> list[Action]:
        """Accept an upload that is in the replica, or refuse its sender.

        Once a refused sender has left, another worker is asked for the state.
        """
        if self.has_state or upload != self.upload or self.uploader is None:
            return []  # the uploader has left
        sender = self._members.get(self.uploader)
        if sender is not None and sender.initial_digest != digest:
            reason = "the state that the worker sent does not match the digest that it announced"
            return refuse(sender.name, reason)
        self.has_state = True
        # The uploader's initial state may differ from the first worker's: the workers with the
        # first worker's state may have left.
        self._initial_digest = digest
        return []

    def replace_uploader(self, worker: str) -> list[Action]:
        """Request the state from another worker if the lost worker was the uploader."""
        if worker != self.uploader or self.has_state:
            return []
        # Chunks of two workers would mix two states: the next worker uploads all chunks.
        self.uploader = None
        return self.request_state()

    # Admission.

    def has_initial_state(self, member: Member) -> bool:
        """Return whether the worker has created the same initial state as the run's."""
        return member.initial_digest == self._initial_digest

    def admit_ready(self) -> list[Action]:
        """At the start, admit every ready worker, at once or after it has loaded state 0."""
        actions: list[Action] = []
        for member in self._members:
            if member.state is not MemberState.READY:
                continue
            if self.has_initial_state(member):
                # The worker already has the same bits, so no state is sent.
                self._members.activate(member)
                actions.append(Subscribe(member.name, 0))
            else:
                member.state = MemberState.LOADING
                actions.append(seed(member))
        return actions

    def admit(self, member: Member, step: int, agreement: Agreement) -> list[Action]:
        """Admit a ready worker to a run in progress, and send the missing steps or the whole state.

        Args:
            member: The worker; active afterwards if it has the state after `step` steps.
            step: Steps committed.
            agreement: The digests of the newest states.
        """
        digest = agreement.digest(member.step)  # None: too long ago, or the replica is behind
        is_provisional = agreement.is_catching_up and digest is None and not member.evaluates
        if member.step == step and member.state_digest == digest and member.evaluates:
            member.begin_following()
            return [Subscribe(member.name, step)]
        if member.step == step and (member.state_digest == digest or is_provisional):
            # After a restart, a worker that kept its state continues before the replica has caught
            # up. Its state is admitted provisionally, and compared with the replica's later.
            if is_provisional:
                agreement.wait_for(member.name)
                agreement.take_answer(member.name, step, member.state_digest)
            self._members.activate(member)
            return [Subscribe(member.name, step)]
        member.state = MemberState.LOADING
        if 0 < member.step < step and digest in (None, member.state_digest):
            # The worker took part before: the missed steps are smaller than the whole state.
            member.begin_replay()
            unverified_digest = member.state_digest if digest is None else None
            return [Replay(member.name, member.step, unverified_digest)]
        return [seed(member)]


def seed(member: Member) -> Seed:
    """Return the action that sends a worker the whole state; the worker takes part after
    `WorkerCaughtUp`."""
    member.begin_replay()
    return Seed(member.name)


def refuse(worker: str, reason: str) -> list[Action]:
    """Dismiss a worker from the run: its task or state is not the run's."""
    return [Report(WorkerRefused(worker, reason)), Dismiss(worker, reason, ExitCode.MISMATCH)]


def is_stale(member: Member, message: Message, run_id: str) -> bool:
    """Return whether a worker sent a message before it knew of this run.

    A message with the ID of another run is stale. Until the worker is ready, so is any message
    except `Ready`, `Unready`, `StateChunk`, `DeviceNote` and `Drain`.
    """
    if isinstance(message, Ready | Unready | StateChunk):
        return message.run_id != run_id
    if isinstance(message, PeerPort | Linked | Unlinked | LinkTraffic) and message.run_id != run_id:
        return True
    is_before_ready = member.state in (MemberState.IDLE, MemberState.PREPARING)
    return is_before_ready and not isinstance(message, DeviceNote | Drain)
