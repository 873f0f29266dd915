"""Every field of `TrainingArguments`: honoured, harmless, or refused where it is set.

Nothing is ignored in silence. A field that is in none of the lists, as a newer transformers may
have, is refused where it is not what it is by default.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

from protocol.base.errors import DataError

HONOURED: Final = frozenset({
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "optim",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16",
    "label_smoothing_factor", "average_tokens_across_devices", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs",
    "use_cache", "eval_strategy", "eval_steps", "save_strategy",
    "save_steps", "save_total_limit", "seed", "data_seed", "use_cpu", "no_cuda",
    "remove_unused_columns", "label_names", "logging_strategy", "logging_steps",
    "logging_first_step", "full_determinism",
})  # fmt: skip
"""They do here what they do there."""

_HARMLESS: Final = {
    "it says how a run is told of": (
        "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "logging_dir",
        "logging_nan_inf_filter", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id", "skip_memory_metrics",
    ),
    "the same batches are made however they are fetched": (
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
        "torch_empty_cache_steps",
    ),
    "it is of processes that transformers would start or join": (
        "local_rank", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
        "ddp_static_graph", "ddp_backend", "ddp_timeout", "save_on_each_node", "save_safetensors",
    ),
    "it is of evaluate and predict, which are transformers' own": (
        "per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches",
        "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
        "batch_eval_metrics", "include_inputs_for_metrics",
    ),
    "scripts read it themselves": ("do_train", "do_eval", "do_predict"),
    "nothing is pushed to the hub": (
        "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision",
    ),
    "it is of a choice that is refused itself": (
        "metric_for_best_model", "greater_is_better", "liger_kernel_config",
        "torch_compile_backend", "torch_compile_mode",
        "fsdp_config", "length_column_name",
    ),
}  # fmt: skip
HARMLESS: Final = {name: why for why, names in _HARMLESS.items() for name in names}
"""They change nothing of what is trained, and why."""

REFUSED: Final[dict[str, str]] = {
    "lr_scheduler_kwargs": "schedules take no more than warmup_steps",
    "optim_args": "the update takes the arguments of AdamW alone",
    "optim_target_modules": "the update is AdamW of all trainable tensors",
    "fp16": 'write samestep={"precision": "float16"}, or bf16=True',
    "tf32": "matrix products are exact in float32; leave it out",
    "torch_compile": "leave it out: bits of compiled kernels differ from machine to machine",
    "use_liger_kernel": "leave it out",
    "neftune_noise_alpha": "leave it out: its noise is not seeded by the microbatch",
    "auto_find_batch_size": "say per_device_train_batch_size",
    "include_num_input_tokens_seen": "leave it out: nobody counts them",
    "report_to": "leave it out: the run's directory has the journal, `coordinator report` a page",
    "bf16_full_eval": "leave it out: held-out data is measured in the precision of training",
    "fp16_full_eval": "leave it out: held-out data is measured in the precision of training",
    "eval_delay": "leave it out",
    "eval_on_start": "call trainer.evaluate() before",
    "save_only_model": "leave it out: a run goes on from its checkpoints",
    "enable_jit_checkpoint": "leave it out: Ctrl-C finishes the step in progress and saves it",
    "push_to_hub": "call trainer.push_to_hub() after",
    "load_best_model_at_end": 'write samestep={"settings": {"checkpoint": {"metric": "loss"}}}',
    "ignore_data_skip": "leave it out",
    "restore_callback_states_from_checkpoint": "leave it out",
    "accelerator_config": "leave it out: workers divide the batch themselves",
    "parallelism_config": "leave it out: workers divide the batch themselves",
    "dataloader_drop_last": "leave it out: every sample counts once in an epoch",
    "train_sampling_strategy": "leave it out: the order of samples follows from the seed",
    "group_by_length": "leave it out: the order of samples follows from the seed",
    "fsdp": "start a group instead: torchrun -m worker --shard",
    "deepspeed": "start a group instead: torchrun -m worker --shard",
    "debug": "leave it out",
    "resume_from_checkpoint": 'write samestep={"directory": DIR, "resume": True}',
}
"""What they would do cannot be had, and what to write instead."""

_SCHEDULES: Final = {
    "linear": "linear", "cosine": "cosine", "constant": "constant",
    "constant_with_warmup": "constant",
}  # fmt: skip
_OPTIMIZERS: Final = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd",
}  # fmt: skip


def refuse_what_is_not_had(arguments: Any, of_the_class: frozenset[str] = frozenset()) -> None:
    """See that every argument that is set is honoured.

    Args:
        arguments: A `TrainingArguments`, or one of a subclass.
        of_the_class: Fields that the trainer's own class honours before it trains (TRL's).

    Raises:
        DataError: One cannot be honoured; it is named.
    """
    usual = type(arguments)(
        output_dir=arguments.output_dir, report_to="none",
        use_cpu=arguments.use_cpu, bf16=arguments.bf16,
    )  # fmt: skip
    for field in dataclasses.fields(arguments):
        name = field.name
        if name in HONOURED or name in HARMLESS or name in of_the_class:
            continue
        given, expected = getattr(arguments, name), getattr(usual, name)
        if given == expected or not (given or (expected and name not in REFUSED)):
            continue
        instead = REFUSED.get(name, "leave it out: this release of samestep does not know it")
        raise DataError(f"TrainingArguments.{name}={given!r} cannot be honoured: {instead}")


def optimizer_of(arguments: Any, steps: int, no_decay: tuple[str, ...]) -> dict[str, Any]:
    """The section `optimizer` of a run spec.

    Args:
        arguments: A `TrainingArguments`.
        steps: Of the run.
        no_decay: Names of the tensors that weight decay leaves out.

    Raises:
        DataError: Schedule or optimizer cannot be had.
    """
    schedule = word_of(arguments.lr_scheduler_type)
    if schedule not in _SCHEDULES:
        raise DataError(
            f"TrainingArguments.lr_scheduler_type={schedule!r} cannot be honoured: write one of "
            f"{', '.join(_SCHEDULES)}"
        )
    optimizer = word_of(arguments.optim)
    if optimizer not in _OPTIMIZERS:
        raise DataError(
            f"TrainingArguments.optim={optimizer!r} cannot be honoured: write one of "
            f"{', '.join(_OPTIMIZERS)}"
        )
    if optimizer == "sgd" and arguments.weight_decay:
        raise DataError(
            "TrainingArguments.weight_decay cannot be honoured with optim='sgd': write adamw_torch"
        )
    warmup = 0 if schedule == "constant" else arguments.get_warmup_steps(steps)
    document: dict[str, Any] = {
        "name": _OPTIMIZERS[optimizer],
        "lr": arguments.learning_rate,
        "schedule": _SCHEDULES[schedule],
        "warmup_steps": warmup,
        "clip_norm": arguments.max_grad_norm or None,
    }
    if document["name"] == "adamw":
        document |= {
            "betas": [arguments.adam_beta1, arguments.adam_beta2],
            "eps": arguments.adam_epsilon,
            "weight_decay": arguments.weight_decay,
        }
    if document.get("weight_decay"):
        document["no_decay"] = list(no_decay)
    if warmup:
        document["warmup_from_zero"] = True
    return document


def steps_of(arguments: Any, samples: int) -> int:
    """Optimizer steps of a run over so many samples.

    Raises:
        DataError: There would be none.
    """
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    if arguments.num_train_epochs <= 0:
        raise DataError(
            f"TrainingArguments.num_train_epochs={arguments.num_train_epochs} cannot be honoured: "
            "a run has a step; write a number above 0, or max_steps"
        )
    step_samples = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    return max(1, math.ceil(float(arguments.num_train_epochs) * -(-samples // int(step_samples))))


def every(strategy: Any, steps: Any, name: str, steps_per_epoch: int, of_run: int) -> int:
    """Steps between two evaluations or checkpoints; 0: at the end only.

    Raises:
        DataError: The strategy cannot be had.
    """
    match word_of(strategy):
        case "no":
            return 0
        case "steps":
            given = float(steps)
            return max(1, math.ceil(of_run * given) if given < 1 else int(given))
        case "epoch":
            return steps_per_epoch
        case other:
            raise DataError(
                f"TrainingArguments.{name}={other!r} cannot be honoured: write no, steps or epoch"
            )


def word_of(choice: Any) -> str:
    """Of an enumeration of transformers', or a plain one."""
    return str(getattr(choice, "value", choice))
