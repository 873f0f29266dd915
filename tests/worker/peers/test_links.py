"""Links between members on real sockets: who gets through, and who does not."""

import contextlib
import queue
import socket
import ssl
import threading

import numpy as np
import pytest

from protocol.base import limits
from protocol.base.errors import SamestepError
from protocol.exact.slices import SliceGrid
from protocol.spec.replicas_spec import Codecs
from protocol.wire import tls
from protocol.wire.authentication import new_nonce
from protocol.wire.connection import encode
from protocol.wire.messages import Challenge, Goodbye, PeerHello, PeerWelcome, SliceSum
from protocol.wire.peers import Peer, PeerList, pair_key
from tests.message_samples import BLOCKS, PLACE
from tests.silent_address import refusing_port
from worker.peers import links
from worker.peers.links import SocketLinks
from worker.peers.proof import answer
from worker.peers.wire import Wire

PATIENCE_S = 60.0
SECRET = bytes(range(32))


class WatchedLinks(SocketLinks):
    """Of each thread that begins is heard."""

    heard: queue.Queue[tuple[object, ...]]

    def _start(self, work, link, what):
        super()._start(work, link, what)
        self.heard.put(("started", what, link.peer.name))


class Member:
    """One member's links, and what it hears of them."""

    def __init__(self, name, *, encrypted=True, listens=True):
        self.name = name
        self.heard: queue.Queue[tuple[object, ...]] = queue.Queue()
        self.links = WatchedLinks(
            name, BLOCKS, Codecs(), self, coordinator="127.0.0.1", encrypted=encrypted
        )
        self.links.heard = self.heard
        self.listens = listens
        self.port, self.fingerprint = self.links.listen() if listens else (0, bytes(32))

    def as_peer(self, other, fingerprint=None):
        return Peer(
            name=self.name, host="", port=self.port,
            fingerprint=(fingerprint or self.fingerprint).hex(),
            key=pair_key(SECRET, self.name, other).hex(),
        )  # fmt: skip

    def know(self, *others):
        peers = tuple(other.as_peer(self.name) for other in others)
        self.links.know(PeerList(me=self.name, listens=self.listens, peers=peers))

    def on_slice(self, peer, received):
        self.heard.put(("slice", peer, received))

    def on_linked(self, peer, mbit):
        assert mbit > 0
        self.heard.put(("linked", peer, None))

    def on_unlinked(self, peer, reason):
        self.heard.put(("unlinked", peer, reason))

    def next(self, what):
        """The next thing of this kind that it hears."""
        while True:
            found = self.heard.get(timeout=PATIENCE_S)
            if found[0] == what:
                return found[1:]


@pytest.fixture
def members():
    with contextlib.ExitStack() as stack:

        def made(*names, **options):
            found = [Member(name, **options) for name in names]
            for member in found:
                stack.callback(member.links.close)
            return found

        yield made


def slice_sum(worker):
    return SliceSum(**PLACE, owners=1, slice=1, worker=worker, lo=0, hi=1, weight=1.0)


def values():
    return np.arange(SliceGrid(BLOCKS).elements(1), dtype=np.float32)


@pytest.mark.parametrize("encrypted", [True, False])
def test_both_reach_each_other_and_a_body_comes_as_it_went(members, encrypted):
    one, other = members("one", "other", encrypted=encrypted)
    one.know(other)
    other.know(one)
    assert one.next("linked")[0] == "other"
    assert other.next("linked")[0] == "one"
    one.links.send("other", encode(slice_sum("one"), values()))
    sender, received = other.next("slice")
    assert sender == "one"
    assert received.body.view(np.float32).tobytes() == values().tobytes()


def test_one_that_only_dials_sends_and_receives(members):
    (one,), (dials,) = members("one"), members("dials", listens=False)
    one.know(dials)
    dials.know(one)
    dials.next("linked")
    one.next("linked")
    one.links.send("dials", encode(slice_sum("one"), values()))
    assert dials.next("slice")[0] == "one"
    dials.links.send("one", encode(slice_sum("dials"), values()))
    assert one.next("slice")[0] == "dials"


def test_a_link_that_breaks_is_told_and_made_anew(members):
    one, other = members("one", "other")
    one.know(other)
    other.know(one)
    one.next("linked")
    other.next("linked")
    one.links._links["other"].receiving.close()
    assert other.next("unlinked")[0] == "one"
    other.next("linked")


def test_who_is_named_no_more_is_left(members):
    one, other = members("one", "other")
    one.know(other)
    other.know(one)
    other.next("linked")
    one.know()
    assert other.next("unlinked")[0] == "one"


