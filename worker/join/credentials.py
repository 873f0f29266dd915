"""A worker's credentials: its key, or else the join token.

The token comes from `--token-file` (or `$SAMESTEP_TOKEN_FILE`), `$SAMESTEP_TOKEN`, systemd's
`$CREDENTIALS_DIRECTORY/join.token`, or the file of a coordinator of the same user on this machine;
never from an argument, which every user of a machine can read. Files are reread at each attempt, so
a changed token applies at once; while a file is missing or damaged, the last token is used.
After the first join the coordinator issues a key, which is stored in `worker/` below `state_home()`
by the fingerprint of the coordinator's certificate.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Final

from protocol.base import limits
from protocol.base.errors import NotAuthorized, UsageError
from protocol.base.regular_file import read_regular
from protocol.machine.secret_file import join_token_file, read_secret, state_home, write_secret
from protocol.wire.authentication import NO_CERTIFICATE
from protocol.wire.join_token import JoinToken

_CREDENTIAL: Final = "join.token"
_ADVICE: Final = (
    "print the current token on its machine with `coordinator token show`, and give it to the "
    "worker as --token-file FILE or SAMESTEP_TOKEN"
)


class WorkerCredentials:
    """Select the secret for the coordinator that answers at an address.

    Args:
        token_file: The user's `--token-file`; None to search the other sources listed above.
        plaintext: Whether to connect without TLS; only a token is used then, no key.
        environment: `SAMESTEP_TOKEN` is removed from it, so that child processes do not inherit it.

    Raises:
        UsageError: The user's token is malformed, or other users may read its file.
    """

    def __init__(
        self,
        token_file: Path | None = None,
        *,
        plaintext: bool = False,
        environment: MutableMapping[str, str] = os.environ,
    ) -> None:
        self.plaintext = plaintext
        home = state_home(environment)
        self._keys = home / "worker"
        self._is_explicit, self._read_token = self._choose_source(token_file, home, environment)
        self._last_token: JoinToken | None = None
        self._token_problem = ""
        self._last_keys: dict[Path, bytes] = {}
        self._refused_keys: set[Path] = set()
        self._last_key_file: Path | None = None
        if self._is_explicit:
            self._last_token = self._read_token()

    def secret(self, certificate: bytes | None, name: str) -> tuple[bytes, bool]:
        """Return the secret for a connection, and whether that is this worker's key.

        Args:
            certificate: The fingerprint of the server's certificate; None without TLS.
            name: The worker's name.

        Raises:
            NotAuthorized: The certificate is not the one that the token names, or there is neither
                token nor key.
            UsageError: A file cannot be used.
        """
        token = self._current_token()
        self._last_key_file = None
        if certificate is None:
            if token is None:
                self._raise_token_problem()
                raise NotAuthorized(f"this worker has no join token; {_ADVICE}")
            return token.secret, False
        if token is not None and token.fingerprint == certificate:
            return self._read_key(certificate, name) or (token.secret, False)
        # A token that the user did not name may stem from an earlier coordinator on this machine.
        if (token is None or not self._is_explicit) and (key := self._read_key(certificate, name)):
            return key
        if token is None:
            self._raise_token_problem()
            if fault := key_fault(path := self._key_file(certificate, name)):
                raise NotAuthorized(
                    f"this worker has no join token, and its key in {str(path)!r} {fault}; restore "
                    f"that file from a backup, or join with a token, which replaces it: {_ADVICE}"
                )
            raise NotAuthorized(
                f"this worker has no join token, and no key for the name {name!r}; keys are stored "
                "by name: use the name with which it joined before (--name), or a token: "
                f"{_ADVICE}"
            )
        raise NotAuthorized(
            f"expected the certificate {_short_hex(token.fingerprint)} that the join token names, "
            f"got {_short_hex(certificate)}: the token is outdated (the coordinator has a new "
            "certificate), belongs to another coordinator, or someone intercepts the connection; "
            f"{_ADVICE}"
        )

    def has_secret_for(self, certificate: bytes, name: str) -> bool:
        """Return whether there is a token or a key for the coordinator with this certificate.

        Args:
            certificate: The certificate's fingerprint; empty without TLS: then the result is False.
            name: The worker's name.

        Raises:
            UsageError: A file cannot be used.
        """
        if not certificate or self.plaintext:
            return False
        token = self._current_token()
        is_in_token = token is not None and token.fingerprint == certificate
        return is_in_token or self._read_key(certificate, name) is not None

    def store_key(self, certificate: bytes | None, name: str, key: bytes) -> str:
        """Store the key that the coordinator issued; return a warning if that fails, else ''."""
        if not key or certificate is None:
            return ""
        path = self._key_file(certificate, name)
        self._refused_keys.discard(path)
        self._last_keys[path] = key
        try:
            write_secret(path, key.hex() + "\n")
        except UsageError as error:
            return f"the key could not be stored, so the next start needs the token: {error}"
        return ""

    def try_token_next(self) -> bool:
        """Drop a refused key; return whether there is a token to try instead."""
        if self._last_key_file is None or self._current_token() is None:
            return False
        self._refused_keys.add(self._last_key_file)
        return True

    @staticmethod
    def _choose_source(
        token_file: Path | None, home: Path, environment: MutableMapping[str, str]
    ) -> tuple[bool, Callable[[], JoinToken | None]]:
        """Return whether the user named the token, and a function that reads it."""
        token_text = environment.pop("SAMESTEP_TOKEN", "")
        if token_file is not None:
            return True, lambda: _read_token_file(token_file, must_exist=True)
        if token_text:
            token = JoinToken.parse(token_text, "SAMESTEP_TOKEN")
            return True, lambda: token
        if directory := environment.get("CREDENTIALS_DIRECTORY"):
            credential = Path(directory) / _CREDENTIAL
            if credential.exists():
                return True, lambda: _read_systemd_credential(credential)
        return False, lambda: _read_token_file(join_token_file(home), must_exist=False)

    def _current_token(self) -> JoinToken | None:
        """Reread and return the token; return the last token while its file is missing or damaged.

        Raises:
            UsageError: No token was read before, and the file that the user named cannot be used.
        """
        self._token_problem = ""
        try:
            self._last_token = self._read_token() or self._last_token
        except UsageError as error:
            if self._last_token is None and self._is_explicit:
                raise
            self._token_problem = str(error)
        return self._last_token

    def _raise_token_problem(self) -> None:
        """Report why a token file that the user did not name cannot be used.

        Raises:
            NotAuthorized: The file cannot be used. Callers have found no key either.
        """
        if self._token_problem:
            raise NotAuthorized(f"this worker has no join token: {self._token_problem}")

    def _read_key(self, certificate: bytes, name: str) -> tuple[bytes, bool] | None:
        path = self._key_file(certificate, name)
        if path in self._refused_keys:
            return None
        text = read_secret(path)
        if text is not None and not _key_text_fault(text):
            self._last_keys[path] = bytes.fromhex(text)
        if path not in self._last_keys:
            return None
        self._last_key_file = path
        return self._last_keys[path], True

    def _key_file(self, certificate: bytes, name: str) -> Path:
        """Return the key's path: a hash, because names may contain any character."""
        assert certificate != NO_CERTIFICATE
        digest = hashlib.sha256(certificate + name.encode()).hexdigest()
        return self._keys / f"{digest[:32]}.key"


