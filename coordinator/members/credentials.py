"""What makes this user's coordinators known to their workers, on disk.

    certificate.pem, key.pem   of TLS; made once
    join.token                 what a machine needs to become a member
    reader.token               what looking at the control port needs, and commanding does not
    workers.json               keys of those that have become one (`worker_keys`)
    control/HOST:PORT.token    of the control port there, new at each start
    lock                       held while any of them is changed

All are of mode 0600, in `coordinator/` below `protocol.host.secret_file.state_home()`: not in a
run's directory, so that a worker's token and key stay good from run to run.

A file that goes missing while a coordinator runs is no order: what was read last counts, and
`look` writes it again once its directory is there.
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
    """See the module's text; make one with `open`.

    Attributes:
        fingerprint: SHA-256 of the certificate.
        keys: Of the workers.
        reader_token: What opens the control port for looking; see `control_guard`.
        made_anew: What `open` replaced that workers may know, and what follows; empty if nothing.
    """

    def __init__(self, home: Path, certificate: str, key: str) -> None:
        self.home = home
        self.token_file = join_token_file(home)
        self.fingerprint = _fingerprint(certificate, self.token_file.with_name(_CERTIFICATE))
        self.keys = WorkerKeys(self.token_file.with_name(_WORKERS))
        self.reader_token = ""
        self.made_anew = ""
        self._texts = {_CERTIFICATE: certificate, _KEY: key}
        self._token: JoinToken | None = None

    @classmethod
    def open(cls, home: Path | None = None) -> CoordinatorCredentials:
        """Read those that are there, and make what is missing.

        Args:
            home: Where; None for this user's own.

        Raises:
            UsageError: They cannot be read or written, others may read them, or of certificate and
                key one is missing.
        """
        home = home or state_home()
        directory = join_token_file(home).parent
        with _locked(directory):
            certificate = read_secret(directory / _CERTIFICATE)
            key = read_secret(directory / _KEY)
            before = read_secret(directory / join_token_file(home).name)
            known = before is not None or os.path.lexists(directory / _WORKERS)
            is_new = certificate is None or key is None
            # A first start that was killed in between leaves a key that nobody knows.
            if (certificate is None) != (key is None) and (known or key is None):
                raise _half_missing(directory, _KEY if key is None else _CERTIFICATE)
            if certificate is None or key is None:
                from protocol.wire.certificate import self_signed  # noqa: PLC0415 -- 40 ms, once

                certificate, key = self_signed()
                write_secret(directory / _KEY, key)
                write_secret(directory / _CERTIFICATE, certificate)
            found = cls(home, certificate, key)
            token = found._read_token()
            # A damaged token opens nothing: a new one is all that can be done.
            if token is None or token.fingerprint != found.fingerprint:
                found._write_token()
                found.made_anew = _said_of_new(
                    known=known, is_new=is_new, token_file=found.token_file
                )
            if not found._read_reader_token():
                found._write_reader_token()
        return found

    def join_token(self) -> JoinToken:
        """The present one; another process may have changed it.

        It is the last one where the file is gone or damaged meanwhile.

        Raises:
            UsageError: There was none, or the file cannot be read.
        """
        token = self._read_token() or self._token
        if token is None:
            raise UsageError(f"{str(self.token_file)!r} is gone; make it: coordinator token rotate")
        return token

    def look(self) -> list[str]:
        """See whether all files are there and can be used; write again what is missing.

        Returns:
            What is wrong, in words; empty if all files can be used.
        """
        directory = self.token_file.parent
        if not _is_there(directory):
            # Not made anew: it may come back under its old name.
            told = "bring it back; its keys and token count until then, and nobody gets a new key"
            return [f"{str(directory)!r} is gone: {told}"]
        troubles: list[str] = []
        for look_at in (
            self._certificate_troubles, self._token_troubles, self._reader_troubles,
            self._key_troubles,
        ):  # fmt: skip
            try:
                troubles += look_at(directory)
            except (UsageError, OSError) as error:
                troubles.append(f"{str(directory)!r}: {error}")
        return troubles

    def _certificate_troubles(self, directory: Path) -> Iterator[str]:
        for name, text in self._texts.items():
            path = directory / name
            yield from _written_again(path, text)
            if read_secret(path) != text:
                yield (
                    f"{str(path)!r} has changed: this coordinator goes on with the one it started "
                    "with, the next start reads the new one"
                )

    def _token_troubles(self, directory: Path) -> Iterator[str]:
        del directory
        if self._token is not None:
            yield from _written_again(self.token_file, self._token.reveal() + "\n")
        if self._read_token() is None:
            yield (
                f"{str(self.token_file)!r} holds no join token, the last one counts; make a new "
                "one: coordinator token rotate (workers that have a key of their own keep it)"
            )

    def _reader_troubles(self, directory: Path) -> Iterator[str]:
        yield from _written_again(directory / _READER, self.reader_token + "\n")
        if not self._read_reader_token():
            yield (
                f"{str(directory / _READER)!r} holds no token, the last one counts; make a new "
                "one: coordinator token reader --new"
            )

    def _key_troubles(self, directory: Path) -> Iterator[str]:
        self.keys.refresh()
        if self.keys.trouble and not os.path.lexists(directory / _WORKERS):
            with _locked(directory):
                self.keys.write_again()
            yield f"{str(directory / _WORKERS)!r} was gone and is written again"
        elif self.keys.trouble:
            yield f"{self.keys.trouble}; the keys that it held last count until then"

    def _read_token(self) -> JoinToken | None:
        """None if there is no file, or it holds no token.

        Raises:
            UsageError: It cannot be read, or others may read it.
        """
        text = read_secret(self.token_file)
        with contextlib.suppress(UsageError):
            self._token = JoinToken.parse(text or "", repr(str(self.token_file)))
            return self._token
        return None

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

    def renew_reader_token(self) -> None:
        """A new token for looking; a running coordinator has it within seconds.

        Raises:
            UsageError: It cannot be written.
        """
        with _locked(self.token_file.parent):
            self._write_reader_token()

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
            if _is_there(self.token_file.parent):  # else `_locked` would make it anew
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
        """Whether there is one."""
        text = read_secret(self.token_file.with_name(_READER)) or ""
        if _READER_TOKEN.fullmatch(text):
            self.reader_token = text.strip()
            return True
        return False

    def _write_reader_token(self) -> None:
        self.reader_token = secrets.token_urlsafe(32)
        write_secret(self.token_file.with_name(_READER), self.reader_token + "\n")


def _fingerprint(certificate: str, path: Path) -> bytes:
    """Of a certificate in PEM.

    Raises:
        UsageError: It is none.
    """
    try:
        return tls.fingerprint(ssl.PEM_cert_to_DER_cert(certificate))
    except ValueError:
        found = "something else" if certificate.strip() else "an empty file"
        raise UsageError(
            f"expected a certificate in {str(path)!r}, got {found}; {RENEWAL}"
        ) from None


def _half_missing(directory: Path, name: str) -> UsageError:
    return UsageError(
        f"expected {_CERTIFICATE} and {_KEY} in {str(directory)!r}, found no {name}; {RENEWAL}"
    )


def _said_of_new(*, known: bool, is_new: bool, token_file: Path) -> str:
    """What workers have to know of a join token that was made anew."""
    if is_new:
        if not known:
            return ""  # a first start
        return (
            f"certificate.pem and key.pem were missing in {str(token_file.parent)!r}: they and the "
            "join token are new, and every worker needs the new token (coordinator token show)"
        )
    return (
        f"{str(token_file)!r} was missing or held no token that fits the certificate: it is new; "
        "workers with a key of their own keep it, others need the new token (coordinator token "
        "show)"
    )


def _is_there(directory: Path) -> bool:
    """Also where the system cannot say: `Path.is_dir` raises then."""
    return os.path.isdir(directory)  # noqa: PTH112


def _written_again(path: Path, text: str) -> Iterator[str]:
    """Write a file that is missing, and say so.

    Raises:
        UsageError: It cannot be written.
    """
    if not os.path.lexists(path):
        with _locked(path.parent):
            if not os.path.lexists(path):
                write_secret(path, text)
        yield f"{str(path)!r} was gone and is written again"


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
