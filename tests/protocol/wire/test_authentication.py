"""Authentication proofs: valid proofs, and proofs of other connections, keys and versions."""

import dataclasses

import pytest

from protocol import PROTOCOL_VERSION
from protocol.base.errors import ExitCode, NotAuthorized
from protocol.wire import authentication
from protocol.wire.authentication import (
    METHOD,
    NO_CERTIFICATE,
    Exchange,
    answer_challenge,
    new_key,
    new_nonce,
)
from protocol.wire.messages import Challenge, Hello, Proof

KEY = bytes(range(32))
CERTIFICATE = b"c" * 32
HELLO = Hello(
    release="1",
    name="w",
    instance="0" * 32,
    backend="cpu",
    duty="train",
    nonce=b"n" * 32,
    enrolled=False,
)
EXCHANGE = Exchange(HELLO, b"m" * 32, CERTIFICATE)


def test_each_side_accepts_the_other():
    challenge = EXCHANGE.challenge(KEY)
    EXCHANGE.check_worker(KEY, answer_challenge(HELLO, challenge, CERTIFICATE, KEY))


def test_proof_bits_are_frozen():
    """Another implementation must produce the same bits; a change requires a new protocol
    version."""
    assert PROTOCOL_VERSION == 13
    assert EXCHANGE.prove("worker", KEY).hex().startswith("d6b33427a41cf1ca")


OTHER_EXCHANGES = {
    "worker nonce": dataclasses.replace(
        EXCHANGE, hello=HELLO.model_copy(update={"nonce": b"x" * 32})
    ),
    "coordinator nonce": dataclasses.replace(EXCHANGE, coordinator_nonce=b"x" * 32),
    "certificate": dataclasses.replace(EXCHANGE, fingerprint=b"x" * 32),
    "no TLS": dataclasses.replace(EXCHANGE, fingerprint=NO_CERTIFICATE),
    "name": dataclasses.replace(EXCHANGE, hello=HELLO.model_copy(update={"name": "v"})),
    "instance": dataclasses.replace(
        EXCHANGE, hello=HELLO.model_copy(update={"instance": "1" * 32})
    ),
    "enrolled": dataclasses.replace(EXCHANGE, hello=HELLO.model_copy(update={"enrolled": True})),
}


@pytest.mark.parametrize("other", OTHER_EXCHANGES.values(), ids=OTHER_EXCHANGES.keys())
def test_a_proof_of_another_connection_is_refused_by_both(other):
    replayed_proof = Proof(proof=other.prove("worker", KEY))
    with pytest.raises(NotAuthorized):
        EXCHANGE.check_worker(KEY, replayed_proof)
    with pytest.raises(NotAuthorized):
        answer_challenge(other.hello, EXCHANGE.challenge(KEY), other.fingerprint, KEY) if (
            other.hello != HELLO or other.fingerprint != CERTIFICATE
        ) else answer_challenge(
            HELLO,
            Challenge(method=METHOD, nonce=b"m" * 32, proof=other.prove("coordinator", KEY)),
            CERTIFICATE,
            KEY,
        )


def test_a_reflected_proof_is_refused_by_both():
    own_proof = EXCHANGE.challenge(KEY).proof
    with pytest.raises(NotAuthorized):
        EXCHANGE.check_worker(KEY, Proof(proof=own_proof))
    mirrored_challenge = Challenge(
        method=METHOD, nonce=EXCHANGE.coordinator_nonce, proof=EXCHANGE.prove("worker", KEY)
    )
    with pytest.raises(NotAuthorized):
        answer_challenge(HELLO, mirrored_challenge, CERTIFICATE, KEY)


@pytest.mark.parametrize("proof", [b"", b"guess", bytes(32), bytes(64)])
def test_invalid_proofs_are_refused(proof):
    with pytest.raises(NotAuthorized) as error_info:
        EXCHANGE.check_worker(KEY, Proof(proof=proof))
    assert error_info.value.exit_code == ExitCode.NOT_AUTHORIZED == 77


def test_another_secret_proves_nothing():
    with pytest.raises(NotAuthorized, match="coordinator token show"):
        answer_challenge(HELLO, EXCHANGE.challenge(new_key()), CERTIFICATE, KEY)
    with pytest.raises(NotAuthorized, match="coordinator token show"):
        EXCHANGE.check_worker(
            KEY, answer_challenge(HELLO, EXCHANGE.challenge(b"k" * 32), CERTIFICATE, b"k" * 32)
        )


def test_another_version_of_the_protocol_proves_nothing(monkeypatch):
    challenge = EXCHANGE.challenge(KEY)
    monkeypatch.setattr(authentication, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with pytest.raises(NotAuthorized):
        answer_challenge(HELLO, challenge, CERTIFICATE, KEY)


def test_worker_names_an_unknown_method():
    with pytest.raises(NotAuthorized, match="'none'"):
        answer_challenge(
            HELLO, Challenge(method="none", nonce=bytes(32), proof=bytes(32)), CERTIFICATE, KEY
        )


def test_nonces_are_unique():
    assert len({new_nonce() for _ in range(100)}) == 100
