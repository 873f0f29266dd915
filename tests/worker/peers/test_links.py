"""Links between workers on real sockets: which connections are accepted."""

import asyncio
import contextlib
import socket
import ssl

import numpy as np
import pytest

from protocol.base import limits
from protocol.base.errors import SamestepError
from protocol.spec.sections.exchange import Codecs
from protocol.wire import tls, tls_transport
from protocol.wire.authentication import answer_challenge, new_nonce
from protocol.wire.connection import Connection, encode
from protocol.wire.messages import BlockGradientPayload, Challenge, Goodbye, PeerHello, PeerWelcome
from protocol.wire.peers import Peer, PeerList, pair_key
from protocol.wire.transport import Channel
from tests.event_loop import on_uvloop
from tests.message_samples import BLOCKS, STEP_ID
from tests.silent_address import refusing_port
from worker.peers import links
from worker.peers.links import LinkSockets, PeerLinks

PATIENCE_S = 60.0
SECRET = bytes(range(32))


class Member:
    """The links of one worker, and their reports."""

    def __init__(self, name, *, encrypted=True, listens=True):
        self.name = name
        self.reports: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        sockets = LinkSockets(name, "127.0.0.1", encrypted=encrypted)
        self.links = PeerLinks(name, BLOCKS, Codecs(), self, sockets)
        self.listens = listens
        self.port, self.fingerprint = self.links.listen() if listens else (0, bytes(32))

    def as_peer(self, other, fingerprint=None):
        return Peer(
            name=self.name, host="", port=self.port,
            fingerprint=(fingerprint or self.fingerprint).hex(),
            key=pair_key(SECRET, self.name, other).hex(),
        )  # fmt: skip

    def set_peers(self, *others):
        peers = tuple(other.as_peer(self.name) for other in others)
        self.links.set_peers(PeerList(me=self.name, listens=self.listens, peers=peers))

    def on_gradient(self, peer, received):
        self.reports.put_nowait(("gradient", peer, received))

    def on_linked(self, peer, mbit):
        assert mbit > 0
        self.reports.put_nowait(("linked", peer, None))

    def on_unlinked(self, peer, reason):
        self.reports.put_nowait(("unlinked", peer, reason))

    async def next(self, kind):
        """Return the next report of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                report = await self.reports.get()
                if report[0] == kind:
                    return report[1:]


@contextlib.contextmanager
def members(*names, **options):
    with contextlib.ExitStack() as stack:
        group = [Member(name, **options) for name in names]
        for member in group:
            stack.callback(member.links.close)
        yield group


def payload(worker):
    return BlockGradientPayload(
        **STEP_ID, owners=1, block=1, chunk=0, worker=worker, lo=0, hi=1, weight=1.0
    )


def values():
    return np.arange(BLOCKS[1].elements, dtype=np.float32)


async def send_gradient(sender, receiver):
    """Send a slice, and check that it arrives unchanged."""
    sender.links.send(receiver.name, encode(payload(sender.name), values()))
    name, received = await receiver.next("gradient")
    assert name == sender.name
    assert received.body.view(np.float32).tobytes() == values().tobytes()


@pytest.mark.parametrize("encrypted", [True, False])
@on_uvloop
async def test_both_reach_each_other_and_a_body_arrives_unchanged(encrypted):
    with members("one", "other", encrypted=encrypted) as (one, other):
        one.set_peers(other)
        other.set_peers(one)
        assert (await one.next("linked"))[0] == "other"
        assert (await other.next("linked"))[0] == "one"
        await send_gradient(one, other)
        await send_gradient(other, one)
        sent_bytes, received = one.links.traffic()["other"]
        assert min(sent_bytes, received) > limits.PEER_PROBE_BYTES


@pytest.mark.parametrize("name", ["a", "z"])
@on_uvloop
async def test_member_that_only_dials_sends_and_receives(name):
    with members("one") as (one,), members(name, listens=False) as (dialing_member,):
        one.set_peers(dialing_member)
        dialing_member.set_peers(one)
        await dialing_member.next("linked")
        await one.next("linked")
        await send_gradient(one, dialing_member)
        await send_gradient(dialing_member, one)


@pytest.mark.parametrize("unreachable", ["one", "other"])
@on_uvloop
async def test_one_reachable_port_is_enough(unreachable, monkeypatch):
    """Behind a firewall a port is open but unreachable: then the other side dials."""
    monkeypatch.setattr(links, "_FALLBACK_DIAL_S", 0.2)
    with members("one", "other") as pair:
        one, other = pair
        closed = one if unreachable == "one" else other
        reachable = other if closed is one else one
        peer = closed.as_peer(reachable.name).model_copy(update={"port": refusing_port()})
        reachable.links.set_peers(PeerList(me=reachable.name, listens=True, peers=(peer,)))
        closed.set_peers(reachable)
        await one.next("linked")
        await other.next("linked")
        await send_gradient(one, other)
        await send_gradient(other, one)


@pytest.mark.parametrize("encrypted", [True, False])
@on_uvloop
async def test_simultaneous_dials_keep_one_link(encrypted, monkeypatch):
    monkeypatch.setattr(links, "_FALLBACK_DIAL_S", 0.0)
    names = [f"{letter}-{number}" for number in range(6) for letter in "ab"]
    with members(*names, encrypted=encrypted) as group:
        pairs = [*zip(group[::2], group[1::2], strict=True)]
        for one, other in pairs:
            one.set_peers(other)
            other.set_peers(one)
        for one, other in pairs:
            for member in (one, other):
                async with asyncio.timeout(PATIENCE_S):
                    assert (await member.reports.get())[0] == "linked"
            await send_gradient(one, other)
            await send_gradient(other, one)
        for member in group:
            async with asyncio.timeout(PATIENCE_S):
                while len(member.links._connections) > 1:  # noqa: ASYNC110 -- nothing is reported
                    await asyncio.sleep(0.01)
            assert member.reports.empty()


@pytest.mark.parametrize("broken_end", ["one", "other"])
@on_uvloop
async def test_broken_link_is_reported_and_restored(broken_end):
    with members("one", "other") as (one, other):
        one.set_peers(other)
        other.set_peers(one)
        await one.next("linked")
        await other.next("linked")
        breaking_member, name = (one, "other") if broken_end == "one" else (other, "one")
        breaking_member.links._links[name].connection.channel.abort("a test")
        for member in (one, other):
            await member.next("unlinked")
            await member.next("linked")
        await send_gradient(one, other)


@on_uvloop
async def test_removed_peer_is_disconnected():
    with members("one", "other") as (one, other):
        one.set_peers(other)
        other.set_peers(one)
        await other.next("linked")
        one.set_peers()
        assert (await other.next("unlinked"))[0] == "one"
        other.links.send("one", encode(payload("other"), values()))  # dropped


@on_uvloop
async def test_peer_removed_during_the_handshake_is_disconnected(monkeypatch):
    with members("one", "other") as (one, other):
        original_use = PeerLinks.use_connection

        def use_after_removal(self, connection, mbit):
            if self is one.links:
                one.set_peers()
            original_use(self, connection, mbit)

        monkeypatch.setattr(PeerLinks, "use_connection", use_after_removal)
        one.set_peers(other)
        other.set_peers(one)
        await other.next("unlinked")
        assert one.reports.empty()
        assert not one.links._connections


class HandshakeClient:
    """A connection to a worker's port that follows the handshake with any key."""

    def __init__(self, hello, key):
        self.hello = hello
        self.key = key
        self.channel = Channel(Connection("client"), self, asyncio.get_running_loop().time)
        self.last = asyncio.get_running_loop().create_future()

    def on_message(self, channel, received):
        message = received.message
        if isinstance(message, Challenge):
            fingerprint = tls.fingerprint(channel.certificate)
            try:
                channel.send(answer_challenge(self.hello, message, fingerprint, self.key))
            except SamestepError as error:
                self.last.set_result(error)
        elif not self.last.done():
            self.last.set_result(message)

    def on_lost(self, channel, reason, error):
        del channel, error
        if not self.last.done():
            self.last.set_exception(ConnectionResetError(reason))


