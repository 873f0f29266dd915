"""Bad input to a live service: a typed goodbye or a silent drop, and the run continues unchanged.

Every scenario ends with the digest of the undisturbed run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import uvloop

from coordinator.run.inputs import ContinueRun
from protocol import PROTOCOL_VERSION
from protocol.base import limits
from protocol.base.errors import ExitCode
from protocol.wire import frames, messages
from protocol.wire.connection import encode
from protocol.wire.messages import BlockGradientPayload, Message, StepApplied, StepPlan, SubtreeLoss
from tests.cluster import Cluster
from tests.event_loop import on_uvloop
from tests.hostile_worker import HostileWorker, payload, zeros
from tests.live_service import LiveService, live_service, run_undisturbed, scripted_spec
from tests.message_samples import DIGEST, EXAMPLES, frame, join_buffers
from worker.logic import actions as act
from worker.shell.client import Client

SPEC = scripted_spec()


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[str, Any]:
    return uvloop.run(run_undisturbed(tmp_path_factory.mktemp("undisturbed"), SPEC))


def equal_results(result: dict[str, Any], reference: dict[str, Any]) -> bool:
    return all(result[key] == reference[key] for key in ("weights_digest", "losses", "eval"))


async def start_with_honest_worker(live: LiveService) -> str:
    """Start a run that waits for its second worker; the honest worker has uploaded state 0."""
    run_id = live.service.submit(SPEC)
    live.start_worker("w0")
    await live.wait_for("worker_ready", worker="w0")
    return run_id


# Unauthenticated peers, which cannot affect the run.


async def farewell_after(live: LiveService, data: bytes) -> messages.Goodbye | None:
    async with HostileWorker(live.port) as peer:
        peer.send_bytes(data)
        return await peer.wait_for_goodbye()


@pytest.mark.parametrize(
    ("data", "reason", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "expected a samestep frame", 1),
        (bytes(100), "expected a samestep frame", 1),
        (b"\x16\x03\x01\x02\x00" + bytes(60), "expected a samestep frame", 1),
        (frames.encode_head(1, bytes(257), None), "a header of <= 256 bytes, got 257", 1),
        (frame(EXAMPLES[messages.StartRun]), "a body of <= 0 bytes", 1),
        (frame(EXAMPLES[messages.Heartbeat]), "Heartbeat is not expected", 1),
        (frame(EXAMPLES[messages.Proof]), "Proof is not expected", 1),
        (frame(EXAMPLES[messages.StepApplied]), "StepApplied is not expected", 1),
        (frames.encode_head(99, b"\x80", None), "got tag 99", 1),
        (frames.encode_head(1, b"\x90", None), "Hello", 1),
        (frame(EXAMPLES[messages.Hello])[:-1] + b"\x02", "checksum", 1),
    ],
    ids=[
        "http", "zeros", "tls", "large header", "body", "heartbeat", "proof", "applied", "tag",
        "no map", "checksum",
    ],
)  # fmt: skip
@on_uvloop
async def test_unauthenticated_peer_learns_its_error(tmp_path, data, reason, code):
    async with live_service(tmp_path, 1) as live:
        goodbye = await farewell_after(live, data)
        assert goodbye is not None
        assert reason in goodbye.reason
        assert goodbye.exit_code == code
        assert not goodbye.retry
        assert not live.service.sessions


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
@on_uvloop
async def test_other_version_learns_which_side_to_upgrade(tmp_path, version):
    hello = bytearray(frame(EXAMPLES[messages.Hello]))
    hello[2] = version
    async with live_service(tmp_path, 1) as live:
        goodbye = await farewell_after(live, bytes(hello))
    assert goodbye is not None
    assert goodbye.exit_code == ExitCode.MISMATCH
    side = "the coordinator" if version > PROTOCOL_VERSION else "this worker"
    assert goodbye.reason == (
        f"the coordinator speaks protocol version {PROTOCOL_VERSION}, this worker {version}: "
        f"upgrade {side}"
    )


@on_uvloop
async def test_invalid_proof_is_not_authorized(tmp_path):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as peer:
        peer.send_hello()
        await peer.wait_for_message(messages.Challenge)
        peer.send(messages.Proof(proof=b"let me in"))
        goodbye = await peer.wait_for_goodbye()
        assert goodbye is not None
        assert goodbye.exit_code == ExitCode.NOT_AUTHORIZED
        assert not live.service.sessions


@on_uvloop
async def test_unauthenticated_peers_do_not_disturb_a_run(tmp_path, reference, monkeypatch):
    """Silent, truncated, garbage and too many connections during a run."""
    monkeypatch.setattr(limits, "HANDSHAKE_TIMEOUT_MS", 2_000)
    async with live_service(tmp_path, 2) as live:
        run_id = await start_with_honest_worker(live)
        async with (
            HostileWorker(live.port) as silent_peer,
            HostileWorker(live.port) as truncated_peer,
        ):
            truncated_peer.send_bytes(frame(EXAMPLES[messages.Hello])[:30])
            async with HostileWorker(live.port) as truncating_peer:
                truncating_peer.send_bytes(frame(EXAMPLES[messages.Hello])[:50])
            assert await farewell_after(live, bytes(100)) is not None
            live.start_worker("w1")
            # Both are closed for silence, without a message: they may not be samestep at all.
            assert await silent_peer.wait_for_goodbye() is None
            assert await truncated_peer.wait_for_goodbye() is None
        result = await live.result(run_id)
        assert equal_results(result, reference)
        assert not live.events_named("worker_lost")
        assert set(live.service.sessions) == {"w0", "w1"}
        assert not live.service._pending


# Members that violate the protocol: they are named and closed, and others do their work.


def subtree_of_another(plan: StepPlan) -> dict[str, int]:
    lo, hi = plan.subtrees[0]
    return {"lo": hi, "hi": hi + hi - lo} if lo == 0 else {"lo": 0, "hi": hi - lo}


def first_leaf(plan: StepPlan) -> dict[str, int]:
    return {"lo": plan.subtrees[0][0], "hi": plan.subtrees[0][0] + 1}


def loss(plan: StepPlan, **changes: Any) -> SubtreeLoss:
    lo, hi = plan.subtrees[0]
    fields = {
        "term": plan.term, "step": plan.step, "attempt": plan.attempt, "lo": lo, "hi": hi,
        "loss_sum": 1.0, "weight": 4.0, "elapsed_ms": 1.0, "sums": b"",
    }  # fmt: skip
    return SubtreeLoss(**{**fields, **changes})


def with_field(message: Message, body: Any, **changes: Any) -> bytes:
    """Return a frame with fields that the message models would not allow."""
    header = msgpack.packb({**message.model_dump(), **changes})
    raw = body.tobytes()
    return frames.encode_head(message.tag, header, raw) + raw


BREACHES: dict[str, tuple[Any, str]] = {
    "a later term": (lambda p: (payload(p, term=p.term + 1), zeros()), "expected (term"),
    "an older term": (lambda p: (payload(p, term=p.term - 1), zeros()), "expected (term"),
    "a future step": (lambda p: (payload(p, step=p.step + 1), zeros()), "expected (term"),
    "a future attempt": (lambda p: (payload(p, attempt=1), zeros()), "expected (term"),
    "another's subtree": (
        lambda p: (payload(p, **subtree_of_another(p)), zeros()),
        "was not assigned to worker 'hostile'",
    ),
    "a part of its own subtree": (
        lambda p: (payload(p, **first_leaf(p)), zeros()),
        "was not assigned to worker 'hostile'",
    ),
    "no subtree of the tree": (
        lambda p: (payload(p, lo=1, hi=3), zeros()),
        "[1,3) is not a subtree",
    ),
    "an empty subtree": (lambda p: (payload(p, lo=2, hi=2), zeros()), "is not a subtree"),
    "a subtree out of range": (lambda p: (payload(p, lo=8, hi=2**62), zeros()), "is not a subtree"),
    "a block too many": (lambda p: (payload(p, block=3), zeros()), "no chunk 0 of block 3"),
    "a chunk too many": (lambda p: (payload(p, chunk=1), zeros()), "no chunk 1 of block 2"),
    "another kind": (
        lambda p: (messages.NonBlockGradientPayload(**payload(p).model_dump()), zeros()),
        "is of type",
    ),
    "too few elements": (lambda p: (payload(p), zeros(15)), "a body of 64 bytes, got 60"),
    "too many elements": (lambda p: (payload(p), zeros(17)), "a body of 64 bytes, got 68"),
    "float64": (lambda p: (payload(p), np.zeros(16)), "a body of 64 bytes, got 128"),
    "float16": (lambda p: (payload(p), np.zeros(16, np.float16)), "64 bytes, got 32"),
    "a weight below zero": (lambda p: with_field(payload(p), zeros(), weight=-1.0), "weight"),
    "a weight of NaN": (
        lambda p: with_field(payload(p), zeros(), weight=float("nan")),
        "weight",
    ),
    "a weight as text": (lambda p: with_field(payload(p), zeros(), weight="4"), "weight"),
    "an extra field": (lambda p: with_field(payload(p), zeros(), shape=[16]), "shape"),
    "a broken checksum": (
        lambda p: join_buffers(encode(payload(p), zeros()))[:-1] + b"\x01",
        "checksum",
    ),
    "a loss of another's subtree": (
        lambda p: (loss(p, **subtree_of_another(p)), None),
        "was not assigned to worker 'hostile'",
    ),
    "a loss of a future step": (lambda p: (loss(p, step=9), None), "expected (term"),
    "an answer to a step to come": (
        lambda p: (StepApplied(term=p.term, step=7, state_digest=DIGEST), None),
        "at most 0",
    ),
    "an answer in another term": (
        lambda p: (StepApplied(term=p.term + 1, step=0, state_digest=DIGEST), None),
        "term",
    ),
    "a second Hello": (lambda _: (EXAMPLES[messages.Hello], None), "Hello is not expected"),
    "a message of the coordinator": (lambda p: (p, None), "StepPlan is not expected"),
    "garbage": (lambda _: b"\x00" * 64, "expected a samestep frame"),
}


@pytest.mark.parametrize("breach", BREACHES)
@on_uvloop
async def test_protocol_violation_ends_only_the_connection(tmp_path, reference, breach):
    make_message, reason = BREACHES[breach]
    async with live_service(tmp_path, 2) as live:
        run_id = await start_with_honest_worker(live)
        async with HostileWorker(live.port) as attacker:
            plan = await attacker.plan()
            message = make_message(plan)
            if isinstance(message, bytes):
                attacker.send_bytes(message)
            else:
                attacker.send(*message)
            goodbye = await attacker.wait_for_goodbye()
        assert goodbye is not None
        assert reason in goodbye.reason
        assert goodbye.exit_code == ExitCode.FAILED
        loss_event = await live.wait_for("worker_lost", worker="hostile")
        assert reason in loss_event["reason"]
        result = await live.result(run_id)
        assert equal_results(result, reference)
        assert set(live.service.sessions) == {"w0"}
        assert not live.events_named("halted")


@on_uvloop
async def test_ready_without_a_manifest_is_refused(tmp_path, reference):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as attacker:
        run_id = live.service.submit(SPEC)
        await attacker.join()
        built_task = await attacker.prepare()
        attacker.send(attacker.ready(built_task), b"{}")
        goodbye = await attacker.wait_for_goodbye()
        assert goodbye is not None
        assert "manifest" in goodbye.reason
        live.start_worker("w0")
        assert equal_results(await live.result(run_id), reference)


@on_uvloop
async def test_different_manifest_is_a_mismatch(tmp_path, reference):
    async with live_service(tmp_path, 2) as live:
        run_id = await start_with_honest_worker(live)
        async with HostileWorker(live.port) as attacker:
            await attacker.join()
            built_task = await attacker.prepare()
            attacker.send(
                attacker.ready(built_task), built_task.manifest.to_bytes().replace(b":64", b":65")
            )
            goodbye = await attacker.wait_for_goodbye()
            assert goodbye is not None
            assert goodbye.exit_code == ExitCode.MISMATCH
        live.start_worker("w1")
        assert equal_results(await live.result(run_id), reference)


@pytest.mark.parametrize("bad_value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("source", ["gradient", "loss"])
@on_uvloop
async def test_non_finite_value_halts_the_run_and_names_its_worker(
    tmp_path, reference, bad_value, source
):
    async with live_service(tmp_path, 2) as live:
        run_id = await start_with_honest_worker(live)
        async with HostileWorker(live.port) as attacker:
            plan = await attacker.plan()
            if source == "gradient":
                values = zeros()
                values[5] = bad_value
                attacker.send(payload(plan, block=1), values)
            else:
                attacker.send(loss(plan, loss_sum=bad_value))
            halt = await live.wait_for("halted")
            assert "worker 'hostile'" in halt["reason"]
            assert "microbatches [" in halt["reason"]
            assert "step 0" in halt["reason"]
            assert ("block 'layer.1'" in halt["reason"]) == (source == "gradient")
            assert (await attacker.wait_for_message(messages.Halt)).reason == halt["reason"]
        await live.wait_for("worker_lost", worker="hostile")
        assert not live.events_named("committed")
        assert live.service.current is not None
        live.service.current.execute_command(ContinueRun())
        assert equal_results(await live.result(run_id), reference)


# Late or duplicate messages are dropped silently.


class RepeatingClient(Client):
    """Sends every gradient and loss twice, and those of the last step once more."""

    repeated = 0

    def _transmit(self, action: act.Transmit) -> None:
        super()._transmit(action)
        if isinstance(action.message, BlockGradientPayload | SubtreeLoss):
            super()._transmit(action)
            self.repeated += 1
            delayed = self.__dict__.setdefault("_late", [])
            if delayed and delayed[0].message.step < action.message.step:
                super()._transmit(delayed.pop(0))
            delayed.append(action)


@pytest.mark.parametrize("workers", [1, 2])
@on_uvloop
async def test_duplicate_and_late_messages_count_once(tmp_path, reference, workers):
    """A single worker's payload covers the whole tree: its duplicate follows the average."""
    async with live_service(tmp_path, workers) as live:
        run_id = live.service.submit(SPEC)
        if workers == 2:
            live.start_worker("w0")
        repeating = live.start_worker("w1", RepeatingClient)
        result = await live.result(run_id)
        assert isinstance(repeating, RepeatingClient)
        assert repeating.repeated >= 4, "the messages of the first step"
        assert equal_results(result, reference)
        assert "w1" in live.service.sessions
        assert not live.events_named("worker_lost")


