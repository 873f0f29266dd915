"""The planner compared with all possible divisions, for small cases."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.run.planner import (
    busy_share,
    divide,
    fastest_division,
    makespan_ms,
    spread_subtrees,
    subtrees_for,
)
from protocol.exact.reduction.tree import Subtree, cover, is_subtree

speeds = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]), st.integers(1, 50).map(float), min_size=1
)


def divisions(microbatches, names):
    """Yield every division of the microbatches among the workers."""
    if len(names) == 1:
        yield {names[0]: microbatches}
        return
    for count in range(microbatches + 1):
        for rest in divisions(microbatches - count, names[1:]):
            yield {names[0]: count, **rest}


@given(st.integers(1, 8), speeds)
def test_no_division_finishes_earlier(microbatches, ms_by_worker):
    division = fastest_division(microbatches, ms_by_worker)
    assert division.keys() == ms_by_worker.keys()
    assert sum(division.values()) == microbatches
    best = min(
        makespan_ms(other, ms_by_worker) for other in divisions(microbatches, sorted(ms_by_worker))
    )
    assert makespan_ms(division, ms_by_worker) == best


def test_unknown_speeds_count_as_the_median():
    division = divide(12, {"a": 10.0, "b": None, "c": 10.0, "d": 40.0})
    assert division["b"] == division["a"] == division["c"] > division["d"]


def test_workers_of_unknown_speed_get_equal_shares():
    assert divide(9, {"a": None, "b": None, "c": None}) == {"a": 3, "b": 3, "c": 3}


def test_zero_speed_does_not_divide_by_zero():
    assert sum(divide(5, {"a": 0.0, "b": 1.0}).values()) == 5


@given(st.integers(1, 30), speeds, st.data())
def test_division_is_kept_while_it_is_within_ten_percent_of_the_best(
    microbatches, ms_by_worker, data
):
    previous = data.draw(
        st.sampled_from(list(itertools.islice(divisions(microbatches, sorted(ms_by_worker)), 200)))
    )
    division = divide(microbatches, ms_by_worker, previous)
    best = fastest_division(microbatches, ms_by_worker)
    if makespan_ms(best, ms_by_worker) < 0.9 * makespan_ms(previous, ms_by_worker):
        assert division == best
    else:
        assert division == previous


def test_noise_does_not_change_the_division():
    first = divide(24, {"a": 10.0, "b": 10.0, "c": 10.0})
    assert divide(24, {"a": 10.4, "b": 9.7, "c": 10.1}, first) == first
    assert divide(24, {"a": 10.0, "b": 10.0, "c": 30.0}, first) != first


@pytest.mark.parametrize("previous", [{"a": 4}, {"a": 2, "b": 3}, {"a": 4, "c": 0}])
def test_division_of_other_workers_or_steps_is_not_reused(previous):
    division = divide(4, {"a": 1.0, "b": 1.0}, previous)
    assert division == {"a": 2, "b": 2}


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_subtrees_cover_every_microbatch_once(counts):
    division = {f"w{index}": count for index, count in enumerate(counts)}
    microbatches = sum(counts)
    planned = subtrees_for(division)
    assert planned.keys() == division.keys()
    leaves = [
        leaf for subtrees in planned.values() for subtree in subtrees for leaf in range(*subtree)
    ]
    assert sorted(leaves) == list(range(microbatches))
    for name, subtrees in planned.items():
        assert sum(subtree.leaves for subtree in subtrees) == division[name]
        assert all(is_subtree(subtree, microbatches) for subtree in subtrees)


def test_equal_shares_of_a_power_of_two_are_one_subtree_each():
    assert all(len(subtrees) == 1 for subtrees in subtrees_for(dict.fromkeys("abcd", 8)).values())
    assert subtrees_for({"small": 1, "large": 8})["large"] == (Subtree(0, 8),)


@given(st.integers(1, 64), speeds, st.data())
def test_spread_covers_the_lost_microbatches(microbatches, ms_by_worker, data):
    lost_microbatches = sorted(data.draw(st.sets(st.integers(0, microbatches - 1), min_size=1)))
    planned = spread_subtrees(cover(lost_microbatches, microbatches), microbatches, ms_by_worker)
    assert planned.keys() <= ms_by_worker.keys()
    leaves = [
        leaf for subtrees in planned.values() for subtree in subtrees for leaf in range(*subtree)
    ]
    assert sorted(leaves) == lost_microbatches
    assert all(subtrees for subtrees in planned.values())


def test_balance_is_one_when_all_workers_finish_together():
    assert busy_share({"a": 4, "b": 2}, {"a": 1.0, "b": 2.0}) == 1.0
    assert busy_share({"a": 4, "b": 0}, {"a": 1.0, "b": None}) == 0.5
    assert busy_share({"a": 0}, {"a": 1.0}) == 1.0
