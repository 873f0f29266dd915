"""How flat float32 arrays travel: every codec of sums and averages, by integer arithmetic.

`projected` says what a codec makes of values; what is projected travels without any further loss,
so both sides, and everyone who is sent the same, have the same bits.

    float32, bfloat16   as they are; rounded to nearest, ties to even
    int8, int4          groups of 64 or 32 share a scale, a power of two: q times 2^e, |q| <= 127
                        or 7, e the least that fits the largest of the group. A power of two makes
                        every product exact (Streaming DiLoCo, arXiv:2501.18512, has such a type)
    topk                of each 4096 the 64 largest in size, in bfloat16, others zero; ordered by
                        (size descending, index), so that equal ones are no matter of a library

A group, or a chosen value, that is not finite stays so: it must be seen.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.exact import bfloat16
from protocol.exact.update import Array
from protocol.spec.replicas_spec import Codec

_GROUP: Final = {"int8": 64, "int4": 32}
_LARGEST: Final = {"int8": 127, "int4": 7}
_MANTISSA: Final = {"int8": np.float32(127 / 128), "int4": np.float32(7 / 8)}
_BITS: Final = {"int8": 7, "int4": 3}
_NOT_FINITE: Final = -128
"""In place of an exponent."""
_LEAST: Final = -126
"""The smallest exponent: below it 2^e is subnormal."""
_REGION: Final = 4096
_SHARE: Final = 64
"""One of so many is sent by topk."""

Bytes = NDArray[np.uint8]


def body_bytes(codec: Codec, elements: int) -> int:
    """The length of what `packed` makes of so many elements."""
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
    """What a codec makes of a flat array, in place."""
    match codec:
        case "float32":
            return values
        case "bfloat16":
            return bfloat16.rounded(values)
        case _:
            values[:] = unpacked(packed(values, codec), codec, len(values))
            return values


def packed(values: Array, codec: Codec) -> NDArray[Any]:
    """What travels of a flat array; of bfloat16 one that is rounded already."""
    match codec:
        case "float32" | "bfloat16":
            return bfloat16.packed(values, codec)
        case "topk":
            return _chosen(values)
        case _:
            return _quantised(values, codec)


def unpacked(raw: Bytes, codec: Codec, elements: int) -> Array:
    """The float32 values of what has travelled; of float32 a view."""
    match codec:
        case "float32" | "bfloat16":
            return bfloat16.unpacked(raw, codec)
        case "topk":
            return _scattered(raw, elements)
        case _:
            return _scaled(raw, codec, elements)


def _groups(codec: Codec, elements: int) -> int:
    return -(-elements // _GROUP[codec])


def _quantised(values: Array, codec: Codec) -> Bytes:
    """Exponents, int8; then int8 each, or two in a byte, the first in the lower half, plus 8."""
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
        whole = np.rint(np.where(finite[:, None], grouped, np.float32(0)) * inverse[:, None])
    flat = whole.astype(np.int8).reshape(-1)[: len(values)]
    head = np.where(finite, exponent, _NOT_FINITE).astype(np.int8).view(np.uint8)
    if codec == "int8":
        return np.concatenate([head, flat.view(np.uint8)])
    nibbles = np.zeros(len(values) + len(values) % 2, np.uint8)
    nibbles[: len(values)] = flat + np.int8(8)
    return np.concatenate([head, nibbles[0::2] | (nibbles[1::2] << np.uint8(4))])


def _scaled(raw: Bytes, codec: Codec, elements: int) -> Array:
    size, groups = _GROUP[codec], _groups(codec, elements)
    head, body = raw[:groups].view(np.int8), raw[groups:]
    whole = np.zeros(groups * size, np.float32)
    if codec == "int8":
        whole[:elements] = body.view(np.int8)
    else:
        pairs = np.stack([body & np.uint8(15), body >> np.uint8(4)], axis=1).reshape(-1)
        whole[:elements] = pairs[:elements].astype(np.int8) - np.int8(8)
    scales = np.ldexp(np.float32(1), np.maximum(head, _LEAST).astype(np.int32))
    scales = np.where(head == _NOT_FINITE, np.float32(np.nan), scales).astype(np.float32)
    with np.errstate(all="ignore"):
        return (whole.reshape(groups, size) * scales[:, None]).reshape(-1)[:elements]


def _regions(elements: int) -> list[tuple[slice, int]]:
    """Where topk chooses, and how many."""
    starts = range(0, elements, _REGION)
    return [
        (slice(lo, min(lo + _REGION, elements)), -(-min(_REGION, elements - lo) // _SHARE))
        for lo in starts
    ]


def _chosen(values: Array) -> Bytes:
    """Indices within their region, ascending, uint16; then their values, bfloat16."""
    indices, kept = [], []
    for part, count in _regions(len(values)):
        # As whole numbers: NaN is above infinity, and both are above all that is finite.
        region = values[part]
        size = (region.view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.int64)
        chosen = np.sort(np.argsort(-size, kind="stable")[:count])
        indices.append(chosen.astype("<u2"))
        kept.append(bfloat16.packed(bfloat16.rounded(region[chosen]), "bfloat16"))
    if not indices:
        return np.zeros(0, np.uint8)
    return np.concatenate([*indices, *kept]).view(np.uint8)


def _scattered(raw: Bytes, elements: int) -> Array:
    values = np.zeros(elements, np.float32)
    regions = _regions(elements)
    total = sum(count for _, count in regions)
    indices = raw[: 2 * total].view("<u2")
    kept = bfloat16.unpacked(raw[2 * total :], "bfloat16")
    at = 0
    for part, count in regions:
        region = values[part]
        # One that lies outside of its region is a forged one: it counts for the last place.
        places = np.minimum(indices[at : at + count], len(region) - 1)
        region[places] = kept[at : at + count]
        at += count
    return values