@on_uvloop
async def test_repeated_subtree_is_not_credited_twice(tmp_path, reference):
    async with live_service(tmp_path, 2) as live:
        run_id = live.service.submit(SPEC)
        live.start_worker("w0")
        live.start_worker("w1", RepeatingClient)
        result = await live.result(run_id)
        assert sum(result["workers"].values()) == sum(reference["workers"].values())


class VanishingClient(Client):
    """Delivers one block of a subtree and disappears: others compute the subtree again."""

    delivered = 0

    def _transmit(self, action: act.Transmit) -> None:
        super()._transmit(action)
        if isinstance(action.message, BlockGradientPayload):
            self.delivered += 1
            assert self._channel is not None
            self._target = self._target.__class__("127.0.0.1", 1, "w1", "scripted", 0.0)
            self._channel.goodbye("I am off", retry=False)


@on_uvloop
async def test_frame_that_overlaps_pending_sums_is_dropped(tmp_path, reference):
    async with live_service(tmp_path, 2) as live:
        run_id = live.service.submit(SPEC)
        live.start_worker("w0")
        vanishing = live.start_worker("w1", VanishingClient)
        loss_event = await live.wait_for("worker_lost", worker="w1")
        assert loss_event["reason"] == "I am off"
        result = await live.result(run_id)
        assert isinstance(vanishing, VanishingClient)
        assert vanishing.delivered >= 1
        assert live.events_named("reassigned")
        assert equal_results(result, reference)