def key_fault(path: Path) -> str:
    """Describe the fault of a key file; empty if the file is valid or missing.

    Raises:
        UsageError: Other users may read the file, or it cannot be read.
    """
    text = read_secret(path)
    return "" if text is None else _key_text_fault(text)


def _key_text_fault(text: str) -> str:
    if re.fullmatch(r"[0-9a-f]{64}\s*", text):
        return ""
    content = "something else" if text.strip() else "an empty file"
    return f"is damaged (expected 64 hexadecimal digits, got {content})"


def _read_token_file(path: Path, *, must_exist: bool) -> JoinToken | None:
    text = read_secret(path)
    if text is None:
        if must_exist:
            raise UsageError(
                f"the token file {str(path)!r} does not exist; copy the join token there, or name "
                "another file (--token-file)"
            )
        return None
    return JoinToken.parse(text, repr(str(path)))


def _read_systemd_credential(path: Path) -> JoinToken:
    """Read a systemd credential; systemd restricts access, so the file's mode is not checked."""
    try:
        text = read_regular(path, limits.SECRET_FILE_CHARACTERS).decode("utf-8", "replace")
        return JoinToken.parse(text, repr(str(path)))
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _short_hex(fingerprint: bytes) -> str:
    return f"{fingerprint.hex()[:16]}..."
