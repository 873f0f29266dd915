"""What the coordinator prints at its start: how workers come in, and where its status is.

The join token is shown to a person at a terminal only. What is written elsewhere (a service's log,
a file) says how to get it instead.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.listening import from_here, is_loopback


def invitation(
    credentials: CoordinatorCredentials,
    address: tuple[str, int],
    *,
    name: str,
    plaintext: bool,
    to_terminal: bool,
) -> Iterator[str]:
    """One line for a worker of this user on this machine, and one to paste on another machine.

    Args:
        credentials: Whose token it takes.
        address: Where the coordinator listens.
        name: Under which it announces itself on the network; empty: it does not.
        plaintext: Without TLS.
        to_terminal: Whether a person at a terminal reads this, and nobody else.
    """
    host, port = address
    option = " --plaintext" if plaintext else ""
    yield f"listening for workers: worker --coordinator {from_here(host)}:{port}{option}"
    if plaintext:
        yield "NOT ENCRYPTED (--plaintext): all that workers send can be read and changed"
    if is_loopback(host):
        return
    there = reachable_address(host)
    if to_terminal:
        token = credentials.join_token().reveal()
    else:
        token = f'"$({_over_ssh(there, credentials)} token show)"'
    yield "on another machine, in one line:"
    yield f"  SAMESTEP_TOKEN={token} worker --coordinator {there}:{port}{option}"
    if name:
        yield f"(on the same network it is found without its address, as {name!r})"


def _over_ssh(host: str, credentials: CoordinatorCredentials) -> str:
    """The command as its user there; a service's user cannot log in, so root says whose it is."""
    if os.environ.get("STATE_DIRECTORY"):
        return f"ssh root@{host} SAMESTEP_HOME={credentials.home} coordinator"
    return f"ssh {host} coordinator"


def reachable_address(host: str) -> str:
    """What other machines can connect to where this one listens on all addresses.

    Not what the host's name resolves to here: that is often 127.0.1.1.
    """
    try:
        every = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host
    if not every:
        return host
    # A datagram socket that is connected sends nothing; it only finds the way out.
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))
            return str(probe.getsockname()[0])
    return socket.gethostname()


def status_line(control: tuple[str, int], token: str, *, to_terminal: bool) -> str:
    """How to see the status; with the control token only for a person at a terminal.

    A fragment of an address stays in the browser: it is in no request and in no log.
    """
    at = f"{control[0]}:{control[1]}"
    fragment = f"#token={token}" if to_terminal else ""
    return f"status: coordinator status --control {at}   (page: http://{at}/{fragment})"
