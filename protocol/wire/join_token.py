"""The join token, `<certificate fingerprint>.<secret>`: a machine's credential for joining.

Error texts name the source of a token, never its content.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import Final

from protocol.base.errors import UsageError
from protocol.wire.authentication import KEY_BYTES

_TOKEN: Final = re.compile(r"([0-9a-f]{64})\.([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A parsed token.

    Attributes:
        fingerprint: SHA-256 of the coordinator's certificate.
        secret: 256 bits that the coordinator and all members know.
    """

    fingerprint: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str, source: str) -> JoinToken:
        """Read a token.

        Args:
            text: The token; surrounding white space is ignored.
            source: The file or variable with the token, for the error.

        Raises:
            UsageError: The text is not a join token.
        """
        match = _TOKEN.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"expected a join token (64 hexadecimal digits, a dot, 43 characters) in {source}, "
                "got something else; print the coordinator's token with: coordinator token show"
            )
        secret = base64.urlsafe_b64decode(match[2] + "=")
        assert len(secret) == KEY_BYTES
        return cls(bytes.fromhex(match[1]), secret)

    def reveal(self) -> str:
        """Return the token's text. Give it to members only, and never log it."""
        secret = base64.urlsafe_b64encode(self.secret).decode().rstrip("=")
        return f"{self.fingerprint.hex()}.{secret}"