async def dial(member, hello, key):
    """Return the last message, or the client's own error, of a handshake with this key."""
    client = HandshakeClient(hello, key)
    await tls_transport.connect(
        "127.0.0.1", member.port, tls.client_context(), client.channel, timeout_s=PATIENCE_S
    )
    client.channel.send(hello)
    async with asyncio.timeout(PATIENCE_S):
        last = await client.last
    client.channel.abort("a test")
    return last


def hello(name, receiver):
    return PeerHello(name=name, to=receiver, nonce=new_nonce())


@on_uvloop
async def test_unlisted_process_gets_no_proof():
    with members("owner") as (owner,):
        owner.set_peers()
        reply = await dial(owner, hello("unknown", "owner"), bytes(32))
        assert isinstance(reply, Goodbye)
        assert "'unknown' is not a peer of 'owner'" in reply.reason


@on_uvloop
async def test_member_that_impersonates_another_is_refused():
    """The impostor has a key with each member, but not the key of their link."""
    with members("owner", "true", "poser") as (owner, true, impostor):
        owner.set_peers(true, impostor)
        own_key = pair_key(SECRET, "poser", "owner")
        reply = await dial(owner, hello("true", "owner"), own_key)
        assert isinstance(reply, SamestepError)
        assert "worker 'owner' does not know the key of this link" in str(reply)


