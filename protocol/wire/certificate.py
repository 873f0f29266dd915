"""Create self-signed certificates, of which a peer checks the fingerprint and not the names."""

from __future__ import annotations

import datetime as dt
import os
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from protocol.wire import tls


def new_certificate(name: str = "samestep coordinator") -> tuple[str, str]:
    """Return a new certificate and its key, in PEM.

    P-256 is fast on every machine. The certificate never expires (RFC 5280, 4.1.2.5), so a wrong
    clock locks nobody out; a new certificate with another fingerprint replaces it.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime(2000, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()


def temporary_context(name: str) -> tuple[ssl.SSLContext, bytes]:
    """Return a TLS server context with a new certificate, and the certificate's SHA-256.

    The certificate is not kept on disk.
    """
    certificate, key = new_certificate(name)
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / "certificate.pem", Path(directory) / "key.pem"]
        for path, text in zip(paths, (certificate, key), strict=True):
            with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(text)
        context = tls.server_context(*paths)
    return context, tls.fingerprint(ssl.PEM_cert_to_DER_cert(certificate))
