"""Trainers of transformers (and of TRL) whose `train` is a run of `fit`.

Everything but `train` is the class's own: what it makes of its arguments, its collator, its loss,
`evaluate`, `predict` and `save_model`.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import transformers
from transformers.trainer_utils import TrainOutput

from backends.base.additivity import measured, seeded
from backends.base.steady_draws import LEVELS, SteadyDraws
from protocol.base.errors import DataError
from samestep.fitting import fit, keeps_the_run, new_directory
from samestep.hf.arguments import (
    every,
    optimizer_of,
    refuse_what_is_not_had,
    steps_of,
    word_of,
)
from samestep.hf.log import write_log
from samestep.refusals import check_data
from samestep.result import FitResult
from samestep.user_task import UserTask
from worker.tasks.additivity import NotASum, modes_kept

_NOT_OURS_TO_CALL: Final = (
    "training_step", "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler",
    "get_optimizer_cls_and_kwargs", "get_train_dataloader", "_get_dataloader", "get_batch_samples",
    "_get_train_sampler", "_inner_training_loop", "_run_epoch", "_init_training_state",
    "_prepare_for_training", "_finalize_training", "_prepare_inputs", "_prepare_input",
    "compute_loss_context_manager", "autocast_smart_context_manager", "_clip_grad_norm",
    "_maybe_log_save_evaluate", "_save_checkpoint", "_get_learning_rate", "_wrap_model",
    "set_initial_training_values", "get_total_train_batch_size", "num_examples", "call_model_init",
    "optimizer_step",
)  # fmt: skip
"""Methods of the loop, which a subclass may have changed and nobody would call."""
_OF_EVALUATION: Final = (
    "evaluate", "_evaluate", "evaluation_loop", "prediction_step", "get_eval_dataloader",
    "_get_eval_sampler",
)  # fmt: skip
"""Likewise, where the loop evaluates; called by `trainer.evaluate()` as ever."""
_SAMPLES: Final = "samestep.samples"
"""Beside a batch's own entries: how many samples it has, a float32 tensor."""

_OF_ITS_OWN_LOOP: Final = "NotebookProgressCallback"
"""Shows a table that the class's own loop begins."""
_USUAL_CALLBACKS: Final = {
    "DefaultFlowCallback", "PrinterCallback", "ProgressCallback", _OF_ITS_OWN_LOOP,
}  # fmt: skip
_LOG: Final = logging.getLogger(__name__)
_PROBE: Final = 1e-4
_PROBED_SAMPLES: Final = 64
"""Looked at, until one has labels that count."""
_AS_A_SUM: Final = (
    "of a Trainer, a sum that is divided by num_items_in_batch adds up, and a mean over samples "
    "does; one that weights divide, as those of classes do, does not"
)


