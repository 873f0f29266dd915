"""A subtree computed by two workers is equal to the last bit, or the run halts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from backends.base.interface import BlockGradient
from backends.scripted import ScriptedBackend, ScriptedProgram
from coordinator.run.exchange.double_check import ResultMismatch, choose_double_check
from coordinator.run.exchange.round import Round
from protocol.exact.reduction.tree import Subtree
from protocol.spec.manifest import Block, TensorSpec
from protocol.wire.messages import BlockGradientPayload, SubtreeLoss
from tests.event_loop import on_uvloop
from tests.live_service import ScriptedFactory, live_service, run_undisturbed, scripted_spec

BLOCKS = (Block(name="layer", kind="block", tensors=(TensorSpec(name="w", shape=(3,)),)),)
STEP_ID = {"term": 1, "step": 0, "attempt": 0}
SUBTREES = {
    "ann": [Subtree(0, 4), Subtree(4, 6)],
    "bob": [Subtree(6, 7), Subtree(7, 8)],
    "eve": [Subtree(8, 10)],
}
PROFILES = {"ann": "s", "bob": "s", "eve": "other"}


def test_double_checks_are_drawn_within_a_numerics_profile():
    steps = 5_000
    choices = [choose_double_check(7, step, 50, SUBTREES, PROFILES) for step in range(steps)]
    doubles = Counter(double for double in choices if double is not None)
    assert 0.5 * steps / 50 < doubles.total() < 1.5 * steps / 50
    assert doubles.keys() == {("ann", "bob", Subtree(4, 6)), ("bob", "ann", Subtree(6, 7))}
    assert all(choose_double_check(7, step, 0, SUBTREES, PROFILES) is None for step in range(300))
    assert all(
        choose_double_check(7, step, 50, SUBTREES, PROFILES, always=True) for step in range(9)
    )
    assert choose_double_check(7, 1, 0, SUBTREES, PROFILES, always=True) is None
    profiles = {"ann": "s", "eve": "other"}
    assert all(choose_double_check(7, step, 1, SUBTREES, profiles) is None for step in range(9))


def round_with_double_check(signatures=("s", "s"), *, awaited=True):
    round_ = Round(BLOCKS, 2, 1, 0, 0)
    for worker, signature, subtrees in (
        ("ann", signatures[0], (Subtree(0, 1),)), ("bob", signatures[1], (Subtree(1, 2), Subtree(0,
        1))),
    ):  # fmt: skip
        round_.assign(worker, subtrees)
        round_.double_check.assign(worker, signature, subtrees)
    if awaited:
        round_.double_assignment = ("ann", "bob", Subtree(0, 1))
    return round_


def deliver(round_, worker, lo, values=(1, 2, 3)):
    message = BlockGradientPayload(**STEP_ID, block=0, chunk=0, lo=lo, hi=lo + 1, weight=1.0)
    outcome = round_.take_payload(worker, message, np.array(values, np.float32))
    round_.take_loss(
        worker,
        SubtreeLoss(
            **STEP_ID, lo=lo, hi=lo + 1, loss_sum=1.0, weight=1.0, sums=b"", elapsed_ms=1.0
        ),
    )
    return outcome


def test_step_waits_for_both_answers_and_accepts_equal_ones():
    round_ = round_with_double_check()
    deliver(round_, "ann", 0)
    assert round_.take_surplus() == {}, "the second answer is needed, too"
    deliver(round_, "bob", 1)
    assert not round_.is_complete
    assert deliver(round_, "bob", 0) is None
    assert round_.is_complete
    assert round_.averages[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("awaited", [True, False])
def test_different_answers_name_both_workers_block_and_subtree(awaited):
    round_ = round_with_double_check(awaited=awaited)
    deliver(round_, "ann", 0)
    outcome = deliver(round_, "bob", 0, (1, 2, 3.0000002))
    assert outcome == ResultMismatch(("bob", "ann"), "gradients in block 'layer'", Subtree(0, 1))
    assert "workers 'ann' and 'bob' have the same numerics profile" in str(outcome)
    assert "block 'layer' for microbatches [0,1)" in str(outcome)


def test_workers_of_different_numerics_profiles_may_differ():
    round_ = round_with_double_check(("s", "t"), awaited=False)
    deliver(round_, "ann", 0)
    assert deliver(round_, "bob", 0, (9, 9, 9)) is None


@pytest.mark.parametrize(
    "leave",
    [
        lambda round_: round_.lose("bob", is_proven=True),
        lambda round_: round_.disown("bob", is_proven=True),
        lambda round_: round_.forgo_double(["bob"]),
    ],
    ids=["lost", "disowned", "late"],
)
def test_round_does_not_wait_for_an_impossible_second_answer(leave):
    round_ = round_with_double_check()
    deliver(round_, "bob", 1)
    deliver(round_, "ann", 0)
    assert not round_.is_complete
    leave(round_)
    assert round_.is_complete


class DamagedProgram(ScriptedProgram):
    """Computes the probe correctly, and a wrong bit in every later microbatch."""

    def _run(self, batch, seed, closed):
        for item in super()._run(batch, seed, closed):
            if isinstance(item, BlockGradient) and seed:  # the probe's seed is 0
                item.values.view(np.uint32)[0] ^= 1
            yield item


class DamagedBackend(ScriptedBackend):
    def compile(self, trainable, example, others=(), evaluations=()):
        del example, others, evaluations
        return DamagedProgram(trainable, 0.0)


class DamagedFactory(ScriptedFactory):
    def __init__(self):
        super().__init__()
        self._backend = DamagedBackend()


@on_uvloop
async def test_damaged_worker_halts_the_run_before_the_commit(tmp_path):
    async with live_service(tmp_path, 2) as live:
        live.start_worker("good")
        live.start_worker("damaged", backend_factory=DamagedFactory())
        live.service.submit(scripted_spec(double_check_every=1))
        halt = await live.wait_for("halted")
        assert "workers 'damaged' and 'good' have the same numerics profile" in halt["reason"]
        assert not live.find_event("committed", step=halt["step"])


@on_uvloop
async def test_double_check_changes_no_bit(tmp_path):
    reference = await run_undisturbed(tmp_path / "alone", scripted_spec(double_check_every=0))
    async with live_service(tmp_path / "three", 3) as live:
        for name in ("w0", "w1", "w2"):
            live.start_worker(name)
        result = await live.result(live.service.submit(scripted_spec(double_check_every=1)))
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["exact"]