async def farewell_of(attacker: HostileWorker) -> messages.Goodbye:
    """Wait for a goodbye, not just the end of the connection."""
    goodbye = await attacker.wait_for_goodbye()
    assert goodbye is not None
    return goodbye


@on_uvloop
async def test_unrequested_state_is_refused(tmp_path, reference):
    async with live_service(tmp_path, 2) as live:
        run_id = await start_with_honest_worker(live)
        async with HostileWorker(live.port) as attacker:
            await attacker.plan()
            attacker.send(attacker.state_chunk(0), zeros())
            assert "was not requested" in (await farewell_of(attacker)).reason
        assert equal_results(await live.result(run_id), reference)


@on_uvloop
async def test_state_that_differs_from_its_digest_is_refused(tmp_path, reference):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as attacker:
        run_id = live.service.submit(SPEC)
        await attacker.join()
        built_task = await attacker.prepare()
        attacker.send(attacker.ready(built_task), built_task.manifest.to_bytes())
        await attacker.wait_for_message(messages.StateRequest)
        attacker.send(attacker.state_chunk(1, last=True), zeros())
        await farewell_of(attacker)
        live.start_worker("w0")
        assert equal_results(await live.result(run_id), reference)


@on_uvloop
async def test_unexpected_answer_is_ignored(tmp_path, reference):
    async with live_service(tmp_path, 2) as live:
        run_id = await start_with_honest_worker(live)
        async with HostileWorker(live.port) as attacker:
            await attacker.join()
            attacker.send(StepApplied(term=attacker.term, step=0, state_digest=DIGEST))
        live.start_worker("w1")
        assert equal_results(await live.result(run_id), reference)
        assert not live.events_named("halted")


