"""A trainer's optimizer and scheduler as arguments of `samestep.fit`.

An optimizer and a schedule that `TrainingArguments` name become keys of the run spec. Everything
else (`optimizers=`, a class that overrides `create_optimizer`, an optimizer or a schedule without a
name here) is created by the trainer itself and translated as objects of torch: see
`samestep.optimizers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from typing import Any, Final

import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau

from protocol.base.errors import DataError, SamestepError
from samestep.hf.arguments import named_optimizer, value_of
from samestep.optimizers import OptimizerArguments

_CREATORS: Final = (
    "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler",
    "get_optimizer_cls_and_kwargs",
)  # fmt: skip


def fit_optimizer(trainer: Any, steps: int) -> dict[str, Any]:
    """Return the arguments `optimizer`, `scheduler` and `settings` of `fit` for a trainer.

    Args:
        trainer: The trainer, with its model; `preserving_optimizer` restores its attributes.
        steps: Steps of the run.

    Raises:
        DataError: The trainer's optimizer cannot be created.
    """
    is_custom = _is_custom(trainer)
    if not is_custom:
        section = named_optimizer(trainer.args, steps, _decay_keys(trainer))
        if section is not None:
            return {"optimizer": section}
    try:
        trainer.create_optimizer_and_scheduler(num_training_steps=steps)
    except SamestepError:
        raise
    except Exception as error:
        raise DataError(
            f"TrainingArguments.optim={value_of(trainer.args.optim)!r}, lr_scheduler_type="
            f"{value_of(trainer.args.lr_scheduler_type)!r}: creating them raised "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        OptimizerArguments(trainer.optimizer, trainer.lr_scheduler).check()
    except DataError as error:
        if is_custom:
            raise
        raise DataError(
            f"TrainingArguments.optim={value_of(trainer.args.optim)!r}, lr_scheduler_type="
            f"{value_of(trainer.args.lr_scheduler_type)!r} cannot be honored: {error}; write it as "
            "Trainer(..., samestep={...})"
        ) from error
    extra_keys: dict[str, Any] = {}
    if max_norm := trainer.args.max_grad_norm:
        extra_keys["clip_norm"] = max_norm
    if isinstance(trainer.lr_scheduler, ReduceLROnPlateau):
        metric = trainer.args.metric_for_best_model or "loss"
        extra_keys["plateau"] = {"metric": metric.removeprefix("eval_")}
    return {
        "optimizer": trainer.optimizer,
        "scheduler": trainer.lr_scheduler,
        "settings": {"optimizer": extra_keys} if extra_keys else {},
    }


@contextmanager
def preserving_optimizer(trainer: Any) -> Iterator[None]:
    """Restore a trainer's original optimizer and scheduler at exit."""
    original = trainer.optimizer, trainer.lr_scheduler
    try:
        yield
    finally:
        trainer.optimizer, trainer.lr_scheduler = original


def _is_custom(trainer: Any) -> bool:
    custom_values = (trainer.optimizer, trainer.lr_scheduler, trainer.optimizer_cls_and_kwargs)
    stock_class = transformers.Trainer
    return any(value is not None for value in custom_values) or any(
        getattr(type(trainer), name) is not getattr(stock_class, name) or name in vars(trainer)
        for name in _CREATORS
    )


def _decay_keys(trainer: Any) -> dict[str, Any]:
    """Return the keys of a run spec's optimizer that leave the same tensors without decay."""
    if not trainer.args.weight_decay:
        return {}
    decayed_names = set(trainer.get_decay_parameter_names(trainer.model))
    names = [
        name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
    ]
    undecayed_names = [name for name in names if name not in decayed_names]
    if any(
        undecayed_name.lower() in name.lower()
        for name in decayed_names
        for undecayed_name in undecayed_names
    ):
        # no_decay matches parts of names.
        group = {"match": [escape(name) for name in undecayed_names], "weight_decay": 0.0}
        return {"no_decay": [], "groups": [group]}
    return {"no_decay": undecayed_names}
