"""A mistake in a script is refused before the run starts, in one line with the code to write."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import samestep
from protocol.base.errors import UsageError
from protocol.spec.run_spec import parse_run_spec
from samestep.fitting import new_directory
from worker.scripts.script_task import ScriptTask

X = torch.linspace(-1, 1, 8)[:, None]
DATA = TensorDataset(X, 2 * X)


class EndlessData(IterableDataset[list[torch.Tensor]]):
    def __iter__(self):
        return itertools.cycle([[X[0], X[0]]])


def squared_error(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()


def build_with(**changes):
    return lambda: samestep.Task(
        **{"module": nn.Linear(1, 1), "train": DATA, "loss": squared_error, **changes}
    )


def build_with_loss(error_to_loss):
    return build_with(loss=lambda module, batch: error_to_loss(module(batch[0]) - batch[1]))


def contrastive_loss(module, batch):
    y = module(batch[0])
    return -torch.log_softmax(y @ y.T, 1).diagonal().sum()


def random_collate(items):
    x = torch.stack([item[0] for item in items])
    return [x + float(np.random.default_rng().random()), x]


def failing_build():
    raise KeyError("weights")


class FrozenLinear(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.requires_grad_(False)


def penalized_loss(module, batch):
    return squared_error(module, batch) + 1e-4 * sum((p**2).sum() for p in module.parameters())


class StatefulModel(nn.Linear):
    """A layer that adds `draw()` to its input in training: random numbers, or a count."""

    def __init__(self, draw):
        super().__init__(1, 1)
        self.draw = draw

    def forward(self, x):
        return super().forward(x + self.draw()) if self.training else super().forward(x)


class ReentrantCheckpoint(nn.Linear):
    """A layer in a reentrant checkpoint: its inputs need no gradient, so its weights get none."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class NormalizedGradient(torch.autograd.Function):
    """The identity, with a gradient of norm one."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient / gradient.norm()


class FrequencyScaledEmbedding(nn.Module):
    """An embedding whose gradients are divided by the frequency of a row in the batch."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        rows = (x[:, 0] > 0).long()
        return nn.functional.embedding(rows, self.rows, scale_grad_by_freq=True)


def hook_tensor(weight, change):
    weight.register_hook(change)


def hook_accumulated(weight, change):
    def change_in_place(parameter):
        parameter.grad.copy_(change(parameter.grad))

    weight.register_post_accumulate_grad_hook(change_in_place)


def hook_multi_grad(weight, change):
    def change_all(gradients):
        for gradient in gradients:
            gradient.copy_(change(gradient))

    torch.autograd.graph.register_multi_grad_hook([weight], change_all)


def hook_node(weight, change):
    """Hook the node that accumulates the gradient; the weight's attribute keeps it alive."""
    weight.node = weight.view_as(weight).grad_fn.next_functions[0][0]
    weight.node.register_prehook(lambda gradients: (change(gradients[0]),))


def hook_held_node(weight, change):
    """Keep the node alive in a global list: a copy of the module has no reference to the node."""
    hook_node(weight, change)
    HELD_NODES.append(weight.__dict__.pop("node"))


HELD_NODES: list[object] = []
HOOKS = [hook_tensor, hook_accumulated, hook_multi_grad, hook_node, hook_held_node]


def hooked_module(register, change):
    module = nn.Linear(1, 1)
    register(module.weight, change)
    return module


def clamp(gradient):
    return gradient.clamp(-0.1, 0.1)


def remove_gradient(parameter):
    parameter.grad = None


def module_with_accumulation_hook(hook):
    module = nn.Linear(1, 1)
    module.weight.register_post_accumulate_grad_hook(hook)
    return module


class InnerCheckpoint(nn.Sequential):
    """A model whose second layer is in a reentrant checkpoint."""

    def __init__(self):
        super().__init__(nn.Linear(1, 1), nn.Linear(1, 1))

    def forward(self, x):
        return checkpoint(self[1], self[0](x), use_reentrant=True)


class MovingAverageTeacher(nn.Linear):
    """A model with a teacher that forward updates."""

    def __init__(self):
        super().__init__(1, 1)
        self.teacher = nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.weight, 0.1)
        return super().forward(x) - self.teacher(x)


def decay(gradient):
    return gradient + 1e-3


