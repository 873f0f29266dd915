"""Evaluation: any history of worker losses gives the same metrics of all parts."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.run.evaluation import Evaluation
from protocol.spec.manifest import Metric
from protocol.wire.messages import EvalPlan, EvalResult

MEAN = Metric(name="mean", numerator={"sum": 1.0}, denominator={"count": 1.0})


def answer(part, step=3, value=None):
    sums = {"sum": 0.1 * (part + 1) ** 3 if value is None else value, "count": 1.0}
    return EvalResult(term=1, step=step, part=part, sums=sums)


def expected(parts):
    total, count = 0.0, 0.0
    for part in range(parts):
        total += 0.1 * (part + 1) ** 3
        count += 1.0
    return {"mean": total / count}


@given(st.integers(1, 12), st.data())
def test_any_history_of_worker_losses_gives_the_same_metrics(parts, data):
    evaluation = Evaluation(3, parts)
    workers: set[str] = {"w0"}
    assigned_parts: dict[str, set[int]] = {"w0": set()}
    for round_number in range(1, 60):
        for worker, (lo, hi) in evaluation.assign(sorted(workers)).items():
            assigned_parts[worker] |= set(range(lo, hi))
        if evaluation.is_complete:
            break
        worker = data.draw(st.sampled_from(sorted(workers)))
        if round_number < 30 and data.draw(st.integers(0, 3)) == 0:
            evaluation.lose(worker, is_proven=data.draw(st.booleans()))
            workers.discard(worker)
            workers.add(f"w{round_number}")
            assigned_parts[f"w{round_number}"] = set()
        elif assigned_parts[worker]:
            evaluation.take_result(worker, answer(assigned_parts[worker].pop()))
        else:
            workers.add("helper")
            assigned_parts.setdefault("helper", set())
    for worker in sorted(workers):
        for part in sorted(assigned_parts[worker]):
            evaluation.take_result(worker, answer(part))
    assert evaluation.is_complete
    assert evaluation.metrics([MEAN]) == expected(parts)
    assert evaluation.awaited_workers() == []


def test_parts_are_divided_once_among_all_workers():
    evaluation = Evaluation(3, 7)
    ranges = evaluation.assign(["a", "b", "c"])
    assert sorted(part for lo, hi in ranges.values() for part in range(lo, hi)) == list(range(7))
    assert evaluation.assign(["a", "b", "c"]) == {}
    assert evaluation.awaited_workers() == ["a", "b", "c"]


def test_plan_has_step_and_range():
    (action,) = Evaluation(3, 2).plan(9, ["a"])
    assert action.message == EvalPlan(term=9, step=3, lo=0, hi=2)  # type: ignore[union-attr]


def test_without_workers_nothing_is_planned():
    assert Evaluation(3, 2).plan(9, []) == []


def test_first_answer_counts_and_foreign_answers_are_ignored():
    evaluation = Evaluation(3, 1)
    evaluation.assign(["a"])
    evaluation.take_result("a", answer(0, step=2))
    evaluation.take_result("a", answer(1))
    evaluation.take_result("nobody", answer(0, value=7.0))
    assert not evaluation.is_complete
    evaluation.take_result("a", answer(0))
    evaluation.take_result("a", answer(0, value=7.0))
    assert evaluation.metrics([MEAN]) == expected(1)


def test_answers_of_unproven_weights_are_dropped_with_their_worker():
    evaluation = Evaluation(3, 2)
    evaluation.assign(["a", "b"])
    evaluation.take_result("a", answer(0, value=7.0))
    evaluation.lose("a", is_proven=False)
    assert evaluation.assign(["b"]) == {"b": (0, 1)}
    evaluation.take_result("b", answer(0))
    evaluation.take_result("b", answer(1))
    evaluation.lose("b", is_proven=True)
    assert evaluation.metrics([MEAN]) == expected(2)
