"""Who agrees with the replica, against a record of all answers."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.run.workers.agreement import Agreement


def committed(*workers):
    agreement = Agreement()
    agreement.expect(1, list(workers))
    return agreement


def test_it_waits_for_every_worker_and_for_the_replica():
    agreement = committed("a", "b")
    assert agreement.waiting_for == ["a", "b"]
    agreement.answer("a", 1, "x")
    agreement.replica_answer(1, "x")
    assert agreement.judge(1) == (["a"], [])
    assert not agreement.reached
    agreement.answer("b", 1, "x")
    assert agreement.judge(1) == (["b"], [])
    assert agreement.reached


def test_answers_are_judged_once_the_replica_is_there():
    agreement = committed("a", "b")
    agreement.answer("a", 1, "x")
    agreement.answer("b", 1, "y")
    assert agreement.judge(1) == ([], [])
    assert not agreement.reached
    agreement.replica_answer(1, "x")
    assert agreement.judge(1) == (["a"], ["b"])
    assert agreement.judge(1) == ([], [])
    assert agreement.waiting_for == ["b"]


def test_the_replica_alone_is_waited_for_too():
    agreement = committed()
    assert not agreement.reached
    agreement.replica_answer(0, "x")
    assert not agreement.reached
    agreement.replica_answer(1, "x")
    assert agreement.reached


def test_a_lost_worker_is_not_waited_for_and_its_answer_does_not_count():
    agreement = committed("a", "b")
    agreement.answer("a", 1, "odd")
    agreement.lose("a")
    agreement.replica_answer(1, "x")
    assert agreement.judge(1) == ([], [])
    assert agreement.waiting_for == ["b"]


def test_old_steps_are_forgotten():
    agreement = Agreement()
    for step in range(1, 50):
        agreement.expect(step, ["a"])
        agreement.answer("a", step, "x")
        agreement.answer("joiner", step - 1, "x")
        agreement.replica_answer(step, "x")
        agreement.judge(step)
    assert len(agreement._arbiter) < 6
    assert len(agreement._answers) < 6


@given(st.permutations(["a", "b", "c", "replica"]), st.sets(st.sampled_from("abc")))
def test_in_any_order_all_and_only_the_odd_are_named(order, odd):
    agreement = committed("a", "b", "c")
    agreed, odd_workers = [], []
    for who in order:
        if who == "replica":
            agreement.replica_answer(1, "x")
        else:
            agreement.answer(who, 1, "odd" if who in odd else "x")
        now, wrong = agreement.judge(1)
        agreed += now
        odd_workers += wrong
    assert set(odd_workers) == odd
    assert set(agreed) == set("abc") - odd
    assert agreement.waiting_for == sorted(odd)
    assert agreement.reached is (not odd)


def test_nothing_is_committed_ahead_of_a_replica_for_which_it_could_not_wait_in_memory():
    agreement = Agreement(5, catching_up=True, known="state", ahead=0)
    assert not agreement.reached
    agreement.replica_answer(5, "state")
    assert agreement.reached
