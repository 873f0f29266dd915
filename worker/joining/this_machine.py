"""Whether a coordinator may be on this machine, where one listens that was not told where."""

from __future__ import annotations

import errno
import socket
from typing import Final

HERE: Final = ("127.0.0.1", 9000)


def someone_listens(host: str, port: int) -> bool:
    """Whether a server has this address of this machine; it does not notice the question."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
