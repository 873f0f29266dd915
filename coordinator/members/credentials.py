"""The credentials of this user's coordinators, on disk.

    certificate.pem, key.pem   for TLS; created once
    join.token                 admits a new machine
    reader.token               read-only access to the control port
    workers.json               one key per worker (`worker_keys`)
    control/HOST:PORT.token    full access to that control port; new at each start
    lock                       held during changes

All have mode 0600, in `coordinator/` below `protocol.machine.secret_file.state_home()`: not in a
run's directory, so that tokens and keys stay valid from run to run.

If a file goes missing while a coordinator runs, nothing is revoked: the content read last stays
valid, and `check` restores the file once its directory exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from coordinator.members.worker_keys import WorkerKeys
from protocol.base.errors import UsageError, lock_failure
from protocol.machine.secret_file import (
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

_CERTIFICATE: Final = "certificate.pem"
_KEY: Final = "key.pem"
_READER: Final = "reader.token"
_READER_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43}\s*")
_WORKERS: Final = "workers.json"
RENEWAL: Final = (
    "restore certificate.pem and key.pem from a backup, or remove both: the next start makes new "
    "ones, and every worker needs the new join token"
)


class CoordinatorCredentials:
    """The credentials described above; create with `open`.

    Attributes:
        fingerprint: SHA-256 of the certificate.
        keys: The workers' keys.
        reader_token: The token for read-only access to the control port; see `control_guard`.
        replacement_note: A message if `open` replaced credentials that workers may use; else empty.
    """

    def __init__(self, home: Path, certificate: str, key: str) -> None:
        self.home = home
        self.token_file = join_token_file(home)
        self.fingerprint = _fingerprint(certificate, self.token_file.with_name(_CERTIFICATE))
        self.keys = WorkerKeys(self.token_file.with_name(_WORKERS))
        self.reader_token = ""
        self.replacement_note = ""
        self._texts = {_CERTIFICATE: certificate, _KEY: key}
        self._token: JoinToken | None = None

    @classmethod
    def open(cls, home: Path | None = None) -> CoordinatorCredentials:
        """Read existing credentials and create missing ones.

        Args:
            home: The directory; None for this user's default.

        Raises:
            UsageError: A file cannot be read or written, other users may read it, or only one of
                certificate and key exists.
        """
        home = home or state_home()
        directory = join_token_file(home).parent
        with _locked(directory):
            certificate = read_secret(directory / _CERTIFICATE)
            key = read_secret(directory / _KEY)
            earlier_token = read_secret(directory / join_token_file(home).name)
            has_members = earlier_token is not None or os.path.lexists(directory / _WORKERS)
            is_new = certificate is None or key is None
            # A first start that was killed halfway leaves a key that no worker uses.
            if (certificate is None) != (key is None) and (has_members or key is None):
                raise _incomplete_pair(directory, _KEY if key is None else _CERTIFICATE)
            if certificate is None or key is None:
                from protocol.wire.certificate import new_certificate  # noqa: PLC0415 -- 40 ms, once

                certificate, key = new_certificate()
                write_secret(directory / _KEY, key)
                write_secret(directory / _CERTIFICATE, certificate)
            credentials = cls(home, certificate, key)
            token = credentials._read_token()
            # A damaged token cannot be repaired: replace it.
            if token is None or token.fingerprint != credentials.fingerprint:
                credentials._write_token()
                credentials.replacement_note = _replacement_note(
                    has_members=has_members, is_new=is_new, token_file=credentials.token_file
                )
            if not credentials._read_reader_token():
                credentials._write_reader_token()
        return credentials

    def join_token(self) -> JoinToken:
        """Reread and return the join token; another process may have changed it.

        While the file is missing or damaged, this is the token read last.

        Raises:
            UsageError: No token was ever read, or the file cannot be read.
        """
        token = self._read_token() or self._token
        if token is None:
            raise UsageError(
                f"{str(self.token_file)!r} is gone; make a new one: coordinator token rotate"
            )
        return token

    def check(self) -> list[str]:
        """Check all files and restore missing ones.

        Returns:
            A line per problem; empty if all files are usable.
        """
        directory = self.token_file.parent
        if not _is_directory(directory):
            # Not created: the old directory may be moved back.
            advice = (
                "restore it; until then its keys and token stay valid, and no new keys are issued"
            )
            return [f"{str(directory)!r} is gone: {advice}"]
        troubles: list[str] = []
        for find_troubles in (
            self._certificate_troubles, self._token_troubles, self._reader_troubles,
            self._key_troubles,
        ):  # fmt: skip
            try:
                troubles += find_troubles(directory)
            except (UsageError, OSError) as error:
                troubles.append(f"{str(directory)!r}: {error}")
        return troubles

    def _certificate_troubles(self, directory: Path) -> Iterator[str]:
        for name, text in self._texts.items():
            path = directory / name
            yield from _restore_file(path, text)
            if read_secret(path) != text:
                yield (
                    f"{str(path)!r} has changed: this coordinator continues with the content that "
                    "it read at its start; the next start reads the new content"
                )

    def _token_troubles(self, directory: Path) -> Iterator[str]:
        del directory
        if self._token is not None:
            yield from _restore_file(self.token_file, self._token.reveal() + "\n")
        if self._read_token() is None:
            yield (
                f"{str(self.token_file)!r} contains no join token, so the last one stays valid; "
                "make a new one: coordinator token rotate (workers that have a key keep it)"
            )

    def _reader_troubles(self, directory: Path) -> Iterator[str]:
        yield from _restore_file(directory / _READER, self.reader_token + "\n")
        if not self._read_reader_token():
            yield (
                f"{str(directory / _READER)!r} contains no token, so the last one stays valid; "
                "make a new one: coordinator token reader --new"
            )

    def _key_troubles(self, directory: Path) -> Iterator[str]:
        self.keys.refresh()
        if self.keys.trouble and not os.path.lexists(directory / _WORKERS):
            with _locked(directory):
                self.keys.restore_file()
            yield f"{str(directory / _WORKERS)!r} was missing and has been written again"
        elif self.keys.trouble:
            yield f"{self.keys.trouble}; until then the last keys read from it stay valid"

    def _read_token(self) -> JoinToken | None:
        """Return the token in the file; None if the file is missing or damaged.

        Raises:
            UsageError: The file cannot be read, or other users may read it.
        """
        text = read_secret(self.token_file)
        with contextlib.suppress(UsageError):
            self._token = JoinToken.parse(text or "", repr(str(self.token_file)))
            return self._token
        return None

    def rotate(self, *, everyone: bool) -> None:
        """Replace the join token.

        Args:
            everyone: Revoke all workers' keys as well.

        Raises:
            UsageError: The token cannot be written.
        """
        with _locked(self.token_file.parent):
            self._write_token()
            if everyone:
                self.keys.clear()

    def renew_reader_token(self) -> None:
        """Replace the reader token; a running coordinator reads it within seconds.

        Raises:
            UsageError: The token cannot be written.
        """
        with _locked(self.token_file.parent):
            self._write_reader_token()

    def revoke(self, name: str) -> None:
        """Revoke a worker's key, and replace the join token, which the worker knows.

        Raises:
            UsageError: No worker has a key under this name, or nothing can be written.
        """
        with _locked(self.token_file.parent):
            self.keys.remove(name)
            self._write_token()

    def issue_key(self, name: str) -> bytes:
        """Return the key of a name, created if missing; empty if a new key cannot be stored."""
        with contextlib.suppress(UsageError):
            if (key := self.keys.get(name)) is not None:
                return key
            if _is_directory(self.token_file.parent):  # else `_locked` would create it
                with _locked(self.token_file.parent):
                    return self.keys.add(name)
        return b""

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context for workers' connections.

        Raises:
            UsageError: Certificate and key do not match.
        """
        directory = self.token_file.parent
        try:
            return tls.server_context(directory / _CERTIFICATE, directory / _KEY)
        except OSError as error:
            raise UsageError(
                f"the certificate in {str(directory)!r} cannot be used with its key ({error}); "
                f"{RENEWAL}"
            ) from None

    def _write_token(self) -> None:
        token = JoinToken(self.fingerprint, new_key())
        write_secret(self.token_file, token.reveal() + "\n")
        self._token = token

    def _read_reader_token(self) -> bool:
        """Read the reader token; return whether the file has one."""
        text = read_secret(self.token_file.with_name(_READER)) or ""
        if _READER_TOKEN.fullmatch(text):
            self.reader_token = text.strip()
            return True
        return False

    def _write_reader_token(self) -> None:
        self.reader_token = secrets.token_urlsafe(32)
        write_secret(self.token_file.with_name(_READER), self.reader_token + "\n")


