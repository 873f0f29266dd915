"""A user's task class: the documented example runs, and invalid classes are refused."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest
import yaml

from backends.base.interface import BlockGradient
from backends.registry import choose
from protocol.base.errors import DataError
from protocol.exact.replica import Replica
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.exact.update import step_scalars
from protocol.spec.run_spec import RunSpec, parse_run_spec
from worker.tasks.base import task as interface
from worker.tasks.base.task import Task
from worker.tasks.registry import build


def documented_example() -> tuple[RunSpec, str]:
    """Return the run spec and the module in the docstring of the task interface."""
    assert interface.__doc__ is not None
    lines = interface.__doc__.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("    import math"))
    middle = next(n for n, line in enumerate(lines) if line.startswith("`my_package.py`"))
    spec = [line for line in lines[:middle] if line.startswith("    ")]
    document = yaml.safe_load(textwrap.dedent("\n".join(spec)))
    return parse_run_spec(document), textwrap.dedent("\n".join(lines[start:]))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that writes an importable module."""

    def write_module(source: str) -> None:
        (tmp_path / "my_package.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield write_module
    sys.modules.pop("my_package", None)


def train(task: Task, spec: RunSpec) -> float:
    """Run all steps on one worker; return the first metric after them."""
    blocks = task.manifest.blocks
    order = SampleOrder(spec.seed, task.manifest.train_samples, spec.batch)
    program = choose("cpu").backend.compile(task.trainable, task.batch(order.microbatches(0)[0]))
    replica = Replica(blocks, spec.optimizer)
    replica.load_parameters(task.initial_parameters())
    for step in range(spec.steps):
        program.load(replica.parameters)
        sums = [np.zeros(block.elements, np.float32) for block in blocks]
        for leaf, samples in enumerate(order.microbatches(step)):
            seed = microbatch_seed(spec.seed, step, leaf)
            for item in program.gradients([(task.batch(samples), seed)]):
                if isinstance(item, BlockGradient):
                    sums[item.block] += item.values / np.float32(spec.batch.samples)
        replica.apply(sums, step_scalars(spec.optimizer, step + 1, step, spec.steps, 1.0))
    program.load(replica.parameters)
    figures = program.evaluate(task.evaluation_batch(0))
    program.close()
    return task.manifest.metrics[0].value(dict(figures))


def test_the_documented_example_learns(install):
    spec, source = documented_example()
    install(source)
    task = build(spec)
    assert {t.shape[0] for b in task.manifest.blocks for t in b.tensors} == {16, 1}
    assert train(task, spec) < 0.02


@pytest.mark.parametrize(
    ("task", "source", "message"),
    [
        ("my_package:Curve", "", "to be a class with the methods initial_parameters"),
        ("my_package:Curve", "def Curve(spec): ...", "to be a class"),
        ("my_package:Popen", "from subprocess import Popen", "to be a class with the methods"),
        ("my_package:Curve", "import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
        ("my_package.inner:Curve", "", "install its package here"),
        ("nowhere_to_be_found:Curve", "", "install its package here"),
        (
            "my_package:Curve",
            "class Curve:\n batch = evaluation_batch = initial_parameters = __init__ = print",
            "expected a Manifest",
        ),
    ],
)
def test_invalid_task_class_is_refused_in_one_line(install, task, source, message):
    install(source)
    with pytest.raises(DataError, match=message) as error_info:
        build(RunSpec(task=task, steps=1))
    assert "\n" not in str(error_info.value)


def test_part_in_evaluation_mode_stays_in_it(install):
    source = """
        from torch import nn
        from backends.base.interface import Trainable
        from protocol.spec.manifest import Manifest
        from worker.models.blocks import cut_into_blocks

        class Modes:
            def __init__(self, spec):
                module = nn.Sequential(nn.Linear(1, 1).eval(), nn.Linear(1, 1))
                self.manifest = Manifest(blocks=cut_into_blocks(module), train_samples=8)
                self.trainable = Trainable(
                    blocks=self.manifest.blocks, module=module,
                    loss=lambda module, arrays: [part.training for part in module],
                )

            def initial_parameters(self): ...
            def batch(self): ...
            def evaluation_batch(self): ...
    """
    install(textwrap.dedent(source))
    trainable = build(RunSpec(task="my_package:Modes", steps=1)).trainable
    assert trainable.module is not None
    assert trainable.loss is not None
    trainable.module.train()
    assert trainable.loss(trainable.module, {}) == [False, True]
