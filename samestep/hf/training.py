"""Trainers of transformers and TRL whose `train` is a run of `samestep.fit`.

Everything else is the class's own: its arguments, collator, loss, `evaluate`, `predict` and
`save_model`.
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
from safetensors.torch import load_file
from torch.utils.data import RandomSampler
from transformers import PreTrainedTokenizerBase, ProcessorMixin, set_seed
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer_utils import TrainOutput, align_special_tokens

from protocol.base.errors import DataError, UsageError
from samestep.fitting import fit, keeps_the_run, new_directory
from samestep.hf.arguments import (
    batch_of,
    best_metric,
    check_arguments,
    checkpoint_interval,
    evaluation_interval,
    steps_of,
    word_of,
)
from samestep.hf.callbacks import CallbackLoop, check_callbacks, early_stopping, silence
from samestep.hf.evaluation import check_evaluation, metrics_of
from samestep.hf.losses import SAMPLES, SummedLoss
from samestep.hf.optimizer import created_optimizer, fit_optimizer
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
"""Methods of the training loop, which samestep does not call: a subclass may not change them."""
_EVALUATION_METHODS: Final = (
    "evaluate", "_evaluate", "evaluation_loop", "get_eval_dataloader", "_get_eval_sampler",
)  # fmt: skip
"""Likewise, if the run evaluates; `trainer.evaluate()` calls them as usual."""

_LOG: Final = logging.getLogger(__name__)
_PROBED_SAMPLES: Final = 64
"""Samples that are searched for one with labels that count."""
_SUM_ADVICE: Final = (
    "in a Trainer, a sum divided by num_items_in_batch adds up, and so does a mean over samples; "
    'write Trainer(..., samestep={"unit": "microbatch"}) for any other, such as a mean that '
    "weights of classes divide"
)


class SamestepMixin:
    """Trains with samestep: `class MyTrainer(SamestepMixin, SomeTrainer)`.

    Args:
        samestep: More arguments of `samestep.fit`, such as {"microbatch": 4, "workers": 2}, and
            `unit`, as in `samestep.Task`.
    """

    honored_by_class: ClassVar[frozenset[str]] = frozenset()
    """Further fields of the training arguments that the class uses before it trains."""

    loop_of_the_class: ClassVar[frozenset[type]] = frozenset()
    """Classes whose changes to the loop have no effect on what is trained."""

    only_own_names: ClassVar[bool] = True
    """See `worker.tasks.checks.reachable_state`: what a Trainer counts does not affect training."""

    fitted: FitResult | None = None
    """The result of `fit`; its module has the last weights, also if the best ones are loaded."""

    def __init__(
        self, *arguments: Any, samestep: Mapping[str, Any] | None = None, **named: Any
    ) -> None:
        given = {**dict(zip(("model", "args"), arguments, strict=False)), **named}
        if given.get("args") is not None:
            check_arguments(given["args"], self.honored_by_class)
        self._fit_arguments = _check_fit_arguments(samestep)
        self._unit = self._fit_arguments.pop("unit", "sample")
        super().__init__(*arguments, **named)
        trainer: Any = self
        if trainer.args.n_gpu > 1:  # a worker has one; transformers multiplies losses by it
            trainer.args._n_gpu = 1  # noqa: SLF001 -- as transformers itself sets it

    def train(self, resume_from_checkpoint: Any = None, **more: Any) -> TrainOutput:
        """Train as the class's own `train` does, with `samestep.fit`.

        Args:
            resume_from_checkpoint: The directory of a run, or True for the newest in `output_dir`.
            more: Other arguments of the class's own `train`, which are refused.

        Raises:
            DataError: Something that was asked for cannot be honored; it is named.
        """
        trainer: Any = self
        _refuse_what_is_never_called(trainer, more)
        check_data("train_dataset", trainer.train_dataset)
        _prepare_model(trainer)
        with created_optimizer(trainer):
            arguments = self._arguments_of_fit(resume_from_checkpoint)
        if served_device() is not None:
            silence(trainer)  # they run in the process that the user started
        loop = CallbackLoop(trainer, _epoch_samples(trainer))
        device = _device_of(trainer.model)
        with loop.watching(), _noisy_embeddings(trainer):
            try:
                on_log = _continued(loop, arguments)
                self.fitted = fit(lambda: _task(trainer, self._unit), on_log=on_log, **arguments)
            except NotASum as error:
                raise DataError(f"compute_loss: {error}; {_SUM_ADVICE}") from error
            metrics = loop.end(self.fitted)
        trainer.model.to(device)  # where the class's own evaluate and predict look for it
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
        steps, per_epoch = steps_of(arguments, samples), -(-samples // batch)
        precision = "bfloat16" if arguments.bf16 else "float32"
        optimizer = {} if "optimizer" in self._fit_arguments else fit_optimizer(trainer, steps)
        given = {
            "steps": steps,
            "batch": batch,
            "microbatch": microbatch,
            **optimizer,
            "seed": arguments.seed,
            "precision": "float16" if arguments.fp16 else precision,
            "evaluate_every": evaluation_interval(arguments, per_epoch, steps),
            **({"device": "cpu"} if arguments.use_cpu else {}),
            **self._fit_arguments,
            "settings": {
                **optimizer.get("settings", {}),
                **_checkpoint_settings(trainer, per_epoch, steps),
                **({} if arguments.data_seed is None else {"data_seed": arguments.data_seed}),
                **(self._fit_arguments.get("settings") or {}),
            },
        }
        if not keeps_the_run(given.get("control")):
            return given
        if resume:
            how = self._fit_arguments.get("resume") or True  # "edited"
            return {**given, "directory": _run_to_resume(arguments, resume), "resume": how}
        if "directory" not in given:
            given["directory"] = new_directory(
                Path(arguments.output_dir), "run", "set another output_dir"
            )
        return given


def _continued(loop: CallbackLoop, arguments: Mapping[str, Any]) -> Any:
    """Return the `on_log` of a run; that of a resumed one first restores the earlier steps."""
    if not arguments.get("resume"):
        return loop.take
    is_first = itertools.chain([True], itertools.repeat(False))

    def take(row: Mapping[str, float]) -> None:
        if next(is_first):
            rows = read_history(Path(arguments["directory"]))
            loop.restore(each for each in rows if each["step"] < row["step"])
        loop.take(row)

    return take


def _checkpoint_settings(trainer: Any, steps_per_epoch: int, steps: int) -> dict[str, Any]:
    """Return the keys of the run spec for checkpoints and early stopping.

    Raises:
        DataError: There is early stopping without evaluations.
    """
    arguments = trainer.args
    save = checkpoint_interval(arguments, steps_per_epoch, steps)
    kept = arguments.save_total_limit or (steps // save + 2 if save else 1)
    checkpoint = {"every": save, "keep_last": kept}
    best, stopping = best_metric(arguments), early_stopping(trainer)
    if stopping is None:
        return {"checkpoint": {**checkpoint, **best}}
    if not evaluation_interval(arguments, steps_per_epoch, steps):
        raise DataError(
            "EarlyStoppingCallback cannot be honored without evaluations: write eval_strategy"
        )
    best = best or best_metric(_WithBest(arguments))
    stop = {
        "figure": best["metric"],
        "better": best["better"],
        "patience": stopping.early_stopping_patience,
    }
    if threshold := stopping.early_stopping_threshold:
        stop |= {"min_delta": threshold, "baseline": "best"}
    return {"checkpoint": checkpoint, "stop": stop}


class _WithBest:
    """Training arguments, as if the best checkpoint were to be loaded."""

    load_best_model_at_end = True

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arguments, name)


def _run_to_resume(arguments: Any, given: object) -> Path:
    """Return the directory of the run to resume.

    Raises:
        UsageError: There is none.
    """
    below = Path(arguments.output_dir)
    if given is True:
        runs = [path for path in below.glob("run-*") if (path / "run.json").is_file()]
        if not runs:
            raise UsageError(
                f"resume_from_checkpoint=True: expected a run in {str(below)!r}, found none; "
                "leave it out to start one"
            )
        return max(runs, key=lambda path: int(path.name.partition("-")[2]))
    path = Path(str(given))
    if not (path / "run.json").is_file():
        raise UsageError(
            f"resume_from_checkpoint: expected the directory of a run, such as "
            f"{str(below / 'run-1')!r}, got {str(path)!r}, which has no run.json"
        )
    return path


def _load_best(trainer: Any, result: FitResult) -> None:
    """Load the weights of the best evaluation into the model.

    Raises:
        DataError: The files in the run's directory were removed or changed.
    """
    if result.directory is None:
        # No reason to fail: the run has succeeded, and the process that began it has them.
        _LOG.warning(
            "load_best_model_at_end: this worker joined the run and keeps its last weights; the "
            "best ones are in the run's directory, in best/, where the run was started"
        )
        return
    best = result.directory / "best"
    named = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, tensor in load_file(best / "model.safetensors").items():
            named[name].copy_(tensor)
    trainer.state.best_model_checkpoint = str(best)


def _check_fit_arguments(given: object) -> dict[str, Any]:
    """Check the trainer's argument `samestep`.

    Raises:
        DataError: It has something other than arguments of `fit`.
    """
    if given is None:
        return {}
    parameters = set(inspect.signature(fit).parameters)
    known = sorted(parameters - {"build", "options", "on_log"} | {"unit"})
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


def _refuse_what_is_never_called(trainer: Any, more: Mapping[str, Any]) -> None:
    if more:
        raise DataError(f"train({next(iter(more))}=...) cannot be honored: leave it out")
    check_evaluation(trainer)
    check_callbacks(trainer.callback_handler.callbacks)
    _refuse_custom_loop(trainer)


def _refuse_custom_loop(trainer: Any) -> None:
    """Refuse methods of the loop that a class, or the trainer itself, has changed."""
    evaluates = word_of(trainer.args.eval_strategy) != "no"
    unused = (*_EVALUATION_METHODS, *(() if trainer.compute_metrics else ("prediction_step",)))
    names = (*_LOOP_METHODS, *(unused if evaluates else ()))
    kinds = type(trainer).__mro__
    ours = {SamestepMixin, *trainer.loop_of_the_class}
    own = [kind for kind in kinds[: kinds.index(transformers.Trainer)] if kind not in ours]
    for where in (trainer, *own):
        if found := [name for name in names if name in vars(where)]:
            instead = (
                "write eval_strategy='no', and call trainer.evaluate() after train()"
                if found[0] in unused
                else "change compute_loss or the collator instead"
            )
            kind = where if isinstance(where, type) else type(where)
            raise DataError(
                f"{kind.__name__}.{found[0]} cannot be honored: it would never be called; {instead}"
            )


def _prepare_model(trainer: Any) -> None:
    """Do to the model what the class's own `train` does before its first step."""
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
def _noisy_embeddings(trainer: Any) -> Iterator[None]:
    """Context in which the model's embeddings add NEFTune's noise while it trains (Jain et al.,
    arXiv:2310.05914); its draws are seeded like others of forward."""
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
    """Turn on activation checkpointing, by whichever name transformers has for it."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(arguments, name, None):
            options = {"use_reentrant": False, **(getattr(arguments, f"{name}_kwargs") or {})}
            own = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
            getattr(model, f"{name}_enable")(**{f"{name}_kwargs": options}, **own)
            return


def _model_columns(trainer: Any, data: Any) -> Any:
    """Return a data set of columns without those that the model does not take."""
    if hasattr(data, "column_names") and hasattr(data, "remove_columns"):
        return trainer._remove_unused_columns(data)  # noqa: SLF001 -- as its own loader does
    return data


def _held_out_columns(trainer: Any, data: Any) -> Any:
    """Return the held-out data, one set or several by name, as `_model_columns` does."""
    if data is None:
        return None
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return {name: _model_columns(trainer, each) for name, each in data.items()}
    return _model_columns(trainer, data)


def _sampler(trainer: Any) -> Any:
    """Return the sampler of a class that overrides the trainer's, or that of `drop_last`."""
    stock = getattr(transformers.Trainer, "_get_train_sampler")  # noqa: B009 -- private
    is_stock = getattr(type(trainer), "_get_train_sampler") is stock  # noqa: B009
    sampler = None if is_stock else trainer._get_train_sampler()  # noqa: SLF001
    if not trainer.args.dataloader_drop_last:
        return sampler
    size = trainer.args.per_device_train_batch_size
    draws = len(trainer.train_dataset if sampler is None else sampler) // size * size
    if not draws:
        raise DataError(
            f"dataloader_drop_last: expected at least {size} training samples, a whole "
            "per_device_train_batch_size, got fewer: leave it out"
        )
    if sampler is None:
        return RandomSampler(trainer.train_dataset, num_samples=draws)
    shorter = copy.copy(sampler)
    shorter.num_samples = draws
    return shorter


