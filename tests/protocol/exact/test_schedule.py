"""Learning rate schedules: values computed by hand, bounds, and torch's own curves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.exact.schedule import learning_rate
from protocol.spec.sections.optimizer import Adamw, OptimizerSpec

NAMES = ("constant", "linear", "cosine", "wsd")


def rates(steps, **settings):
    spec = OptimizerSpec(**settings)
    return [learning_rate(spec, step, steps) for step in range(steps)]


def test_constant_rate_stays():
    assert rates(4, lr=0.5, schedule="constant") == [0.5] * 4


def test_linear_ends_one_part_above_zero():
    assert rates(4, lr=1.0, schedule="linear") == [1.0, 0.75, 0.5, 0.25]


def test_cosine_matches_values_by_hand():
    expected = [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]
    assert rates(4, lr=1.0, schedule="cosine") == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("schedule", NAMES)
def test_warm_up_rises_from_one_part_to_the_full_rate(schedule):
    lrs = rates(12, lr=1.0, schedule=schedule, warmup_steps=4)
    assert lrs[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_curve_spans_the_steps_after_warm_up():
    assert rates(8, lr=1.0, schedule="linear", warmup_steps=4)[4:] == [1.0, 0.75, 0.5, 0.25]


def test_a_warm_up_longer_than_the_run_never_ends():
    assert rates(3, lr=1.0, schedule="cosine", warmup_steps=10) == [0.1, 0.2, 0.3]


def test_a_schedule_ends_at_its_floor():
    lrs = rates(4, lr=2.0, schedule="linear", min_lr_ratio=0.5)
    assert lrs == [2.0, 1.75, 1.5, 1.25]
    spec = Adamw(lr=2.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(spec, 9, 9) == pytest.approx(0.2, abs=1e-15)


def test_wsd_is_stable_and_then_decays():
    lrs = rates(10, lr=1.0, schedule="wsd", warmup_steps=2, decay_ratio=0.4)
    assert lrs == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(4, lr=1.0, schedule="wsd", warmup_steps=2, decay_ratio=1.0) == [0.5, 1, 1, 0.5]


@pytest.mark.parametrize("decay", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_wsd_and_floors_equal_transformers(decay, floor):
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = optimization.get_wsd_schedule(
        optimizer, 0, 6, num_training_steps=20, decay_type=decay, min_lr_ratio=floor
    )
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    lrs = rates(20, lr=0.3, schedule="wsd", decay_ratio=0.3, decay=decay, min_lr_ratio=floor)
    assert lrs == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rate_past_the_end_is_zero(schedule):
    spec = Adamw(lr=1.0, schedule=schedule)
    assert learning_rate(spec, 10, 10) == 0.0
    assert learning_rate(spec, 11, 10) == 0.0


@given(
    st.sampled_from(NAMES),
    st.floats(1e-8, 10),
    st.integers(0, 50),
    st.integers(1, 200),
)
def test_rate_is_positive_at_most_lr_and_never_rises_after_warm_up(schedule, lr, warmup, steps):
    lrs = rates(steps, lr=lr, schedule=schedule, warmup_steps=warmup)
    assert all(0 < rate <= lr for rate in lrs)
    assert lrs[:warmup] == sorted(lrs[:warmup])
    assert lrs[warmup:] == sorted(lrs[warmup:], reverse=True)


def test_cosine_equals_torch():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(20, lr=0.3, schedule="cosine") == pytest.approx(expected, rel=1e-12)


def rates_of(make_scheduler, steps, lr=0.3):
    """Return the rates of a scheduler that `make_scheduler` creates for an optimizer."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, expected = make_scheduler(optimizer), []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return expected


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(
    ("settings", "function", "options"),
    [
        (
            {"schedule": "polynomial", "power": 2.0, "min_lr_ratio": 0.1},
            "get_polynomial_decay_schedule_with_warmup",
            {"num_training_steps": 20, "lr_end": 0.03, "power": 2.0},
        ),
        (
            {"schedule": "cosine-restarts", "cycles": 3},
            "get_cosine_with_hard_restarts_schedule_with_warmup",
            {"num_training_steps": 20, "num_cycles": 3},
        ),
        ({"schedule": "inverse-sqrt"}, "get_inverse_sqrt_schedule", {}),
    ],
)
def test_schedules_equal_transformers(settings, function, options, warmup):
    optimization = pytest.importorskip("transformers.optimization")
    make_scheduler = getattr(optimization, function)
    expected = rates_of(
        lambda optimizer: make_scheduler(optimizer, num_warmup_steps=warmup, **options), 20
    )
    lrs = rates(20, lr=0.3, warmup_steps=warmup, warmup_from_zero=warmup > 0, **settings)
    assert lrs == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("steps", [1, 7, 20])
def test_one_cycle_equals_torch(steps):
    torch = pytest.importorskip("torch")
    make_scheduler = torch.optim.lr_scheduler.OneCycleLR
    settings = {"pct_start": 0.3, "div_factor": 25.0, "final_div_factor": 100.0}
    expected = rates_of(
        lambda optimizer: make_scheduler(
            optimizer, 0.3, total_steps=steps + 1, cycle_momentum=False, **settings
        ),
        steps + 1,
    )
    lrs = rates(steps + 1, lr=0.3, schedule="onecycle", min_lr_ratio=1 / 2500)
    assert lrs == pytest.approx(expected, rel=1e-9)


def test_piecewise_equals_torch():
    torch = pytest.importorskip("torch")
    make_scheduler = torch.optim.lr_scheduler.MultiStepLR
    expected = rates_of(lambda optimizer: make_scheduler(optimizer, [3, 11], gamma=0.5), 20)
    lrs = rates(20, lr=0.3, schedule="piecewise", milestones=[3, 11], gamma=0.5)
    assert lrs == pytest.approx(expected, rel=1e-12)


def test_last_listed_rate_holds():
    assert rates(4, lr=2.0, schedule="rates", rates=[0.5, 1.0, 0.25]) == [1.0, 2.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"schedule": "onecycle", "warmup_steps": 3}, "set rise_ratio"),
        ({"schedule": "rates"}, "expected rates"),
        ({"schedule": "piecewise", "milestones": [5, 5]}, "ascending order"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        Adamw(**settings)
