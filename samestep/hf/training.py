"""Trainers of transformers and TRL whose `train` is a run of `samestep.fit`.

Everything else is inherited: arguments, collator, loss, `evaluate`, `predict` and `save_model`.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import transformers
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils.data import RandomSampler
from transformers import PreTrainedTokenizerBase, ProcessorMixin, set_seed
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer_utils import TrainOutput, align_special_tokens

from protocol.base.errors import DataError, RunFailed, UsageError
from samestep.fitting import fit, new_directory, writes_run_directory
from samestep.hf.arguments import (
    batch_of,
    best_metric,
    check_arguments,
    checkpoint_interval,
    evaluation_interval,
    steps_of,
    value_of,
)
from samestep.hf.callbacks import CallbackLoop, check_callbacks, early_stopping, silence
from samestep.hf.evaluation import check_evaluation, metrics_of
from samestep.hf.losses import SAMPLES, SummedLoss
from samestep.hf.optimizer import fit_optimizer, preserving_optimizer
from samestep.result import FitResult, read_history
from samestep.served_device import served_device
from worker.scripts.checks import check_data
from worker.scripts.user_task import UserTask
from worker.tasks.checks.additivity import NotASum

_LOOP_METHODS: Final = (
    "training_step", "get_train_dataloader", "_get_dataloader", "get_batch_samples",
    "_inner_training_loop", "_run_epoch", "_init_training_state",
    "_prepare_for_training", "_finalize_training", "_prepare_inputs", "_prepare_input",
    "compute_loss_context_manager", "autocast_smart_context_manager", "_clip_grad_norm",
    "_maybe_log_save_evaluate", "_save_checkpoint", "_get_learning_rate", "_wrap_model",
    "set_initial_training_values", "get_total_train_batch_size", "num_examples", "call_model_init",
    "optimizer_step",
)  # fmt: skip
"""Methods of the training loop, which samestep does not call: a subclass may not override them."""
_EVALUATION_METHODS: Final = (
    "evaluate", "_evaluate", "evaluation_loop", "get_eval_dataloader", "_get_eval_sampler",
)  # fmt: skip
"""Methods of the evaluation loop: a subclass may not override them if the run evaluates.
`trainer.evaluate()` calls them as usual."""

_LOG: Final = logging.getLogger(__name__)
_PROBED_SAMPLES: Final = 64
"""Maximum number of batches to try, until one has a loss above 0."""
_SUM_ADVICE: Final = (
    "in a Trainer, a sum divided by num_items_in_batch adds up, and so does a mean over samples; "
    'write Trainer(..., samestep={"unit": "microbatch"}) for any other, such as a mean weighted '
    "by class"
)


class SamestepMixin:
    """Trains with samestep: `class MyTrainer(SamestepMixin, SomeTrainer)`.

    Args:
        samestep: More arguments of `samestep.fit`, such as {"microbatch": 4, "workers": 2}, and
            `unit`, as in `samestep.Task`.
    """

    honored_by_class: ClassVar[frozenset[str]] = frozenset()
    """Further fields of the training arguments that the class uses before it trains."""

    replaced_loop_classes: ClassVar[frozenset[type]] = frozenset()
    """Classes whose changes to the loop have no effect on the trained parameters."""

    only_own_names: ClassVar[bool] = True
    """See `worker.tasks.checks.reachable_state`: a Trainer's counters do not affect training."""

    fitted: FitResult | None = None
    """The result of `fit`. Its module has the last weights, even if the trainer loads the best."""

    def __init__(
        self, *arguments: Any, samestep: Mapping[str, Any] | None = None, **keywords: Any
    ) -> None:
        constructor_arguments = {
            **dict(zip(("model", "args"), arguments, strict=False)),
            **keywords,
        }
        if constructor_arguments.get("args") is not None:
            check_arguments(constructor_arguments["args"], self.honored_by_class)
        self._fit_arguments = _check_fit_arguments(samestep)
        self._unit = self._fit_arguments.pop("unit", "sample")
        super().__init__(*arguments, **keywords)
        trainer: Any = self
        if trainer.args.n_gpu > 1:  # a worker has one GPU; transformers multiplies losses by n_gpu
            trainer.args._n_gpu = 1  # noqa: SLF001 -- as transformers itself sets it

    def train(self, resume_from_checkpoint: Any = None, **other_arguments: Any) -> TrainOutput:
        """Train with `samestep.fit` in place of the class's own loop.

        Args:
            resume_from_checkpoint: The directory of a run, or True for the newest in `output_dir`.
            other_arguments: Other arguments of the class's own `train`, which are refused.

        Raises:
            DataError: An option cannot be honored; the message names it.
        """
        trainer: Any = self
        _refuse_unsupported(trainer, other_arguments)
        check_data("train_dataset", trainer.train_dataset)
        _prepare_model(trainer)
        with preserving_optimizer(trainer):
            arguments = self._arguments_of_fit(resume_from_checkpoint)
        if served_device() is not None:
            silence(trainer)  # callbacks run in the process that the user started
        loop = CallbackLoop(trainer, _epoch_samples(trainer))
        device = _device_of(trainer.model)
        with loop.observing(), _adding_embedding_noise(trainer):
            try:
                on_log = _log_handler(loop, arguments)
                self.fitted = fit(
                    lambda: _make_task(trainer, self._unit), on_log=on_log, **arguments
                )
            except NotASum as error:
                raise DataError(f"compute_loss: {error}; {_SUM_ADVICE}") from error
            metrics = loop.end(self.fitted)
        trainer.model.to(device)  # the class's own evaluate and predict expect it there
        if trainer.args.load_best_model_at_end:
            _load_best(trainer, self.fitted)
        trainer.control = trainer.callback_handler.on_train_end(
            trainer.args, trainer.state, trainer.control
        )
        return TrainOutput(self.fitted.steps, metrics["train_loss"], metrics)

    def _arguments_of_fit(self, resume: Any) -> dict[str, Any]:
        trainer: Any = self
        arguments, samples = trainer.args, _epoch_samples(trainer)
        batch, microbatch = batch_of(arguments)
        steps, steps_per_epoch = steps_of(arguments, samples), -(-samples // batch)
        precision = "bfloat16" if arguments.bf16 else "float32"
        optimizer = {} if "optimizer" in self._fit_arguments else fit_optimizer(trainer, steps)
        fit_arguments = {
            "steps": steps,
            "batch": batch,
            "microbatch": microbatch,
            **optimizer,
            "seed": arguments.seed,
            "precision": "float16" if arguments.fp16 else precision,
            "evaluate_every": evaluation_interval(arguments, steps_per_epoch, steps),
            **({"device": "cpu"} if arguments.use_cpu else {}),
            **self._fit_arguments,
            "settings": {
                **optimizer.get("settings", {}),
                **_checkpoint_settings(trainer, steps_per_epoch, steps),
                **({} if arguments.data_seed is None else {"data_seed": arguments.data_seed}),
                **(self._fit_arguments.get("settings") or {}),
            },
        }
        if not writes_run_directory(fit_arguments.get("control")):
            return fit_arguments
        if resume:
            mode = self._fit_arguments.get("resume") or True  # "edited"
            return {**fit_arguments, "directory": _run_to_resume(arguments, resume), "resume": mode}
        if "directory" not in fit_arguments:
            fit_arguments["directory"] = new_directory(
                Path(arguments.output_dir), "run", "set another output_dir"
            )
        return fit_arguments


def _log_handler(loop: CallbackLoop, arguments: Mapping[str, Any]) -> Any:
    """Return the `on_log` of a run; for a resumed run it first restores the earlier steps."""
    if not arguments.get("resume"):
        return loop.add_row
    is_first = itertools.chain([True], itertools.repeat(False))

    def add_row(row: Mapping[str, float]) -> None:
        if next(is_first):
            rows = read_history(Path(arguments["directory"]))
            loop.restore(earlier_row for earlier_row in rows if earlier_row["step"] < row["step"])
        loop.add_row(row)

    return add_row


def _checkpoint_settings(trainer: Any, steps_per_epoch: int, steps: int) -> dict[str, Any]:
    """Return the keys of the run spec for checkpoints and early stopping.

    Raises:
        DataError: There is early stopping without evaluations.
    """
    arguments = trainer.args
    interval = checkpoint_interval(arguments, steps_per_epoch, steps)
    keep_last = arguments.save_total_limit or (steps // interval + 2 if interval else 1)
    checkpoint = {"every": interval, "keep_last": keep_last}
    best_keys, early_stopping_callback = best_metric(arguments), early_stopping(trainer)
    if early_stopping_callback is None:
        return {"checkpoint": {**checkpoint, **best_keys}}
    if not evaluation_interval(arguments, steps_per_epoch, steps):
        raise DataError(
            "EarlyStoppingCallback cannot be honored without evaluations: write eval_strategy"
        )
    best_keys = best_keys or best_metric(_BestModelArguments(arguments))
    stop_section = {
        "figure": best_keys["metric"],
        "better": best_keys["better"],
        "patience": early_stopping_callback.early_stopping_patience,
    }
    if threshold := early_stopping_callback.early_stopping_threshold:
        stop_section |= {"min_delta": threshold, "baseline": "best"}
    return {"checkpoint": checkpoint, "stop": stop_section}


class _BestModelArguments:
    """Training arguments, with `load_best_model_at_end` set."""

    load_best_model_at_end = True

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arguments, name)


def _run_to_resume(arguments: Any, requested: object) -> Path:
    """Return the directory of the run to resume.

    Raises:
        UsageError: There is no such run.
    """
    output_directory = Path(arguments.output_dir)
    if requested is True:
        runs = [path for path in output_directory.glob("run-*") if (path / "run.json").is_file()]
        if not runs:
            raise UsageError(
                f"resume_from_checkpoint=True: expected a run in {str(output_directory)!r}, found "
                "none; leave it out to start one"
            )
        return max(runs, key=lambda path: int(path.name.partition("-")[2]))
    path = Path(str(requested))
    if not (path / "run.json").is_file():
        raise UsageError(
            f"resume_from_checkpoint: expected the directory of a run, such as "
            f"{str(output_directory / 'run-1')!r}, got {str(path)!r}, which has no run.json"
        )
    return path


def _load_best(trainer: Any, result: FitResult) -> None:
    """Load the weights of the best evaluation into the model.

    Raises:
        RunFailed: The file in the run's directory was removed or is damaged.
    """
    if result.directory is None:
        # Not an error: the run has succeeded, and the process that started it has these weights.
        _LOG.warning(
            "load_best_model_at_end: this worker joined the run and keeps its last weights; the "
            "best ones are in the run's directory, in best/, where the run was started"
        )
        return
    best_directory = result.directory / "best"
    path = best_directory / "model.safetensors"
    try:
        best_weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunFailed(
            f"load_best_model_at_end: expected the best weights in {str(path)!r}, got {error}; the "
            "model has the weights of the last step"
        ) from None
    model = trainer.model
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        for name, tensor in best_weights.items():
            tensors[name].copy_(tensor)
    trainer.state.best_model_checkpoint = str(best_directory)


def _check_fit_arguments(fit_arguments: object) -> dict[str, Any]:
    """Check the trainer's argument `samestep`.

    Raises:
        DataError: It is not a mapping of arguments of `fit`.
    """
    if fit_arguments is None:
        return {}
    parameters = set(inspect.signature(fit).parameters)
    known_names = sorted(parameters - {"build", "options", "on_log"} | {"unit"})
    if not isinstance(fit_arguments, Mapping):
        raise DataError(
            f"samestep: expected arguments of fit by name, got {type(fit_arguments).__name__}: "
            'write samestep={"workers": 2}'
        )
    for name in fit_arguments:
        if name not in known_names:
            close_names = difflib.get_close_matches(str(name), known_names, n=1)
            hint = f"expected one of {', '.join(known_names)}"
            if close_names:
                hint = f"did you mean {close_names[0]!r}?"
            raise DataError(f"samestep: expected an argument of fit, got {name!r}; {hint}")
    return dict(fit_arguments)


class Trainer(SamestepMixin, transformers.Trainer):  # type: ignore[misc]  # it ships no types
    """`transformers.Trainer`, trained by samestep."""


def _refuse_unsupported(trainer: Any, other_arguments: Mapping[str, Any]) -> None:
    if other_arguments:
        raise DataError(f"train({next(iter(other_arguments))}=...) cannot be honored: leave it out")
    check_evaluation(trainer)
    check_callbacks(trainer.callback_handler.callbacks)
    _refuse_custom_loop(trainer)


def _refuse_custom_loop(trainer: Any) -> None:
    """Refuse methods of the loop that a subclass, or the trainer object, overrides."""
    evaluates = value_of(trainer.args.eval_strategy) != "no"
    evaluation_methods = (
        *_EVALUATION_METHODS,
        *(() if trainer.compute_metrics else ("prediction_step",)),
    )
    names = (*_LOOP_METHODS, *(evaluation_methods if evaluates else ()))
    classes = type(trainer).__mro__
    exempt_classes = {SamestepMixin, *trainer.replaced_loop_classes}
    user_classes = [
        owner_class
        for owner_class in classes[: classes.index(transformers.Trainer)]
        if owner_class not in exempt_classes
    ]
    for owner in (trainer, *user_classes):
        if overridden := [name for name in names if name in vars(owner)]:
            remedy = (
                "write eval_strategy='no', and call trainer.evaluate() after train()"
                if overridden[0] in evaluation_methods
                else "change compute_loss or the collator instead"
            )
            owner_class = owner if isinstance(owner, type) else type(owner)
            raise DataError(
                f"{owner_class.__name__}.{overridden[0]} cannot be honored: it would never be "
                f"called; {remedy}"
            )


def _prepare_model(trainer: Any) -> None:
    """Prepare the model as the class's own `train` does before its first step."""
    arguments = trainer.args
    if trainer.model_init is not None:
        set_seed(arguments.seed)
        trainer.model = trainer.callback_handler.model = trainer.call_model_init()
    has_config = hasattr(trainer.model, "config")
    tokenizer = trainer.processing_class
    if has_config and isinstance(tokenizer, PreTrainedTokenizerBase | ProcessorMixin):
        align_special_tokens(trainer.model, tokenizer)  # type: ignore[no-untyped-call]
    _checkpoint_activations(arguments, trainer.model)


@contextmanager
def _adding_embedding_noise(trainer: Any) -> Iterator[None]:
    """Add NEFTune's noise to the model's embeddings in training (Jain et al., arXiv:2310.05914).

    The noise is drawn with the seed of forward.
    """
    alpha = trainer.neftune_noise_alpha
    if alpha is None:
        yield
        return
    hook = activate_neftune(trainer.model, alpha)  # type: ignore[no-untyped-call]  # theirs
    try:
        yield
    finally:
        deactivate_neftune(trainer.model, hook)  # type: ignore[no-untyped-call]  # theirs


def _checkpoint_activations(arguments: Any, model: Any) -> None:
    """Turn on activation checkpointing, under the name that this transformers version uses."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(arguments, name, None):
            options = {"use_reentrant": False, **(getattr(arguments, f"{name}_kwargs") or {})}
            enable_options = {
                key: options.pop(key) for key in ("every_n_layers", "offload") if key in options
            }
            getattr(model, f"{name}_enable")(**{f"{name}_kwargs": options}, **enable_options)
            return


def _model_columns(trainer: Any, data: Any) -> Any:
    """Remove the columns that the model does not take from a data set."""
    if hasattr(data, "column_names") and hasattr(data, "remove_columns"):
        return trainer._remove_unused_columns(data)  # noqa: SLF001 -- as its own loader does
    return data


def _held_out_columns(trainer: Any, data: Any) -> Any:
    """Apply `_model_columns` to the held-out data, one data set or several by name."""
    if data is None:
        return None
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return {name: _model_columns(trainer, data_set) for name, data_set in data.items()}
    return _model_columns(trainer, data)


def _sampler(trainer: Any) -> Any:
    """Return the sampler of a class that overrides the trainer's; None for the default order.

    With `dataloader_drop_last`, its samples fill whole batches.
    """
    stock_method = getattr(transformers.Trainer, "_get_train_sampler")  # noqa: B009 -- private
    is_stock = getattr(type(trainer), "_get_train_sampler") is stock_method  # noqa: B009
    sampler = None if is_stock else trainer._get_train_sampler()  # noqa: SLF001
    if not trainer.args.dataloader_drop_last:
        return sampler
    size = trainer.args.per_device_train_batch_size
    epoch_size = len(trainer.train_dataset if sampler is None else sampler) // size * size
    if not epoch_size:
        raise DataError(
            f"dataloader_drop_last: expected at least {size} training samples, a whole "
            "per_device_train_batch_size, got fewer: leave it out"
        )
    if sampler is None:
        return RandomSampler(trainer.train_dataset, num_samples=epoch_size)
    truncated = copy.copy(sampler)
    truncated.num_samples = epoch_size
    return truncated


def _epoch_samples(trainer: Any) -> int:
    """Return the number of samples of an epoch."""
    sampler = _sampler(trainer)
    return len(trainer.train_dataset if sampler is None else sampler)


def _make_task(trainer: Any, unit: Any = "sample") -> UserTask:
    trainer.model.train()  # every submodule, as the trainer's loop does before each step
    train = _model_columns(trainer, trainer.train_dataset)
    collate = trainer.data_collator
    if train is trainer.train_dataset:
        collate = trainer._get_collator_with_removed_columns(collate)  # noqa: SLF001 -- likewise
    evaluates = value_of(trainer.args.eval_strategy) != "no"
    held_out = trainer.eval_dataset if evaluates else None
    # transformers has moved the model to its default card; a worker moves it to its own device.
    device = _device_of(trainer.model)
    if trainer.neftune_noise_alpha is not None:
        unit = "microbatch"  # its noise depends on the width of the batch
    size = trainer.args.per_device_train_batch_size if unit == "microbatch" else 1
    probe_batches = (
        send_to_device(sample_batch, device)
        for sample_batch in _small_batches(train, collate, size)
    )
    losses = SummedLoss(trainer, probe_batches, is_mean=unit == "microbatch")
    trainer.model.cpu()
    if losses.stock_loop_adds_means:
        _LOG.warning(
            "gradient_accumulation_steps: expected a loss divided by num_items_in_batch, which "
            "this model takes and ignores: transformers' loop adds up its %d means, samestep "
            "takes their mean",
            trainer.args.gradient_accumulation_steps,
        )
    computes_metrics = trainer.compute_metrics is not None and held_out is not None
    return UserTask(
        module=trainer.model,
        train=train,
        sampler=_sampler(trainer),
        held_out=_held_out_columns(trainer, held_out),
        collate=lambda items: {
            **collate(items),
            SAMPLES: torch.tensor(float(len(items))),
        },
        loss=losses.loss,
        weight=losses.weight,
        unit=unit,
        evaluate=(lambda model, batches: metrics_of(trainer, model, batches))
        if computes_metrics
        else None,
    )


def _device_of(model: Any) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _small_batches(data: Any, collate: Any, size: int) -> Iterator[Mapping[str, Any]]:
    """Yield batches of `size` samples, evenly spread over the data."""
    count = min(len(data), _PROBED_SAMPLES)
    for index in range(count):
        start = index * len(data) // count
        yield collate([data[(start + offset) % len(data)] for offset in range(size)])


def fields_of(arguments: type, base: type) -> frozenset[str]:
    """Return the fields that a class of training arguments adds to those of its base."""
    names = set(inspect.signature(arguments).parameters)
    return frozenset(names - set(inspect.signature(base).parameters))
