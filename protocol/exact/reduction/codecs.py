"""Codecs of sums and averages, by integer arithmetic.

`projected` rounds values to what a codec can represent. Projected values are sent without further
loss, so the sender and all receivers have the same bits.

    float32, bfloat16   unchanged; rounded to nearest, ties to even
    int8, int4          groups of 64 or 32 values share a scale that is a power of two: q times 2^e
                        with |q| <= 127 or 7, and the smallest e that fits the group's largest
                        value. A power of two makes every product exact (compare Streaming DiLoCo,
                        arXiv:2501.18512)
    topk                the 64 largest magnitudes of every 4096 values, in bfloat16, others zero;
                        ordered by (magnitude descending, index), so that ties are well-defined

A group or a selected value that is not finite stays so, to be detected by the receiver.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.exact.kernels.library import library_for, library_for_bytes
from protocol.exact.reduction import bfloat16
from protocol.exact.reduction.average import Array
from protocol.spec.sections.exchange import Codec

_GROUP: Final = {"int8": 64, "int4": 32}
_LARGEST: Final = {"int8": 127, "int4": 7}
_MANTISSA: Final = {"int8": np.float32(127 / 128), "int4": np.float32(7 / 8)}
_BITS: Final = {"int8": 7, "int4": 3}
_NOT_FINITE: Final = -128
"""Exponent that marks a group that is not finite."""
_LEAST: Final = -126
"""Smallest exponent: below it 2^e is subnormal."""
_REGION: Final = 4096
_SHARE: Final = 64
"""topk sends one value in this many."""

Bytes = NDArray[np.uint8]


def body_bytes(codec: Codec, elements: int) -> int:
    """Return the length of the encoding of a number of elements."""
    match codec:
        case "float32":
            return 4 * elements
        case "bfloat16":
            return 2 * elements
        case "int8":
            return elements + _groups(codec, elements)
        case "int4":
            return (elements + 1) // 2 + _groups(codec, elements)
        case "topk":
            return 4 * sum(count for _, count in _regions(elements))


def projected(values: Array, codec: Codec) -> Array:
    """Round a flat array in place to what the codec can represent."""
    match codec:
        case "float32":
            return values
        case "bfloat16":
            return bfloat16.rounded(values)
        case _:
            values[:] = unpacked(packed(values, codec), codec, len(values))
            return values


def packed(values: Array, codec: Codec) -> NDArray[Any]:
    """Encode a flat array; for bfloat16 it must be rounded already."""
    match codec:
        case "float32" | "bfloat16":
            return bfloat16.packed(values, codec)
        case _ if (library := library_for(values)) is not None:
            head = _head_bytes(codec, len(values))
            return library.pack(codec, values, head, body_bytes(codec, len(values)) - head)
        case "topk":
            return _encode_largest(values)
        case _:
            return _quantized(values, codec)


def unpacked(raw: Bytes, codec: Codec, elements: int) -> Array:
    """Decode to float32; float32 gives a view."""
    match codec:
        case "float32" | "bfloat16":
            return bfloat16.unpacked(raw, codec)
        case _ if (library := library_for_bytes(raw, body_bytes(codec, elements))) is not None:
            return library.unpack(codec, raw, _head_bytes(codec, elements), elements)
        case "topk":
            return _scattered(raw, elements)
        case _:
            return _dequantize(raw, codec, elements)


def _head_bytes(codec: Codec, elements: int) -> int:
    """Return the length of the exponents or indices."""
    return body_bytes(codec, elements) // 2 if codec == "topk" else _groups(codec, elements)


def _groups(codec: Codec, elements: int) -> int:
    return -(-elements // _GROUP[codec])


def _quantized(values: Array, codec: Codec) -> Bytes:
    """Encode exponents as int8, then values as int8, or as two nibbles per byte, low one first.

    Nibbles are offset by 8.
    """
    size, groups = _GROUP[codec], _groups(codec, len(values))
    grouped = np.zeros((groups, size), np.float32)
    grouped.reshape(-1)[: len(values)] = values
    largest = np.abs(grouped).max(axis=1, initial=0)
    finite = np.isfinite(largest)
    mantissa, power = np.frexp(np.where(finite, largest, np.float32(0)))
    exponent = power - _BITS[codec] + (mantissa > _MANTISSA[codec])
    exponent = np.maximum(exponent, _LEAST)
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
    size, groups = _GROUP[codec], _groups(codec, elements)
    head, body = raw[:groups].view(np.int8), raw[groups:]
    integers = np.zeros(groups * size, np.float32)
    if codec == "int8":
        integers[:elements] = body.view(np.int8)
    else:
        pairs = np.stack([body & np.uint8(15), body >> np.uint8(4)], axis=1).reshape(-1)
        integers[:elements] = pairs[:elements].astype(np.int8) - np.int8(8)
    scales = np.ldexp(np.float32(1), np.maximum(head, _LEAST).astype(np.int32))
    scales = np.where(head == _NOT_FINITE, np.float32(np.nan), scales).astype(np.float32)
    with np.errstate(all="ignore"):
        return (integers.reshape(groups, size) * scales[:, None]).reshape(-1)[:elements]


def _regions(elements: int) -> list[tuple[slice, int]]:
    """Return the regions from which topk selects, and how many values of each."""
    starts = range(0, elements, _REGION)
    return [
        (slice(lo, min(lo + _REGION, elements)), -(-min(_REGION, elements - lo) // _SHARE))
        for lo in starts
    ]


def _encode_largest(values: Array) -> Bytes:
    """Encode the indices within each region, ascending, as uint16, then the values as bfloat16."""
    indices, values_kept = [], []
    for part, count in _regions(len(values)):
        # As integers NaN is above infinity, and both are above all finite values.
        region = values[part]
        size = (region.view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.int64)
        selected = np.sort(np.argsort(-size, kind="stable")[:count])
        indices.append(selected.astype("<u2"))
        values_kept.append(bfloat16.packed(bfloat16.rounded(region[selected]), "bfloat16"))
    if not indices:
        return np.zeros(0, np.uint8)
    return np.concatenate([*indices, *values_kept]).view(np.uint8)


def _scattered(raw: Bytes, elements: int) -> Array:
    values = np.zeros(elements, np.float32)
    regions = _regions(elements)
    total = sum(count for _, count in regions)
    indices = raw[: 2 * total].view("<u2")
    values_kept = bfloat16.unpacked(raw[2 * total :], "bfloat16")
    at = 0
    for part, count in regions:
        region = values[part]
        # An index outside the region is forged: clamp it to the last one.
        clamped = np.minimum(indices[at : at + count], len(region) - 1)
        region[clamped] = values_kept[at : at + count]
        at += count
    return values
