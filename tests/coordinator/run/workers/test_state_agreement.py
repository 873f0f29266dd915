"""Agreement of workers with the replica, compared with a record of all answers."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.run.workers.state_agreement import Agreement


def committed_step(*workers):
    agreement = Agreement()
    agreement.expect_answers(1, list(workers))
    return agreement


def test_agreement_waits_for_every_worker_and_the_replica():
    agreement = committed_step("a", "b")
    assert agreement.awaited_workers == ["a", "b"]
    agreement.take_answer("a", 1, "x")
    agreement.take_replica_answer(1, "x")
    assert agreement.judge(1) == (["a"], [])
    assert not agreement.is_reached
    agreement.take_answer("b", 1, "x")
    assert agreement.judge(1) == (["b"], [])
    assert agreement.is_reached


def test_answers_are_judged_once_the_replica_has_answered():
    agreement = committed_step("a", "b")
    agreement.take_answer("a", 1, "x")
    agreement.take_answer("b", 1, "y")
    assert agreement.judge(1) == ([], [])
    assert not agreement.is_reached
    agreement.take_replica_answer(1, "x")
    assert agreement.judge(1) == (["a"], ["b"])
    assert agreement.judge(1) == ([], [])
    assert agreement.awaited_workers == ["b"]


def test_agreement_without_workers_waits_for_the_replica():
    agreement = committed_step()
    assert not agreement.is_reached
    agreement.take_replica_answer(0, "x")
    assert not agreement.is_reached
    agreement.take_replica_answer(1, "x")
    assert agreement.is_reached


def test_lost_worker_is_ignored():
    agreement = committed_step("a", "b")
    agreement.take_answer("a", 1, "odd")
    agreement.lose("a")
    agreement.take_replica_answer(1, "x")
    assert agreement.judge(1) == ([], [])
    assert agreement.awaited_workers == ["b"]


def test_old_steps_are_discarded():
    agreement = Agreement()
    for step in range(1, 50):
        agreement.expect_answers(step, ["a"])
        agreement.take_answer("a", step, "x")
        agreement.take_answer("joiner", step - 1, "x")
        agreement.take_replica_answer(step, "x")
        agreement.judge(step)
    assert len(agreement._replica_digests) < 6
    assert len(agreement._answers) < 6


@given(st.permutations(["a", "b", "c", "replica"]), st.sets(st.sampled_from("abc")))
def test_exactly_the_deviating_workers_are_named_in_any_order(order, deviating):
    agreement = committed_step("a", "b", "c")
    agreed, deviated = [], []
    for participant in order:
        if participant == "replica":
            agreement.take_replica_answer(1, "x")
        else:
            agreement.take_answer(participant, 1, "odd" if participant in deviating else "x")
        agreed_workers, deviating_workers = agreement.judge(1)
        agreed += agreed_workers
        deviated += deviating_workers
    assert set(deviated) == deviating
    assert set(agreed) == set("abc") - deviating
    assert agreement.awaited_workers == sorted(deviating)
    assert agreement.is_reached is (not deviating)


def test_commits_wait_for_a_replica_that_would_exceed_memory():
    agreement = Agreement(5, catching_up=True, known_digest="state", most_steps_ahead=0)
    assert not agreement.is_reached
    agreement.take_replica_answer(5, "state")
    assert agreement.is_reached
