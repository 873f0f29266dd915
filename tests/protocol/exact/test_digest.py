"""Digests: frozen, and different whenever any relevant value differs."""

import struct

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from protocol.exact.digest import state_digest, state_digest_1, weights_digest

SHAPES = [(), (0,), (3,), (2, 3), (3, 2), (1, 6), (6, 1), (0, 4)]


def tensor(*shape, fill=1.0):
    return np.full(shape, fill, np.float32)


def naive_weights_digest(tensors):
    """Hash the documented encoding, built as one byte string."""
    document = b"samestep tensors 1\n" + len(tensors).to_bytes(8, "little")
    for name, array in sorted(tensors.items()):
        document += len(name.encode()).to_bytes(4, "little") + name.encode()
        document += array.ndim.to_bytes(4, "little")
        document += b"".join(size.to_bytes(8, "little") for size in array.shape)
        document += b"".join(struct.pack("<f", value) for value in array.ravel().tolist())
    return blake3(document).hexdigest()


@given(st.dictionaries(st.text(max_size=5), st.sampled_from(SHAPES), max_size=4))
def test_weights_digest_hashes_the_documented_bytes(shapes):
    tensors = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    assert weights_digest(tensors) == naive_weights_digest(tensors)


def test_digests_are_frozen():
    tensors = {"b": tensor(2, 3), "a.weight": np.arange(4, dtype=np.float32)}
    assert (
        weights_digest(tensors)
        == "81e9caf73a6a1b51ec1cfe7edf1ee6a6266dff3a5b7c9c2598919aeca4e669e4"
    )
    assert (
        state_digest_1(3, 2, {"parameters": tensors, "first_moment": tensors}.items())
        == "a943551bbb757572e746d6e5908f9f2cee8009f709e3701ebee372633e04d83c"
    )
    blocks = [tensor(6), np.arange(4, dtype=np.float32)]
    assert (
        state_digest(3, 2, {"parameters": blocks, "first_moment": blocks}.items())
        == "c71f6ff560b06cbb7b309681f083959268845b3a81f1473ce3ed4ebdba95cb0d"
    )


def test_state_digest_hashes_the_documented_bytes():
    arrays = {
        "parameters": [tensor(3), tensor(65_600, fill=2.0)],
        "first_moment": [tensor(3), tensor(65_600)],
    }
    document = b"samestep state 2\n" + struct.pack("<QQI", 4, 3, 2)
    for kind, blocks in arrays.items():
        document += struct.pack("<I", len(kind)) + kind.encode() + struct.pack("<I", len(blocks))
        for block in blocks:
            document += struct.pack("<Q", block.size)
            for piece in np.split(block, range(65_536, block.size, 65_536)):
                document += xxhash.xxh3_128(piece.tobytes()).digest()
    assert state_digest(4, 3, arrays.items()) == blake3(document).hexdigest()


def test_the_order_of_names_does_not_count():
    a, b = tensor(2), tensor(3)
    assert weights_digest({"a": a, "b": b}) == weights_digest({"b": b, "a": a})


def test_layout_in_memory_does_not_count():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = weights_digest({"w": array})
    assert weights_digest({"w": np.asfortranarray(array)}) == expected
    assert weights_digest({"w": np.repeat(array, 2, axis=1)[:, ::2]}) == expected
    unaligned = np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(np.float32)
    assert weights_digest({"w": unaligned.reshape(3, 4)}) == expected


def test_names_shapes_and_tensor_boundaries_count():
    cases = [
        {},
        {"w": tensor(6)},
        {"v": tensor(6)},
        {"w": tensor(2, 3)},
        {"w": tensor(3, 2)},
        {"w": tensor(6, 1)},
        {"w": tensor(5)},
        {"w": tensor(6), "x": tensor(0)},
        {"w": tensor(3), "x": tensor(3)},
        {"w": tensor(2), "x": tensor(4)},
        {"w": tensor(0)},
        {"w": tensor(0, 2)},
    ]
    assert len({weights_digest(case) for case in cases}) == len(cases)


@given(st.integers(0, 20 * 32 - 1))
def test_every_bit_counts(bit):
    array = np.arange(20, dtype=np.float32)
    before = weights_digest({"w": array})
    array.view(np.uint32)[bit // 32] ^= np.uint32(1 << bit % 32)
    assert weights_digest({"w": array}) != before


def test_zeros_and_nans_count_by_their_bits():
    patterns = np.array([0, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32)
    digests = {weights_digest({"w": patterns[i : i + 1].view(np.float32)}) for i in range(5)}
    assert len(digests) == 5


def test_every_part_of_the_state_changes_the_digest():
    w, other = tensor(3), tensor(3, fill=2.0)
    cases = [
        (1, 1, {"parameters": [w]}),
        (2, 1, {"parameters": [w]}),
        (1, 0, {"parameters": [w]}),
        (1, 1, {"parameters": [other]}),
        (1, 1, {"first_moment": [w]}),
        (1, 1, {"parameters": [w], "first_moment": [w]}),
        (1, 1, {"parameters": [w], "first_moment": [other]}),
        (1, 1, {"parameters": [other], "first_moment": [w]}),
        (1, 1, {"parameters": [w, w]}),
        (1, 1, {"parameters": [np.concatenate([w, w])]}),
        (1, 1, {}),
    ]
    digests = {state_digest(step, updates, kinds.items()) for step, updates, kinds in cases}
    digests |= {
        state_digest_1(
            step,
            updates,
            {kind: dict(zip("ab", arrays, strict=False)) for kind, arrays in kinds.items()}.items(),
        )
        for step, updates, kinds in cases
    }
    assert len(digests) == 2 * len(cases)


def test_another_dtype_is_an_internal_error():
    with pytest.raises(AssertionError):
        weights_digest({"w": np.zeros(2)})  # type: ignore[dict-item]
