"""The method "none": what it asks, what it answers, and what it does not accept."""

import pytest

from protocol.authentication import LoopbackOnly
from protocol.errors import ExitCode, NotAuthorised
from protocol.messages import Challenge, Proof
from tests.message_samples import EXAMPLES, messages

HELLO = EXAMPLES[messages.Hello]
NONCE = bytes(32)


def test_what_one_side_asks_the_other_can_answer():
    coordinator, worker = LoopbackOnly(), LoopbackOnly()
    challenge = coordinator.challenge(HELLO)  # type: ignore[arg-type]
    coordinator.verify(challenge, worker.prove(challenge))


def test_every_challenge_is_new():
    nonces = {LoopbackOnly().challenge(HELLO).nonce for _ in range(100)}  # type: ignore[arg-type]
    assert len(nonces) == 100
    assert {len(nonce) for nonce in nonces} == {32}


def test_a_worker_says_which_method_it_does_not_have():
    with pytest.raises(NotAuthorised, match="'token'") as caught:
        LoopbackOnly().prove(Challenge(method="token", nonce=NONCE))
    assert caught.value.exit_code == ExitCode.NOT_AUTHORISED == 77


@pytest.mark.parametrize(
    ("challenge", "proof"),
    [
        (Challenge(method="none", nonce=NONCE), Proof(proof=b"x")),
        (Challenge(method="token", nonce=NONCE), Proof(proof=b"")),
    ],
)
def test_anything_but_an_empty_proof_is_refused(challenge, proof):
    with pytest.raises(NotAuthorised, match="expected an empty proof"):
        LoopbackOnly().verify(challenge, proof)
