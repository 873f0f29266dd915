"""Where other members come in: a listening socket, its certificate, and the handshake.

As at the coordinator a stranger costs little: few are inside at once, for a few seconds, with
headers of 256 bytes and no bodies, and nobody gets in who does not know the key of a pair. Whoever
comes meanwhile waits in the system's queue: all members of a run come at about one time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from protocol.base import limits
from protocol.base.errors import NotAuthorised, OutOfPlace, SamestepError
from protocol.base.fields import cut_text
from protocol.wire import tls
from protocol.wire.authentication import NO_CERTIFICATE, new_nonce
from protocol.wire.connection import encode
from protocol.wire.messages import Goodbye, PeerHello, PeerWelcome, Proof
from protocol.wire.transport import set_socket_options
from worker.peers.proof import challenge, check
from worker.peers.wire import Wire


class Door:
    """One member's.

    Args:
        me: Its name.
        encrypted: Whether there is TLS.
        key_of: The key of this member and the one of that name; None if there is none.
        came: Is given each connection on which both have proved themselves, in a thread of its own.
    """

    def __init__(
        self,
        me: str,
        *,
        encrypted: bool,
        key_of: Callable[[str], bytes | None],
        came: Callable[[Wire, PeerHello], None],
    ) -> None:
        self._me = me
        self._encrypted = encrypted
        self._key_of = key_of
        self._came = came
        self._context: ssl.SSLContext | None = None
        self._fingerprint = NO_CERTIFICATE
        self._listener: socket.socket | None = None
        self._strangers = threading.BoundedSemaphore(limits.PEER_STRANGERS_CONNECTIONS)

    def open(self) -> tuple[int, bytes]:
        """Listen on a free port of all addresses; gives it and the certificate's SHA-256.

        Raises:
            OSError: That cannot be done here.
        """
        if self._listener is None:
            if self._encrypted:
                self._context, self._fingerprint = _new_certificate(self._me)
            self._listener = _listening()
            threading.Thread(target=self._accept, name="door", daemon=True).start()
        return self._listener.getsockname()[1], self._fingerprint

    def close(self) -> None:
        """Let nobody in any more."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            self._strangers.acquire()
            try:
                endpoint, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(endpoint,), daemon=True).start()

    def _greet(self, endpoint: socket.socket) -> None:
        try:
            greeted = self._proved(endpoint)
        except (OSError, SamestepError):
            endpoint.close()
            return
        finally:
            self._strangers.release()
        self._came(*greeted)

    def _proved(self, endpoint: socket.socket) -> tuple[Wire, PeerHello]:
        """The connection, once whoever dialled has proved that it is who it says.

        Raises:
            OSError: It does not get so far, or not in time.
            SamestepError: It is not.
        """
        endpoint.settimeout(limits.HANDSHAKE_TIMEOUT_MS / 1000)
        set_socket_options(endpoint)
        if self._context is not None:
            endpoint = self._context.wrap_socket(endpoint, server_side=True)
        wire = Wire(endpoint, "listener")
        try:
            hello = self._checked(wire)
            wire.send(encode(PeerWelcome()))
        except NotAuthorised as error:
            reason = cut_text(str(error), 200)
            wire.send(encode(Goodbye(reason=reason, retry=False, exit_code=error.exit_code)))
            wire.close()
            raise
        except BaseException:
            wire.close()
            raise
        return wire, hello

    def _checked(self, wire: Wire) -> PeerHello:
        hello = wire.receive().message
        if not isinstance(hello, PeerHello):
            raise OutOfPlace(f"expected a PeerHello, got {type(hello).__name__}")
        key = self._key_of(hello.name)
        if key is None or hello.to != self._me:
            raise NotAuthorised(f"{hello.name!r} is no peer of {self._me!r}, or of {hello.to!r}")
        nonce = new_nonce()
        wire.send(encode(challenge(hello, nonce, self._fingerprint, key)))
        proof = wire.receive().message
        if not isinstance(proof, Proof):
            raise OutOfPlace(f"expected a Proof, got {type(proof).__name__}")
        check(hello, nonce, self._fingerprint, key, proof)
        return hello


def _listening() -> socket.socket:
    """A free port of all addresses, of both families where there are both.

    Raises:
        OSError: There is none.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # compiled in, and turned off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=limits.WORKERS, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=limits.WORKERS)


def _new_certificate(name: str) -> tuple[ssl.SSLContext, bytes]:
    """One for this run alone, in no file that stays."""
    from protocol.wire.certificate import self_signed  # noqa: PLC0415 -- 40 ms, once

    certificate, key = self_signed(f"samestep worker {name}"[:64])
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / "certificate.pem", Path(directory) / "key.pem"]
        for path, text in zip(paths, (certificate, key), strict=True):
            with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(text)
        context = tls.server_context(*paths)
    der = ssl.PEM_cert_to_DER_cert(certificate)
    return context, tls.fingerprint(der)
