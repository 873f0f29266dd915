"""Admission of workers: with the token, with a worker's own key, and with invalid credentials."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.run.outputs.events import ViewChanged
from protocol.base import limits
from protocol.base.errors import ExitCode, NotAuthorized, Unreachable
from protocol.wire import messages, tls
from protocol.wire.authentication import (
    METHOD,
    NO_CERTIFICATE,
    Exchange,
    answer_challenge,
    new_key,
    new_nonce,
)
from protocol.wire.certificate import new_certificate
from protocol.wire.connection import Connection, encode
from protocol.wire.join_token import JoinToken
from protocol.wire.messages import Challenge, Hello, Proof, Welcome
from tests.durable_run import read_journal
from tests.event_loop import on_uvloop
from tests.hostile_worker import HostileWorker
from tests.live_service import PATIENCE_S, LiveService, ScriptedFactory, live_service, scripted_spec
from tests.message_samples import EXAMPLES, frame, join_buffers
from worker.join.credentials import WorkerCredentials
from worker.shell.client import Client, Target


@pytest.fixture(autouse=True)
def separate_home(tmp_path, monkeypatch) -> Path:
    """Use a separate home, because these tests change tokens."""
    home = tmp_path / "home"
    monkeypatch.setenv("SAMESTEP_HOME", str(home))
    return home


def remote_credentials(tmp_path: Path, token: str = "") -> WorkerCredentials:
    """Return credentials of a worker on another machine, or of another user."""
    environment = {"SAMESTEP_HOME": str(tmp_path / "elsewhere")}
    if token:
        environment["SAMESTEP_TOKEN"] = token
    return WorkerCredentials(environment=environment)


def client(port: int, credentials: WorkerCredentials, name: str = "w") -> Client:
    target = Target("127.0.0.1", port, name, "scripted", 20.0)
    return Client(target, ScriptedFactory(), credentials, lambda _: None)


async def refusal(port: int, credentials: WorkerCredentials) -> str:
    """Return the one-line error of a worker that is not admitted."""
    with pytest.raises(NotAuthorized) as error_info:
        async with asyncio.timeout(PATIENCE_S):
            await client(port, credentials).serve()
    assert error_info.value.exit_code == ExitCode.NOT_AUTHORIZED == 77
    text = str(error_info.value)
    assert "\n" not in text
    return text


@asynccontextmanager
async def joined_worker(
    live: LiveService, worker: Client, name: str = "w", nth: int = 1
) -> AsyncIterator[None]:
    """Wait until the worker has joined; it drains at the end of the context."""
    task = asyncio.create_task(worker.serve())
    async with asyncio.timeout(PATIENCE_S):
        while len(live.events_named("worker_connected")) < nth:
            live.changed.clear()
            await live.changed.wait()
    assert live.events_named("worker_connected")[-1]["worker"] == name
    yield
    worker.drain()
    assert await task == ExitCode.OK


# Members.


@on_uvloop
async def test_worker_uses_the_token_once_and_then_its_key(tmp_path):
    async with live_service(tmp_path, 1) as live:
        credentials = CoordinatorCredentials.open()
        token = credentials.join_token().reveal()
        async with joined_worker(live, client(live.port, remote_credentials(tmp_path, token))):
            assert list(credentials.keys.names()) == ["w"]
        # The worker does not need the new token, because it has a key.
        credentials.rotate(everyone=False)
        async with joined_worker(live, client(live.port, remote_credentials(tmp_path)), nth=2):
            pass
        async with joined_worker(
            live, client(live.port, remote_credentials(tmp_path, token)), nth=3
        ):
            pass
        assert "certificate" not in await refusal(
            live.port, remote_credentials(tmp_path / "other", token)
        )
        credentials.rotate(everyone=True)
        assert not credentials.keys.names()
        assert "revoked" in await refusal(live.port, remote_credentials(tmp_path))


@on_uvloop
async def test_invalid_key_falls_back_to_the_token(tmp_path):
    async with live_service(tmp_path, 1) as live:
        credentials = CoordinatorCredentials.open()
        first = remote_credentials(tmp_path, credentials.join_token().reveal())
        async with joined_worker(live, client(live.port, first)):
            first_key = credentials.keys.get("w")
        credentials.revoke("w")
        second = remote_credentials(tmp_path, credentials.join_token().reveal())
        async with joined_worker(live, client(live.port, second), nth=2):
            assert credentials.keys.get("w") not in (None, first_key)


@on_uvloop
async def test_worker_retries_while_keys_are_unreadable(tmp_path):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as member:
        keys = CoordinatorCredentials.open()
        assert keys.issue_key("ann")
        path = keys.keys._path
        path.unlink()
        path.symlink_to(path)
        member.send_hello(name="ann", enrolled=True)
        goodbye = await member.wait_for_goodbye()
        assert goodbye is not None
        assert "cannot check workers: cannot read" in goodbye.reason
        assert goodbye.retry


@on_uvloop
async def test_revoked_worker_is_dismissed_and_stays_away(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "HEARTBEAT_INTERVAL_MS", 30)
    async with live_service(tmp_path, 1) as live:
        credentials = CoordinatorCredentials.open()
        token = credentials.join_token().reveal()
        async with joined_worker(
            live, client(live.port, remote_credentials(tmp_path / "b", token), "b"), "b"
        ):
            refusal_task = asyncio.create_task(
                refusal(live.port, remote_credentials(tmp_path, token))
            )
            await live.wait_for("worker_connected", worker="w")
            credentials.revoke("w")
            assert await refusal_task == "the key of 'w' was revoked"
            # It knows a key and a token, and both are revoked.
            assert "token show" in await refusal(live.port, remote_credentials(tmp_path, token))
            assert "revoked" in await refusal(live.port, remote_credentials(tmp_path))
            assert list(live.service.sessions) == ["b"]


@on_uvloop
async def test_key_is_bound_to_its_worker_name(tmp_path):
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as attacker:
        credentials = CoordinatorCredentials.open()
        assert credentials.issue_key("ann")
        key = credentials.issue_key("bob")
        attacker.send_hello(name="ann", enrolled=True)
        challenge = await attacker.wait_for_message(Challenge)
        exchange = Exchange(attacker.hello, challenge.nonce, credentials.fingerprint)
        attacker.send(Proof(proof=exchange.prove("worker", key)))
        goodbye = await attacker.wait_for_goodbye()
        assert goodbye is not None
        assert goodbye.exit_code == ExitCode.NOT_AUTHORIZED


@on_uvloop
async def test_journal_names_the_credential_of_each_worker(tmp_path):
    async with live_service(tmp_path, 1) as live:
        credentials = CoordinatorCredentials.open()
        token = credentials.join_token().reveal()
        for nth in (1, 2):
            async with joined_worker(
                live, client(live.port, remote_credentials(tmp_path, token)), nth=nth
            ):
                run_id = live.service.submit(scripted_spec())
                await live.result(run_id)
            mark = credentials.keys.marks()["w"]
            expected = "the join token" if nth == 1 else f"the key {mark} of 'w'"
            assert live.events_named("worker_connected")[-1]["admitted_by"] == expected
            journal = read_journal(tmp_path / run_id / "journal.jsonl")
            views = [e.record for e in journal if isinstance(e.record, ViewChanged)]
            assert views[0].change == "started"
            assert [member.admitted_by for member in views[0].members] == [expected]


# Unauthenticated connections.


@on_uvloop
async def test_worker_without_a_token_explains_how_to_get_one(tmp_path):
    async with live_service(tmp_path, 1) as live:
        assert "coordinator token show" in await refusal(live.port, remote_credentials(tmp_path))
        assert not live.service.sessions


@on_uvloop
async def test_token_with_a_wrong_secret_is_refused(tmp_path):
    async with live_service(tmp_path, 1) as live:
        wrong_token = JoinToken(CoordinatorCredentials.open().fingerprint, new_key()).reveal()
        text = await refusal(live.port, remote_credentials(tmp_path, wrong_token))
        assert "does not know this worker's join token or key: it is outdated" in text
        assert wrong_token.partition(".")[2] not in text


@pytest.mark.parametrize(
    "change",
    [
        "another worker nonce",
        "another coordinator nonce",
        "another certificate",
        "no TLS",
        "mirror",
    ],
)
@on_uvloop
async def test_proof_of_another_connection_is_refused(tmp_path, change):
    """The attacker has recorded a valid handshake, or relays between two TLS connections."""
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as attacker:
        token = CoordinatorCredentials.open().join_token()
        attacker.send_hello()
        challenge = await attacker.wait_for_message(Challenge)
        hello, nonce, certificate = attacker.hello, challenge.nonce, token.fingerprint
        if change == "another worker nonce":
            hello = hello.model_copy(update={"nonce": new_nonce()})
        elif change == "another coordinator nonce":
            nonce = new_nonce()
        elif change == "another certificate":
            certificate = b"x" * 32
        elif change == "no TLS":
            certificate = NO_CERTIFICATE
        role = "coordinator" if change == "mirror" else "worker"
        proof = Exchange(hello, nonce, certificate).prove(role, token.secret)  # type: ignore[arg-type]
        attacker.send(Proof(proof=proof))
        goodbye = await attacker.wait_for_goodbye()
        assert goodbye is not None
        assert goodbye.exit_code == ExitCode.NOT_AUTHORIZED
        assert not live.service.sessions


@on_uvloop
async def test_replayed_handshake_is_refused(tmp_path):
    async with live_service(tmp_path, 1) as live:
        token = CoordinatorCredentials.open().join_token()
        async with HostileWorker(live.port) as member:
            member.send_hello()
            proof = answer_challenge(
                member.hello,
                await member.wait_for_message(Challenge),
                token.fingerprint,
                token.secret,
            )
            member.send(proof)
            await member.wait_for_message(Welcome)
            recorded_hello = member.hello
        async with HostileWorker(live.port) as replayer:
            replayer.send(recorded_hello)
            await replayer.wait_for_message(Challenge)
            replayer.send(proof)
            goodbye = await replayer.wait_for_goodbye()
            assert goodbye is not None
            assert goodbye.exit_code == ExitCode.NOT_AUTHORIZED


@pytest.mark.parametrize("after_hello", [False, True])
@on_uvloop
async def test_other_messages_before_the_welcome_end_the_connection(tmp_path, after_hello):
    for kind in EXAMPLES:
        if kind not in (Hello, messages.Goodbye):
            directory = tmp_path / kind.__name__
            await check_refusal_before_the_welcome(directory, kind, after_hello=after_hello)


async def check_refusal_before_the_welcome(
    directory: Path, kind: type[messages.Message], *, after_hello: bool
) -> None:
    async with live_service(directory, 1) as live, HostileWorker(live.port) as newcomer:
        if after_hello:
            newcomer.send_hello()
            await newcomer.wait_for_message(Challenge)
        newcomer.send_bytes(frame(EXAMPLES[kind]))
        async with asyncio.timeout(limits.HANDSHAKE_TIMEOUT_MS / 1000 - 1):
            goodbye = await newcomer.wait_for_goodbye()
        assert goodbye is not None, kind
        assert goodbye.exit_code in (ExitCode.FAILED, ExitCode.NOT_AUTHORIZED), kind
        assert not live.service.sessions, kind


# Messages that a worker sends to impostors.


class Impostor:
    """Listens like a coordinator; records what it receives.

    Args:
        context: The TLS context; None for plaintext.
        reply: A function from a Hello to the answer, a message or bytes.
    """

    def __init__(self, context: ssl.SSLContext | None, reply: object = None) -> None:
        self.received: list[messages.Message] = []
        self._context = context
        self._reply = reply

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection("coordinator")
        while data := await reader.read(65_536):
            for message, _ in connection.receive_data(data):
                self.received.append(message)
                if isinstance(message, Hello) and callable(self._reply):
                    reply = self._reply(message)
                    if isinstance(reply, bytes):
                        writer.write(reply)
                        continue
                    connection.send(reply)
                    writer.write(join_buffers(encode(reply)))
        writer.close()


def another_context(tmp_path: Path) -> ssl.SSLContext:
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    for path, text in zip(paths, new_certificate(), strict=True):
        path.write_text(text)
    return tls.server_context(*paths)


@on_uvloop
async def test_relay_with_its_own_certificate_receives_nothing(tmp_path):
    token = CoordinatorCredentials.open().join_token().reveal()
    async with Impostor(another_context(tmp_path)) as relay:
        text = await refusal(relay.port, remote_credentials(tmp_path, token))
        assert "expected the certificate" in text
        assert token.partition(".")[2] not in text
        assert relay.received == []


@on_uvloop
async def test_relay_receives_nothing_from_a_worker_with_a_key(tmp_path):
    async with live_service(tmp_path, 1) as live:
        token = CoordinatorCredentials.open().join_token().reveal()
        async with joined_worker(live, client(live.port, remote_credentials(tmp_path, token))):
            pass
    async with Impostor(another_context(tmp_path)) as relay:
        message = await refusal(relay.port, remote_credentials(tmp_path))
        assert "no key for the name" in message
        assert "keys are stored by name" in message
        assert relay.received == []


@pytest.mark.parametrize("forgery", ["guess", "mirror", "replay", "other method"])
@on_uvloop
async def test_impostor_without_the_secret_gets_no_proof(tmp_path, forgery):
    """The impostor has the coordinator's certificate and key, but not the secret."""
    credentials = CoordinatorCredentials.open()
    recorded_exchange = Exchange(EXAMPLES[Hello], bytes(32), credentials.fingerprint)  # type: ignore[arg-type]

    def reply(hello: Hello) -> Challenge:
        proof = {
            "guess": bytes(32),
            "mirror": hello.nonce,
            "replay": recorded_exchange.prove("coordinator", credentials.join_token().secret),
            "other method": bytes(32),
        }[forgery]
        return Challenge(
            method="none" if forgery == "other method" else METHOD, nonce=hello.nonce, proof=proof
        )

    async with Impostor(credentials.server_context(), reply) as impostor:
        await refusal(
            impostor.port, remote_credentials(tmp_path, credentials.join_token().reveal())
        )
        assert [type(message) for message in impostor.received] in (
            [Hello],
            [Hello, messages.Goodbye],
        )