def test_who_is_named_no_more_while_connections_are_made_is_left_too(members, monkeypatch):
    forgotten = threading.Event()
    probed, answer_probe = links._probed, SocketLinks._answer_probe

    def probed_late(wire):
        mbit = probed(wire)
        if threading.current_thread().name == "dial other":
            assert forgotten.wait(PATIENCE_S)
        return mbit

    def answer_late(self, wire):
        answer_probe(self, wire)
        if self is one.links:
            assert forgotten.wait(PATIENCE_S)

    monkeypatch.setattr(links, "_probed", probed_late)
    monkeypatch.setattr(SocketLinks, "_answer_probe", answer_late)
    one, other = members("one", "other")
    one.know(other)
    other.know(one)
    other.next("linked")
    one.know()
    forgotten.set()
    assert other.next("unlinked")[0] == "one"


def knock(member, hello, key, endpoint=None):
    """What comes of saying this at its door, with this key."""
    endpoint = endpoint or socket.create_connection(("127.0.0.1", member.port), PATIENCE_S)
    with tls.client_context().wrap_socket(endpoint) as secured:
        wire = Wire(secured, "dialler")
        wire.send(encode(hello))
        asked = wire.receive().message
        if isinstance(asked, Goodbye):
            return asked
        assert isinstance(asked, Challenge)
        fingerprint = tls.fingerprint(secured.getpeercert(binary_form=True) or b"")
        wire.send(encode(answer(hello, asked, fingerprint, key)))
        return wire.receive().message


def hello(name, to):
    return PeerHello(name=name, to=to, sends=True, nonce=new_nonce())


def test_a_stranger_gets_no_proof(members):
    (owner,) = members("owner")
    owner.know()
    said = knock(owner, hello("stranger", "owner"), bytes(32))
    assert isinstance(said, Goodbye)
    assert "'stranger' is no peer of 'owner'" in said.reason


def test_a_member_that_poses_as_another_owner_is_refused(members):
    """It knows its own key with each of them, and not the key of the two."""
    owner, true, poser = members("owner", "true", "poser")
    owner.know(true, poser)
    own_key = pair_key(SECRET, "poser", "owner")
    with pytest.raises(SamestepError, match="does not know the key of the two"):
        knock(owner, hello("true", "owner"), own_key)


def test_a_proof_for_another_door_is_refused(members):
    owner, other, third = members("owner", "other", "third")
    owner.know(other, third)
    said = knock(owner, hello("other", "third"), pair_key(SECRET, "other", "third"))
    assert "is no peer of 'owner'" in said.reason


def test_an_answer_with_another_certificate_is_told_nothing(members):
    one, other, false = members("one", "other", "false")
    peer = other.as_peer("one").model_copy(update={"port": false.port})
    one.links.know(PeerList(me="one", listens=True, peers=(peer,)))
    assert "another certificate" in one.next("unlinked")[1]


def test_why_a_peer_is_not_reached_is_told(members):
    one, other = members("one", "other")
    port = refusing_port()
    peer = other.as_peer("one").model_copy(update={"port": port})
    one.links.know(PeerList(me="one", listens=True, peers=(peer,)))
    assert one.next("unlinked")[1] == f"127.0.0.1:{port} refused the connection"


def test_while_strangers_are_inside_a_member_waits_and_comes_in(members):
    """All members of a run come at one time: nobody is to take a full door for a broken link."""
    owner, other = members("owner", "other")
    owner.links.know(PeerList(me="owner", listens=True, peers=(unreachable(other, "owner"),)))
    address = ("127.0.0.1", owner.port)
    inside = [socket.create_connection(address) for _ in range(limits.PEER_STRANGERS_CONNECTIONS)]
    waits = socket.create_connection(address, PATIENCE_S)
    for stranger in inside:
        stranger.close()
    key = pair_key(SECRET, "other", "owner")
    assert isinstance(knock(owner, hello("other", "owner"), key, waits), PeerWelcome)


def unreachable(member, other):
    """As a peer of the other's, at a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return member.as_peer(other).model_copy(update={"port": closed.getsockname()[1]})


def test_who_is_turned_away_comes_again_as_soon_as_the_other_knows_it(members, monkeypatch):
    """On a busy machine some are told of all members seconds after others."""
    monkeypatch.setattr(links, "_AGAIN_S", (10 * PATIENCE_S,))
    early, late = members("early", "late")
    late.know()
    early.know(late)
    assert "is no peer of 'late'" in early.next("unlinked")[1]
    late.know(early)
    early.next("linked")
    late.next("linked")


def test_one_direction_that_cannot_be_made_leaves_the_other_until_that_is_closed(members):
    one, other = members("one", "other")
    listing = PeerList(me="other", listens=True, peers=(unreachable(one, "other"),))
    other.links.know(listing)
    one.know(other)
    while other.next("started")[0] != "from":
        pass
    assert other.next("unlinked")[0] == "one"
    receiving = other.links._links["one"].receiving
    assert receiving is not None
    assert receiving.endpoint.fileno() > 0, "it is open"
    # The other knows better now, and begins anew; of the old link it is the end that reads nothing
    # that has to notice.
    other.know(one)
    other.next("linked")


def test_no_older_tls(members):
    (owner,) = members("owner")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", owner.port), PATIENCE_S) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(plain)