def _epoch_samples(trainer: Any) -> int:
    """Return the number of samples of an epoch."""
    sampler = _sampler(trainer)
    return len(trainer.train_dataset if sampler is None else sampler)


def _task(trainer: Any, unit: Any = "sample") -> UserTask:
    trainer.model.train()  # all of it, as its own loop does before each step
    train = _model_columns(trainer, trainer.train_dataset)
    collate = trainer.data_collator
    if train is trainer.train_dataset:
        collate = trainer._get_collator_with_removed_columns(collate)  # noqa: SLF001 -- likewise
    evaluates = word_of(trainer.args.eval_strategy) != "no"
    held_out = trainer.eval_dataset if evaluates else None
    # transformers has moved the model to the card that it found; a worker moves it to its own.
    device = _device_of(trainer.model)
    if trainer.neftune_noise_alpha is not None:
        unit = "microbatch"  # its noise depends on the width of the batch
    size = trainer.args.per_device_train_batch_size if unit == "microbatch" else 1
    singles = (send_to_device(each, device) for each in _small_batches(train, collate, size))
    losses = SummedLoss(trainer, singles, is_mean=unit == "microbatch")
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
        first = index * len(data) // count
        yield collate([data[(first + number) % len(data)] for number in range(size)])


def fields_of(arguments: type, base: type) -> frozenset[str]:
    """Return the fields that a class of training arguments has beside those of its base."""
    own = set(inspect.signature(arguments).parameters)
    return frozenset(own - set(inspect.signature(base).parameters))
