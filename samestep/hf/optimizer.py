"""A trainer's optimizer and scheduler as arguments of `samestep.fit`.

Those that `TrainingArguments` name become keys of the run spec. Everything else (`optimizers=`, a
class that overrides `create_optimizer`, an optimizer or a schedule without a name here) is created
by the trainer itself and translated as objects of torch: see `samestep.optimizers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from typing import Any, Final

import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau

from protocol.base.errors import DataError, SamestepError
from samestep.hf.arguments import named_optimizer, word_of
from samestep.optimizers import OptimizerArguments

_CREATORS: Final = (
    "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler",
    "get_optimizer_cls_and_kwargs",
)  # fmt: skip


def fit_optimizer(trainer: Any, steps: int) -> dict[str, Any]:
    """Return arguments of `fit`: the optimizer, and the scheduler if torch's objects say it.

    Args:
        trainer: The trainer, with its model; `created_optimizer` restores what this creates.
        steps: Steps of the run.

    Raises:
        DataError: The trainer's optimizer cannot be created.
    """
    is_custom = _is_custom(trainer)
    if not is_custom:
        named = named_optimizer(trainer.args, steps, _decay_keys(trainer))
        if named is not None:
            return {"optimizer": named}
    try:
        trainer.create_optimizer_and_scheduler(num_training_steps=steps)
    except SamestepError:
        raise
    except Exception as error:
        raise DataError(
            f"TrainingArguments.optim={word_of(trainer.args.optim)!r}, lr_scheduler_type="
            f"{word_of(trainer.args.lr_scheduler_type)!r}: creating them raised "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        OptimizerArguments(trainer.optimizer, trainer.lr_scheduler).check()
    except DataError as error:
        if is_custom:
            raise
        raise DataError(
            f"TrainingArguments.optim={word_of(trainer.args.optim)!r}, lr_scheduler_type="
            f"{word_of(trainer.args.lr_scheduler_type)!r} cannot be honored: {error}; the trainer "
            "takes that as samestep={...}"
        ) from error
    extra: dict[str, Any] = {}
    if clip := trainer.args.max_grad_norm:
        extra["clip_norm"] = clip
    if isinstance(trainer.lr_scheduler, ReduceLROnPlateau):
        metric = trainer.args.metric_for_best_model or "loss"
        extra["plateau"] = {"metric": metric.removeprefix("eval_")}
    return {
        "optimizer": trainer.optimizer,
        "scheduler": trainer.lr_scheduler,
        "settings": {"optimizer": extra} if extra else {},
    }


@contextmanager
def created_optimizer(trainer: Any) -> Iterator[None]:
    """Context after which a trainer has the optimizer and scheduler that it was given."""
    given = trainer.optimizer, trainer.lr_scheduler
    try:
        yield
    finally:
        trainer.optimizer, trainer.lr_scheduler = given


def _is_custom(trainer: Any) -> bool:
    given = (trainer.optimizer, trainer.lr_scheduler, trainer.optimizer_cls_and_kwargs)
    stock = transformers.Trainer
    return any(each is not None for each in given) or any(
        getattr(type(trainer), name) is not getattr(stock, name) or name in vars(trainer)
        for name in _CREATORS
    )


def _decay_keys(trainer: Any) -> dict[str, Any]:
    """Return the keys of a run spec's optimizer that leave the same tensors without decay."""
    if not trainer.args.weight_decay:
        return {}
    decays = set(trainer.get_decay_parameter_names(trainer.model))
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    without = [name for name in names if name not in decays]
    if any(part.lower() in name.lower() for name in decays for part in without):
        # no_decay matches parts of names.
        group = {"match": [escape(name) for name in without], "weight_decay": 0.0}
        return {"no_decay": [], "groups": [group]}
    return {"no_decay": without}
