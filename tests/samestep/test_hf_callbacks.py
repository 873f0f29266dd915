"""Callbacks of a Trainer: its metrics during training, early stopping, the best model, resuming."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

import samestep.hf
from protocol.base.errors import SamestepError
from protocol.exact.samples import SampleOrder
from protocol.spec.sections.tasks import BatchSpec
from samestep.hf.training import _load_best

torch.manual_seed(3)
X = torch.randn(24, 4)
CLASSES = (X.sum(1) > 0).long()
DATA = [{"x": x, "labels": y} for x, y in zip(X, CLASSES, strict=True)]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
    "learning_rate": 0.1, "lr_scheduler_type": "constant", "logging_steps": 1, "seed": 5,
    "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
NOT_CALLED = {"on_init_end", "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end",
              "on_prediction_step"}  # fmt: skip
"""Events that are not compared; samestep's Trainer refuses callbacks that have the middle three."""


class Classifier(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x, labels=None):
        logits = super().forward(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class EpochSampler(torch.utils.data.Sampler[int]):
    def __init__(self):
        self._epoch = 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def __len__(self):
        return len(DATA)

    def __iter__(self):
        order = SampleOrder(5, len(DATA), BatchSpec(samples=8, microbatch=4))
        steps = range(3 * self._epoch, 3 * self._epoch + 3)
        self._epoch += 1
        return (s for step in steps for part in order.microbatches(step) for s in part)


class StockTrainer(transformers.Trainer):
    """transformers' Trainer, with samestep's order of samples."""

    def _get_train_sampler(self, *_):
        return EpochSampler()


def accuracy(prediction):
    classes = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((classes == prediction.label_ids).mean())}


def make_trainer(trainer_class, directory, *callbacks, **overrides):
    torch.manual_seed(0)
    metrics = overrides.pop("compute_metrics", None)
    return trainer_class(
        model=Classifier(),
        args=TrainingArguments(output_dir=str(directory), **{**SETTINGS, **overrides}),
        train_dataset=DATA, eval_dataset=DATA[:10], callbacks=list(callbacks),
        compute_metrics=metrics,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _any_port(monkeypatch):
    monkeypatch.setenv("SAMESTEP_BIND", "127.0.0.1:0")


def make_recorder():
    """Return a callback, and the list in which it records its calls.

    A call is recorded as (event, step, epoch, values), without durations.
    """
    calls: list[Any] = []

    def make_method(event):
        def record(*event_args, logs=None, metrics=None, **_):
            state = event_args[2]
            values = {
                name: value
                for name, value in (logs or metrics or {}).items()
                if not re.search("runtime|per_second|total_flos", name)
            }
            calls.append((event, state.global_step, pytest.approx(state.epoch or 0), values))

        return record

    events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    methods = {event: make_method(event) for event in {*events} - NOT_CALLED}
    return type("Recorder", (TrainerCallback,), methods)(), calls


def test_callbacks_get_the_same_calls_as_from_the_stock_trainer(tmp_path):
    call_lists = []
    training_options = {
        "eval_strategy": "epoch",
        "compute_metrics": accuracy,
        "num_train_epochs": 1,
    }
    for number, trainer_class in enumerate((StockTrainer, samestep.hf.Trainer)):
        callback, calls = make_recorder()
        hf_trainer = make_trainer(
            trainer_class, tmp_path / str(number), callback, **training_options
        )
        hf_trainer.train()
        call_lists.append(calls)
    assert [call[:3] for call in call_lists[1]] == [call[:3] for call in call_lists[0]]
    for (*_, actual), (*_, expected) in zip(call_lists[1], call_lists[0], strict=True):
        assert actual == pytest.approx(expected, rel=1e-4)
    assert any("eval_accuracy" in call[3] for call in call_lists[1])


class Stopper(TrainerCallback):
    def on_step_end(self, args, state, control, **__):  # noqa: ARG002
        control.should_training_stop = state.global_step == 2


class ReadsWeights(TrainerCallback):
    def on_step_end(self, *_, model=None, **__):
        model.weight.norm()


class ReadsGradients(TrainerCallback):
    def on_pre_optimizer_step(self, *_, **__): ...


class RequestsLog(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **__):  # noqa: ARG002
        assert not hasattr(model, "config")
        control.should_log = state.global_step == 2


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Stopper(), "Stopper cannot be honored: it set should_training_stop after step 2"),
        (ReadsWeights(), r"no use of the model in ReadsWeights.on_step_end .* got \.weight"),
        (ReadsGradients(), r"ReadsGradients\.on_pre_optimizer_step cannot be honored"),
    ],
)
def test_callback_that_needs_the_stock_loop_is_refused_by_name(tmp_path, callback, message):
    with pytest.raises(SamestepError, match=message):
        make_trainer(samestep.hf.Trainer, tmp_path, callback).train()


def test_callback_may_request_a_row_of_the_log(tmp_path):
    hf_trainer = make_trainer(samestep.hf.Trainer, tmp_path, RequestsLog(), logging_strategy="no")
    hf_trainer.train()
    assert [row["step"] for row in hf_trainer.state.log_history if "loss" in row] == [2]


