"""What a capture of a teacher's logits keeps of each sample: agreed on in the manifest.

A sample is a window of tokens. Row t of it is what the teacher says of token t + 1.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from protocol.base import limits

FLOAT16_BYTES: Final = 2
_SAMPLE_ID_BYTES: Final = 8
_COUNT_BYTES: Final = 4
_TOKEN_BYTES: Final = 4
_MASK_BYTES: Final = 1
_LSE_BYTES: Final = 2 * 4


class CaptureLayout(BaseModel):
    """Which logits, of how many tokens.

    Attributes:
        tokens: Rows of a sample at most; it has one token more, which the last row is about.
        vocabulary: How many tokens the teacher's distribution is over.
        top_k: Logits kept of each row: the largest ones, or those of tokens drawn from it.
        drawn: Whether they were drawn.
        temperature: Of the draws, and of the second log-sum-exp.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Annotated[int, Field(ge=1, le=65_536)]
    vocabulary: Annotated[int, Field(ge=1, le=2**31 - 1)]
    top_k: Annotated[int, Field(ge=1, le=limits.ROW_LOGITS_ELEMENTS)]
    drawn: bool = False
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0

    @property
    def id_bytes(self) -> int:
        """Of one token's number beside its logit."""
        return 2 if self.vocabulary <= 2**16 else 4

    @property
    def logits_bytes(self) -> int:
        """Of one row's numbers, logits and log-sum-exps: 264 for 64 of up to 65,536 tokens."""
        return self.top_k * (self.id_bytes + FLOAT16_BYTES) + _LSE_BYTES

    @property
    def sample_bytes(self) -> int:
        """Of one sample as it travels: all have the length of the longest."""
        each = self.logits_bytes + _TOKEN_BYTES + _MASK_BYTES
        return _SAMPLE_ID_BYTES + _COUNT_BYTES + _TOKEN_BYTES + self.tokens * each
