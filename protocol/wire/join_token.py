"""The join token: `<certificate fingerprint>.<secret>`, what a machine needs to become a member.

Texts of errors say where a token came from, never what it holds.
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
    """A token, taken apart.

    Attributes:
        fingerprint: SHA-256 of the coordinator's certificate.
        secret: 256 bits that coordinator and members know.
    """

    fingerprint: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str, source: str) -> JoinToken:
        """Read a token.

        Args:
            text: Its text; white space around it does not count.
            source: Where it is from, for the error.

        Raises:
            UsageError: It is none.
        """
        match = _TOKEN.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"expected a join token (64 hexadecimal digits, a dot, 43 characters) in {source}, "
                "got something else; print the coordinator's with: coordinator token show"
            )
        secret = base64.urlsafe_b64decode(match[2] + "=")
        assert len(secret) == KEY_BYTES
        return cls(bytes.fromhex(match[1]), secret)

    def reveal(self) -> str:
        """The text to hand to a member; to nobody else, and into no log."""
        secret = base64.urlsafe_b64encode(self.secret).decode().rstrip("=")
        return f"{self.fingerprint.hex()}.{secret}"
