"""A file written in pieces equals, byte for byte, a file of the safetensors library."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, save

from coordinator.disk import safetensors_file
from coordinator.disk.durable_file import replace_file
from coordinator.disk.safetensors_file import safetensors_pieces

NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(st.dictionaries(NAMES, SHAPES, max_size=6), st.text('abc\u00e9\n"\\', max_size=5))
def test_bytes_equal_the_safetensors_library(shapes, format_name):
    random = np.random.default_rng(1)
    tensors = {
        name: np.asarray(random.standard_normal(shape), np.float32)
        for name, shape in shapes.items()
    }
    metadata = {"format": format_name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "_PIECE_BYTES", 12)
        actual = b"".join(safetensors_pieces(tensors, metadata))
    assert actual == save(tensors, metadata=metadata)
    assert {name: values.tobytes() for name, values in load(actual).items()} == {
        name: values.tobytes() for name, values in tensors.items()
    }


def test_pieces_are_short_views(tmp_path):
    tensors = {"a": np.ones((3, 1 << 20), np.float32), "b": np.zeros(7, np.float32)}
    pieces = list(safetensors_pieces(tensors, {"step": "3"}))
    assert max(piece.nbytes for piece in pieces) <= 8 << 20
    assert all(np.shares_memory(np.frombuffer(p, np.uint8), tensors["a"]) for p in pieces[1:3])
    replace_file(tmp_path / "t", pieces)
    with safe_open(tmp_path / "t", "numpy") as file:
        assert file.metadata() == {"step": "3"}
        assert file.get_tensor("b").tolist() == [0.0] * 7
