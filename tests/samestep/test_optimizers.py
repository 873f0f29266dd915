"""torch's optimizers and schedulers as arguments of `fit`: groups and rates are translated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop, lr_scheduler
from torch.utils.data import TensorDataset
from transformers import (
    Adafactor,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

import samestep
from protocol.base.errors import DataError
from protocol.exact.reduction.average import square_sum
from protocol.exact.replica import Replica
from protocol.exact.samples import SampleOrder
from protocol.exact.update import global_norm, step_scalars
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.run_spec import parse_run_spec
from protocol.spec.sections.tasks import BatchSpec
from samestep.optimizers import OptimizerArguments

STEPS, EPOCH_STEPS = 24, 6
NESTEROV: dict[str, Any] = {"lr": 0.1, "momentum": 0.8, "weight_decay": 5e-4, "nesterov": True}
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def build_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def groups(module: nn.Sequential) -> list[dict[str, Any]]:
    """Return groups: another rate for the first layer, no decay on biases, nothing of the norm."""
    return [
        {"params": [module[2].weight]},
        {"params": [module[0].weight], "lr": 0.002},
        {"params": [module[0].bias, module[2].bias], "weight_decay": 0.0},
    ]


def section_of(optimizer: object, scheduler: object = None, **overrides: Any) -> dict[str, Any]:
    module = overrides.pop("module", None) or build_net()
    evaluate_every = 5 if overrides.pop("evaluates", False) else 0
    arguments = OptimizerArguments(optimizer, scheduler, **overrides)
    arguments.check()
    section = arguments.section(module, STEPS, EPOCH_STEPS)
    parse_run_spec(
        {"task": "digits", "steps": STEPS, "optimizer": section, "evaluate_every": evaluate_every}
    )
    return section


def apply_updates(section: dict[str, Any], module: nn.Module) -> list[np.ndarray[Any, Any]]:
    """Apply the exact update with the gradients of `gradient`; return the parameters."""
    spec = parse_run_spec({"task": "regress", "steps": STEPS, "optimizer": section}).optimizer
    parameters = dict(module.named_parameters())
    blocks = tuple(
        Block(name=n, kind="block", tensors=(TensorSpec(name=n, shape=tuple(p.shape)),))
        for n, p in parameters.items()
    )
    replica = Replica(blocks, spec)
    for values, p in zip(replica.parameters, parameters.values(), strict=True):
        values[:] = p.detach().numpy().ravel()
    for step in range(STEPS):
        gradients = [gradient(step, p).numpy().ravel() for p in parameters.values()]
        norm = global_norm([square_sum(values_of_block) for values_of_block in gradients])
        replica.apply(gradients, step_scalars(spec, step + 1, step, STEPS, norm))
    return replica.parameters


def gradient(step: int, p: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, p.numel()).reshape(p.shape) * float(np.cos(step + p.numel()))


def update_in_torch(optimizer: Any, scheduler: Any, interval: str, module: nn.Module) -> None:
    for step in range(STEPS):
        for p in module.parameters():
            p.grad = gradient(step, p)
        optimizer.step()
        if scheduler is not None and (interval == "step" or (step + 1) % EPOCH_STEPS == 0):
            scheduler.step()


OPTIMIZERS: list[Callable[[Any], Any]] = [
    lambda module: SGD(module.parameters(), lr=0.5),
    lambda module: SGD(module.parameters(), lr=0.1, weight_decay=0.01),
    lambda module: SGD(module.parameters(), lr=0.1, momentum=0.9),
    lambda module: SGD(groups(module), **NESTEROV),
    lambda module: Adam(module.parameters(), lr=0.01, betas=(0.7, 0.9)),
    lambda module: Adam(module.parameters(), lr=0.01, weight_decay=0.1),
    lambda module: Adam(
        module.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    lambda module: AdamW(module.named_parameters(), lr=torch.tensor(0.01)),
    lambda module: AdamW(groups(module), **ADAMW),
    lambda module: RMSprop(module.parameters(), lr=0.01, alpha=0.9, weight_decay=0.1),
    lambda module: Adagrad(module.parameters(), lr=0.1),
    lambda module: Adam(module.parameters(), lr=0.01, amsgrad=True),
    lambda module: RMSprop(module.parameters(), lr=0.01, momentum=0.5, centered=True),
    lambda module: torch.optim.Adafactor(module.parameters(), weight_decay=0.01),
    lambda module: Adafactor(
        module.parameters(), lr=0.01, scale_parameter=False, relative_step=False, weight_decay=0.01
    ),
    lambda module: Adafactor(module.parameters()),
    lambda module: Adafactor(module.parameters(), warmup_init=True),
]


def test_updates_of_translated_optimizers_equal_torch():
    for number, make_optimizer in enumerate(OPTIMIZERS):
        assert_same(make_optimizer, None, "step", f"optimizer {number}")


SCHEDULERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lambda": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step), "step"),
    "warmup": (lambda o: lr_scheduler.LambdaLR(o, lambda s: min(1.0, s / 5)), "step"),
    "step, by epoch": (lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5), "epoch"),
    "exponential, by epoch": (lambda o: lr_scheduler.ExponentialLR(o, 0.8), "epoch"),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=1e-4), "step"),
    "warm restarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2), "step"),
    "one cycle": (
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS, cycle_momentum=False), "step",
    ),
    "one cycle, with momentum": (
        lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.01, 0.1], total_steps=STEPS), "step",
    ),
    "a schedule per group": (
        lambda o: lr_scheduler.LambdaLR(
            o, [lambda s: 0.9**s, lambda s: s // 3, lambda _: 1.0]
        ), "step",
    ),
    "a schedule per group, by epoch": (
        lambda o: lr_scheduler.LambdaLR(o, [lambda s: 0.5**s, lambda s: s, lambda _: 1]), "epoch",
    ),
    "sequential": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.PolynomialLR(o, 20)], [4]
        ),
        "step",
    ),
    "chained": (
        lambda o: lr_scheduler.ChainedScheduler([
            lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9),
        ]),
        "step",
    ),
    "linear of transformers": (lambda o: get_linear_schedule_with_warmup(o, 4, STEPS), "step"),
    "cosine of transformers": (lambda o: get_cosine_schedule_with_warmup(o, 4, STEPS), "step"),
}  # fmt: skip


def test_updates_with_translated_schedulers_equal_torch():
    for name, (make_scheduler, interval) in SCHEDULERS.items():
        for optimizer in (partial(SGD, lr=0.1, momentum=0.9), partial(AdamW, lr=0.01)):
            assert_same(lambda m, make=optimizer: make(groups(m)), make_scheduler, interval, name)


def assert_same(make_optimizer: Any, make_scheduler: Any, interval: str, case: str) -> None:
    """Assert that objects and functions give one run spec section, whose updates equal torch's."""
    module = build_net()
    optimizer = make_optimizer(module)
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    rates_before = None if scheduler is None else scheduler.get_last_lr()
    options: dict[str, Any] = {"interval": interval, "module": module}
    section = section_of(optimizer, scheduler, **options)
    assert section == section_of(make_optimizer, make_scheduler, **options), case
    if scheduler is not None:
        assert scheduler.get_last_lr() == rates_before, case
    new_values = apply_updates(section, module)
    update_in_torch(optimizer, scheduler, interval, module)
    for (name, p), values in zip(module.named_parameters(), new_values, strict=True):
        np.testing.assert_allclose(
            values, p.detach().numpy().ravel(), rtol=2e-5, atol=1e-6, err_msg=f"{case}: {name}"
        )


