"""Values of a script that workers compare: what is a difference, and what is not."""

from __future__ import annotations

import pytest

from protocol.spec.cross_check import CrossCheck
from protocol.spec.manifest import Block, Manifest, TensorSpec

FIRST = CrossCheck(constants={"MODE": "mse", "SCALE": "2"}, first_loss=0.5)
WEIGHT = Block(name="weight", kind="block", tensors=(TensorSpec(name="weight", shape=(2,)),))


@pytest.mark.parametrize(
    "other",
    [
        FIRST,
        None,
        CrossCheck(),
        CrossCheck(constants={"SCALE": "2", "only in another version": "1"}),
        CrossCheck(first_loss=0.51),
    ],
    ids=["the same", "an older release", "no values", "other names", "rounding"],
)
def test_values_that_agree(other):
    assert FIRST.describe_difference(other, "on the first worker") == ""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            CrossCheck(constants={"SCALE": "3"}),
            "expected SCALE = 2 as on the first worker, got 3: ",
        ),
        (
            CrossCheck(first_loss=0.6),
            "expected a loss of 0.5 for the first samples as on the first ",
        ),
    ],
)
def test_values_that_differ(other, message):
    assert FIRST.describe_difference(other, "on the first worker").startswith(message)


def test_losses_near_zero_may_differ_by_rounding():
    assert CrossCheck(first_loss=1e-7).find_difference(CrossCheck(first_loss=-9e-7)) is None


def test_compared_values_are_sent_but_not_digested():
    plain = Manifest(blocks=(WEIGHT,), train_samples=4)
    compared = plain.model_copy(update={"cross_check": FIRST})
    assert compared.digest() == plain.digest()
    assert compared.differences(plain) == []
    assert Manifest.from_bytes(compared.to_bytes()) == compared
    assert b"cross_check" not in plain.to_bytes()