@pytest.mark.parametrize("first", ["nothing", "challenge"])
@on_uvloop
async def test_impostor_that_skips_the_proof_is_rejected(tmp_path, first):
    """The impostor sends a welcome and a run together with its invalid challenge."""
    credentials = CoordinatorCredentials.open()

    def reply(hello: Hello) -> bytes:
        challenge = Challenge(method=METHOD, nonce=hello.nonce, proof=bytes(32))
        first_messages = [challenge] if first == "challenge" else []
        welcome = EXAMPLES[messages.Welcome].model_copy(update={"key": b"k" * 32})
        messages_sent = [*first_messages, welcome, EXAMPLES[messages.StartRun]]
        return b"".join(frame(message) for message in messages_sent)

    received: list[str] = []
    secrets = remote_credentials(tmp_path, credentials.join_token().reveal())
    async with Impostor(credentials.server_context(), reply) as impostor:
        target = Target("127.0.0.1", impostor.port, "w", "scripted", 0.5)
        with pytest.raises(Unreachable, match="Welcome is not expected"):
            async with asyncio.timeout(PATIENCE_S):
                await Client(target, ScriptedFactory(), secrets, received.append).serve()
    assert Proof not in [type(message) for message in impostor.received]
    assert not any("joined" in line or "building" in line for line in received)
    assert not list((tmp_path / "elsewhere").rglob("*.key"))


@on_uvloop
async def test_older_tls_is_refused(tmp_path):
    async with live_service(tmp_path, 1) as live:
        context = tls.client_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection("127.0.0.1", live.port, ssl=context)