OF_ANOTHER_RUN = {
    "Ready": lambda _: (EXAMPLES[messages.Ready].model_copy(update={"run_id": "another"}), b"{}"),
    "Unready": lambda _: (
        messages.Unready(run_id="another", reason="late", own=False, exit_code=2),
        None,
    ),
    "StateChunk": lambda h: (h.state_chunk(0, run_id="another", last=True), zeros()),
    "BlobRequest": lambda _: (
        messages.BlobRequest(run_id="another", digest=DIGEST, offset=0),
        None,
    ),
    "StepApplied": lambda h: (StepApplied(term=h.term, step=0, state_digest=DIGEST), None),
}


@pytest.mark.parametrize("kind", OF_ANOTHER_RUN)
@on_uvloop
async def test_messages_of_another_run_change_nothing(tmp_path, reference, kind):
    async with live_service(tmp_path, 2) as live:
        run_id = await start_with_honest_worker(live)
        async with HostileWorker(live.port) as attacker:
            await attacker.join()
            live.start_worker("w1")
            await live.wait_for("worker_connected", worker="w1")
            attacker.send(*OF_ANOTHER_RUN[kind](attacker))
            assert equal_results(await live.result(run_id), reference)


@on_uvloop
async def test_manifest_of_petabytes_is_refused(tmp_path, reference):
    async with live_service(tmp_path, 1) as live:
        run_id = live.service.submit(SPEC)
        async with HostileWorker(live.port) as attacker:
            await attacker.join()
            built_task = await attacker.prepare()
            huge = built_task.manifest.to_bytes().replace(b"[16]", b"[2147483648,1048576]")
            attacker.send(attacker.ready(built_task), huge)
            await farewell_of(attacker)
        live.start_worker("w0")
        assert equal_results(await live.result(run_id), reference)