BATCH_NORM = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
BATCH_NORM_WITHOUT_STATISTICS = nn.Sequential(
    nn.Linear(1, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 1)
)
with warnings.catch_warnings(action="ignore"):  # some releases of torch deprecate jit
    SCRIPTED = nn.Sequential(nn.Linear(1, 2), torch.jit.script(nn.Linear(2, 1)))
SGD = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)


def call_backward_before_return(errors):
    (0.5 * errors.abs().sum()).backward(retain_graph=True)
    return (errors**2).sum()


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (build_with_loss(lambda e: (e**2).mean()), {},
         r'a mean \(\S+ for a batch of 8 samples and .* write reduction="sum" or \.sum\(\)'),
        (build_with_loss(lambda e: e**2), {}, r"one sum, got shape \(2, 1\): add \.sum\(\)"),
        (build_with_loss(lambda e: e.sum().item()), {}, r"got float: leave out \.item\(\)"),
        (build_with_loss(call_backward_before_return), {}, r"got a call of backward\(\) in it"),
        (build_with_loss(lambda _: None), {},
         r"as loss, got NoneType: its last line must be `return"),
        (build_with_loss(lambda e: (e.sum(), e)), {}, r"as loss, got tuple: return only the loss"),
        (build_with_loss(lambda e: e.detach().sum()), {},
         r"on a trainable tensor.*inference_mode\(\)"),
        (build_with(loss=contrastive_loss), {}, "a loss across samples"),
        (build_with_loss(lambda e: -(e * 0).log().sum()), {},
         "a finite loss of the first.*, got inf"),
        (build_with(loss=penalized_loss), {}, "adds up.*belongs in the optimizer's weight_decay"),
        (build_with_loss(lambda e: (NormalizedGradient.apply(e) ** 2).sum()), {},
         "gradients that.*Function"),
        (build_with(module=FrequencyScaledEmbedding()), {},
         "that add up over samples, got a gradient of 'rows'"),
        *((build_with(module=hooked_module(register, change)), {}, "got a gradient of 'weight'")
          for register in HOOKS for change in (clamp, torch.sign, decay)),
        (build_with(module=module_with_accumulation_hook(lambda p: p.grad)), {},
         "should return None.*: let the hook of 'weight' return nothing$"),
        (build_with(module=module_with_accumulation_hook(remove_gradient)), {},
         "'weight' to remain after its hooks, got none"),
        (build_with(module=InnerCheckpoint()), {},
         r"raised .*: write use_reentrant=False where checkpoint"),
        (build_with(module=MovingAverageTeacher()), {},
         r"samples and seed.*, because module\.teacher\.weight"),
        (build_with(module=StatefulModel(np.random.default_rng(0).random)), {},
         "and seed.*torch's functions"),
        (build_with(module=StatefulModel(itertools.count().__next__)), {},
         "keep no state in the model"),
        (build_with(weight=lambda _: 0), {}, "weight.* above 0, got 0 for each of 8 samples"),
        (build_with(weight=lambda _: torch.tensor(0.0)), {}, "weight.* above 0, got 0 for each"),
        (build_with(weight=lambda _: -1), {}, "expected weight to return a finite number.*got -1"),
        (build_with(weight=lambda _: float("nan")), {},
         "expected weight to return a finite.*got nan"),
        (build_with(weight=lambda _: "many"), {}, "expected weight to return a finite.*got 'many'"),
        (build_with(weight=lambda b: b[9]), {},
         r"weight raised IndexError.*in test_mistakes.py, line"),
        (build_with(loss=None), {}, "got none: write loss=lambda module, batch"),
        (build_with(module=BATCH_NORM), {}, "running statistics.*use LayerNorm or GroupNorm"),
        (build_with(module=BATCH_NORM_WITHOUT_STATISTICS), {},
         "sample 0 alone raised.*is there a layer across the batch"),
        (build_with(module=SCRIPTED), {}, r"one compiled by torch\.jit\.script as '1'; pass"),
        (build_with(module=SCRIPTED[1]), {}, r"torch\.jit\.script; pass the nn\.Module"),
        (build_with(module=nn.Linear(1, 1, device="meta")), {}, r"on the CPU.*leave out \.to"),
        (build_with(module=nn.Linear(1, 1).bfloat16()), {}, r"float32.*write module\.float\(\)"),
        (build_with(module=FrozenLinear()), {}, "model with trainable tensors, got none"),
        (build_with(module=nn.DataParallel(nn.Linear(1, 1))), {}, r"pass module\.module"),
        (build_with(train=EndlessData()), {}, "a length.*read it into a list"),
        (build_with(train=DataLoader(DATA)), {}, "got a DataLoader: pass its dataset"),
        (build_with(train=(X, X)), {}, r"write torch\.utils\.data\.TensorDataset\(x, y\)"),
        (build_with(train=[]), {}, "expected samples as train, got an empty list"),
        (build_with(collate=random_collate), {},
         "same batch from samples 0, 1 at each read.*draw from"),
        (build_with(collate=lambda _: {"text": "a"}), {}, "'text' of type str: leave it out"),
        (lambda: nn.Linear(1, 1), {}, r"got Linear: write return samestep\.Task"),
        (build_with()(), {}, r"got UserTask: write def build\(\)"),
        (failing_build, {}, "build raised KeyError: 'weights'"),
        (lambda: nn.Linear(2**22, 2**23), {}, "available: tried to allocate 131072.00 GiB; only"),
        (build_with(), {"optimizer": SGD}, "parameters of the module that build returns, got"),
        (lambda options: options, {"options": {"model": SGD}}, "models and tensors inside build"),
        (build_with(), {"epochs": 1}, "expected either steps= or epochs="),
        (build_with(), {"batch": 128, "microbatch": None},
         "expected at least .*one microbatch.*lower batch= or microbatch="),
        (build_with(), {"evaluate_every": 1}, "expected held-out data, got none"),
        (build_with(), {"microbatch": 64}, "microbatch <= samples, got 64 > 4"),
        (build_with(), {"settings": {"seed": 1}}, "'seed': use the argument of fit"),
        (build_with(), {"settings": {"checkpont": {}}}, "did you mean 'checkpoint'"),
        (lambda: samestep.fit(build_with(), steps=1), {},
         "one within another: call them in sequence"),
    ],
)  # fmt: skip
def test_mistake_is_refused_in_one_line_with_the_code_to_write(build, arguments, message):
    fit_arguments = {"steps": 1, "batch": 4, "microbatch": 2, **arguments}
    with pytest.raises(samestep.SamestepError, match=message) as error:
        samestep.fit(build, **fit_arguments)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_error_for_a_reentrant_checkpoint_without_gradients_names_the_remedy():
    with pytest.raises(
        samestep.SamestepError, match=r"depends on a trainable tensor.*use_reentrant=False"
    ):
        samestep.fit(build_with(module=ReentrantCheckpoint(1, 1)), steps=1, batch=4, microbatch=2)


