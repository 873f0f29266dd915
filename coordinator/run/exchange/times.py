"""How long the exchange of a step should take, by the speeds of links: as a star, and sharded.

Pure. `exchange.way: auto` decides by it; `python -m benchmarks.planned` plays it for many hosts and
compares it with what was measured. The constants are measured ones (benchmarks/README.md): what
protocols add to bytes, and what a processor takes for a byte with TLS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_HEADERS: Final = 1.05
"""Of Ethernet, IP, TCP, TLS and frames, on 1500-byte packets."""
_UNEVEN: Final = 1.17
"""Of a star: workers that send to one link do not get equal parts of it, and a sum waits for the
last one; averages go the other way over the same connections meanwhile."""
_LOOP_S: Final = 0.9e-9
"""Of the coordinator's event loop for a byte in or out: TLS, checksum, sums."""
_LINK_S: Final = 0.6e-9
"""Of a member's processor for a byte that goes to another member or comes from there."""
_MEMBER_CORES: Final = 4
"""That a member has beside those that compute."""
_FIXED_S: Final = 0.003
"""Messages without gradients, and waking up."""


@dataclass(frozen=True, slots=True)
class MeshMember:
    """One host.

    Attributes:
        mbit: Of its link to the network, Mbit/s, each way.
        share: Of all slices, what it owns where they have owners; all shares sum up to 1.
        here: Whether the coordinator is on this machine.
    """

    mbit: float
    share: float
    here: bool = False

    def takes_s(self, sent_bytes: float) -> float:
        """For so many bytes, in one direction."""
        return _HEADERS * sent_bytes * 8e-6 / self.mbit


@dataclass(frozen=True, slots=True)
class Volume:
    """What is exchanged in a step.

    Attributes:
        up_bytes: All sums of one host, as they travel.
        down_bytes: All averages, likewise.
        pieces: In which they travel, one after the other: a sum's average can go down when that
            one has come from all.
    """

    up_bytes: int
    down_bytes: int
    pieces: int


def star_s(volume: Volume, members: Sequence[MeshMember]) -> float:
    """All sums to the coordinator, and all averages from it; both directions at once."""
    away = [member for member in members if not member.here]
    # Without a member there the coordinator's link is not measured: as quick as the quickest.
    at_centre = [member for member in members if member.here] or members
    centre = max(at_centre, key=lambda member: member.mbit)
    larger = max(volume.up_bytes, volume.down_bytes)
    wire_s = max([centre.takes_s(len(away) * larger), *(m.takes_s(larger) for m in away)])
    last_s = max(
        [
            centre.takes_s(len(away) * volume.down_bytes),
            *(member.takes_s(volume.down_bytes) for member in away),
        ]
    )
    loop_s = _LOOP_S * len(members) * (volume.up_bytes + volume.down_bytes)
    return _FIXED_S + max(_UNEVEN * (wire_s + last_s / volume.pieces), loop_s)


def sharded_s(volume: Volume, members: Sequence[MeshMember], cores: float = _MEMBER_CORES) -> float:
    """Every sum to the owners of its slices, and averages from them to all.

    Args:
        volume: What is exchanged.
        members: Who has what share.
        cores: Of each member, for what goes over links.
    """
    others = len(members) - 1
    # No table without a member on the coordinator's machine: it gets each average once more.
    extra = 0 if any(member.here for member in members) else 1
    takes_s = []
    for member in members:
        rest = 1 - member.share
        sent = rest * volume.up_bytes + member.share * (others + extra) * volume.down_bytes
        come = rest * volume.down_bytes + member.share * others * volume.up_bytes
        links_s = _LINK_S * (sent + come) / min(cores, 2 * max(others, 1))
        takes_s.append(max(member.takes_s(max(sent, come)), links_s))
    return _FIXED_S + max(takes_s) * (1 + 1 / volume.pieces)
