"""What a request to the control port must be before any of it is looked at.

Allow-lists: the methods, the host that it was sent to (a name that someone else's DNS has pointed
here is none), no other site's page behind it, and a bearer token. The control token is new at each
start of the coordinator and is not the join token: a worker may not halt a run. The reader token
stays from start to start, and opens `READS` alone: who collects figures may not command. There are
no cookies, so no browser adds anything by itself.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from coordinator.operator.page_server import PAGE_PATHS
from protocol.base.errors import UsageError
from protocol.host.secret_file import control_token_file, state_home, write_secret

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

METHODS: Final = ("GET", "POST")
OPEN: Final = ("/healthz", *PAGE_PATHS)
"""Without a token: whether the loop answers, and the page, which holds no data of its own."""
READS: Final = frozenset({
    "/readyz", "/status", "/metrics", "/events", "/runs", "/history", "/report",
})  # fmt: skip
"""What the reader token opens: it changes nothing and shows no secret, as /join does."""
_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_PORT: Final = re.compile(r":[0-9]{1,5}$")
_SITES: Final = frozenset({"same-origin", "none"})


class Guard:
    """Of one control port.

    Attributes:
        token: What a request must bear.
        reader_token: Gives what is enough for one that only reads; an empty text is no token.
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self.reader_token: Callable[[], str] = str
        self._hosts = _HOSTS
        self._file: Path | None = None

    def listens_at(self, host: str, port: int) -> None:
        """Put the token where this user's commands find it.

        Raises:
            UsageError: It cannot be written.
        """
        shown = f"[{host}]" if ":" in host else host
        self._hosts = _HOSTS | {shown}
        self._file = control_token_file(state_home(), f"{host}:{port}")
        write_secret(self._file, self.token + "\n")

    def write_again(self) -> None:
        """Put the token back where it was, if it is gone and its directory is there."""
        if self._file is None:
            return
        with contextlib.suppress(UsageError, OSError):
            if not self._file.exists() and self._file.parent.parent.is_dir():
                write_secret(self._file, self.token + "\n")

    def close(self) -> None:
        """The token opens nothing any more; take it away."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def refusal(self, request: web.Request) -> web.Response | None:
        """Why a request is not answered; None if it is."""
        if request.method not in METHODS:
            return _refused(405, f"expected one of {', '.join(METHODS)}, got another method")
        name = request.headers.get("Host", "")
        if _PORT.sub("", name) not in self._hosts:
            return _refused(403, "expected a loopback address as host, got another name")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{name}":
            return _refused(403, "expected no other site's request, got a foreign origin")
        if request.headers.get("Sec-Fetch-Site", "none") not in _SITES:
            return _refused(403, "expected no other site's request, got a cross-site one")
        if request.path in OPEN:
            return None
        shown = _bearer(request)
        if hmac.compare_digest(shown, self.token.encode()):
            return None
        reader = self.reader_token().encode()
        if reader and hmac.compare_digest(shown, reader):
            if request.method == "GET" and request.path in READS:
                return None
            return _refused(
                403, "expected the control token (coordinator token control), got the reader token"
            )
        answer = _refused(401, "expected the control token (Authorization: Bearer ...)")
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer


def _bearer(request: web.Request) -> bytes:
    """The token that a request bears; empty if none."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # aiohttp keeps bytes that are no UTF-8 as lone surrogates.
    return given.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason, "exit_code": 77}, status=status)
