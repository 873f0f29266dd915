"""Parameter groups: rules by tensor name, like torch's groups; on replicas and in inner steps."""

from typing import Any

import numpy as np
import pytest
import torch

from protocol.base.errors import RunSpecError
from protocol.exact.parameter_groups import (
    ClippedGroups,
    TensorRule,
    decays,
    tensor_rule,
    unmatched_pattern,
)
from protocol.exact.reduction.average import square_sum
from protocol.exact.replica import Replica
from protocol.exact.update import global_norm, step_scalars
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.run_spec import parse_run_spec, parse_run_spec_bytes
from protocol.spec.sections.optimizer import Adam, Adamw, OptimizerSpec, ParameterGroup
from tests.torch_optimizers import torch_optimizer

SIZES = {"layers.0.weight": 35, "layers.0.bias": 5, "layers.10.weight": 15, "head.norm": 6}
BLOCKS = tuple(
    Block(name=f"block {number}", kind="block", tensors=tuple(
        TensorSpec(name=name, shape=(SIZES[name],)) for name in names
    ))
    for number, names in enumerate([list(SIZES)[:3], list(SIZES)[3:]])
)  # fmt: skip
GROUPS = (
    ParameterGroup(match=("*.bias",), weight_decay=0.3),
    ParameterGroup(match=("layers.0.*",), lr_scale=0.5),
    ParameterGroup(match=("head.*",), lr_scale=16.0, weight_decay=0.0),
)
RULES = {
    "layers.0.weight": (0.5, 0.1), "layers.0.bias": (1.0, 0.3), "layers.10.weight": (1.0, 0.1),
    "head.norm": (16.0, 0.0),
}  # fmt: skip
NAMES = (
    "sgd", "momentum", "nesterov", "adamw", "adam", "rmsprop", "adagrad", "lion", "schedule-free",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("encoder.layer.0.dense.weight", True),
        ("encoder.layer.0.dense.bias", False),
        ("encoder.LayerNorm.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_decay_groups_match_name_parts_in_any_case(name, expected):
    assert decays(name, Adamw(no_decay=("BIAS", "norm"))) is expected
    assert decays(name, Adamw(no_decay=()))


def spec_of(name, **keys):
    return OptimizerSpec(
        name=name, lr=1e-3, weight_decay=0.1, groups=GROUPS, momentum=momentum_of(name), **keys
    )


def momentum_of(name):
    return 0.0 if name == "rmsprop" else 0.9


def gradient(block, step):
    random = np.random.default_rng([block.elements, step])
    return random.standard_normal(block.elements).astype(np.float32)


def train(spec, steps=20):
    replica = Replica(BLOCKS, spec)
    replica.load_parameters([gradient(block, 99) for block in BLOCKS])
    for step in range(steps):
        gradients = [gradient(block, step) for block in BLOCKS]
        norm = global_norm(map(square_sum, gradients))
        replica.apply(gradients, step_scalars(spec, step + 1, step, steps, norm))
    return replica.trained_tensors()


def test_the_first_group_that_matches_decides():
    for name, (lr_scale, weight_decay) in RULES.items():
        assert tensor_rule(name, spec_of("adamw")) == TensorRule(lr_scale, weight_decay)


@pytest.mark.parametrize("name", NAMES)
def test_each_group_is_a_separate_optimizer(name):
    """A tensor has the bits of an ungrouped run with its rate and decay, up to one rounding."""
    weights = train(spec_of(name))
    for tensor, (lr_scale, weight_decay) in RULES.items():
        ungrouped = OptimizerSpec(
            name=name, lr=1e-3 * lr_scale, weight_decay=weight_decay, no_decay=(),
            momentum=momentum_of(name),
        )  # fmt: skip
        expected = train(ungrouped)[tensor]
        assert np.allclose(weights[tensor], expected, rtol=2e-6, atol=1e-7)
        if lr_scale == 1.0 and weight_decay == 0.1:
            assert weights[tensor].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "schedule-free"])
def test_groups_equal_torch(name):
    spec = spec_of(name, clip_norm=1.0)
    start = Replica(BLOCKS, spec)
    start.load_parameters([gradient(block, 99) for block in BLOCKS])
    parameters = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in start.tensors().items()}
    optimizer = torch_optimizer(spec, [
        {"params": [p], "lr": spec.lr * RULES[n][0], "weight_decay": RULES[n][1]}
        for n, p in parameters.items()
    ])  # fmt: skip
    for step in range(20):
        for block in BLOCKS:
            values = gradient(block, step)
            for tensor, part in block.slices():
                parameters[tensor.name].grad = torch.tensor(values[part])
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
    weights = train(spec)
    for name_of_tensor, parameter in parameters.items():
        assert np.allclose(
            weights[name_of_tensor], parameter.detach().numpy(), rtol=1e-5, atol=1e-6
        )


