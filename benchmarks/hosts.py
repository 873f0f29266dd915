"""Hosts on one machine: network namespaces, each with a link of limited speed to one switch.

A link is a pair of virtual Ethernet devices; `tc tbf` holds both directions to the link's speed,
and the kernel counts what goes through. Needs root, `ip`, `tc` and `nsenter`. Names contain the
process id, and closing the network removes everything.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_CLONE_NEWNET: Final = 0x40000000
_DEVICE: Final = "eth0"
_BURST: Final = "256kb"
_LATENCY: Final = "100ms"
"""Longest delay in a link's queue; packets that would wait longer are dropped."""


def why_unavailable() -> str:
    """Return why this machine cannot create hosts; empty if it can."""
    if os.geteuid() != 0:
        return "simulated hosts need root: network namespaces and traffic control"
    missing_commands = [name for name in ("ip", "tc", "nsenter") if shutil.which(name) is None]
    if missing_commands:
        names = ", ".join(missing_commands)
        return f"simulated hosts need the commands {names} (iproute2, util-linux)"
    try:
        Network([1000]).__enter__().__exit__(None, None, None)
    except RuntimeError as error:
        return f"no hosts can be made here: {error}"
    return ""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace.

    Attributes:
        name: Name of the namespace.
        address: The host's only address other than loopback.
        mbit: Speed of the host's link in each direction, Mbit/s.
    """

    name: str
    address: str
    mbit: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """Return the prefix that runs a command on this host."""
        return ("nsenter", f"--net={self._path}")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Return a context in which this thread opens its sockets on this host."""
        with (
            Path("/proc/self/ns/net").open("rb") as own_namespace,
            self._path.open("rb") as host_namespace,
        ):
            _set_namespace(host_namespace.fileno())
            try:
                yield
            finally:
                _set_namespace(own_namespace.fileno())

    def counted_bytes(self) -> tuple[int, int]:
        """Return the bytes sent and received by this host, including Ethernet headers."""
        answer = _run("ip", "-j", "-s", "-n", self.name, "link", "show", "dev", _DEVICE)
        counters = json.loads(answer)[0]["stats64"]
        return counters["tx"]["bytes"], counters["rx"]["bytes"]

    @property
    def _path(self) -> Path:
        return Path("/run/netns") / self.name


class Network:
    """Hosts that are connected by one switch.

    Attributes:
        hosts: One host for each speed, in order.

    Args:
        mbits: The speed of each host's link, Mbit/s.
    """

    def __init__(self, mbits: Sequence[int]) -> None:
        prefix = f"ss{os.getpid()}"
        self._switch = f"{prefix}s"
        self.hosts = tuple(
            Host(f"{prefix}h{index}", f"10.77.0.{index + 1}", mbit)
            for index, mbit in enumerate(mbits)
        )

    def __enter__(self) -> Self:
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
            for index, host in enumerate(self.hosts):
                self._add(host, f"port{index}")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _add(self, host: Host, port: str) -> None:
        _run("ip", "netns", "add", host.name)
        _run(
            "ip", "link", "add", _DEVICE, "netns", host.name,
            "type", "veth", "peer", "name", port, "netns", self._switch,
        )  # fmt: skip
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", _DEVICE)
        _run("ip", "-n", host.name, "link", "set", "lo", "up")
        _run("ip", "-n", host.name, "link", "set", _DEVICE, "up")
        for namespace, device in ((host.name, _DEVICE), (self._switch, port)):
            _run(
                "tc", "-n", namespace, "qdisc", "add", "dev", device, "root",
                "tbf", "rate", f"{host.mbit}mbit", "burst", _BURST, "latency", _LATENCY,
            )  # fmt: skip

    def _remove(self) -> None:
        for name in (*(host.name for host in self.hosts), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # noqa: S603, S607 -- our own names


def _set_namespace(descriptor: int) -> None:
    """Switch this thread to the network namespace of a descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _run(*command: str) -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: The command failed; the message has its output.
    """
    process = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 -- our own commands
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {process.stderr.strip()}")
    return process.stdout
