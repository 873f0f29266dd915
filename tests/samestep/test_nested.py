"""Batches as arrays and back: every container and every tensor is restored."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from protocol.base.errors import DataError
from worker.scripts.nested_batches import NestedBatches, batch_digest

ONE, TWO = torch.tensor([1.0, 2.0]), torch.tensor([3, 4])


# Called in tests, not at import: this starts OpenMP threads, and processes forked later would wait
# for them.
def make_sparse_and_nested():
    # torch warns about prototypes and deprecations
    with warnings.catch_warnings(action="ignore"):
        return [
            torch.eye(3).to_sparse(),
            torch.eye(3).to_sparse_csr(),
            torch.nested.nested_tensor([ONE, ONE[:1]]),
            torch.nested.nested_tensor([ONE, ONE[:1]], layout=torch.jagged),
        ]


def make_quantized():
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: Any
    directed: bool = True


class TensorSubclass(torch.Tensor):
    pass


class ListSubclass(list[Any]):
    pass


def round_trip(batch, batches=None):
    batches = batches or NestedBatches()
    arrays = batches.flatten(batch)
    with batches.rebuild(tensors_of(arrays)) as rebuilt_batch:
        return rebuilt_batch


def tensors_of(arrays):
    return {name: torch.tensor(values) for name, values in arrays.items()}


def assert_equal(first, second):
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert (first.dtype, first.layout) == (second.dtype, second.layout)
        assert first.requires_grad == second.requires_grad
        if first.is_nested:
            assert_equal(list(first.unbind()), list(second.unbind()))
        else:
            assert first.shape == second.shape
            dense = (tensor.detach().to_dense() for tensor in (first, second))
            assert torch.equal(*dense)
    elif isinstance(first, Mapping):
        assert list(first) == list(second)
        assert_equal(list(first.values()), list(second.values()))
    elif isinstance(first, list | tuple):
        for a, b in zip(first, second, strict=True):
            assert_equal(a, b)
    elif isinstance(first, Graph):
        assert_equal([first.nodes, first.directed], [second.nodes, second.directed])
    else:
        assert first == second


@pytest.mark.parametrize(
    "batch",
    [
        ONE,
        {"a": {"b": ONE}, "a.b": TWO},
        {0: ONE, "0": TWO, (1, 2): ONE + 1},
        {"flag": False, "none": None, "count": 3, "rate": 0.1, "x": ONE},
        [ONE, (TWO, Pair(ONE, [TWO]))],
        Graph({"x": ONE}, directed=False),
        OrderedDict(y=ONE, x=TWO),
        defaultdict(lambda: ONE, x=ONE),
        UserDict({"x": ONE}),
        BatchEncoding({"input_ids": TWO, "attention_mask": ONE}),
        BaseModelOutput(last_hidden_state=ONE),
        ONE.bfloat16(),
        ONE.to(torch.float8_e5m2),
        torch.complex(ONE, ONE).conj(),
        ONE.clone().requires_grad_(),
    ],
)
def test_rebuilt_batch_equals_the_original(batch):
    assert_equal(round_trip(batch), batch)


def test_sparse_and_nested_tensors_are_rebuilt():
    for batch in make_sparse_and_nested():
        assert_equal(round_trip(batch), batch)


def test_structures_with_equal_names_are_distinguished():
    structures = [
        [ONE, TWO], (ONE, TWO), {"0": ONE, "1": TWO}, {"1": TWO, "0": ONE}, {0: ONE, 1: TWO},
        {"x": ONE, "train": True}, {"x": ONE, "train": False},
        {"x": ONE, "y": None}, {"x (2)": ONE}, {"x": ONE},
    ]  # fmt: skip
    batches = NestedBatches()
    array_sets = [batches.flatten(batch) for batch in structures]
    for arrays, batch in zip(array_sets, structures, strict=True):
        tensors = {name: torch.tensor(values) for name, values in arrays.items()}
        with batches.rebuild(tensors) as rebuilt_batch:
            assert_equal(rebuilt_batch, batch)
        assert set(batches.flatten(batch)) == set(arrays)
    assert len({batch_digest(batch) for batch in structures}) == len(structures)


def test_digest_covers_values_and_structure_only():
    assert batch_digest({"x": ONE, "n": 2}) == batch_digest({"x": ONE.clone(), "n": 2})
    assert batch_digest({"x": ONE, "n": 2}) != batch_digest({"x": ONE, "n": 3})
    assert batch_digest({"x": ONE, "n": 2}) != batch_digest({"x": ONE, "n": 2.0})


def make_list_with_attribute():
    batch = ListSubclass([ONE])
    batch.labels = TWO  # type: ignore[attr-defined]
    return batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"text": "a"}, "got 'text' of type str: leave it out"),
        (
            {"x": ONE.as_subclass(TensorSubclass)},
            r"got 'x' of type TensorSubclass .*\.as_subclass\(torch\.Tensor",
        ),
        ({"x": np.ma.masked_array([1.0], [True])}, "got 'x' of type MaskedArray"),
        ({"x": np.array([None])}, "got 'x' of type ndarray in object"),
        (
            make_list_with_attribute(),
            "as attribute 'labels' of a ListSubclass: make it a separate entry",
        ),
        ({"x": nn.Linear(1, 1)}, "got 'x' of type Linear"),
        ({}, "got dict without any"),
    ],
)
def test_unsupported_values_are_refused_by_name(batch, message):
    with pytest.raises(DataError, match=message) as error:
        NestedBatches().flatten(batch)
    assert "\n" not in str(error.value)


def test_quantized_tensor_is_refused_by_name():
    with pytest.raises(DataError, match=r"\.dequantize\(\)"):
        NestedBatches().flatten({"x": make_quantized()})


def test_tensor_used_twice_is_rebuilt_as_one_tensor():
    x, array = torch.arange(6.0), np.arange(6)
    bfloat16_tensor = x.bfloat16()
    original = {
        "x": x,
        "again": [x, x.view(6)],
        "half": bfloat16_tensor,
        "array": array,
        "pair": (bfloat16_tensor, array),
    }
    rebuilt_batch = round_trip(original)
    assert rebuilt_batch["again"][0] is rebuilt_batch["again"][1] is rebuilt_batch["x"]
    assert rebuilt_batch["pair"][0] is rebuilt_batch["half"]
    assert rebuilt_batch["pair"][1] is rebuilt_batch["array"]
    assert batch_digest(original) == batch_digest({**original, "again": [x, x.clone()]})
    batches = NestedBatches()
    for batch in ([x, x], [x, x + 0.0], [x, x], [x, x.clone().requires_grad_()]):
        rebuilt_batch = round_trip(batch, batches)
        assert_equal(rebuilt_batch, batch)
        assert (rebuilt_batch[0] is rebuilt_batch[1]) == (batch[0] is batch[1])


def test_overlapping_views_may_be_read_but_not_changed():
    tokens = torch.arange(12).view(2, 6)
    batches = NestedBatches()
    arrays = batches.flatten(
        {"inputs": tokens[:, :-1], "labels": tokens[:, 1:], "x": tokens[0] + 0}
    )
    with batches.rebuild(tensors_of(arrays)) as rebuilt_batch:
        rebuilt_batch["x"].zero_()
        assert torch.equal(rebuilt_batch["inputs"] + 1, rebuilt_batch["labels"])
    message = r"'labels' of the batch.* view that shares memory with 'inputs'.*\.clone\(\)"
    with (
        pytest.raises(DataError, match=message),
        batches.rebuild(tensors_of(arrays)) as rebuilt_batch,
    ):
        rebuilt_batch["labels"][:, 0] = -100
    with pytest.raises(DataError, match="'inputs' of the batch"):  # noqa: SIM117
        with batches.rebuild(tensors_of(arrays)) as rebuilt_batch:
            rebuilt_batch["inputs"].mul_(2)
    separate = batches.flatten(
        {"inputs": tokens[:, :3], "labels": tokens[:, 3:], "x": tokens[0] + 0}
    )
    assert separate.keys() == arrays.keys()
    fresh_batches = NestedBatches()
    with fresh_batches.rebuild(
        tensors_of(fresh_batches.flatten([tokens[:, :3], tokens[:, 3:]]))
    ) as rebuilt_batch:
        rebuilt_batch[0].zero_()
