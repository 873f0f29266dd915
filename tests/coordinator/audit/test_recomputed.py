"""The audit that has steps recomputed: from which states, and what it finds."""

import numpy as np

from coordinator.audit.audit import audit
from coordinator.audit.recomputed import RecomputedStep, RecomputeRequest
from coordinator.storage.log.log_records import Array
from tests.commands import called
from tests.durable_run import SPEC, WrittenRun, averages

FORGED = 4
ELEMENT = 12


def honest(step, loss_scale, _parameters):
    assert loss_scale == 1.0
    return RecomputedStep(1.0 / (1 + step), averages(step))


def of_another(step, loss_scale, parameters):
    """What step 4 would have been, had nobody turned over a bit of it before it was hashed."""
    loss, values = honest(step, loss_scale, parameters)
    if step == FORGED:
        values[0].view(np.uint32)[ELEMENT] ^= 1
    return RecomputedStep(loss, values)


def finished(path, mode="full", states=None):
    run = WrittenRun(path, mode=mode)
    while run.replica.step < SPEC.steps:
        if states is not None:
            states.append([values.copy() for values in run.replica.parameters])
        run.step()
        if run.replica.step % 3 == 0:
            run.checkpoint()
    return run.finish()


def recomputed(path, steps, compute):
    return [
        f
        for f in audit(path, request=RecomputeRequest(steps, compute)).findings
        if f.check == "recomputed"
    ]


def test_each_step_is_computed_from_the_state_before_it(tmp_path):
    states: list[list[Array]] = []
    states_before: dict[int, list[Array]] = {}

    def compute(step, loss_scale, parameters):
        states_before[step] = [values.copy() for values in parameters]
        return honest(step, loss_scale, parameters)

    [finding] = recomputed(finished(tmp_path / "run", states=states), 99, compute)
    assert finding.ok
    assert "9 of 9 steps recomputed" in finding.text
    for step, state in enumerate(states):
        for one, other in zip(states_before[step], state, strict=True):
            assert np.array_equal(one, other)


def test_this_many_are_drawn_as_are_asked_for(tmp_path):
    path = finished(tmp_path / "run")
    [finding] = recomputed(path, 2, honest)
    assert finding.ok
    assert "2 of 9 steps recomputed" in finding.text
    texts = {recomputed(path, 2, honest)[0].text for _ in range(12)}
    assert len(texts) > 1


def test_one_forged_element_is_found_by_this_alone(tmp_path):
    path = finished(tmp_path / "run")
    assert audit(path).ok
    by_digest, by_element, summary = recomputed(path, 99, of_another)
    assert [by_digest.ok, by_element.ok, summary.ok] == [False] * 3
    assert f"step {FORGED}: recomputed, its gradients have digest" in by_digest.text
    place = "block 'layer.0', tensor 'layer.0.weight', element 12"
    assert f"step {FORGED}: recomputed, {place} is" in by_element.text
    assert "of 40 elements 1 differ" in by_element.text


def test_a_loss_that_differs_is_named(tmp_path):
    path = finished(tmp_path / "run")
    finding = recomputed(path, 99, lambda *a: RecomputedStep(0.25, honest(*a).averages))[0]
    assert "step 0: recomputed, its loss is 0.25, in the journal 1.0" in finding.text


def test_without_gradients_those_at_checkpoints_are_computed(tmp_path):
    path = finished(tmp_path / "run", mode="checkpoint")
    [finding] = recomputed(path, 99, of_another)
    assert finding.ok
    assert "3 of 9 steps recomputed on this CPU, every bit compared: 0, 3, 6" in finding.text
    assert "checkpoint.keep_log=true" in finding.text
    wrong = recomputed(path, 99, lambda *a: RecomputedStep(honest(*a).loss, averages(99)))
    assert ["digest" in finding.text for finding in wrong] == [True, True, True, False]


def test_a_native_run_is_refused(tmp_path):
    path = finished(tmp_path / "run")
    ended = called("coordinator", "audit", str(path), "--recompute", "1")
    assert ended.returncode == 2
    assert "expected a run with arithmetic=canonical, got native" in ended.stderr
    assert not ended.stdout
