"""A trainer's `compute_metrics` during training: one worker computes it on all held-out samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import EvalPrediction, trainer_pt_utils, trainer_utils

from protocol.base.errors import DataError
from samestep.hf.losses import SAMPLES


def check_evaluation(trainer: Any) -> None:
    """Refuse options of `compute_metrics` that training cannot honor.

    Raises:
        DataError: Such an option is set; the message names it.
    """
    if trainer.compute_metrics is not None and trainer.args.batch_eval_metrics:
        raise DataError(
            "TrainingArguments.batch_eval_metrics=True cannot be honored while the run trains: "
            "leave it out, as compute_metrics gets all predictions at once"
        )


def metrics_of(trainer: Any, model: Any, batches: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Collect the predictions of all batches as `Trainer.evaluation_loop` does, and return the
    metrics that `compute_metrics` computes from them.

    Args:
        trainer: The trainer, with `compute_metrics`.
        model: The model in evaluation mode, with the weights to evaluate.
        batches: The held-out batches on the model's device.
    """
    requested = set(trainer.args.include_for_metrics)
    concatenates = trainer.args.eval_do_concat_batches
    names = ("losses", "predictions", "label_ids", "inputs")
    containers: Any = trainer_pt_utils.EvalLoopContainer
    collected = {name: containers(concatenates, padding_index=-100) for name in names}
    main_input = getattr(model, "main_input_name", "input_ids")
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != SAMPLES}
        main_inputs = inputs.get(main_input) if "inputs" in requested else None
        loss, logits, labels = trainer.prediction_step(model, inputs, prediction_loss_only=False)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        if loss is not None:
            loss = loss.repeat(int(batch[SAMPLES]))
        for name, tensor in zip(names, (loss, logits, labels, main_inputs), strict=True):
            if tensor is not None:
                collected[name].add(tensor)
                collected[name].to_cpu_and_numpy()
    arrays = {name: container.get_arrays() for name, container in collected.items()}
    if arrays["predictions"] is None or arrays["label_ids"] is None:
        raise DataError(
            "expected predictions and labels of the held-out data for compute_metrics, got none: "
            "name the labels in TrainingArguments.label_names"
        )
    extra = {
        name: arrays[name]
        for name, option in (("losses", "loss"), ("inputs", "inputs"))
        if option in requested
    }
    prediction = EvalPrediction(arrays["predictions"], arrays["label_ids"], **extra)
    raw_metrics = trainer.compute_metrics(prediction)
    metrics = trainer_utils.denumpify_detensorize(raw_metrics)  # type: ignore[no-untyped-call]
    return {name.removeprefix("eval_"): value for name, value in metrics.items()}