@pytest.mark.parametrize("held_out", [True, False])
def test_labels_out_of_range_are_reported_in_training_and_evaluation(held_out):
    labeled = TensorDataset(X, torch.zeros(8, dtype=torch.int64))
    bad_labels = TensorDataset(X, torch.full((8,), 7))
    build = build_with(
        module=nn.Linear(1, 3),
        train=labeled if held_out else bad_labels,
        held_out=bad_labels if held_out else labeled,
        loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="sum"),
    )
    samples_name = f"{'held-out' if held_out else 'the first'} samples"
    message = rf"^the loss of {samples_name}: input '1' has 7 at \[0\], .* 3 rows: expected 0 to 2$"
    with pytest.raises(samestep.SamestepError, match=message):
        samestep.fit(build, steps=1, batch=4, microbatch=2)


def test_samples_of_unequal_shapes_are_named():
    samples = [X[0], X[1, :0]]
    with pytest.raises(samestep.SamestepError, match="cannot build a batch of samples 0, 1"):
        samestep.fit(build_with(train=samples), steps=1, batch=4, microbatch=1)


class LateData(list[list[torch.Tensor]]):
    """Samples whose inputs are their numbers."""

    def __getitem__(self, number):
        return [torch.full((1,), float(number)), torch.full((1,), 1.0)]


def late_loss(module, batch):
    if module.bias.abs() > 0.3:
        raise ValueError("boom")
    return squared_error(module, batch)


