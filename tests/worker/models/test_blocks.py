"""Division of a module's trainable tensors into blocks."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from protocol.base.errors import DataError
from worker.models.blocks import cut_by_size, cut_into_blocks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(10))


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(layers))


class Model(nn.Module):
    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(3, 2)
        self.encoder = Encoder(layers)
        self.pooler = nn.Linear(2, 2)
        self.classifier = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def structure(module: nn.Module) -> list[tuple[str, str, int]]:
    return [(b.name, b.kind, len(b.tensors)) for b in cut_into_blocks(module)]


def test_an_encoder_has_embeddings_layers_in_order_and_a_head():
    assert structure(Model()) == [
        ("embeddings", "non_block", 1),
        *[(f"layer.{n}", "block", 22) for n in range(12)],
        ("head", "non_block", 6),
    ]


def test_every_trainable_tensor_is_listed_once_with_its_shape():
    module = Model(3)
    shape_by_name = {t.name: t.shape for block in cut_into_blocks(module) for t in block.tensors}
    assert shape_by_name == {name: tuple(p.shape) for name, p in module.named_parameters()}


def test_a_single_layer_is_a_block_too():
    assert [name for name, _, _ in structure(Model(1))] == ["embeddings", "layer.0", "head"]


def test_layers_keep_their_numbers_without_frozen_blocks():
    module = Model(3)
    module.requires_grad_(False)
    for name in ("encoder.layer.1.linear.bias", "classifier.2.weight"):
        module.get_parameter(name).requires_grad_(True)
    assert structure(module) == [("layer.1", "block", 1), ("head", "non_block", 1)]


def test_tied_tensor_is_in_its_first_block():
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(3, 2)
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
            self.norm = nn.LayerNorm(2)
            self.head = nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

    assert structure(Decoder()) == [
        ("embeddings", "non_block", 1),
        ("layer.0", "block", 2),
        ("layer.1", "block", 2),
        ("head", "non_block", 2),
    ]


def test_encoder_decoder_has_both_stacks_and_the_layers_between():
    module = nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(3, 2),
            encoder=Encoder(2),
            bridge=nn.Linear(2, 2),
            decoder=Encoder(2),
            out=nn.Linear(2, 2),
        )
    )
    assert [name for name, _, _ in structure(module)] == [
        "embeddings", "layer.0", "layer.1", "between.1", "layer.2", "layer.3", "head",
    ]  # fmt: skip


def test_a_plain_sequential_of_linears_is_a_stack():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    assert structure(module) == [(f"layer.{n}", "block", 2) for n in range(3)]


def test_a_model_without_layers_is_one_block():
    assert structure(nn.Linear(3, 1)) == [("model", "block", 2)]


def test_model_without_layers_is_split_by_size_on_request():
    uneven_stack = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 1))
    assert len(cut_into_blocks(uneven_stack)) == 1
    blocks = cut_by_size(uneven_stack, 18)
    assert [(block.name, block.elements) for block in blocks] == [
        ("part.0", 20), ("part.1", 20), ("part.2", 5),
    ]  # fmt: skip
    tensor_names = [tensor.name for block in blocks for tensor in block.tensors]
    assert tensor_names == [name for name, _ in uneven_stack.named_parameters()]
    assert cut_by_size(Model(), 1) == cut_into_blocks(Model())


def test_model_without_trainable_tensors_is_refused():
    with pytest.raises(DataError, match="expected a model with trainable tensors"):
        cut_into_blocks(Model().requires_grad_(False))
