"""Codecs of sums and averages, by integer arithmetic.

`project` rounds values to what a codec can represent. Projected values are sent without further
loss, so the sender and all receivers have the same bits.

    float32, bfloat16   unchanged; rounded to nearest, ties to even
    int8, int4          groups of 64 or 32 values share a scale that is a power of two: q times 2^e
                        with |q| <= 127 or 7, and the smallest e that fits the group's largest
                        value. A power of two makes every product exact (compare Streaming DiLoCo,
                        arXiv:2501.18512)
    topk                the 64 largest magnitudes of every 4096 values, in bfloat16, others zero;
                        of equal magnitudes, those with the lowest indices

A value that is not finite makes its group NaN (int8, int4) or stays non-finite, so that the
receiver detects it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.exact.kernels.library import library_for, library_for_bytes
from protocol.exact.reduction import bfloat16
from protocol.exact.reduction.average import Array
from protocol.spec.sections.exchange import Codec

_GROUP_ELEMENTS: Final = {"int8": 64, "int4": 32}
_LARGEST: Final = {"int8": 127, "int4": 7}
_MANTISSA: Final = {"int8": np.float32(127 / 128), "int4": np.float32(7 / 8)}
_BITS: Final = {"int8": 7, "int4": 3}
_NOT_FINITE: Final = -128
"""Exponent that marks a group with a value that is not finite."""
_MIN_EXPONENT: Final = -126
"""Smallest exponent: below it 2^e is subnormal."""
_REGION_ELEMENTS: Final = 4096
_SELECTED_PERIOD: Final = 64
"""topk selects one value of this many, rounded up, in each region."""

Bytes = NDArray[np.uint8]


def body_bytes(codec: Codec, elements: int) -> int:
    """Return the length of the encoding of a number of elements."""
    match codec:
        case "float32":
            return 4 * elements
        case "bfloat16":
            return 2 * elements
        case "int8":
            return elements + _group_count(codec, elements)
        case "int4":
            return (elements + 1) // 2 + _group_count(codec, elements)
        case "topk":
            return 4 * sum(count for _, count in _regions(elements))


def project(values: Array, codec: Codec) -> Array:
    """Round a flat array in place to values that the codec can represent, and return it."""
    match codec:
        case "float32":
            return values
        case "bfloat16":
            return bfloat16.round_to_bfloat16(values)
        case _:
            values[:] = unpack(pack(values, codec), codec, len(values))
            return values


def pack(values: Array, codec: Codec) -> NDArray[Any]:
    """Encode a flat array; for bfloat16 it must be rounded already."""
    match codec:
        case "float32" | "bfloat16":
            return bfloat16.pack(values, codec)
        case _ if (library := library_for(values)) is not None:
            head = _head_bytes(codec, len(values))
            return library.pack(codec, values, head, body_bytes(codec, len(values)) - head)
        case "topk":
            return _encode_largest(values)
        case _:
            return _quantize(values, codec)


def unpack(raw: Bytes, codec: Codec, elements: int) -> Array:
    """Decode to float32; float32 gives a view."""
    match codec:
        case "float32" | "bfloat16":
            return bfloat16.unpack(raw, codec)
        case _ if (library := library_for_bytes(raw, body_bytes(codec, elements))) is not None:
            return library.unpack(codec, raw, _head_bytes(codec, elements), elements)
        case "topk":
            return _decode_largest(raw, elements)
        case _:
            return _dequantize(raw, codec, elements)


def _head_bytes(codec: Codec, elements: int) -> int:
    """Return the length of the exponents (int8, int4) or indices (topk) before the values."""
    return body_bytes(codec, elements) // 2 if codec == "topk" else _group_count(codec, elements)


def _group_count(codec: Codec, elements: int) -> int:
    return -(-elements // _GROUP_ELEMENTS[codec])


def _quantize(values: Array, codec: Codec) -> Bytes:
    """Encode exponents as int8, then values as int8, or as two nibbles per byte, low one first.

    A nibble is the value plus 8.
    """
    size, groups = _GROUP_ELEMENTS[codec], _group_count(codec, len(values))
    grouped = np.zeros((groups, size), np.float32)
    grouped.reshape(-1)[: len(values)] = values
    largest = np.abs(grouped).max(axis=1, initial=0)
    finite = np.isfinite(largest)
    mantissa, power = np.frexp(np.where(finite, largest, np.float32(0)))
    exponent = power - _BITS[codec] + (mantissa > _MANTISSA[codec])
    exponent = np.maximum(exponent, _MIN_EXPONENT)
    inverse = np.ldexp(np.float32(1), -exponent).astype(np.float32)
    with np.errstate(all="ignore"):
        integers = np.rint(np.where(finite[:, None], grouped, np.float32(0)) * inverse[:, None])
    flat = integers.astype(np.int8).reshape(-1)[: len(values)]
    head = np.where(finite, exponent, _NOT_FINITE).astype(np.int8).view(np.uint8)
    if codec == "int8":
        return np.concatenate([head, flat.view(np.uint8)])
    nibbles = np.zeros(len(values) + len(values) % 2, np.uint8)
    nibbles[: len(values)] = flat + np.int8(8)
    return np.concatenate([head, nibbles[0::2] | (nibbles[1::2] << np.uint8(4))])


def _dequantize(raw: Bytes, codec: Codec, elements: int) -> Array:
    """Decode the result of `_quantize`."""
    size, groups = _GROUP_ELEMENTS[codec], _group_count(codec, elements)
    head, body = raw[:groups].view(np.int8), raw[groups:]
    integers = np.zeros(groups * size, np.float32)
    if codec == "int8":
        integers[:elements] = body.view(np.int8)
    else:
        pairs = np.stack([body & np.uint8(15), body >> np.uint8(4)], axis=1).reshape(-1)
        integers[:elements] = pairs[:elements].astype(np.int8) - np.int8(8)
    scales = np.ldexp(np.float32(1), np.maximum(head, _MIN_EXPONENT).astype(np.int32))
    scales = np.where(head == _NOT_FINITE, np.float32(np.nan), scales).astype(np.float32)
    with np.errstate(all="ignore"):
        return (integers.reshape(groups, size) * scales[:, None]).reshape(-1)[:elements]


def _regions(elements: int) -> list[tuple[slice, int]]:
    """Return the regions from which topk selects, each with the number of values to select."""
    starts = range(0, elements, _REGION_ELEMENTS)
    return [
        (
            slice(lo, min(lo + _REGION_ELEMENTS, elements)),
            -(-min(_REGION_ELEMENTS, elements - lo) // _SELECTED_PERIOD),
        )
        for lo in starts
    ]


def _encode_largest(values: Array) -> Bytes:
    """Encode the indices within each region, ascending, as uint16, then the values as bfloat16."""
    indices, selected_values = [], []
    for part, count in _regions(len(values)):
        # As integers NaN is above infinity, and both are above all finite values.
        region = values[part]
        magnitudes = (region.view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.int64)
        selected = np.sort(np.argsort(-magnitudes, kind="stable")[:count])
        indices.append(selected.astype("<u2"))
        selected_values.append(
            bfloat16.pack(bfloat16.round_to_bfloat16(region[selected]), "bfloat16")
        )
    if not indices:
        return np.zeros(0, np.uint8)
    return np.concatenate([*indices, *selected_values]).view(np.uint8)


def _decode_largest(raw: Bytes, elements: int) -> Array:
    """Decode the result of `_encode_largest`; values that were not selected are zero."""
    values = np.zeros(elements, np.float32)
    regions = _regions(elements)
    total = sum(count for _, count in regions)
    indices = raw[: 2 * total].view("<u2")
    selected_values = bfloat16.unpack(raw[2 * total :], "bfloat16")
    start = 0
    for part, count in regions:
        region = values[part]
        # An index outside the region can only be forged: clamp it to the last index.
        clamped = np.minimum(indices[start : start + count], len(region) - 1)
        region[clamped] = selected_values[start : start + count]
        start += count
    return values