def _fingerprint(certificate: str, path: Path) -> bytes:
    """Return the fingerprint of a PEM certificate.

    Raises:
        UsageError: The text is not a certificate.
    """
    try:
        return tls.fingerprint(ssl.PEM_cert_to_DER_cert(certificate))
    except ValueError:
        content = "something else" if certificate.strip() else "an empty file"
        raise UsageError(
            f"expected a certificate in {str(path)!r}, got {content}; {RENEWAL}"
        ) from None


def _incomplete_pair(directory: Path, name: str) -> UsageError:
    return UsageError(
        f"expected {_CERTIFICATE} and {_KEY} in {str(directory)!r}, found no {name}; {RENEWAL}"
    )


def _replacement_note(*, has_members: bool, is_new: bool, token_file: Path) -> str:
    """Return the message about a replaced join token; empty on a first start."""
    if is_new:
        if not has_members:
            return ""  # a first start
        return (
            f"certificate.pem and key.pem were missing in {str(token_file.parent)!r}: they and the "
            "join token are new, and every worker needs the new token (coordinator token show)"
        )
    return (
        f"{str(token_file)!r} was missing or held no token that fits the certificate: a new token "
        "was made; workers that have a key keep it, others need the new token (coordinator token "
        "show)"
    )


def _is_directory(directory: Path) -> bool:
    """Return whether the directory exists; False on errors, for which `Path.is_dir` raises."""
    return os.path.isdir(directory)  # noqa: PTH112


def _restore_file(path: Path, text: str) -> Iterator[str]:
    """Restore a missing file, and yield a line about it.

    Raises:
        UsageError: The file cannot be written.
    """
    if not os.path.lexists(path):
        with _locked(path.parent):
            if not os.path.lexists(path):
                write_secret(path, text)
        yield f"{str(path)!r} was missing and has been written again"


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the directory, so that one process at a time changes its files."""
    make_private(directory)
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_to_owner(fd, directory)
    except OSError as error:
        raise UsageError(f"cannot use {str(directory)!r}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            raise UsageError(
                f"cannot lock {str(directory)!r}: {lock_failure(error)}; SAMESTEP_HOME=DIR keeps "
                "tokens elsewhere"
            ) from None
        yield
    finally:
        os.close(fd)
