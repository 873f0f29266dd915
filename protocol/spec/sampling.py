"""How the samples of an epoch are drawn, if an epoch is not one pass over all samples.

`Sampling` is part of the manifest, since all workers must agree on the weights, and an audit
repeats the draws. Weights are whole numbers, so that draws are exact on every machine.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from functools import cached_property
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from protocol.base import limits
from protocol.base.errors import DataError, MessageError

WEIGHT_STEPS: Final = 2**32 - 1
"""The integer of the largest weight; the others are rounded in proportion to it."""
_PACKED_CHARACTERS: Final = limits.BODY_BYTES // 2
_TYPE: Final = np.dtype("<u4")

Weights = NDArray[np.uint32]


class Sampling(BaseModel):
    """How to draw an epoch's samples: with or without replacement, by weight or with equal chances.

    Attributes:
        draws: Number of samples in an epoch.
        replacement: Whether a sample can be drawn again in the same epoch.
        packed_weights: The weight of each sample: little-endian uint32, deflated, in base64; empty
            if all weights are equal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    draws: Annotated[int, Field(ge=1, le=limits.SAMPLES)]
    replacement: bool
    packed_weights: Annotated[str, Field(max_length=_PACKED_CHARACTERS)] = ""

    @classmethod
    def by_weight(
        cls, weights: ArrayLike, draws: int | None = None, *, replacement: bool = True
    ) -> Sampling:
        """Describe draws in proportion to weights.

        Args:
            weights: A number of at least 0 for each sample, float64 of shape (samples,).
            draws: Number of samples in an epoch; default: the number of weights.
            replacement: Whether a sample can be drawn again in the same epoch.

        Raises:
            DataError: A weight is negative or not finite, all are zero, or too few samples can be
                drawn.
        """
        chances = np.asarray(weights, np.float64)
        message = "expected weights of samples: numbers of at least 0 in one dimension, {}: {}"
        if chances.ndim != 1 or not len(chances):
            raise DataError(
                message.format(f"got shape {chances.shape}", "set one weight for each sample")
            )
        is_invalid = ~(np.isfinite(chances) & (chances >= 0))
        if is_invalid.any():
            first = int(is_invalid.argmax())
            raise DataError(
                message.format(f"got {chances[first]} for sample {first}", "correct it")
            )
        if not chances.any():
            raise DataError(message.format("got only zeros", "set some weight above 0"))
        # These operations are correctly rounded, so the integers are the same on every machine.
        steps = np.rint(chances / chances.max() * WEIGHT_STEPS)
        integers = np.where(chances > 0, np.maximum(steps, 1), 0).astype(_TYPE)
        draws = len(chances) if draws is None else draws
        possible = int((integers > 0).sum())
        if not replacement and draws > possible:
            raise DataError(
                f"expected at most {possible} draws without replacement, the number of samples "
                f"with a weight above 0, got {draws}: lower it, or draw with replacement"
            )
        packed_weights = base64.b64encode(zlib.compress(integers.tobytes(), 9)).decode()
        if len(packed_weights) > _PACKED_CHARACTERS:
            raise DataError(
                f"expected weights of {len(chances)} samples in {_PACKED_CHARACTERS} bytes, got "
                f"{len(packed_weights)} after compression: round them to fewer distinct values"
            )
        return cls(draws=draws, replacement=replacement, packed_weights=packed_weights)

    def __str__(self) -> str:
        """Return a description such as `by weight, with replacement,`."""
        chances = "with equal chances" if self.weights is None else "by weight"
        return f"{chances}, {'with' if self.replacement else 'without'} replacement,"

    def check(self, samples: int) -> None:
        """Check that these draws are possible among `samples` samples.

        Raises:
            MessageError: The numbers of weights and samples differ, or there are more draws than
                samples.
        """
        weights = self.weights
        if weights is not None and len(weights) != samples:
            raise MessageError(f"expected weights of {samples} samples, got {len(weights)}")
        possible = samples if weights is None else int((weights > 0).sum())
        if not possible or (not self.replacement and self.draws > possible):
            raise MessageError(f"expected at most {possible} draws, got {self.draws}")

    @cached_property
    def weights(self) -> Weights | None:
        """The weight of each sample, (samples,) uint32; None if all weights are equal.

        Raises:
            MessageError: The packed weights are damaged.
        """
        if not self.packed_weights:
            return None
        inflater: Any = zlib.decompressobj()
        try:
            compressed = base64.b64decode(self.packed_weights, validate=True)
            data = inflater.decompress(compressed, limits.WEIGHTS_BYTES)
        except (binascii.Error, zlib.error):
            raise MessageError("expected weights in base64 and deflate, got damaged ones") from None
        if not inflater.eof or len(data) % _TYPE.itemsize:
            raise MessageError("expected weights of four bytes each, got incomplete ones")
        return np.frombuffer(data, _TYPE)
