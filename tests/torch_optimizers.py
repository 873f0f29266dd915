"""torch optimizers that correspond to the optimizers of a run spec."""

from __future__ import annotations

from typing import Any

import torch

from protocol.spec.sections.optimizer import OptimizerSpec


class Lion(torch.optim.Optimizer):
    """Lion, with the update of lion-pytorch 0.2."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        moment = state.setdefault("moment", torch.zeros_like(parameter))
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        update = moment.clone().mul_(beta1).add(parameter.grad, alpha=1.0 - beta1).sign_()
        parameter.add_(update, alpha=-group["lr"])
        moment.mul_(beta2).add_(parameter.grad, alpha=1.0 - beta2)


def torch_optimizer(spec: OptimizerSpec, groups: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer for a spec; each group has its own `weight_decay`."""
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(
                groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, amsgrad=spec.amsgrad
            )
        case "adam":
            return torch.optim.Adam(
                groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, amsgrad=spec.amsgrad
            )
        case "rmsprop":
            return torch.optim.RMSprop(
                groups, lr=spec.lr, alpha=spec.alpha, eps=spec.eps, momentum=spec.momentum,
                centered=spec.centered,
            )  # fmt: skip
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=spec.lr, eps=spec.eps)
        case "lion":
            return Lion(groups, lr=spec.lr, betas=spec.betas)
        case "sgd":
            return torch.optim.SGD(groups, lr=spec.lr)
        case "momentum" | "nesterov":
            return torch.optim.SGD(
                groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.name == "nesterov"
            )
    raise AssertionError(f"torch has no {spec.name}")
