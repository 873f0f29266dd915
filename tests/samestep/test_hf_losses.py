"""The loss of a Trainer's model, and its conversion to a sum over samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Trainer, TrainingArguments

import samestep.hf
from protocol.base.errors import SamestepError

X = torch.linspace(-2, 2, 96).view(24, 4)
CLASSES = (torch.arange(24) >= 19).long()


class Tagger(nn.Module):
    """A model that labels three positions of each sample; its frozen base is in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).requires_grad_(False).eval()
        self.head = nn.Linear(4, 6)

    def forward(self, x, labels=None):
        logits = self.head(self.base(x) + torch.randn_like(x)).view(-1, 3, 2)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Classifier(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x, labels=None):
        assert labels is None
        return {"logits": super().forward(x)}


class ClassifierIgnoringItemCount(Classifier):
    """A model that accepts transformers' item count and ignores it, as BERT's heads do."""

    def forward(self, x, labels=None, **_):  # type: ignore[override]
        return {"loss": functional.cross_entropy(super().forward(x)["logits"], labels)}


class TrainerWithWeightedMean(samestep.hf.Trainer):
    def compute_loss(self, model, inputs, **_):  # type: ignore[override]
        logits, weights = model(inputs["x"])["logits"], torch.tensor([0.2, 0.8]).to(inputs["x"])
        return functional.cross_entropy(logits, inputs["labels"], weights)


class TrainerWithWeightedSum(samestep.hf.Trainer):
    def compute_loss(self, model, inputs, *, num_items_in_batch):  # type: ignore[override]
        logits, weights = model(inputs["x"])["logits"], torch.tensor([0.2, 0.8]).to(inputs["x"])
        summed = functional.cross_entropy(logits, inputs["labels"], weights, reduction="sum")
        return summed / num_items_in_batch


def make_trainer(trainer_class, model, labels, directory, *, batch=8, microbatches=1, **overrides):
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=batch, max_steps=1, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
        gradient_accumulation_steps=microbatches,
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in zip(X, labels, strict=True)]
    is_ours = issubclass(trainer_class, samestep.hf.Trainer)
    our_arguments = {"samestep": overrides} if is_ours else {}
    return trainer_class(model=model, args=arguments, train_dataset=data, **our_arguments)


def test_mean_weighted_by_class_is_refused_with_a_remedy(tmp_path):
    hf_trainer = make_trainer(
        TrainerWithWeightedMean, Classifier(), CLASSES, tmp_path, microbatch=4
    )
    message = r"compute_loss: .*a mean weighted by class.*divided by num_items_in_batch adds up"
    with pytest.raises(SamestepError, match=message) as error:
        hf_trainer.train()
    assert "\n" not in str(error.value)


def test_weighted_sum_divided_by_the_item_count_is_trained(tmp_path):
    hf_trainer = make_trainer(TrainerWithWeightedSum, Classifier(), CLASSES, tmp_path, microbatch=4)
    assert hf_trainer.train().global_step == 1


def test_model_with_noise_trains_although_the_first_samples_have_only_ignored_labels(tmp_path):
    labels = (torch.arange(72) % 2).view(24, 3).masked_fill(torch.arange(24)[:, None] < 3, -100)
    model = Tagger()
    hf_trainer = make_trainer(samestep.hf.Trainer, model, labels, tmp_path, microbatch=4)
    before = model.head.weight.detach().clone()
    assert hf_trainer.train().global_step == 1
    assert not torch.equal(before, model.head.weight)


def test_trial_of_a_loss_leaves_the_model_in_training_mode(tmp_path, monkeypatch):
    """transformers' loop calls `model.train()` before each step."""
    model = Tagger()
    hf_trainer = make_trainer(samestep.hf.Trainer, model, CLASSES[:, None].expand(-1, 3), tmp_path)

    def build_only(build, **_):
        build()
        raise SamestepError("built")

    monkeypatch.setattr("samestep.hf.training.fit", build_only)
    with pytest.raises(SamestepError, match="built"):
        hf_trainer.train()
    assert all(module.training for module in model.modules())


def test_warning_if_the_stock_trainer_adds_means_because_the_item_count_is_ignored(
    tmp_path, caplog
):
    losses_by_trainer = []
    for number, trainer_class in enumerate((samestep.hf.Trainer, Trainer)):
        torch.manual_seed(1)
        sizes = {"batch": 12, "microbatches": 2}
        hf_trainer = make_trainer(
            trainer_class, ClassifierIgnoringItemCount(), CLASSES, tmp_path / str(number), **sizes
        )
        hf_trainer.train()
        losses_by_trainer.append(
            [row["loss"] for row in hf_trainer.state.log_history if "loss" in row]
        )
    assert losses_by_trainer[1] == pytest.approx(
        [2 * loss for loss in losses_by_trainer[0]], rel=1e-3
    )
    assert "takes and ignores: transformers' loop adds up its 2 means" in caplog.text
