"""What the coordinator prints at its start: how workers come in, and where its status is.

The join token is shown to a person at a terminal only. What is written elsewhere (a service's log,
a file) says how to get it instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.listening import from_here, is_loopback, reachable_addresses
from protocol.base.address import format_address


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
    here = format_address(from_here(host), port)
    yield f"listening for workers: worker --coordinator {here}{option}"
    if plaintext:
        yield "NOT ENCRYPTED (--plaintext): all that workers send can be read and changed"
    if is_loopback(host):
        return
    there, *others = reachable_addresses(host) or [""]
    if not there:
        yield "other machines cannot reach this one: it is on no network (ip addr)"
        return
    if to_terminal:
        token = credentials.join_token().reveal()
    else:
        token = f'"$({_over_ssh(there, credentials)} token show)"'
    yield "on another machine, in one line:"
    yield f"  SAMESTEP_TOKEN={token} worker --coordinator {format_address(there, port)}{option}"
    if others:
        yield f"  or at {', '.join(format_address(each, port) for each in others)}"
    if name and "%" not in there:
        yield f"(on the same network it is found without its address, as {name!r})"


def _over_ssh(host: str, credentials: CoordinatorCredentials) -> str:
    """The command as its user there; a service's user cannot log in, so root says whose it is."""
    if os.environ.get("STATE_DIRECTORY"):
        return f"ssh root@{host} SAMESTEP_HOME={credentials.home} coordinator"
    return f"ssh {host} coordinator"


def status_line(control: tuple[str, int], token: str, *, to_terminal: bool) -> str:
    """How to see the status; with the control token only for a person at a terminal.

    A fragment of an address stays in the browser: it is in no request and in no log.
    """
    at = format_address(*control)
    fragment = f"#token={token}" if to_terminal else ""
    return f"status: coordinator status --control {at}   (page: http://{at}/{fragment})"