def zero_linear():
    module = nn.Linear(1, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


@pytest.mark.parametrize(
    ("samples", "changed_arguments", "message"),
    [
        # The checks before the run read most of 60 samples, but not number 3.
        (
            60,
            {"weight": lambda b: -1 if (b[0] == 3).any() else 1},
            "^worker '.*': expected weight to return .* got -1",
        ),
        (
            8,
            {"loss": late_loss},
            r"ValueError: boom in test_mistakes.py, line \d+, step \d+, samples \d$",
        ),
    ],
)
def test_error_during_training_names_its_cause(samples, changed_arguments, message, tmp_path):
    fit_arguments = {
        "steps": 20,
        "batch": 3,
        "microbatch": 1,
        "device": "cpu",
        "directory": tmp_path / "r",
    }
    fit_arguments["optimizer"] = {"name": "adamw", "lr": 0.1}
    with pytest.raises(samestep.SamestepError, match=message) as error:
        samestep.fit(
            build_with(module=zero_linear(), train=LateData([[X]] * samples), **changed_arguments),
            **fit_arguments,
        )
    assert "\n" not in str(error.value)
    assert "the device failed" not in str(error.value)


def late_penalty_loss(module, batch):
    return squared_error(module, batch) + (module.bias.abs() - 0.05).clamp_min(0).sum()


def test_penalty_that_begins_after_some_steps_is_detected(tmp_path):
    fit_arguments = {
        "steps": 9,
        "batch": 4,
        "microbatch": 2,
        "device": "cpu",
        "directory": tmp_path / "r",
    }
    fit_arguments["optimizer"] = {"name": "adamw", "lr": 0.1}
    message = "after step 2.* counts once for each microbatch"
    with pytest.raises(samestep.SamestepError, match=message) as error:
        samestep.fit(build_with(module=zero_linear(), loss=late_penalty_loss), **fit_arguments)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("worker '")
    assert "resume" not in str(error.value)


def slope_loss(module, batch):
    x = batch[0].requires_grad_()
    slope = torch.autograd.grad(module(x).sum(), x, create_graph=True)[0]
    return ((slope - 2) ** 2).sum()


def test_loss_with_a_derivative_of_the_model_is_trained_and_evaluated():
    metrics = {"slope off": lambda m, b: slope_loss(m, b).sqrt()}
    build = build_with(
        module=nn.Sequential(nn.Linear(1, 1)), loss=slope_loss, held_out=DATA, metrics=metrics
    )
    result = samestep.fit(
        build, steps=3, batch=4, microbatch=2, device="cpu", evaluate_every=1,
        optimizer={"name": "sgd", "lr": 0.1},
    )  # fmt: skip
    assert result.metrics["loss"] < result.history[0]["loss"]


class NoisyLinear(nn.Linear):
    """A layer that adds noise from torch's generator in both modes."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


TIED = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
TIED[2].weight = TIED[0].weight


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x):
        return self.lstm(x[:, None].expand(-1, 6, -1))[0].mean((1, 2))


CONVOLUTION = nn.Sequential(
    nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2, padding=1), nn.GroupNorm(4, 8),
    nn.Dropout(0.5), nn.Flatten(), nn.Linear(72, 4),
)  # fmt: skip


class MixedTypes(nn.Linear):
    """A layer that cannot compute in float64, so it is tried in float32."""

    def forward(self, x):
        return super().forward(x) @ torch.eye(4)


class ScaledGradients(nn.Module):
    """A model with a hook that scales a gradient, and with rows that most samples do not use."""

    def __init__(self, register):
        super().__init__()
        # One of the hooks sees a sparse gradient.
        self.rows = nn.Embedding(50, 4, sparse=register is hook_tensor)
        register(self.rows.weight, lambda gradient: gradient * 0.5)

    def forward(self, x):
        return self.rows((x[:, 0] > 0).long()) * x


@pytest.mark.parametrize(
    "module",
    [
        NoisyLinear(4, 4),
        TIED,
        Recurrent(),
        CONVOLUTION,
        MixedTypes(4, 4),
        *map(ScaledGradients, HOOKS),
    ],
)
def test_additive_losses_are_not_refused(module):
    data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    spec = parse_run_spec({
        "task": "samestep.script:FitTask", "steps": 1, "batch": {"samples": 4, "microbatch": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
    })  # fmt: skip
    user_task = samestep.Task(module=module, train=data, loss=lambda m, b: (m(b[0]) ** 2).sum())
    assert ScriptTask(user_task, spec, {}).manifest.train_samples == 8


def test_error_for_an_unwritable_directory_names_the_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UsageError) as error:
        new_directory(Path("runs"), "run")
    message = "expected a writable directory for runs, got 'runs' (File exists); write fit("
    assert str(error.value).startswith(message)
    (tmp_path / "runs").unlink()
    assert [new_directory(Path("runs"), "run").name for _ in range(2)] == ["run-1", "run-2"]
    with pytest.raises(UsageError, match="set another output_dir"):
        new_directory(Path("/proc/none"), "run", "set another output_dir")
