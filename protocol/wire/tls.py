"""TLS 1.3 between the daemons: no authorities, one pinned certificate.

A worker does not ask who signed the coordinator's certificate or which name is in it: its SHA-256
must be the one that the join token names. `verify` is done by `Channel`'s user with
`fingerprint`, before anything else is said.
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
"""Reasons of OpenSSL's for an answer that is not TLS."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """The coordinator's side.

    Raises:
        OSError: A file cannot be read, or the two do not fit (ssl.SSLError).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes: each join is a whole handshake
    context.load_cert_chain(certificate, key)
    return context


def client_context() -> ssl.SSLContext:
    """The worker's side; what the certificate is worth is decided by its fingerprint alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 of a certificate in DER, as `openssl x509 -fingerprint -sha256` shows it."""
    return hashlib.sha256(certificate).digest()
