"""Who averages which chunk: the coordinator all of them (a star), or workers that reach each other.

Pure. Workers report where they listen, then which peers they reach; the table of owners follows
from that and from which workers compute. All members of a table reach each other in both
directions; other workers send to the coordinator. A table changes between steps, and within a step
if an owner is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from coordinator.run.exchange.times import MeshMember, StepTimes, Volume, sharded_s, star_s
from coordinator.run.outputs.actions import Action, Send
from protocol.exact.reduction.bfloat16 import ELEMENT_BYTES
from protocol.exact.reduction.chunk_grid import ChunkGrid, divide_chunks
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import ExchangeSpec
from protocol.wire.messages import ListenForPeers, Owners, PeerPort, Peers
from protocol.wire.peers import HERE, OwnerTable, Peer, PeerList, pair_key

_FEWEST_HOSTS: Final = 3
"""With two hosts, each sends and receives as much in a star."""
_PAYS: Final = 0.9
"""`auto` chooses sharded if it is expected to take less than this share of the star's time."""
_ALIKE: Final = 4.0
"""Links whose measured speeds differ by less than this factor count as equally fast."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a member listens; port 0: it does not."""

    port: int
    fingerprint: str


class Mesh:
    """The workers of a run that reach one another, and the table of owners.

    Attributes:
        number: The number of the newest table that workers have received. A star that was in force
            from the start is table 0.
        table: The table in force.
        star: The table whose only owner is the coordinator.
        reason: Why this table was chosen, as text for users.
        links: The link speeds that each member reports: Mbit/s by peer.
        traffic: Bytes sent and received on each link.

    Args:
        run_id: ID of the run.
        term: Term of the coordinator.
        exchange: The section of the run spec.
        blocks: The blocks of the manifest.
        secret: Secret of the run, from which the keys of pairs derive; empty: no links.
    """

    def __init__(
        self, run_id: str, term: int, exchange: ExchangeSpec, blocks: tuple[Block, ...],
        secret: bytes,
    ) -> None:  # fmt: skip
        self.number = 0
        self._grid = ChunkGrid(blocks)
        self.table = self.star = OwnerTable.star(self._grid.count)
        self.reason = ""
        if exchange.topology == "star":
            self.reason = "a star: the run spec says so"
        elif not secret:
            self.reason = "a star: this run has no links between workers"
        self.links: dict[str, dict[str, float]] = {}
        self.traffic: dict[str, dict[str, tuple[int, int]]] = {}
        self._run_id = run_id
        self._term = term
        self._way = exchange.topology if secret else "star"
        elements = sum(block.elements for block in blocks)
        self._volume = Volume(
            elements * ELEMENT_BYTES[exchange.precision],
            elements * ELEMENT_BYTES[exchange.averages],
            max(1, self._grid.count),
        )
        self._secret = secret
        self._hosts: dict[str, str] = {}
        self._listening: dict[str, Offer] = {}
        self._demoted: dict[str, int] = {}
        self._reported: dict[str, int] = {}
        self._invited: set[str] = set()
        self._times = StepTimes()
        self._timed: frozenset[str] = frozenset()

    # Members.

    def joined(self, worker: str, host: str) -> list[Action]:
        """Add a ready worker; if links may pay off, ask all workers to listen.

        Args:
            worker: The worker's name.
            host: The host it connects from; `HERE` for the coordinator's machine.
        """
        self.lost(worker)
        self._hosts[worker] = host
        if self._way == "star":
            return []
        if self._way == "auto" and len(set(self._hosts.values())) < _FEWEST_HOSTS:
            self.reason = f"a star: fewer than {_FEWEST_HOSTS} hosts"
            return []
        names = [name for name in sorted(self._hosts) if name not in self._invited]
        self._invited.update(names)
        return [Send(name, ListenForPeers(run_id=self._run_id)) for name in names]

    def opened(self, worker: str, message: PeerPort) -> list[Action]:
        """Note that a worker listens, and send the list of peers to all that do."""
        if worker not in self._hosts:
            return []
        self._listening[worker] = Offer(message.port, message.fingerprint.hex())
        names = sorted(self._listening)
        return [self._peers(name, names) for name in names]

    def _peers(self, me: str, names: Sequence[str]) -> Send:
        others = tuple(
            Peer(
                name=name, host=self._hosts[name], port=self._listening[name].port,
                fingerprint=self._listening[name].fingerprint,
                key=pair_key(self._secret, me, name).hex(),
            )
            for name in names
            if name != me
        )  # fmt: skip
        listens = self._listening[me].port > 0
        document = PeerList(me=me, listens=listens, peers=others)
        return Send(me, Peers(run_id=self._run_id), document.to_bytes())

    def linked(self, worker: str, peer: str, mbit: float) -> None:
        """Note that a worker reaches a peer, and at what speed in Mbit/s."""
        if worker in self._listening and peer in self._listening:
            self.links.setdefault(worker, {})[peer] = mbit

    def unlinked(self, worker: str, peer: str) -> None:
        """Note that a worker no longer reaches a peer."""
        self.links.get(worker, {}).pop(peer, None)

    def lost(self, worker: str) -> list[Action]:
        """Remove a worker that left; the others get a new list and close their links to it."""
        had_links = worker in self._listening
        for table in (self._hosts, self._listening, self._reported, self._demoted):
            table.pop(worker, None)
        self._invited.discard(worker)
        self.links.pop(worker, None)
        self.traffic.pop(worker, None)
        for reachable_names in self.links.values():
            reachable_names.pop(worker, None)
        names = sorted(self._listening)
        return [self._peers(name, names) for name in names] if had_links else []

    def demote(self, worker: str, until: int) -> None:
        """Let a worker whose averages were late own nothing before step `until`."""
        self._demoted[worker] = until

    def took(self, step_ms: float, *, sharded: bool) -> None:
        """Note the duration of a step that committed in its first attempt."""
        self._times.add(step_ms, sharded=sharded)

    # Tables.

    def choose(self, active: Collection[str], step: int) -> OwnerTable:
        """Choose the table for a step that these workers compute."""
        if self._way == "star":
            return self.star
        if self._timed != frozenset(active):
            self._timed = frozenset(active)
            self._times.clear()
        members = self._clique(sorted(set(active) & self._listening.keys()))
        speeds = {name: self._speed(name, members) for name in members}
        shares = _shares([speeds[name] for name in members])
        without_late = [
            0.0 if self._demoted.get(name, 0) > step else share
            for name, share in zip(members, shares, strict=True)
        ]
        # A member with a slow link may own nothing anyway: somebody must own something.
        if any(without_late):
            shares = without_late
        self.reason = self._why_star(members, speeds, shares, active)
        if self.reason:
            self.table = self.star
            return self.table
        return self._set(self._table_of(members, shares))

    def without(self, lost_owners: Collection[str]) -> OwnerTable:
        """Reassign the chunks of lost owners within a step; to the coordinator if none is left."""
        table = self.table
        if not table.has_peers:
            return table
        rest = self._clique([name for name in table.members if name not in lost_owners])
        if not rest:
            self.reason = "a star: no owner is left"
            return self._set(self.star)
        index = {name: number for number, name in enumerate(rest)}
        next_owner = itertools.cycle(range(len(rest)))
        owners = tuple(
            index[owner] if (owner := table.owner(number)) in index else next(next_owner)
            for number in range(self._grid.count)
        )
        scribe = table.scribe if table.scribe in index else self._scribe(rest)
        return self._set(OwnerTable(members=tuple(rest), owners=owners, scribe=scribe))

    def reown(self, worker: str) -> OwnerTable:
        """Reassign the chunks of one owner within a step; it stays a member."""
        table = self.table
        others = [n for n, name in enumerate(table.members) if name != worker]
        if not others:
            return table
        next_owner = itertools.cycle(others)
        member_index = table.members.index(worker)
        owners = tuple(
            next(next_owner) if owner == member_index else owner for owner in table.owners
        )
        return self._set(table.model_copy(update={"owners": owners}))

    def tell(self, workers: Collection[str]) -> list[Action]:
        """Send the table to each of these workers that does not have it."""
        message = Owners(run_id=self._run_id, term=self._term, number=self.number)
        document = self.table.to_bytes()
        new = [name for name in sorted(workers) if self._reported.get(name) != self.number]
        self._reported.update(dict.fromkeys(new, self.number))
        return [Send(name, message, document) for name in new]

    def owned(self) -> dict[str, float]:
        """Return the share of all chunks that each worker owns; empty for a star."""
        table = self.table
        if not table.has_peers:
            return {}
        counts = dict.fromkeys(table.members, 0)
        for owner in table.owners:
            counts[table.members[owner]] += 1
        return {name: round(count / self._grid.count, 3) for name, count in counts.items()}

    def _set(self, table: OwnerTable) -> OwnerTable:
        if table.has_peers:
            owning, member_count = len({*table.owners}), len(table.members)
            self.reason = f"sharded: {owning} of {member_count} linked members average"
        if table != self.table:
            self.table = table
            self.number += 1
        return table

    def _table_of(self, members: Sequence[str], shares: Sequence[float]) -> OwnerTable:
        owners = tuple(divide_chunks(shares, self._grid))
        return OwnerTable(members=tuple(members), owners=owners, scribe=self._scribe(members))

    def _scribe(self, members: Sequence[str]) -> str | None:
        """Return a member on the coordinator's machine, which receives all averages anyway."""
        return next((name for name in members if self._hosts[name] == HERE), None)

    def _are_linked(self, one: str, other: str) -> bool:
        return other in self.links.get(one, {}) and one in self.links.get(other, {})

    def _clique(self, names: Sequence[str]) -> list[str]:
        """Return members that all reach each other; drop those with the most missing links."""
        candidates = list(names)
        while candidates:
            lacking = {
                name: sum(
                    not self._are_linked(name, other) for other in candidates if other != name
                )
                for name in candidates
            }
            worst = max(candidates, key=lambda name: (lacking[name], name))
            if not lacking[worst]:
                break
            candidates.remove(worst)
        return candidates

    def _speed(self, name: str, members: Sequence[str]) -> float:
        """Return the speed of a member's network link in Mbit/s: that of its fastest peer link."""
        speeds = [
            min(self.links[name][other], self.links[other][name])
            for other in members
            if other != name
        ]
        return max(speeds, default=1.0)

    def _why_star(
        self, members: Sequence[str], speeds: Mapping[str, float], shares: Sequence[float],
        active: Collection[str],
    ) -> str:  # fmt: skip
        """Return why the exchange is a star; empty if it is sharded."""
        if len(active) < 2:
            return "a star: there is one worker, and sharded needs two"
        if len(members) < 2:
            return "a star: no two members reach each other"
        if self._way == "sharded":
            return ""
        hosts = {self._hosts.get(name, name) for name in active}
        if len(hosts) < _FEWEST_HOSTS:
            return f"a star: fewer than {_FEWEST_HOSTS} hosts"
        total = sum(shares)
        mesh_members = [
            MeshMember(speeds[name], share / total, here=self._hosts[name] == HERE)
            for name, share in zip(members, shares, strict=True)
        ]
        star, sharded = star_s(self._volume, mesh_members), sharded_s(self._volume, mesh_members)
        if sharded > _PAYS * star:
            ms = f"{star * 1e3:.0f} ms, a sharded exchange {sharded * 1e3:.0f}"
            return f"a star: it is expected to take {ms}"
        return self._times.why_star()


def _shares(speeds: Sequence[float]) -> list[float]:
    """Return the share that each member owns, so that all links are busy for about as long.

    A member of speed b that owns the share f of n members' chunks sends 1 - f of a payload to
    other owners and its average to n - 1 others: 1 + (n - 2) f payloads, and receives as many.
    """
    count = len(speeds)
    if count < 3:
        return [1.0] * count
    median_speed = median(speeds)
    smoothed_speeds = [
        median_speed if median_speed / _ALIKE < speed < median_speed * _ALIKE else speed
        for speed in speeds
    ]
    low, high = 0.0, 2.0 * count / min(smoothed_speeds)
    for _ in range(60):  # bisect the duration of a step at which all shares sum to 1
        middle = (low + high) / 2
        if sum(_share(middle, speed, count) for speed in smoothed_speeds) < 1:
            low = middle
        else:
            high = middle
    return [_share(high, speed, count) for speed in smoothed_speeds]


def _share(time: float, speed: float, count: int) -> float:
    return max(0.0, (time * speed - 1) / (count - 2))