def test_groups_are_clipped_by_their_own_norm():
    groups = (
        ParameterGroup(match=("*.bias", "head.*"), clip_norm=0.5),
        ParameterGroup(match=("layers.10.*",), lr_scale=2.0),
        ParameterGroup(match=("layers.0.*",), clip_norm=0.25, weight_decay=0.1),
    )
    spec = Adam(name="adam", lr=1e-2, clip_norm=2.0, groups=groups, eps=1e-2)
    replica = Replica(BLOCKS, spec)
    replica.load_parameters([gradient(block, 99) for block in BLOCKS])
    p = {n: torch.nn.Parameter(torch.tensor(v)) for n, v in replica.tensors().items()}
    torch_groups: list[dict[str, Any]] = [
        {"params": [p["layers.0.bias"], p["head.norm"]]},
        {"params": [p["layers.10.weight"]], "lr": 2e-2},
        {"params": [p["layers.0.weight"]], "weight_decay": 0.1},
    ]
    optimizer = torch.optim.Adam(torch_groups, lr=1e-2, eps=1e-2)
    for step in range(20):
        for block in BLOCKS:
            for tensor, part in block.slices():
                p[tensor.name].grad = torch.tensor(gradient(block, step)[part])
        for group, limit in zip(optimizer.param_groups, (0.5, 2.0, 0.25), strict=True):
            torch.nn.utils.clip_grad_norm_(group["params"], limit)
        optimizer.step()
        gradients = [gradient(block, step) for block in BLOCKS]
        norms = ClippedGroups(spec).norms_of(BLOCKS, gradients)
        assert norms.whole == global_norm(map(square_sum, gradients))
        replica.apply(gradients, step_scalars(spec, step + 1, step, 20, norms))
    for name, weights in replica.tensors().items():
        assert np.allclose(weights, p[name].detach().numpy(), rtol=1e-6, atol=1e-6)


def test_contradictory_clipping_options_are_refused():
    group_clipping = {"groups": [{"match": "*", "clip_norm": 1.0}]}
    group_list = {"groups": [{"match": f"t{n}", "clip_norm": 1.0} for n in range(17)]}
    for keys, text in (
        ({"clip_value": 1.0, "clip_norm": 1.0}, "clip_norm or clip_value, got both"),
        ({"clip_value": 1.0, **group_clipping}, "clip_norm or clip_value, got both"),
        (group_list, "at most 16 groups with clip_norm, got 17"),
    ):
        with pytest.raises(RunSpecError, match=text):
            parse_run_spec({"task": "regress", "steps": 3, "optimizer": keys})


def test_decay_below_float32_is_zero():
    group = ParameterGroup(match=("w",), weight_decay=1e-50)
    spec = OptimizerSpec(name="sgd", lr=0.1, weight_decay=0.5, groups=(group,))
    block = Block(name="b", kind="block", tensors=(TensorSpec(name="w", shape=(1,)),))
    replica = Replica((block,), spec)
    replica.parameters[0][:] = 1.0
    replica.apply([np.zeros(1, np.float32)], step_scalars(spec, 1, 0, 10, 0.0))
    assert replica.parameters[0].tolist() == [1.0]


def test_zero_rate_leaves_tensors_unchanged():
    spec = Adamw(weight_decay=0.1, groups=(ParameterGroup(match=("layers.*",), lr_scale=0.0),))
    start, weights = train(spec, steps=0), train(spec)
    for name in SIZES:
        assert (weights[name].tobytes() == start[name].tobytes()) is name.startswith("layers.")


@pytest.mark.parametrize(
    ("patterns", "fault"),
    [
        ([("*",)], ""),
        ([("*.bias",), ("layers.*", "head.norm")], ""),
        ([("*.bias", "layers.1.*")], r"groups\[0\].*'layers.1.\*'; none matches.*layers.10.weight"),
        ([("weight",)], "'weight'; none matches"),
        ([("layers.*",), ("*.bias",)], r"groups\[1\].*'\*.bias'; all matches are in earlier"),
    ],
)
def test_unmatched_pattern_is_named_with_the_tensor_names(patterns, fault):
    spec = Adamw(groups=tuple(ParameterGroup(match=group) for group in patterns))
    message = unmatched_pattern(spec, BLOCKS)
    assert bool(message) is bool(fault)
    if fault:
        with pytest.raises(ValueError, match=fault):
            raise ValueError(message)


def test_run_spec_may_have_groups():
    document = {"task": "regress", "steps": 3, "optimizer": {"weight_decay": 0.1}}
    plain_spec = parse_run_spec(document)
    assert "groups" not in plain_spec.to_bytes().decode()
    group = "optimizer.groups=[{match: b, lr_scale: 2}, {match: [w], weight_decay: 0}]"
    spec = parse_run_spec(document, [group])
    assert spec.optimizer.groups[0] == ParameterGroup(match=("b",), lr_scale=2.0)
    assert spec.digest() != plain_spec.digest()
    assert parse_run_spec_bytes(spec.to_bytes()) == spec
    with pytest.raises(RunSpecError, match=r"optimizer.groups.*lr_sale"):
        parse_run_spec(document, ["optimizer.groups=[{match: w, lr_sale: 2}]"])
