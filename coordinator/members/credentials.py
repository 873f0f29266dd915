"""What makes this user's coordinators known to their workers, on disk.

    certificate.pem, key.pem   of TLS; made once
    join.token                 what a machine needs to become a member
    workers.json               keys of those that have become one (`worker_keys`)
    control/HOST:PORT.token    of the control port there, new at each start
    lock                       held while any of them is changed

All are of mode 0600, in `coordinator/` below `protocol.host.secret_file.state_home()`: not in a
run's directory, so that a worker's token and key stay good from run to run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from coordinator.members.worker_keys import WorkerKeys
from protocol.base.errors import UsageError
from protocol.host.secret_file import (
    give_to_owner,
    join_token_file,
    make_private,
    read_secret,
    state_home,
    write_secret,
)
from protocol.wire import tls
from protocol.wire.authentication import new_key
from protocol.wire.join_token import JoinToken


class CoordinatorCredentials:
    """See the module's text; make one with `open`.

    Attributes:
        fingerprint: SHA-256 of the certificate.
        keys: Of the workers.
    """

    def __init__(self, home: Path, fingerprint: bytes) -> None:
        self.home = home
        self.fingerprint = fingerprint
        self.token_file = join_token_file(home)
        self.keys = WorkerKeys(self.token_file.with_name("workers.json"))

    @classmethod
    def open(cls, home: Path | None = None) -> CoordinatorCredentials:
        """Those that are there; what is missing is made.

        Args:
            home: Where; None for this user's own.

        Raises:
            UsageError: They cannot be read or written, or others may read them.
        """
        home = home or state_home()
        directory = join_token_file(home).parent
        with _locked(directory):
            certificate, key = directory / "certificate.pem", directory / "key.pem"
            if read_secret(certificate) is None or read_secret(key) is None:
                from protocol.wire.certificate import self_signed  # noqa: PLC0415 -- 40 ms, once

                for path, text in zip((key, certificate), reversed(self_signed()), strict=True):
                    write_secret(path, text)
            der = ssl.PEM_cert_to_DER_cert(read_secret(certificate) or "")
            found = cls(home, tls.fingerprint(der))
            token = read_secret(found.token_file)
            if token is None or found.join_token().fingerprint != found.fingerprint:
                found._write_token()
        return found

    def join_token(self) -> JoinToken:
        """The present one; another process may have changed it.

        Raises:
            UsageError: It is not there, or cannot be used.
        """
        text = read_secret(self.token_file)
        if text is None:
            raise UsageError(f"{str(self.token_file)!r} is gone; make it: coordinator token rotate")
        return JoinToken.parse(text, repr(str(self.token_file)))

    def rotate(self, *, everyone: bool) -> None:
        """A new join token; workers that have a key of their own keep it, unless told otherwise.

        Args:
            everyone: Take all workers' keys as well.

        Raises:
            UsageError: It cannot be written.
        """
        with _locked(self.token_file.parent):
            self._write_token()
            if everyone:
                self.keys.clear()

    def revoke(self, name: str) -> None:
        """Take one worker's key, and the join token that it knows.

        Raises:
            UsageError: No worker has a key under this name, or nothing can be written.
        """
        with _locked(self.token_file.parent):
            self.keys.remove(name)
            self._write_token()

    def enrol(self, name: str) -> bytes:
        """The key of that name, made if it has none; empty if it cannot be kept."""
        with contextlib.suppress(UsageError):
            if (known := self.keys.get(name)) is not None:
                return known
            with _locked(self.token_file.parent):
                return self.keys.add(name)
        return b""

    def server_context(self) -> ssl.SSLContext:
        """For connections of workers.

        Raises:
            UsageError: Certificate and key do not fit.
        """
        directory = self.token_file.parent
        try:
            return tls.server_context(directory / "certificate.pem", directory / "key.pem")
        except OSError as error:
            raise UsageError(
                f"the certificate in {str(directory)!r} cannot be used ({error}); remove "
                "certificate.pem and key.pem, and the next start makes new ones"
            ) from None

    def _write_token(self) -> None:
        token = JoinToken(self.fingerprint, new_key())
        write_secret(self.token_file, token.reveal() + "\n")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time changes what is in the directory."""
    make_private(directory)
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_to_owner(fd, directory)
    except OSError as error:
        raise UsageError(f"cannot use {str(directory)!r}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