def test_schedule_of_the_run_spec_is_written_by_its_name():
    linear = section_of(
        partial(AdamW, lr=0.01), lambda o: get_linear_schedule_with_warmup(o, 4, STEPS)
    )
    assert {linear[key] for key in ("schedule", "warmup_steps", "lr")} == {"linear", 4, 0.01}
    steps = section_of(
        partial(SGD, lr=0.1), lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5), interval="epoch"
    )
    assert (steps["rates"], steps["rates_every"]) == ([1.0, 1.0, 0.5], EPOCH_STEPS)
    clipped = section_of(partial(AdamW, lr=0.01), extra_keys={"clip_norm": 1.0})
    assert clipped["clip_norm"] == 1.0


def test_plateau_follows_the_evaluation_loss_or_a_chosen_metric():
    section = section_of(
        partial(SGD, lr=0.1),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", 0.5, 3, min_lr=1e-3, cooldown=2),
        extra_keys={"plateau": {"metric": "accuracy"}},
        evaluates=True,
    )
    assert (section["schedule"], section["min_lr_ratio"]) == ("plateau", pytest.approx(0.01))
    assert section["plateau"] == {
        "metric": "accuracy", "better": "higher", "factor": 0.5, "patience": 3,
        "threshold": 1e-4, "threshold_mode": "rel", "cooldown": 2,
    }  # fmt: skip


def optimizer_after_steps() -> torch.optim.Optimizer:
    module = build_net()
    optimizer = AdamW(module.parameters())
    update_in_torch(optimizer, None, "step", module)
    return optimizer


