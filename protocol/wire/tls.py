"""TLS 1.3 between the daemons, with one pinned certificate instead of certificate authorities.

A worker ignores the signer and the names of the coordinator's certificate: the certificate's
SHA-256 must be the one in the join token. The owner of a `Channel` compares `fingerprint` before it
sends any secret.
"""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path
from typing import Final

ERROR_MEANS_NO_TLS: Final = frozenset({
    "WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL",
    "UNEXPECTED_MESSAGE", "BAD_RECORD_TYPE",
})  # fmt: skip
"""OpenSSL's error reasons for an answer that is not TLS."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the coordinator's TLS context.

    Raises:
        OSError: A file cannot be read, or certificate and key do not match (ssl.SSLError).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session resumption: each join does a full handshake
    context.load_cert_chain(certificate, key)
    return context


def client_context() -> ssl.SSLContext:
    """Return the worker's TLS context; the certificate is verified by its fingerprint alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint(certificate: bytes) -> bytes:
    """Return the SHA-256 of a DER certificate, as `openssl x509 -fingerprint -sha256` shows it."""
    return hashlib.sha256(certificate).digest()
