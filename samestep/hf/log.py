"""A trainer's state and log after a run, row by row as its own loop would have written them."""

from __future__ import annotations

from typing import Any

from transformers.trainer_utils import speed_metrics

from samestep.hf.arguments import steps_of, word_of
from samestep.result import FitResult


def write_log(trainer: Any, samples: int, result: FitResult, begun_s: float) -> dict[str, float]:
    """Say what came of each step, as `logging_strategy` wants it; what the run is summed up as.

    Args:
        trainer: Whose `args` the run was made of.
        samples: Of its training data.
        result: The run.
        begun_s: When it began (`time.time`).
    """
    state, arguments = trainer.state, trainer.args
    accumulated = arguments.gradient_accumulation_steps
    microbatches = -(-samples // arguments.per_device_train_batch_size)
    per_epoch = -(-microbatches // accumulated)
    state.max_steps = steps_of(arguments, samples)
    state.num_train_epochs = -(-state.max_steps // per_epoch)
    state.compute_steps(arguments, state.max_steps)
    since: list[float] = []
    for row in result.history:
        state.global_step = int(row["step"])
        epoch, inside = divmod(state.global_step - 1, per_epoch)
        state.epoch = epoch + min((inside + 1) * accumulated, microbatches) / microbatches
        since.append(row["loss"])
        if _is_due(arguments, state, epoch_ends=inside + 1 == per_epoch):
            beside = {name: row[name] for name in ("grad_norm", "learning_rate") if name in row}
            trainer.log({"loss": sum(since) / len(since), **beside})
            since.clear()
        if "held_out_loss" in row:
            trainer.log({"eval_loss": row["held_out_loss"]})
    losses = [row["loss"] for row in result.history]
    metrics: dict[str, float] = speed_metrics(  # type: ignore[no-untyped-call]  # theirs
        "train", begun_s, num_samples=samples * (state.epoch or 0.0), num_steps=result.steps
    )
    metrics["train_loss"] = sum(losses) / max(1, len(losses))
    trainer.log(metrics)
    return metrics


def _is_due(arguments: Any, state: Any, *, epoch_ends: bool) -> bool:
    step, strategy = state.global_step, word_of(arguments.logging_strategy)
    return (
        (step == 1 and arguments.logging_first_step)
        or (strategy == "steps" and step % state.logging_steps == 0)
        or (strategy == "epoch" and (epoch_ends or step == state.max_steps))
    )
