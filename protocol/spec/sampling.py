"""How samples are drawn for an epoch, if an epoch is not one pass over all of them.

Part of the manifest: all workers must agree on the weights, and an audit repeats the draws from
them. Weights are whole numbers, so that draws are exact on every machine.
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
"""The largest weight: others are multiples of the largest one's 1 / (2^32 - 1), rounded."""
_PACKED_CHARACTERS: Final = limits.BODY_BYTES // 2
_TYPE: Final = np.dtype("<u4")

Weights = NDArray[np.uint32]


class Sampling(BaseModel):
    """Draws of an epoch, with or without replacement, by weight or with equal chances.

    Attributes:
        draws: Samples of an epoch.
        replacement: Whether a sample can be drawn again in the same epoch.
        packed_weights: Weights by sample: little-endian uint32, deflated, in base64; empty if all
            are equal.
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
            draws: Samples of an epoch. Default: as many as there are.
            replacement: Whether a sample can be drawn again in the same epoch.

        Raises:
            DataError: The weights cannot be used.
        """
        given = np.asarray(weights, np.float64)
        wanted = "expected weights of samples: numbers of at least 0 in one dimension, {}: {}"
        if given.ndim != 1 or not len(given):
            raise DataError(wanted.format(f"got shape {given.shape}", "give one for each sample"))
        bad = ~(np.isfinite(given) & (given >= 0))
        if bad.any():
            first = int(bad.argmax())
            raise DataError(wanted.format(f"got {given[first]} for sample {first}", "correct it"))
        if not given.any():
            raise DataError(wanted.format("got only zeros", "give some sample a chance"))
        # Correctly rounded operations: the same whole numbers on every machine.
        scaled = np.rint(given / given.max() * WEIGHT_STEPS)
        whole = np.where(given > 0, np.maximum(scaled, 1), 0).astype(_TYPE)
        draws = len(given) if draws is None else draws
        possible = int((whole > 0).sum())
        if not replacement and draws > possible:
            raise DataError(
                f"expected at most {possible} draws without replacement, as many as samples with a "
                f"weight above 0, got {draws}: lower them, or draw with replacement"
            )
        packed = base64.b64encode(zlib.compress(whole.tobytes(), 9)).decode()
        if len(packed) > _PACKED_CHARACTERS:
            raise DataError(
                f"expected weights of {len(given)} samples in {_PACKED_CHARACTERS} bytes, got "
                f"{len(packed)} after compression: round them to fewer distinct values"
            )
        return cls(draws=draws, replacement=replacement, packed_weights=packed)

    def __str__(self) -> str:
        """Return `by weight, with replacement` or the like."""
        chances = "with equal chances" if self.weights is None else "by weight"
        return f"{chances}, {'with' if self.replacement else 'without'} replacement,"

    def check(self, samples: int) -> None:
        """Check that these are draws among `samples` samples.

        Raises:
            MessageError: They are not.
        """
        weights = self.weights
        if weights is not None and len(weights) != samples:
            raise MessageError(f"expected weights of {samples} samples, got {len(weights)}")
        possible = samples if weights is None else int((weights > 0).sum())
        if not possible or (not self.replacement and self.draws > possible):
            raise MessageError(f"expected at most {possible} draws, got {self.draws}")

    @cached_property
    def weights(self) -> Weights | None:
        """Weights by sample, or None if all are equal.

        Raises:
            MessageError: They are damaged.
        """
        if not self.packed_weights:
            return None
        inflater: Any = zlib.decompressobj()
        try:
            packed = base64.b64decode(self.packed_weights, validate=True)
            data = inflater.decompress(packed, limits.WEIGHTS_BYTES)
        except (binascii.Error, zlib.error):
            raise MessageError("expected packed weights, got damaged ones") from None
        if not inflater.eof or len(data) % _TYPE.itemsize:
            raise MessageError("expected packed weights of whole numbers, got a part of them")
        return np.frombuffer(data, _TYPE)