class SamestepMixin:
    """Put before a Trainer: `class MyTrainer(SamestepMixin, SomeTrainer)`.

    Args:
        samestep: More arguments of `samestep.fit`, such as {"microbatch": 4, "workers": 2}.
    """

    honoured_by_the_class: ClassVar[frozenset[str]] = frozenset()
    """Further fields of its training arguments that the class makes use of before it trains."""

    loop_of_the_class: ClassVar[frozenset[type]] = frozenset()
    """Classes whose changes to the loop are of no effect on what is trained."""

    only_own_names: ClassVar[bool] = True
    """See `worker.tasks.reachable_state`: what a Trainer counts does not affect training."""

    fitted: FitResult | None = None
    """What the run gave, once it is over."""

    def __init__(
        self, *arguments: Any, samestep: Mapping[str, Any] | None = None, **named: Any
    ) -> None:
        given = {**dict(zip(("model", "args"), arguments, strict=False)), **named}
        if given.get("args") is not None:
            refuse_what_is_not_had(given["args"], self.honoured_by_the_class)
        self._of_fit = _for_fit(samestep)
        super().__init__(*arguments, **named)

    def train(self, resume_from_checkpoint: Any = None, **more: Any) -> TrainOutput:
        """As the class's own, by `samestep.fit`; the trained model is `self.model`.

        Raises:
            DataError: Something that was asked for cannot be honoured; it is named.
        """
        trainer: Any = self
        _refuse_what_nobody_calls(trainer, resume_from_checkpoint, more)
        check_data("train_dataset", trainer.train_dataset)
        arguments, model = trainer.args, trainer.model
        _checkpoint_activations(arguments, model)
        begun_s = time.time()
        try:
            self.fitted = fit(lambda: _task(trainer), **self._arguments_of_fit())
        except NotASum as error:
            raise DataError(f"compute_loss: {error}; {_AS_A_SUM}") from error
        metrics = self._take_over(self.fitted, begun_s)
        return TrainOutput(self.fitted.steps, metrics["train_loss"], metrics)

    def _arguments_of_fit(self) -> dict[str, Any]:
        trainer: Any = self
        arguments, samples = trainer.args, len(_columns_of_model(trainer, trainer.train_dataset))
        microbatch = arguments.per_device_train_batch_size
        batch = microbatch * arguments.gradient_accumulation_steps
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if getattr(arguments, name) < 1:
                raise DataError(
                    f"TrainingArguments.{name}={getattr(arguments, name)} cannot be honoured: "
                    "write 1 or more"
                )
        steps, per_epoch = steps_of(arguments, samples), -(-samples // batch)
        save = every(
            arguments.save_strategy, arguments.save_steps, "save_strategy", per_epoch, steps
        )
        kept = arguments.save_total_limit or (steps // save + 2 if save else 1)
        settings = {"checkpoint": {"every": save, "keep_last": kept}}
        given = {
            "steps": steps,
            "batch": batch,
            "microbatch": microbatch,
            "optimizer": optimizer_of(arguments, steps, _no_decay(trainer)),
            "seed": arguments.seed,
            "precision": "bfloat16" if arguments.bf16 else "float32",
            "evaluate_every": every(
                arguments.eval_strategy, arguments.eval_steps or arguments.logging_steps,
                "eval_strategy", per_epoch, steps,
            ),
            "settings": settings,
            **({"device": "cpu"} if arguments.use_cpu else {}),
        }  # fmt: skip
        given |= self._of_fit
        if "directory" not in given and keeps_the_run(given.get("control")):
            given["directory"] = new_directory(
                Path(arguments.output_dir), "run", "set another output_dir"
            )
        return given

    def _take_over(self, result: FitResult, begun_s: float) -> dict[str, float]:
        """The trainer's state and log, as after a run of its own; what the run is summed up as."""
        trainer: Any = self
        callbacks = trainer.callback_handler.callbacks
        trainer.callback_handler.callbacks = [
            each for each in callbacks if type(each).__name__ != _OF_ITS_OWN_LOOP
        ]
        try:
            return write_log(trainer, len(trainer.train_dataset), result, begun_s)
        finally:
            trainer.callback_handler.callbacks = callbacks


def _for_fit(given: object) -> dict[str, Any]:
    """What the trainer's argument `samestep` has for `fit`.

    Raises:
        DataError: It is no such thing.
    """
    if given is None:
        return {}
    known = sorted(set(inspect.signature(fit).parameters) - {"build", "options"})
    if not isinstance(given, Mapping):
        raise DataError(
            f"samestep: expected arguments of fit by name, got {type(given).__name__}: write "
            'samestep={"workers": 2}'
        )
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise DataError(f"samestep: expected an argument of fit, got {name!r}; {hint}")
    return dict(given)


class Trainer(SamestepMixin, transformers.Trainer):  # type: ignore[misc]  # it ships no types
    """`transformers.Trainer`, trained by samestep."""


def _refuse_what_nobody_calls(trainer: Any, resume: Any, more: Mapping[str, Any]) -> None:
    if resume:
        raise DataError(
            'resume_from_checkpoint cannot be honoured: write samestep={"directory": DIR, '
            '"resume": True}'
        )
    if more:
        raise DataError(f"train({next(iter(more))}=...) cannot be honoured: leave it out")
    if trainer.model_init is not None:
        raise DataError("model_init cannot be honoured: make the model, and give it as model")
    own = (trainer.optimizer, trainer.lr_scheduler, trainer.optimizer_cls_and_kwargs)
    if any(each is not None for each in own):
        raise DataError(
            "an optimizer or scheduler of one's own cannot be honoured: say optim, learning_rate "
            "and lr_scheduler_type in TrainingArguments"
        )
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ not in _USUAL_CALLBACKS:
            raise DataError(
                f"the callback {type(callback).__name__} cannot be honoured: leave it out; the "
                "loop is the coordinator's"
            )
    if trainer.compute_metrics is not None and word_of(trainer.args.eval_strategy) != "no":
        raise DataError(
            "compute_metrics cannot be honoured while it trains: write eval_strategy='no', and "
            "call trainer.evaluate() after train()"
        )
    if trainer.args.data_seed not in (None, trainer.args.seed):
        raise DataError("data_seed cannot be honoured beside seed: leave it out")
    _refuse_another_loop(trainer)


def _refuse_another_loop(trainer: Any) -> None:
    """A class may change the loop before the mixin, after it, or on the trainer itself."""
    evaluates = word_of(trainer.args.eval_strategy) != "no"
    names = (*_NOT_OURS_TO_CALL, *(_OF_EVALUATION if evaluates else ()))
    kinds = type(trainer).__mro__
    ours = {SamestepMixin, *trainer.loop_of_the_class}
    own = [kind for kind in kinds[: kinds.index(transformers.Trainer)] if kind not in ours]
    for where in (trainer, *own):
        if found := [name for name in names if name in vars(where)]:
            instead = (
                "write eval_strategy='no', and call trainer.evaluate() after train()"
                if found[0] in _OF_EVALUATION
                else "change compute_loss or the collator instead"
            )
            kind = where if isinstance(where, type) else type(where)
            raise DataError(
                f"{kind.__name__}.{found[0]} cannot be honoured: nobody would call it; {instead}"
            )


def _checkpoint_activations(arguments: Any, model: Any) -> None:
    """By whichever name transformers has it; a release with both keeps them alike."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(arguments, name, None):
            further = {"use_reentrant": False, **(getattr(arguments, f"{name}_kwargs") or {})}
            own = {key: further.pop(key) for key in ("every_n_layers", "offload") if key in further}
            getattr(model, f"{name}_enable")(**{f"{name}_kwargs": further}, **own)
            return


def _no_decay(trainer: Any) -> tuple[str, ...]:
    """Names of the tensors without decay; an update finds them by parts of names.

    Raises:
        DataError: They cannot be told by their names from those that decay.
    """
    if not trainer.args.weight_decay:
        return ()
    decays = set(trainer.get_decay_parameter_names(trainer.model))
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    without = tuple(name for name in names if name not in decays)
    for name in decays:
        if any(part in name for part in without):
            raise DataError(f"weight_decay cannot be honoured: {name!r} holds the name of another")
    return without


def _columns_of_model(trainer: Any, data: Any) -> Any:
    """The data set without the columns that the model does not read, where it is one of columns."""
    if hasattr(data, "column_names") and hasattr(data, "remove_columns"):
        return trainer._remove_unused_columns(data)  # noqa: SLF001 -- as its own loader does
    return data


def _task(trainer: Any) -> UserTask:
    trainer.model.train()  # all of it, as its own loop does before each step
    train = _columns_of_model(trainer, trainer.train_dataset)
    collate = trainer.data_collator
    if train is trainer.train_dataset:
        collate = trainer._get_collator_with_removed_columns(collate)  # noqa: SLF001 -- likewise
    evaluates = word_of(trainer.args.eval_strategy) != "no"
    held_out = trainer.eval_dataset if evaluates else None
    count = min(len(train), _PROBED_SAMPLES)
    places = (place * len(train) // count for place in range(count))
    losses = _Losses(trainer, (collate([train[place]]) for place in places))
    if losses.stock_multiplies:
        _LOG.warning(
            "gradient_accumulation_steps: expected a loss divided by num_items_in_batch, which "
            "this model takes and ignores: transformers' loop adds up its %d means, samestep "
            "takes their mean",
            trainer.args.gradient_accumulation_steps,
        )
    return UserTask(
        module=trainer.model,
        train=train,
        held_out=None if held_out is None else _columns_of_model(trainer, held_out),
        collate=lambda items: {
            **collate(items),
            _SAMPLES: torch.tensor(float(len(items))),
        },
        loss=losses.loss,
        weight=losses.weight,
    )


class _Losses:
    """The class's own loss as a sum, and what it is divided by.

    Models that are told how many items there are divide their sum by it: they are told 1. What
    the others give is a mean over their samples, or over the labels that count.

    Args:
        trainer: The trainer.
        ones: Batches of one sample each, to see by the first that counts which kind it is.

    Raises:
        DataError: It cannot be made a sum that is the trainer's own.
    """

    def __init__(self, trainer: Any, ones: Iterable[Mapping[str, Any]]) -> None:
        self._trainer = trainer
        self._told, one = self._is_told(ones)
        labels = one.get("labels")
        self._has_labels = labels is not None
        dims = 0
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            dims = labels.dim()
        self._by_label = dims > 0 and not self._told
        if self._by_label and dims > 1 and trainer.args.gradient_accumulation_steps > 1:
            raise DataError(
                "gradient_accumulation_steps cannot be honoured with this model, whose loss is "
                "a mean over the labels of each microbatch: write 1, a larger "
                'per_device_train_batch_size, and samestep={"microbatch": N}'
            )

    @property
    def stock_multiplies(self) -> bool:
        """Whether transformers' loop takes each microbatch's mean for a part of the step's.

        `Trainer.training_step` leaves out the division by the number of microbatches for every
        model that takes keywords.
        """
        trainer = self._trainer
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            takes_items = trainer.model_accepts_loss_kwargs and self._has_labels
            scaled = takes_items or trainer.compute_loss_func is not None
        return bool(scaled) and not self._told and trainer.args.gradient_accumulation_steps > 1

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Summed."""
        if self._told:
            return self._of(model, batch, torch.tensor(1))
        mean, count = self._of(model, batch, None), self._count(batch)
        if self._by_label:  # over no label it is NaN, whose gradients are zeros
            mean = torch.where(count > 0, mean, 0.0)
        return mean * count

    def weight(self, batch: Mapping[str, Any]) -> float:
        """What the sum is divided by in the end."""
        if not self._told:
            return float(self._count(batch))
        counted = self._trainer._get_num_items_in_batch([batch], torch.device("cpu"))  # noqa: SLF001
        return float(counted) if counted is not None else float(self._count(batch))

    def _is_told(self, ones: Iterable[Mapping[str, Any]]) -> tuple[bool, Mapping[str, Any]]:
        """Whether the loss is divided by the items that it is told of, and the sample it was."""
        model = self._trainer.model
        one: Mapping[str, Any] = {}
        with modes_kept(model):
            model.train()
            for one in ones:
                by = [self._probed(one, torch.tensor(n)) for n in (1, 2)]
                if by[0] and all(map(math.isfinite, by)):
                    return abs(by[0] - 2 * by[1]) <= _PROBE * abs(by[0]), one
        return False, one

    def _probed(self, one: Mapping[str, Any], items: torch.Tensor) -> float:
        """With the same draws each time."""
        with seeded(0), SteadyDraws(LEVELS[0]):
            loss = measured(lambda: self._of(self._trainer.model, one, items))
            return float(loss.detach())

    def _of(self, model: Any, batch: Mapping[str, Any], items: Any) -> Any:
        inputs = {name: each for name, each in batch.items() if name != _SAMPLES}
        return self._trainer.compute_loss(model, inputs, num_items_in_batch=items)

    def _count(self, batch: Mapping[str, Any]) -> Any:
        """A tensor: no device has to tell its value."""
        return (batch["labels"] != -100).sum() if self._by_label else batch[_SAMPLES]


def fields_of(arguments: type, base: type) -> frozenset[str]:
    """Names that a class of training arguments has beside its base's."""
    own = set(inspect.signature(arguments).parameters)
    return frozenset(own - set(inspect.signature(base).parameters))
