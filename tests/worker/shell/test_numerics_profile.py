"""The numerics profile distinguishes workers with different bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from backends.base.interface import Batch
from backends.losses import vocabulary_loss
from backends.scripted import ScriptedBackend, ScriptedProgram
from protocol.spec.sections.model import ArithmeticSpec
from tests.backends.losses.test_vocabulary_loss import add_lora
from tests.small_heads import bert, llama
from tests.worker.shell.test_engine import SPEC
from worker.shell import engine
from worker.shell.numerics_profile import (
    library_versions,
    loss_version,
    numerics_digest,
    probe_digest,
)
from worker.tasks.small.scripted import Scripted


class DifferentForLargeBatches(ScriptedProgram):
    """A device that differs only for batches of three samples."""

    def gradients(self, leaves):
        (batch, seed), *_ = leaves
        is_three = len(batch.arrays["x"]) == 3
        return super().gradients([(batch, seed + is_three)])


def batch(samples):
    return Batch({"x": np.zeros((samples, 2), np.float32)}, float(samples))


def test_every_shape_is_probed():
    trainable = Scripted(SPEC).trainable
    one, other = ScriptedProgram(trainable, 0.0), DifferentForLargeBatches(trainable, 0.0)
    assert probe_digest(one, [batch(2)]) == probe_digest(other, [batch(2)])
    shapes = [batch(2), batch(3)]
    assert probe_digest(one, shapes) == probe_digest(one, shapes)
    assert probe_digest(one, shapes) != probe_digest(other, shapes)


@pytest.mark.parametrize("key", ["name", "driver", "torch", "transformers", "subnormals"])
def test_profile_contains_everything_that_may_decide_bits(key):
    traits = {"device": "cuda", "processor": "one", key: "a"}
    assert numerics_digest(traits, "p") != numerics_digest({**traits, key: "b"}, "p")
    assert numerics_digest(traits, "p") == numerics_digest({**traits, "processor": "b"}, "p")


def test_profile_lists_the_libraries_of_the_model_layers():
    assert library_versions(None) == {}
    assert library_versions(torch.nn.Linear(1, 1)) == {"torch": torch.__version__}
    # A layer of another installed package.
    layer = type("Layer", (torch.nn.Linear,), {"__module__": "numpy.layers"})
    versions = library_versions(torch.nn.Sequential(layer(1, 1)))
    assert versions == {"torch": torch.__version__, "numpy": np.__version__}


def test_build_with_another_vocabulary_loss_has_another_profile(monkeypatch):
    """No probe is large enough to show the difference; a build without a version differs, too."""
    model = add_lora(llama())
    expected = numerics_digest(loss_version(model), "p")
    assert expected == numerics_digest(loss_version(bert()), "p") != numerics_digest({}, "p")
    monkeypatch.setattr(vocabulary_loss, "VERSION", vocabulary_loss.VERSION + "0")
    assert numerics_digest(loss_version(model), "p") != expected


def test_profile_without_a_vocabulary_ignores_the_loss_version():
    classifier = transformers.BertForSequenceClassification(bert().config)
    for module in (None, torch.nn.Linear(2, 2), classifier):
        assert loss_version(module) == {}


def test_profile_has_the_loss_version_in_every_arithmetic():
    for arithmetic in (ArithmeticSpec(), ArithmeticSpec(mode="canonical")):
        job: Any = SimpleNamespace(
            spec=SPEC.model_copy(update={"arithmetic": arithmetic}),
            task=SimpleNamespace(trainable=SimpleNamespace(module=llama())),
            keeps_subnormals=True,
        )
        traits = engine._numerics_traits(ScriptedBackend(), job)
        assert traits["vocabulary_loss"] == vocabulary_loss.VERSION
