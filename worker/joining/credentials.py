"""What this worker proves itself with: the key that it was given, else the join token.

The token comes from `--token-file` (or `$SAMESTEP_TOKEN_FILE`), `$SAMESTEP_TOKEN`, systemd's
`$CREDENTIALS_DIRECTORY/join.token`, else from where a coordinator of the same user on this machine
keeps it; never from an argument, which every user of a machine can read. Files are read at each
attempt, so that a changed token counts at once; one that goes missing later, or is damaged, leaves
what was read last. After the first join the coordinator, known by its
certificate's fingerprint, gives a key, which is kept in `worker/` below `state_home()`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Final

from protocol.base import limits
from protocol.base.errors import NotAuthorised, UsageError
from protocol.base.regular_file import read_regular
from protocol.host.secret_file import join_token_file, read_secret, state_home, write_secret
from protocol.wire.authentication import NO_CERTIFICATE
from protocol.wire.join_token import JoinToken

_CREDENTIAL: Final = "join.token"
_HOW: Final = (
    "print the present token on its machine with `coordinator token show`, and give it to the "
    "worker as --token-file FILE or SAMESTEP_TOKEN"
)


class WorkerCredentials:
    """Finds the secret for whoever answers at the coordinator's address.

    Args:
        token_file: As the user said; None to look where the module's text says.
        plaintext: Connect without TLS; then there are no keys, and only a token will do.
        environment: `SAMESTEP_TOKEN` is taken out of it, so that nothing started from here has it.

    Raises:
        UsageError: A token that the user gave is none, or others may read it too.
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
        self._given, self._token = self._source(token_file, home, environment)
        self._last_token: JoinToken | None = None
        self._last_keys: dict[Path, bytes] = {}
        self._refused: set[Path] = set()
        self._used: Path | None = None
        if self._given:
            self._last_token = self._token()

    def secret(self, certificate: bytes | None, name: str) -> tuple[bytes, bool]:
        """What to prove oneself with on a connection, and whether that is this name's own key.

        Args:
            certificate: Fingerprint of what answered; None without TLS.
            name: This worker's.

        Raises:
            NotAuthorised: It is another coordinator than this worker was told of, or there is
                nothing to prove oneself with.
            UsageError: A file cannot be used.
        """
        token = self._present_token()
        self._used = None
        if certificate is None:
            if token is None:
                raise NotAuthorised(f"this worker has no join token; {_HOW}")
            return token.secret, False
        if token is not None and token.fingerprint == certificate:
            return self._key(certificate, name) or (token.secret, False)
        # A token that was only found here may be of a coordinator that once ran on this machine.
        if (token is None or not self._given) and (key := self._key(certificate, name)):
            return key
        if token is None:
            if fault := key_fault(path := self._key_file(certificate, name)):
                raise NotAuthorised(
                    f"this worker has no join token, and its key in {str(path)!r} {fault}; restore "
                    f"that file from a backup, or join with a token, which mends it: {_HOW}"
                )
            raise NotAuthorised(
                f"this worker has no join token, and under the name {name!r} no key; keys are kept "
                f"by name, so one that has joined before comes back under its old one (--name), or "
                f"with a token: {_HOW}"
            )
        raise NotAuthorised(
            f"expected the certificate {_short(token.fingerprint)} that the join token names, got "
            f"{_short(certificate)}: the token is outdated (the coordinator's certificate was made "
            f"anew), or of another coordinator, or someone is in between; {_HOW}"
        )

    def is_for(self, certificate: bytes, name: str) -> bool:
        """Whether there is a token or a key for the coordinator with this certificate.

        Args:
            certificate: Its fingerprint; none without TLS, and nothing is for that alone.
            name: This worker's.

        Raises:
            UsageError: A file cannot be used.
        """
        if not certificate or self.plaintext:
            return False
        token = self._present_token()
        named = token is not None and token.fingerprint == certificate
        return named or self._key(certificate, name) is not None

    def remember(self, certificate: bytes | None, name: str, key: bytes) -> str:
        """Keep the key that the coordinator gave; why it cannot be kept, else an empty text."""
        if not key or certificate is None:
            return ""
        path = self._key_file(certificate, name)
        self._refused.discard(path)
        self._last_keys[path] = key
        try:
            write_secret(path, key.hex() + "\n")
        except UsageError as error:
            return f"the key for the next time is not kept, the token will do: {error}"
        return ""

    def try_token_next(self) -> bool:
        """The key was refused: whether there is a token to try instead."""
        if self._used is None or self._present_token() is None:
            return False
        self._refused.add(self._used)
        return True

    @staticmethod
    def _source(
        token_file: Path | None, home: Path, environment: MutableMapping[str, str]
    ) -> tuple[bool, Callable[[], JoinToken | None]]:
        """Whether the token was given by someone, and how to get it."""
        in_variable = environment.pop("SAMESTEP_TOKEN", "")
        if token_file is not None:
            return True, lambda: _from_file(token_file, must_exist=True)
        if in_variable:
            token = JoinToken.parse(in_variable, "SAMESTEP_TOKEN")
            return True, lambda: token
        if directory := environment.get("CREDENTIALS_DIRECTORY"):
            credential = Path(directory) / _CREDENTIAL
            if credential.exists():
                return True, lambda: _from_systemd(credential)
        return False, lambda: _from_file(join_token_file(home), must_exist=False)

    def _present_token(self) -> JoinToken | None:
        """The token now; the last one while its file is missing or damaged.

        Raises:
            UsageError: There was none before, and the file that the user named cannot be used.
        """
        try:
            self._last_token = self._token() or self._last_token
        except UsageError:
            if self._last_token is None and self._given:
                raise
        return self._last_token

    def _key(self, certificate: bytes, name: str) -> tuple[bytes, bool] | None:
        path = self._key_file(certificate, name)
        if path in self._refused:
            return None
        text = read_secret(path)
        if text is not None and not _key_text_fault(text):
            self._last_keys[path] = bytes.fromhex(text)
        if path not in self._last_keys:
            return None
        self._used = path
        return self._last_keys[path], True

    def _key_file(self, certificate: bytes, name: str) -> Path:
        """One file for each coordinator and name; names may hold what file names may not."""
        assert certificate != NO_CERTIFICATE
        digest = hashlib.sha256(certificate + name.encode()).hexdigest()
        return self._keys / f"{digest[:32]}.key"


def key_fault(path: Path) -> str:
    """What is wrong with a key that a coordinator gave; empty if nothing is, or it is not there.

    Raises:
        UsageError: Others may read it too, or it cannot be read.
    """
    text = read_secret(path)
    return "" if text is None else _key_text_fault(text)


def _key_text_fault(text: str) -> str:
    if re.fullmatch(r"[0-9a-f]{64}\s*", text):
        return ""
    found = "something else" if text.strip() else "an empty file"
    return f"is damaged (expected 64 hexadecimal digits, got {found})"


def _from_file(path: Path, *, must_exist: bool) -> JoinToken | None:
    text = read_secret(path)
    if text is None:
        if must_exist:
            raise UsageError(f"the token file {str(path)!r} is not there")
        return None
    return JoinToken.parse(text, repr(str(path)))


def _from_systemd(path: Path) -> JoinToken:
    """Guarded by systemd, by its directory and access lists: the mode does not say who may read."""
    try:
        text = read_regular(path, limits.SECRET_FILE_CHARACTERS).decode("utf-8", "replace")
        return JoinToken.parse(text, repr(str(path)))
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _short(fingerprint: bytes) -> str:
    return f"{fingerprint.hex()[:16]}..."
