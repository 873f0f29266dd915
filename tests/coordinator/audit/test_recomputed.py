"""Audits that recompute steps: the states that they start from, and the forgeries that they
detect."""

import numpy as np

from coordinator.audit.audit import audit
from coordinator.audit.recomputed import RecomputedStep, RecomputeRequest
from coordinator.storage.log.log_records import Array
from tests.commands import run_command
from tests.durable_run import SPEC, WrittenRun, averages

FORGED_STEP = 4
FLIPPED_ELEMENT = 12


def honest_step(step, loss_scale, _parameters):
    assert loss_scale == 1.0
    return RecomputedStep(1.0 / (1 + step), averages(step))


def forged_step(step, loss_scale, parameters):
    """Recompute a step; as after a forgery, step 4 differs from the log in one bit."""
    loss, values = honest_step(step, loss_scale, parameters)
    if step == FORGED_STEP:
        values[0].view(np.uint32)[FLIPPED_ELEMENT] ^= 1
    return RecomputedStep(loss, values)


def write_finished_run(path, mode="full", states=None):
    run = WrittenRun(path, mode=mode)
    while run.replica.step < SPEC.steps:
        if states is not None:
            states.append([values.copy() for values in run.replica.parameters])
        run.step()
        if run.replica.step % 3 == 0:
            run.checkpoint()
    return run.finish()


def recomputed_findings(path, steps, compute):
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
        return honest_step(step, loss_scale, parameters)

    [finding] = recomputed_findings(
        write_finished_run(tmp_path / "run", states=states), 99, compute
    )
    assert finding.ok
    assert "9 of 9 steps recomputed" in finding.text
    for step, state in enumerate(states):
        for one, other in zip(states_before[step], state, strict=True):
            assert np.array_equal(one, other)


def test_requested_number_of_steps_is_drawn(tmp_path):
    path = write_finished_run(tmp_path / "run")
    [finding] = recomputed_findings(path, 2, honest_step)
    assert finding.ok
    assert "2 of 9 steps recomputed" in finding.text
    texts = {recomputed_findings(path, 2, honest_step)[0].text for _ in range(12)}
    assert len(texts) > 1


def test_forged_element_is_found_only_by_recomputing(tmp_path):
    path = write_finished_run(tmp_path / "run")
    assert audit(path).ok
    by_digest, by_element, summary = recomputed_findings(path, 99, forged_step)
    assert [by_digest.ok, by_element.ok, summary.ok] == [False] * 3
    assert f"step {FORGED_STEP}: the recomputed gradients have digest" in by_digest.text
    location = "block 'layer.0', tensor 'layer.0.weight', element 12"
    assert f"step {FORGED_STEP}: {location}: recomputed " in by_element.text
    assert "1 of 40 elements differ" in by_element.text


def test_different_loss_is_named(tmp_path):
    path = write_finished_run(tmp_path / "run")
    finding = recomputed_findings(
        path, 99, lambda *a: RecomputedStep(0.25, honest_step(*a).averages)
    )[0]
    assert "step 0: the recomputed loss is 0.25, the journal's is 1.0" in finding.text


def test_without_gradients_steps_at_checkpoints_are_recomputed(tmp_path):
    path = write_finished_run(tmp_path / "run", mode="checkpoint")
    [finding] = recomputed_findings(path, 99, forged_step)
    assert finding.ok
    assert "3 of 9 steps recomputed on this CPU, every bit compared: 0, 3, 6" in finding.text
    assert "checkpoint.keep_log=true" in finding.text
    report = recomputed_findings(
        path, 99, lambda *a: RecomputedStep(honest_step(*a).loss, averages(99))
    )
    assert ["digest" in finding.text for finding in report] == [True, True, True, False]


def test_a_native_run_is_refused(tmp_path):
    path = write_finished_run(tmp_path / "run")
    completed = run_command("coordinator", "audit", str(path), "--recompute", "1")
    assert completed.returncode == 2
    assert "expected a run with arithmetic=canonical, got native" in completed.stderr
    assert not completed.stdout
