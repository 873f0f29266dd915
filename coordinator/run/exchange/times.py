"""Predicted duration of a step's exchange, in a star and sharded, and measured step times.

Pure. `exchange.topology: auto` decides by both; `python -m benchmarks.planned` predicts the
duration for many hosts and compares it with measurements. The constants were measured
(benchmarks/README.md): the overhead of protocols, and the processor time per byte with TLS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_HEADERS: Final = 1.05
"""Factor of the overhead of Ethernet, IP, TCP, TLS and frames, on 1500-byte packets."""
_UNEVEN: Final = 1.17
"""Factor of a star: workers that share one link do not get equal parts of it, and a sum waits for
the last worker; meanwhile averages use the other direction of the same connections."""
_LOOP_S: Final = 0.9e-9
"""Time of the coordinator's event loop per byte in or out: TLS, checksum, sums."""
_LINK_S: Final = 0.6e-9
"""Processor time of a member per byte that it exchanges with another member."""
_MEMBER_CORES: Final = 4
"""Cores of a member that do not compute gradients."""
_FIXED_S: Final = 0.003
"""Time of messages without gradients, and of waking processes."""
_WINDOW_STEPS: Final = 8
_WINDOW_MS: Final = 5_000.0
"""Ticks, ten per second, time the steps: an error of two percent over a window."""
_SHARDED_WINDOWS: Final = 2
"""More than one window, since a single window may be slow for another reason."""
_SLOWER: Final = 1.05


@dataclass(frozen=True, slots=True)
class MeshMember:
    """One host.

    Attributes:
        mbit: Speed of the host's link to the network in each direction, Mbit/s.
        share: The part of all chunks that the host owns where workers average; all shares sum to 1.
        here: Whether the coordinator is on this machine.
    """

    mbit: float
    share: float
    here: bool = False

    def takes_s(self, sent_bytes: float) -> float:
        """Return the seconds to send this many bytes in one direction."""
        return _HEADERS * sent_bytes * 8e-6 / self.mbit


@dataclass(frozen=True, slots=True)
class Volume:
    """The data that is exchanged in a step.

    Attributes:
        up_bytes: Encoded size of all sums of one host.
        down_bytes: Encoded size of all averages.
        pieces: Number of chunks, sent in sequence: an average can be sent as soon as the sums of
            its chunk have arrived from all hosts.
    """

    up_bytes: int
    down_bytes: int
    pieces: int


def star_s(volume: Volume, members: Sequence[MeshMember]) -> float:
    """Return the seconds of a star: all hosts send their sums to the coordinator and receive all
    averages, in parallel."""
    away = [member for member in members if not member.here]
    # Without a member on its machine, the coordinator's link is not measured: assume the fastest.
    at_center = [member for member in members if member.here] or members
    center = max(at_center, key=lambda member: member.mbit)
    larger = max(volume.up_bytes, volume.down_bytes)
    wire_s = max([center.takes_s(len(away) * larger), *(m.takes_s(larger) for m in away)])
    last_s = max(
        [
            center.takes_s(len(away) * volume.down_bytes),
            *(member.takes_s(volume.down_bytes) for member in away),
        ]
    )
    loop_s = _LOOP_S * len(members) * (volume.up_bytes + volume.down_bytes)
    return _FIXED_S + max(_UNEVEN * (wire_s + last_s / volume.pieces), loop_s)


def sharded_s(volume: Volume, members: Sequence[MeshMember], cores: float = _MEMBER_CORES) -> float:
    """Return the seconds of a sharded exchange: sums to the owners of chunks, averages to all.

    Args:
        volume: The data that is exchanged.
        members: The members with their shares.
        cores: Cores of each member that process link traffic.
    """
    others = len(members) - 1
    # Without a member on its machine, the coordinator receives another copy of each average.
    extra = 0 if any(member.here for member in members) else 1
    takes_s = []
    for member in members:
        rest = 1 - member.share
        sent_bytes = rest * volume.up_bytes + member.share * (others + extra) * volume.down_bytes
        received_bytes = rest * volume.down_bytes + member.share * others * volume.up_bytes
        links_s = _LINK_S * (sent_bytes + received_bytes) / min(cores, 2 * max(others, 1))
        takes_s.append(max(member.takes_s(max(sent_bytes, received_bytes)), links_s))
    return _FIXED_S + max(takes_s) * (1 + 1 / volume.pieces)


class StepTimes:
    """Measured times of steps, star and sharded, for one set of workers.

    A step's time includes forward and backward, which take equally long in both topologies.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all times: the set of workers has changed."""
        self._windows_ms: dict[bool, list[float]] = {False: [], True: []}
        self._open_ms: list[float] = []
        self._sharded: bool | None = None

    def add(self, step_ms: float, *, sharded: bool) -> None:
        """Add a step; the first one after a change of topology does not count."""
        if self._sharded is not sharded:
            self._sharded, self._open_ms = sharded, []
            return
        self._open_ms.append(step_ms)
        if len(self._open_ms) >= _WINDOW_STEPS and sum(self._open_ms) >= _WINDOW_MS:
            mean_ms = sum(self._open_ms) / len(self._open_ms)
            window = [*self._windows_ms[sharded], mean_ms]
            self._windows_ms[sharded] = window[-_SHARDED_WINDOWS:]
            self._open_ms = []

    def reason_for_star(self) -> str:
        """Return why the measurements call for a star; empty if they do not."""
        star_ms, sharded_ms = self._windows_ms[False], self._windows_ms[True]
        if len(sharded_ms) < _SHARDED_WINDOWS:
            return ""
        sharded = f"{min(sharded_ms):.0f} ms"
        if not star_ms:
            return f"a star, to measure it: a sharded step took {sharded}"
        if min(sharded_ms) > _SLOWER * min(star_ms):
            return f"a star: its steps took {min(star_ms):.0f} ms, sharded ones {sharded}"
        return ""
