"""Every field of `TrainingArguments`: honored, without effect on training, or refused if set.

Nothing is ignored silently. A field that is in none of the lists, such as one of a newer
transformers, is refused unless it has its default value.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

from protocol.base.errors import DataError

HONORED: Final = frozenset({
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "warmup_ratio", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "bf16", "fp16",
    "label_smoothing_factor", "average_tokens_across_devices", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs",
    "use_cache", "eval_strategy", "eval_steps", "save_strategy",
    "save_steps", "save_total_limit", "seed", "data_seed", "use_cpu", "no_cuda",
    "remove_unused_columns", "label_names", "logging_strategy", "logging_steps",
    "logging_first_step", "full_determinism", "report_to", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "dataloader_drop_last", "optim_args",
    "neftune_noise_alpha",
})  # fmt: skip
"""Arguments with the same effect as in transformers."""

_HARMLESS: Final = {
    "it sets how progress is reported": (
        "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "logging_dir",
        "logging_nan_inf_filter", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id", "skip_memory_metrics",
    ),
    "batches are the same however they are fetched": (
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
        "torch_empty_cache_steps",
    ),
    "it configures processes that transformers would start or join": (
        "local_rank", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
        "ddp_static_graph", "ddp_backend", "ddp_timeout", "save_on_each_node", "save_safetensors",
    ),
    "it configures evaluate, predict and compute_metrics": (
        "per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches",
        "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
        "batch_eval_metrics", "include_inputs_for_metrics",
    ),
    "only scripts read it": ("do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
    "nothing is pushed to the hub": (
        "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision",
    ),
    "it belongs to an argument that is refused": (
        "liger_kernel_config", "torch_compile_backend", "torch_compile_mode", "fsdp_config",
        "length_column_name",
    ),
}  # fmt: skip
HARMLESS: Final = {name: reason for reason, names in _HARMLESS.items() for name in names}
"""Arguments that have no effect on training, each with the reason."""

REFUSED: Final[dict[str, str]] = {
    "optim_target_modules": "leave it out: the update covers all trainable tensors",
    "tf32": "matrix products are exact in float32; leave it out",
    "torch_compile": "leave it out: bits of compiled kernels differ from machine to machine",
    "use_liger_kernel": "leave it out",
    "auto_find_batch_size": "write per_device_train_batch_size",
    "include_num_input_tokens_seen": "leave it out: tokens are not counted",
    "bf16_full_eval": "leave it out: held-out data is measured in the precision of training",
    "fp16_full_eval": "leave it out: held-out data is measured in the precision of training",
    "eval_delay": "leave it out",
    "eval_on_start": "call trainer.evaluate() before",
    "save_only_model": "leave it out: a run resumes from its checkpoints",
    "enable_jit_checkpoint": "leave it out: Ctrl-C finishes the step in progress and saves it",
    "push_to_hub": "call trainer.push_to_hub() after",
    "ignore_data_skip": "leave it out",
    "restore_callback_states_from_checkpoint": "leave it out",
    "accelerator_config": "leave it out: workers divide the batch themselves",
    "parallelism_config": "leave it out: workers divide the batch themselves",
    "train_sampling_strategy": "leave it out: the order of samples follows from the seed",
    "group_by_length": "leave it out: the order of samples follows from the seed",
    "fsdp": "start a group instead: torchrun -m worker --shard",
    "deepspeed": "start a group instead: torchrun -m worker --shard",
    "debug": "leave it out",
}
"""Arguments that samestep cannot honor, with what to write instead."""

_SCHEDULES: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "constant": ("constant", {}),
    "constant_with_warmup": ("constant", {}),
    "cosine_with_min_lr": ("cosine", {"min_lr": "min_lr", "min_lr_rate": "min_lr_ratio"}),
    "cosine_with_restarts": ("cosine-restarts", {"num_cycles": "cycles"}),
    "inverse_sqrt": ("inverse-sqrt", {}),
    "polynomial": ("polynomial", {"lr_end": "min_lr", "power": "power"}),
}
"""Schedules by their name in transformers, each with its name in a run spec, and the keys of a run
spec by their names in `lr_scheduler_kwargs`."""
_OPTIMIZERS: Final = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "rmsprop": "rmsprop",
    "adagrad": "adagrad",
}  # fmt: skip


def check_arguments(arguments: Any, honored_by_class: frozenset[str] = frozenset()) -> None:
    """Check that every argument that is set can be honored.

    Args:
        arguments: A `TrainingArguments`, or one of a subclass.
        honored_by_class: Fields that the trainer's class (such as TRL's) uses before it trains.

    Raises:
        DataError: An argument cannot be honored; the message names it.
    """
    defaults = type(arguments)(
        output_dir=arguments.output_dir, report_to="none",
        use_cpu=arguments.use_cpu, bf16=arguments.bf16, fp16=arguments.fp16,
    )  # fmt: skip
    for field in dataclasses.fields(arguments):
        name = field.name
        if name in HONORED or name in HARMLESS or name in honored_by_class:
            continue
        value, default = getattr(arguments, name), getattr(defaults, name)
        if value == default or not (value or (default and name not in REFUSED)):
            continue
        remedy = REFUSED.get(name, "leave it out: this release of samestep does not know it")
        raise DataError(f"TrainingArguments.{name}={value!r} cannot be honored: {remedy}")


def named_optimizer(
    arguments: Any, steps: int, decay_keys: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the section `optimizer` of a run spec; None if it cannot express the arguments.

    Args:
        arguments: A `TrainingArguments`.
        steps: Number of steps of the run.
        decay_keys: Keys that name the tensors without weight decay; used if there is weight decay.
    """
    schedule, optimizer = value_of(arguments.lr_scheduler_type), value_of(arguments.optim)
    keys = _schedule_of(schedule, arguments)
    has_named_optimizer = optimizer in _OPTIMIZERS and keys is not None and not arguments.optim_args
    if not has_named_optimizer or (_OPTIMIZERS[optimizer] != "adamw" and arguments.weight_decay):
        return None
    warmup = 0 if schedule == "constant" else arguments.get_warmup_steps(steps)
    section: dict[str, Any] = {
        "name": _OPTIMIZERS[optimizer],
        "lr": arguments.learning_rate,
        **(keys or {}),
        "warmup_steps": warmup,
        "clip_norm": arguments.max_grad_norm or None,
    }
    if section["name"] == "adamw":
        section |= {
            "betas": [arguments.adam_beta1, arguments.adam_beta2],
            "eps": arguments.adam_epsilon,
            "weight_decay": arguments.weight_decay,
        }
    if section.get("weight_decay"):
        section |= decay_keys
    if warmup:
        section["warmup_from_zero"] = True
    return section