@on_uvloop
async def test_a_hello_for_another_worker_is_refused():
    with members("owner", "other", "third") as (owner, other, third):
        owner.set_peers(other, third)
        key = pair_key(SECRET, "other", "third")
        reply = await dial(owner, hello("other", "third"), key)
        assert "is not a peer of 'owner'" in reply.reason


@on_uvloop
async def test_a_peer_with_another_certificate_gets_no_hello():
    with members("one", "other", "z-false") as (one, other, false):
        peer = other.as_peer("one").model_copy(update={"port": false.port})
        one.links.set_peers(PeerList(me="one", listens=True, peers=(peer,)))
        assert "got another certificate" in (await one.next("unlinked"))[1]


@on_uvloop
async def test_reason_for_an_unreachable_peer_is_reported():
    with members("one", "other") as (one, other):
        port = refusing_port()
        peer = other.as_peer("one").model_copy(update={"port": port})
        one.links.set_peers(PeerList(me="one", listens=True, peers=(peer,)))
        assert (await one.next("unlinked"))[1] == f"127.0.0.1:{port} refused the connection"


@on_uvloop
async def test_member_waits_while_the_port_is_full(monkeypatch):
    """All members of a run connect at once: a full port is not a broken link."""
    monkeypatch.setattr(limits, "UNAUTHENTICATED_SLOT_MS", 100)
    with members("owner") as (owner,), members("other", listens=False) as (other,):
        owner.set_peers(other)
        address = ("127.0.0.1", owner.port)
        silent_connections = [
            socket.create_connection(address) for _ in range(limits.PENDING_PEER_CONNECTIONS)
        ]
        while len(owner.links._pending_connections) < limits.PENDING_PEER_CONNECTIONS:  # noqa: ASYNC110 -- nothing is reported
            await asyncio.sleep(0.01)
        key = pair_key(SECRET, "other", "owner")
        dial_task = asyncio.create_task(dial(owner, hello("other", "owner"), key))
        await asyncio.sleep(0.1)
        assert not dial_task.done()
        for each in silent_connections:
            each.close()
        assert isinstance(await dial_task, PeerWelcome)


@on_uvloop
async def test_refused_peer_is_dialed_as_soon_as_it_is_listed(monkeypatch):
    """On a busy machine some workers get the list of members seconds after others."""
    monkeypatch.setattr(links, "_RETRY_S", (10 * PATIENCE_S,))
    monkeypatch.setattr(links, "_FALLBACK_DIAL_S", 10 * PATIENCE_S)
    with members("early", "late") as (early_member, late_member):
        late_member.set_peers()
        early_member.set_peers(late_member)
        assert "is not a peer of 'late'" in (await early_member.next("unlinked"))[1]
        late_member.set_peers(early_member)
        await early_member.next("linked")
        await late_member.next("linked")


@on_uvloop
async def test_older_tls_is_refused():
    with members("owner") as (owner,):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", owner.port, ssl=context)
