"""A trainer's callbacks, state and log during a run, driven by the rows of its history.

The coordinator owns the loop: callbacks see each step after it is committed. Callbacks that only
observe (progress bars, loggers) run unchanged. A callback that tries to change the run is refused
by name, because a decision of one process would not reach the other workers;
`EarlyStoppingCallback` and the default flow become keys of the run spec.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from transformers import DefaultFlowCallback, EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl
from transformers.trainer_utils import speed_metrics

from protocol.base.errors import DataError
from samestep.hf.arguments import steps_of
from samestep.result import FitResult

_UNCALLED_METHODS: Final = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
"""Methods of a callback that see gradients or parts of a step, which only workers have."""
_REMEDIES: Final = {
    "should_training_stop": "write max_steps, or use EarlyStoppingCallback",
    "should_epoch_stop": "leave it out",
    "should_evaluate": "write eval_strategy and eval_steps",
    "should_save": "write save_strategy and save_steps",
}
"""Flags of `TrainerControl` that change the run, with what to write instead."""
_READABLE_ATTRIBUTES: Final = frozenset({
    "config", "generation_config", "name_or_path", "num_parameters", "peft_config",
    "active_adapter", "get_nb_trainable_parameters",
})  # fmt: skip
"""Attributes of the model that training does not change."""


class CallbackLoop:
    """Calls the callbacks of a trainer and writes its log, as the loop of transformers does.

    Args:
        trainer: The trainer.
        samples: Number of training samples of an epoch.
    """

    def __init__(self, trainer: Any, samples: int) -> None:
        self._trainer = trainer
        self._samples = samples
        arguments = trainer.args
        self._accumulation_steps = arguments.gradient_accumulation_steps
        self._microbatches = -(-samples // arguments.per_device_train_batch_size)
        self._steps_per_epoch = -(-self._microbatches // self._accumulation_steps)
        self._losses: list[float] = []
        self._logged_losses = 0
        self._begin_s = time.time()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Let callbacks observe a run until the block ends, without changing it."""
        trainer = self._trainer
        handler, arguments = trainer.callback_handler, trainer.args
        candidates = (*handler.callbacks, trainer.control)
        stateful_callbacks: Any = [
            candidate for candidate in candidates if isinstance(candidate, ExportableState)
        ]
        state: Any = TrainerState(stateful_callbacks=stateful_callbacks)
        trainer.state = state
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        state.train_batch_size = arguments.per_device_train_batch_size
        state.max_steps = steps_of(arguments, self._samples)
        state.num_train_epochs = -(-state.max_steps // self._steps_per_epoch)
        state.compute_steps(arguments, state.max_steps)
        trainer.callback_handler, trainer.is_in_train = _ObservingCallbacks(handler), True
        try:
            trainer.control = trainer.callback_handler.on_train_begin(
                arguments, state, trainer.control
            )
            yield
        finally:
            trainer.callback_handler, trainer.is_in_train = handler, False

    def add_row(self, row: Mapping[str, float]) -> None:
        """Add a row of the history: a committed step, or the metrics of an evaluation."""
        if "loss" in row:
            self._add_step(row)
        metrics = {
            f"eval_{name.removeprefix('held_out_')}": value
            for name, value in row.items()
            if name.startswith("held_out_")
        }
        if metrics:
            self._log_evaluation(int(row["step"]), metrics)

    def restore(self, rows: Iterator[Mapping[str, float]]) -> None:
        """Add the rows of steps before this process took part, without calling callbacks."""
        handler = self._trainer.callback_handler
        silence(self._trainer)
        try:
            for row in rows:
                self.add_row(row)
        finally:
            self._trainer.callback_handler = handler

    def end(self, result: FitResult) -> dict[str, float]:
        """Log the summary of a run, and return it."""
        trainer, state = self._trainer, self._trainer.state
        self.restore(row for row in result.history if row["step"] > state.global_step)
        metrics: dict[str, float] = speed_metrics(  # type: ignore[no-untyped-call]  # theirs
            "train",
            self._begin_s,
            num_samples=self._samples * (state.epoch or 0.0),
            num_steps=result.steps,
        )
        metrics["train_loss"] = sum(self._losses) / max(1, len(self._losses))
        trainer.log(metrics)
        return metrics

    def _add_step(self, row: Mapping[str, float]) -> None:
        trainer, state = self._trainer, self._trainer.state
        handler, arguments = trainer.callback_handler, trainer.args
        step = int(row["step"])
        epoch, index = divmod(step - 1, self._steps_per_epoch)
        if index == 0:
            state.epoch = float(epoch)
            trainer.control = handler.on_epoch_begin(arguments, state, trainer.control)
        trainer.control = handler.on_step_begin(arguments, state, trainer.control)
        state.global_step, state.epoch = step, self._epoch_after(step)
        self._losses.append(row["loss"])
        trainer.control = handler.on_step_end(arguments, state, trainer.control)
        self._log(row)
        if index + 1 == self._steps_per_epoch or step == state.max_steps:
            trainer.control = handler.on_epoch_end(arguments, state, trainer.control)
            self._log(row)

    def _log(self, row: Mapping[str, float]) -> None:
        trainer = self._trainer
        losses = self._losses[self._logged_losses :]
        if trainer.control.should_log and losses:
            self._logged_losses = len(self._losses)
            extra = {name: row[name] for name in ("grad_norm", "learning_rate") if name in row}
            trainer.log({"loss": sum(losses) / len(losses), **extra})
        if trainer.control.should_save:
            trainer.control = trainer.callback_handler.on_save(
                trainer.args, trainer.state, trainer.control
            )

    def _log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics after `step` steps; later steps may have been committed meanwhile.

        As in transformers, each held-out data set is a separate evaluation.
        """
        trainer, state = self._trainer, self._trainer.state
        latest = state.global_step, state.epoch
        state.global_step, state.epoch = step, self._epoch_after(step)
        for data_set_metrics in self._by_data_set(metrics):
            trainer.log(data_set_metrics)
            trainer.control = trainer.callback_handler.on_evaluate(
                trainer.args, state, trainer.control, data_set_metrics
            )
        try:
            trainer._determine_best_metric(metrics, None)  # noqa: SLF001 -- as its own loop does
        except KeyError as error:
            raise DataError(str(error.args[0])) from None
        state.global_step, state.epoch = latest

    def _by_data_set(self, metrics: dict[str, float]) -> list[dict[str, float]]:
        """Divide metrics by the data set whose name they begin with."""
        data_sets = self._trainer.eval_dataset
        if not isinstance(data_sets, Mapping):
            return [metrics]
        metrics_by_name: dict[str, dict[str, float]] = {name: {} for name in data_sets}
        for name, value in metrics.items():
            matching_names = [
                data_set for data_set in metrics_by_name if name.startswith(f"eval_{data_set}_")
            ]
            metrics_by_name[max(matching_names, key=len)][name] = value
        return list(metrics_by_name.values())

    def _epoch_after(self, step: int) -> float:
        epoch, index = divmod(step - 1, self._steps_per_epoch)
        microbatches: int = min((index + 1) * self._accumulation_steps, self._microbatches)
        return float(epoch + microbatches / self._microbatches)


def silence(trainer: Any) -> None:
    """Remove a trainer's callbacks, except the default one, which decides when the trainer logs."""
    handler_class: Any = CallbackHandler
    trainer.callback_handler = handler_class([DefaultFlowCallback], None, None, None, None)


def early_stopping(trainer: Any) -> EarlyStoppingCallback | None:
    """Return the trainer's `EarlyStoppingCallback`, if it has one."""
    callbacks = trainer.callback_handler.callbacks
    return next(
        (callback for callback in callbacks if type(callback) is EarlyStoppingCallback), None
    )


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks with methods that are never called.

    Raises:
        DataError: A callback has such a method; the message names it.
    """
    for callback_class, name in itertools.product(map(type, callbacks), _UNCALLED_METHODS):
        if getattr(callback_class, name, None) is not getattr(TrainerCallback, name):
            raise DataError(
                f"{callback_class.__name__}.{name} cannot be honored: gradients and parts of a "
                "step exist only on the workers; use on_step_end, or a hook on the parameter"
            )


class _ObservingCallbacks(CallbackHandler):
    """Callbacks that may observe the run, but not change it."""

    def __init__(self, handler: Any) -> None:
        vars(self).update(vars(handler))

    def call_event(self, event: str, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        """Call a method of all callbacks.

        Raises:
            DataError: A callback tried to change the run; the message names it.
        """
        for callback in self.callbacks:
            if type(callback) is EarlyStoppingCallback:
                continue  # a key of the run spec
            callback_name = type(callback).__name__
            old_flags = dict(vars(control))
            model = _Unavailable(
                f"the model in {callback_name}.{event}", self.model, _READABLE_ATTRIBUTES
            )
            answer = getattr(callback, event)(
                args, state, control,
                model=self.model if event == "on_train_begin" else model,
                processing_class=self.processing_class,
                optimizer=_Unavailable(f"the optimizer in {callback_name}.{event}"),
                lr_scheduler=_Unavailable(f"the scheduler in {callback_name}.{event}"),
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **keywords,
            )  # fmt: skip
            new_flags = answer if isinstance(answer, Mapping) else vars(answer or control)
            if not isinstance(callback, DefaultFlowCallback):
                _refuse_steering(callback_name, state.global_step, old_flags, new_flags)
            if isinstance(answer, TrainerControl):
                control = answer
        return control


def _refuse_steering(
    callback_name: str, step: int, old_flags: Mapping[str, Any], new_flags: Mapping[str, Any]
) -> None:
    for flag, remedy in _REMEDIES.items():
        if new_flags.get(flag) and not old_flags[flag]:
            raise DataError(
                f"the callback {callback_name} cannot be honored: it set {flag} after step "
                f"{step}, which would not be the same on every worker; {remedy}"
            )


class _UnavailableError(DataError, AttributeError):
    """Also an AttributeError, so that `hasattr` works."""


class _Unavailable:
    """Takes the place of an object whose state is on the workers during the run.

    Args:
        name: The object's name in the error.
        target: The object.
        readable: Attributes that can be read.
    """

    def __init__(
        self, name: str, target: object = None, readable: frozenset[str] = frozenset()
    ) -> None:
        self._name, self._target, self._readable = name, target, readable

    def __getattr__(self, attribute: str) -> Any:
        if attribute in self._readable:
            return getattr(self._target, attribute)
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise _UnavailableError(
            f"expected no use of {self._name} during the run, got .{attribute}: its state is on "
            "the workers; read it after train()"
        )

    def __call__(self, *_: object, **__: object) -> Any:
        return self.__getattr__("forward")