def batch_of(arguments: Any) -> tuple[int, int]:
    """Return the number of samples of a step and of a microbatch.

    Raises:
        DataError: A batch would have no samples.
    """
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(arguments, name) < 1:
            raise DataError(
                f"TrainingArguments.{name}={getattr(arguments, name)} cannot be honored: write 1 "
                "or more"
            )
    microbatch = int(arguments.per_device_train_batch_size)
    return microbatch * int(arguments.gradient_accumulation_steps), microbatch


def steps_of(arguments: Any, samples: int) -> int:
    """Return the number of optimizer steps of a run, for a number of training samples.

    Raises:
        DataError: The run would have no steps.
    """
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    if arguments.num_train_epochs <= 0:
        raise DataError(
            f"TrainingArguments.num_train_epochs={arguments.num_train_epochs} cannot be honored: "
            "write a number above 0, or max_steps"
        )
    step_samples = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    return max(1, math.ceil(float(arguments.num_train_epochs) * -(-samples // int(step_samples))))


def evaluation_interval(arguments: Any, steps_per_epoch: int, steps: int) -> int:
    """Return the number of steps between evaluations; 0: only at the end.

    Args:
        arguments: A `TrainingArguments`.
        steps_per_epoch: Steps of an epoch.
        steps: Steps of the run.
    """
    interval = arguments.eval_steps or arguments.logging_steps
    return _interval(arguments.eval_strategy, interval, steps_per_epoch, steps)


def checkpoint_interval(arguments: Any, steps_per_epoch: int, steps: int) -> int:
    """Return the number of steps between checkpoints; 0: only at the end."""
    if value_of(arguments.save_strategy) == "best":
        return evaluation_interval(arguments, steps_per_epoch, steps)
    return _interval(arguments.save_strategy, arguments.save_steps, steps_per_epoch, steps)


def best_metric(arguments: Any) -> dict[str, str]:
    """Return metric and direction by which checkpoints are compared; empty if none is set.

    Raises:
        DataError: No checkpoint would have the metric.
    """
    is_best_saved = value_of(arguments.save_strategy) == "best"
    if not arguments.load_best_model_at_end and not is_best_saved:
        return {}
    metric = str(arguments.metric_for_best_model or "loss").removeprefix("eval_")
    better = arguments.greater_is_better
    is_higher_better = not metric.endswith("loss") if better is None else bool(better)
    return {"metric": metric, "better": "higher" if is_higher_better else "lower"}


def _interval(strategy: Any, steps_or_share: Any, steps_per_epoch: int, steps: int) -> int:
    match value_of(strategy):
        case "no":
            return 0
        case "epoch":
            return steps_per_epoch
        case _:
            interval = float(steps_or_share)
            return max(1, math.ceil(steps * interval) if interval < 1 else int(interval))


def value_of(choice: Any) -> str:
    """Return the value of an enumeration's member, or the value itself."""
    return str(getattr(choice, "value", choice))


def _schedule_of(schedule: str, arguments: Any) -> dict[str, Any] | None:
    """Return the keys of a schedule, with transformers' defaults where samestep has others.

    None if no schedule of a run spec has these options.
    """
    if schedule not in _SCHEDULES:
        return None
    name, keys = _SCHEDULES[schedule]
    options = dict(arguments.lr_scheduler_kwargs or {})
    if schedule == "polynomial":
        options = {"lr_end": 1e-7, **options}
    if options.keys() - keys.keys():
        return None
    document = {keys[key]: value for key, value in options.items()}
    if (min_rate := document.pop("min_lr", None)) is not None:
        document["min_lr_ratio"] = min_rate / arguments.learning_rate
    return {"schedule": name, **document}