def sgd_with_step_hook(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = SGD(module.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def sgd_with_replaced_step(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = SGD(module.parameters(), lr=0.1)
    optimizer.step = lambda *_: None  # type: ignore[method-assign]
    return optimizer


def scheduler_with_replaced_step(optimizer: torch.optim.Optimizer) -> Any:
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    scheduler.step = lambda *_: None  # type: ignore[method-assign]
    return scheduler


REFUSED_CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "dampening": (lambda: section_of(partial(SGD, lr=1, momentum=0.9, dampening=0.1)), "dampening"),
    "adadelta": (lambda: section_of(Adadelta), 'has no exact equivalent.*"name": "adamw"'),
    "a subclass": (lambda: section_of(type("Own", (SGD,), {})), "Own has no exact equiv"),
    "betas": (
        lambda: section_of(
            lambda m: AdamW(
                [{"params": m[0].weight}, {"params": m[0].bias, "betas": (0.5, 0.9)}]
            )
        ),
        "groups of parameters with other betas",
    ),
    "parameters of an unrelated module": (
        lambda: section_of(AdamW(build_net().parameters())),
        "parameters of the module",
    ),
    "steps taken": (lambda: section_of(optimizer_after_steps()), "one that has taken no step"),
    "a step hook": (lambda: section_of(sgd_with_step_hook), "no step hooks, got some on SGD"),
    "a replaced step": (lambda: section_of(sgd_with_replaced_step), "whose step was replaced"),
    "a scheduler's replaced step": (
        lambda: section_of(SGD, scheduler_with_replaced_step), "expected the step of StepLR"
    ),
    "no optimizer": (lambda: section_of(3), "or one of torch's, got int"),
    "no rate": (lambda: section_of(partial(SGD, lr=0.0)), "a learning rate above 0"),
    "a scheduler by name": (lambda: section_of("adamw", StopIteration), "none beside an optimizer"),
    "the scheduler of an unrelated optimizer": (
        lambda: section_of(
            SGD, lambda _: lr_scheduler.ExponentialLR(SGD(build_net().parameters()), 1)
        ),
        "ExponentialLR of another",
    ),
    "several lowest rates": (
        lambda: section_of(
            lambda m: SGD(groups(m)), lambda o: lr_scheduler.ReduceLROnPlateau(o, min_lr=1e-4)
        ),
        "leave min_lr out",
    ),
    "first moments of Adafactor": (
        lambda: section_of(lambda m: Adafactor(m.parameters(), beta1=0.9)), "beta1=0.9"
    ),
    "a scheduler with too few steps": (
        lambda: section_of(
            AdamW, lambda o: lr_scheduler.OneCycleLR(o, 1, total_steps=9, cycle_momentum=False)
        ),
        "OneCycleLR raised ValueError at step 11 of 24",
    ),
    "a rate that begins at 0": (
        lambda: section_of(
            lambda m: SGD(groups(m)),
            lambda o: lr_scheduler.LambdaLR(o, [lambda s: s % 2, lambda s: (s + 1) % 2, float]),
        ),
        "let the rates begin above 0",
    ),
    "two optimizers": (lambda: section_of((SGD, SGD)), "expected one optimizer, got 2"),
    "a setting of the object": (
        lambda: section_of(AdamW, extra_keys={"betas": [0.9, 0.9]}), "does not set, got 'betas'",
    ),
}  # fmt: skip


def test_unsupported_optimizers_and_schedulers_are_refused_by_name():
    for name, (make_section, message) in REFUSED_CASES.items():
        with pytest.raises(DataError, match=message) as error:
            make_section()
        assert "\n" not in str(error.value), name


def test_script_trains_with_a_custom_optimizer_and_scheduler(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = torch.linspace(-1, 1, 48).reshape(16, 3)
    data = TensorDataset(x, x[:, :2].sin())
    modules = [build_net(), build_net()]
    optimizers = [AdamW(groups(module), lr=0.01, weight_decay=0.1) for module in modules]
    rate_factors = [lambda epoch: 0.5**epoch, lambda _: 1.0, lambda epoch: 0.5**epoch]
    schedulers = [lr_scheduler.LambdaLR(optimizer, rate_factors) for optimizer in optimizers]
    result = samestep.fit(
        lambda: samestep.Task(
            module=modules[0], train=data,
            loss=lambda module, batch: ((module(batch[0]) - batch[1]) ** 2).sum(),
        ),
        epochs=2, batch=8, microbatch=8, device="cpu", optimizer=optimizers[0],
        scheduler=schedulers[0], scheduler_interval="epoch",
        settings={"optimizer": {"clip_norm": 0.5}},
    )  # fmt: skip
    order = SampleOrder(0, 16, BatchSpec(samples=8, microbatch=8))
    for step in range(4):
        (rows,) = order.microbatches(step)
        inputs, targets = data[list(rows)]
        modules[1].zero_grad()
        (((modules[1](inputs) - targets) ** 2).sum() / 8).backward()
        nn.utils.clip_grad_norm_(modules[1].parameters(), 0.5)
        optimizers[1].step()
        if step % 2:  # an epoch has two steps
            schedulers[1].step()
    assert [row["learning_rate"] for row in result.history] == pytest.approx(
        [0.01] * 2 + [0.005] * 2
    )
    actual = result.module.state_dict()
    for name, expected in modules[1].state_dict().items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-5, atol=1e-6, msg=name)