def test_an_error_in_a_callback_is_raised_and_the_run_can_be_resumed(tmp_path, capsys):
    class FailingCallback(TrainerCallback):
        def on_log(self, args, state, control, **__):  # noqa: ARG002
            if state.global_step == 2:
                raise ZeroDivisionError("mine")

    training_options: dict[str, Any] = {"num_train_epochs": 8}
    with pytest.raises(ZeroDivisionError, match="mine"):
        make_trainer(samestep.hf.Trainer, tmp_path, FailingCallback(), **training_options).train()
    assert "resume it: " in capsys.readouterr().out
    resumed = make_trainer(samestep.hf.Trainer, tmp_path, **training_options)
    resumed.train(resume_from_checkpoint=True)
    assert [row["step"] for row in resumed.state.log_history if "loss" in row] == [*range(1, 25)]
    uninterrupted = make_trainer(samestep.hf.Trainer, tmp_path / "whole", **training_options)
    uninterrupted.train()
    assert resumed.fitted.digest == uninterrupted.fitted.digest
    repeat = make_trainer(samestep.hf.Trainer, tmp_path, **training_options)
    repeat.train(resume_from_checkpoint=str(tmp_path / "run-1"))
    assert repeat.fitted.digest == uninterrupted.fitted.digest


def test_a_resumed_run_may_have_more_steps(tmp_path):
    def train(name, steps, resume=None):
        hf_trainer = make_trainer(
            samestep.hf.Trainer, tmp_path / name, max_steps=steps, lr_scheduler_type="constant"
        )
        hf_trainer.train(resume_from_checkpoint=resume)
        assert hf_trainer.state.global_step == hf_trainer.state.max_steps == steps
        return hf_trainer.fitted.digest

    train("more", 2)
    assert train("more", 5, resume=True) == train("whole", 5)


def test_resuming_without_a_run_is_refused(tmp_path):
    for resume_from, message in (
        (True, "expected a run in"),
        (str(tmp_path), "which has no run.json"),
    ):
        with pytest.raises(SamestepError, match=message):
            make_trainer(samestep.hf.Trainer, tmp_path).train(resume_from_checkpoint=resume_from)


@pytest.mark.parametrize(
    ("patience", "threshold"), [(2, 0.0), pytest.param(3, 0.06, marks=pytest.mark.slow)]
)
def test_early_stopping_and_best_model_equal_the_stock_trainer(tmp_path, patience, threshold):
    """An improvement below the threshold gives the best model, but does not reset the patience."""
    outcomes: list[Any] = []
    for number, trainer_class in enumerate((StockTrainer, samestep.hf.Trainer)):
        hf_trainer = make_trainer(
            trainer_class, tmp_path / str(number), EarlyStoppingCallback(patience, threshold),
            eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            load_best_model_at_end=True, num_train_epochs=6, compute_metrics=accuracy,
            metric_for_best_model="loss" if threshold else "accuracy",
            learning_rate=0.05 if threshold else 0.3, greater_is_better=not threshold,
        )  # fmt: skip
        hf_trainer.train()
        state = hf_trainer.state
        metrics = hf_trainer.evaluate()
        outcomes.append((state.best_global_step, state.global_step, metrics["eval_accuracy"]))
        outcomes[-1] += (state.best_metric, hf_trainer.model.weight.detach().clone())
    assert outcomes[0][1] < 18, "stopped before the last of 6 epochs ended"
    for expected, actual in zip(outcomes[0][:4], outcomes[1][:4], strict=True):
        assert actual == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(outcomes[1][4], outcomes[0][4], rtol=1e-4, atol=1e-5)


def test_joined_script_logs_where_the_best_weights_are(caplog):
    joined_result: Any = SimpleNamespace(directory=None)
    _load_best(trainer=None, result=joined_result)
    assert "keeps its last weights; the best ones are in the run's directory" in caplog.text


def test_error_for_a_metric_that_is_not_computed_lists_the_computed_ones(tmp_path):
    hf_trainer = make_trainer(
        samestep.hf.Trainer, tmp_path, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="f1", compute_metrics=accuracy,
    )  # fmt: skip
    with pytest.raises(SamestepError, match=r"accuracy"):
        hf_trainer.train()


def test_model_init_is_called_for_each_training(tmp_path):
    hf_trainer: Any = samestep.hf.Trainer(
        model_init=Classifier, args=TrainingArguments(output_dir=str(tmp_path), **SETTINGS),
        train_dataset=DATA,
    )  # fmt: skip
    digests = []
    for _ in range(2):
        hf_trainer.train()
        digests.append(hf_trainer.fitted.digest)
    assert digests[0] == digests[1]


def test_rows_reach_on_log_as_they_are_committed(tmp_path):
    rows: list[Any] = []
    result = samestep.fit(
        lambda: samestep.Task(
            module=nn.Linear(4, 1), train=DATA, held_out=DATA[:4],
            loss=lambda module, batch: (module(batch["x"]) ** 2).sum(),
            evaluate=lambda module, batches: {
                "largest": max(float(module(batch["x"]).max()) for batch in batches)
            },
        ),
        steps=4, batch=8, evaluate_every=2, optimizer={"name": "sgd", "lr": 0.1}, device="cpu",
        directory=tmp_path / "run", on_log=rows.append,
    )  # fmt: skip
    assert [row["step"] for row in rows] == [1, 2, 2, 3, 4, 4]
    merged: dict[float, dict[str, float]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    assert list(merged.values()) == list(result.history)
    with torch.no_grad():
        expected = max(float(result.module(sample["x"])) for sample in DATA[:4])
    assert result.metrics["largest"] == pytest.approx(expected, rel=1e-6)
    assert re.fullmatch(r"[0-9a-f]{64}", result.digest)
