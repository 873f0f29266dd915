"""Hosts on one machine: network namespaces on a bridge, with links that a test can cut and restore.

Their addresses are loopback addresses (127.8.0.x) unless a test requests others. They are routed
over the links, so the test's other hosts, and nothing else, can reach a loopback listener.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from tests.processes import Process, start

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
"""Constant of sched.h: a network namespace."""


class Network:
    """Hosts by name; create it with `network`."""

    def __init__(self, names: tuple[str, ...], subnet: str) -> None:
        self._subnet = subnet
        self._prefix = f"samestep-{os.getpid()}"
        self._numbers = {name: number for number, name in enumerate(names, start=1)}

    def address(self, host: str) -> str:
        """Return the host's address."""
        return f"{self._subnet}.{self._numbers[host]}"

    def namespace(self, host: str) -> Path:
        """Return the file of the host's network namespace."""
        return Path(f"/run/netns/{self._name(host)}")

    def cut(self, host: str) -> None:
        """Silently drop all packets on the host's link, in both directions, from now on."""
        _ip("-n", self._name("hub"), "link", "set", f"port{self._numbers[host]}", "nomaster")

    def mend(self, host: str) -> None:
        """Restore the host's link."""
        port = f"port{self._numbers[host]}"
        _ip("-n", self._name("hub"), "link", "set", port, "master", "bridge")

    def drop_large_packets(self, host: str, mtu: int) -> None:
        """Silently drop packets above `mtu` bytes on the host's link, in both directions, from now
        on."""
        port = f"port{self._numbers[host]}"
        _ip("-n", self._name("hub"), "link", "set", port, "mtu", str(mtu))
        # Otherwise a host passes packets of up to 64 KiB to its link, which forwards them whole.
        for name in self._numbers:
            _ip("-n", self._name(name), "link", "set", "eth0", "gso_max_segs", "1")

    def start(
        self, host: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start one of the two commands as a process on that host."""
        return start(module, *arguments, environment=environment, network=self.namespace(host))

    def run_on(self, host: str, work: Callable[[], T]) -> T:
        """Run a function in the host's network namespace; threads that it starts inherit it."""

        def enter() -> None:
            with self.namespace(host).open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")

        with ThreadPoolExecutor(1, initializer=enter) as thread:
            return thread.submit(work).result()

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _set_up(self) -> None:
        _ip("netns", "add", self._name("hub"))
        _ip("-n", self._name("hub"), "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._name("hub"), "link", "set", "bridge", "up")
        for host, number in self._numbers.items():
            name, port = self._name(host), f"port{number}"
            _ip("netns", "add", name)
            link = ("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._name("hub"), *link)
            self.mend(host)
            _ip("-n", self._name("hub"), "link", "set", port, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if self._subnet.startswith("127."):
                self._route_loopback(name)
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            if not self._subnet.startswith("127."):
                _ip("-n", name, "route", "add", "default", "dev", "eth0")

    def _route_loopback(self, name: str) -> None:
        for scope in ("all", "eth0"):
            setting = f"net.ipv4.conf.{scope}.route_localnet=1"
            _ip("netns", "exec", name, "sysctl", "-qw", setting)
        # Packets of a host to itself go through lo, which must not claim all of 127/8.
        _ip("-n", name, "addr", "del", "127.0.0.1/8", "dev", "lo")

    def _tear_down(self) -> None:
        for host in ("hub", *self._numbers):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._name(host))


@contextlib.contextmanager
def network(*names: str, subnet: str = "127.8.0") -> Iterator[Network]:
    """Set up hosts on one bridge; skip the test where that is impossible.

    Args:
        names: Names of the hosts.
        subnet: The first three numbers of the hosts' addresses.
    """
    net = Network(names, subnet)
    try:
        try:
            net._set_up()
        except FileNotFoundError:
            pytest.skip("no network namespaces here: the command ip is missing (iproute2)")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield net
    finally:
        with contextlib.suppress(FileNotFoundError):
            net._tear_down()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