@on_uvloop
async def test_infinite_sum_of_weights_halts_the_run(tmp_path):
    """Three of six microbatches are two subtrees; each weight alone is finite."""
    async with live_service(tmp_path, 2) as live:
        live.service.submit(scripted_spec(batch={"samples": 6, "microbatch": 1}))
        live.start_worker("w0")
        await live.wait_for("worker_ready", worker="w0")
        async with HostileWorker(live.port) as attacker:
            plan = await attacker.plan()
            assert len(plan.subtrees) == 2
            for block in (2, 1, 0):
                for lo, hi in plan.subtrees:
                    attacker.send(payload(plan, block=block, lo=lo, hi=hi, weight=1.7e308), zeros())
            halt = await live.wait_for("halted")
            assert "non-finite" in halt["reason"]


# Real processes.


def test_processes_continue_after_bad_input(tmp_path, reference):
    """Some of the cases above, with the coordinator and the honest worker as processes."""
    spec = tmp_path / "scripted.yaml"
    spec.write_text(SPEC.model_dump_json())
    with Cluster(tmp_path, "--expect-workers", "2", "--run", str(spec)) as cluster:
        cluster.start_worker("w0", "--backend", "scripted:1")
        cluster.wait_for("worker_ready", worker="w0")
        port = int(cluster.address["data"].rpartition(":")[2])

        async def disturb() -> None:
            for data in (bytes(100), frame(EXAMPLES[messages.Hello])[:20]):
                async with HostileWorker(port) as peer:
                    peer.send_bytes(data)
            async with HostileWorker(port) as attacker:
                plan = await attacker.plan()
                attacker.send(payload(plan, step=plan.step + 1), zeros())
                goodbye = await attacker.wait_for_goodbye()
                assert goodbye is not None
                assert "expected (term, step, attempt)" in goodbye.reason

        uvloop.run(disturb())
        result = cluster.result()
        loss_event = cluster.wait_for("worker_lost", worker="hostile")
        assert "expected (term" in loss_event["reason"]
    assert equal_results(result, reference)
    assert Path(tmp_path / "out" / "result.json").exists()
