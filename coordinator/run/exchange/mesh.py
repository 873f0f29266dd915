"""Choose the machine that averages each chunk: the coordinator for all chunks (a star), or workers
that reach each other.

Pure. Workers report where they listen, then which peers they reach; the table of owners depends on
these reports and on the computing workers. All members of a table reach each other in both
directions; other workers send to the coordinator. A table changes between steps, and within a step
if an owner is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from coordinator.run.exchange.times import (
    MeshMember,
    StepTimes,
    Volume,
    predict_sharded_s,
    predict_star_s,
)
from coordinator.run.outputs.actions import Action, Send
from protocol.exact.reduction.bfloat16 import ELEMENT_BYTES
from protocol.exact.reduction.chunk_grid import ChunkGrid, divide_chunks
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import ExchangeSpec
from protocol.wire.messages import ListenForPeers, Owners, PeerPort, Peers
from protocol.wire.peers import COORDINATOR_HOST, OwnerTable, Peer, PeerList, pair_key

_FEWEST_HOSTS: Final = 3
"""With two hosts a sharded exchange gains nothing: each sends and receives as much in a star."""
_MOST_TIME_RATIO: Final = 0.9
"""`auto` chooses sharded if its expected time is below this share of the star's."""
_SIMILAR_SPEED_FACTOR: Final = 4.0
"""Links whose measured speeds differ from the median by less than this factor count as equally
fast."""


@dataclass(frozen=True, slots=True)
class PeerEndpoint:
    """The port at which a member listens for peers, 0 if it does not; and the SHA-256 fingerprint
    of its certificate, in hex."""

    port: int
    fingerprint: str


class Mesh:
    """The workers of a run that reach one another, and the table of owners.

    Attributes:
        number: The number of the newest table. A star that was in force from the start is table 0.
        table: The table in force.
        star: The table whose only owner is the coordinator.
        reason: Why the table was chosen, as text for users.
        links: The link speeds that each member reports: Mbit/s by peer.
        traffic: Bytes sent and received on each link.

    Args:
        run_id: ID of the run.
        term: Term of the coordinator.
        exchange: The section of the run spec.
        blocks: The blocks of the manifest.
        secret: Secret of the run, from which the keys of pairs are derived; empty: no links.
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
        self._topology = exchange.topology if secret else "star"
        elements = sum(block.elements for block in blocks)
        self._volume = Volume(
            elements * ELEMENT_BYTES[exchange.precision],
            elements * ELEMENT_BYTES[exchange.averages],
            max(1, self._grid.count),
        )
        self._secret = secret
        self._hosts: dict[str, str] = {}
        self._endpoints: dict[str, PeerEndpoint] = {}
        self._demoted_until: dict[str, int] = {}
        self._sent_numbers: dict[str, int] = {}
        self._invited: set[str] = set()
        self._times = StepTimes()
        self._timed_workers: frozenset[str] = frozenset()

    # Members.

    def add_worker(self, worker: str, host: str) -> list[Action]:
        """Add a ready worker; if links may pay off, ask all workers to listen.

        Args:
            worker: The worker's name.
            host: The host from which the worker connects; `COORDINATOR_HOST` for the coordinator's
                machine.
        """
        self.remove_worker(worker)
        self._hosts[worker] = host
        if self._topology == "star":
            return []
        if self._topology == "auto" and len(set(self._hosts.values())) < _FEWEST_HOSTS:
            self.reason = f"a star: fewer than {_FEWEST_HOSTS} hosts"
            return []
        names = [name for name in sorted(self._hosts) if name not in self._invited]
        self._invited.update(names)
        return [Send(name, ListenForPeers(run_id=self._run_id)) for name in names]

    def add_listener(self, worker: str, message: PeerPort) -> list[Action]:
        """Note where a worker listens, and send the list of peers to all that listen."""
        if worker not in self._hosts:
            return []
        self._endpoints[worker] = PeerEndpoint(message.port, message.fingerprint.hex())
        names = sorted(self._endpoints)
        return [self._send_peers(name, names) for name in names]

    def _send_peers(self, worker: str, names: Sequence[str]) -> Send:
        peers = tuple(
            Peer(
                name=name, host=self._hosts[name], port=self._endpoints[name].port,
                fingerprint=self._endpoints[name].fingerprint,
                key=pair_key(self._secret, worker, name).hex(),
            )
            for name in names
            if name != worker
        )  # fmt: skip
        listens = self._endpoints[worker].port > 0
        document = PeerList(me=worker, listens=listens, peers=peers)
        return Send(worker, Peers(run_id=self._run_id), document.to_bytes())

    def add_link(self, worker: str, peer: str, mbit: float) -> None:
        """Note that a worker reaches a peer, and at what speed in Mbit/s."""
        if worker in self._endpoints and peer in self._endpoints:
            self.links.setdefault(worker, {})[peer] = mbit

    def remove_link(self, worker: str, peer: str) -> None:
        """Note that a worker no longer reaches a peer."""
        self.links.get(worker, {}).pop(peer, None)

    def remove_worker(self, worker: str) -> list[Action]:
        """Remove a worker that has left; the others get a new list and close their links to it."""
        had_links = worker in self._endpoints
        for by_worker in (self._hosts, self._endpoints, self._sent_numbers, self._demoted_until):
            by_worker.pop(worker, None)
        self._invited.discard(worker)
        self.links.pop(worker, None)
        self.traffic.pop(worker, None)
        for reachable_names in self.links.values():
            reachable_names.pop(worker, None)
        names = sorted(self._endpoints)
        return [self._send_peers(name, names) for name in names] if had_links else []

    def demote(self, worker: str, until: int) -> None:
        """Assign no chunk before step `until` to a worker whose averages were late."""
        self._demoted_until[worker] = until

    def note_duration(self, step_ms: float, *, sharded: bool) -> None:
        """Note the duration of a step that committed in its first attempt."""
        self._times.add(step_ms, sharded=sharded)

    # Tables.

    def choose_table(self, active: Collection[str], step: int) -> OwnerTable:
        """Choose the table for a step that these workers compute."""
        if self._topology == "star":
            return self.star
        if self._timed_workers != frozenset(active):
            self._timed_workers = frozenset(active)
            self._times.clear()
        members = self._clique(sorted(set(active) & self._endpoints.keys()))
        speeds = {name: self._speed(name, members) for name in members}
        shares = _equal_time_shares([speeds[name] for name in members])
        shares_without_late = [
            0.0 if self._demoted_until.get(name, 0) > step else share
            for name, share in zip(members, shares, strict=True)
        ]
        # If the other members have no share because of slow links, keep the late owners.
        if any(shares_without_late):
            shares = shares_without_late
        self.reason = self._reason_for_star(members, speeds, shares, active)
        if self.reason:
            self.table = self.star
            return self.table
        return self._adopt(self._table_of(members, shares))

    def reassign_lost(self, lost_owners: Collection[str]) -> OwnerTable:
        """Reassign the chunks of lost owners within a step; to the coordinator if no owner is
        left."""
        table = self.table
        if not table.has_peers:
            return table
        remaining = self._clique([name for name in table.members if name not in lost_owners])
        if not remaining:
            self.reason = "a star: no owner is left"
            return self._adopt(self.star)
        index = {name: number for number, name in enumerate(remaining)}
        next_owner = itertools.cycle(range(len(remaining)))
        owners = tuple(
            index[owner] if (owner := table.owner(number)) in index else next(next_owner)
            for number in range(self._grid.count)
        )
        scribe = table.scribe if table.scribe in index else self._choose_scribe(remaining)
        return self._adopt(OwnerTable(members=tuple(remaining), owners=owners, scribe=scribe))

    def reassign_owner(self, worker: str) -> OwnerTable:
        """Reassign the chunks of one owner within a step; the owner stays a member."""
        table = self.table
        others = [n for n, name in enumerate(table.members) if name != worker]
        if not others:
            return table
        next_owner = itertools.cycle(others)
        member_index = table.members.index(worker)
        owners = tuple(
            next(next_owner) if owner == member_index else owner for owner in table.owners
        )
        return self._adopt(table.model_copy(update={"owners": owners}))

    def send_table(self, workers: Collection[str]) -> list[Action]:
        """Send the table to each of these workers that does not have it."""
        message = Owners(run_id=self._run_id, term=self._term, number=self.number)
        document = self.table.to_bytes()
        receivers = [n for n in sorted(workers) if self._sent_numbers.get(n) != self.number]
        self._sent_numbers.update(dict.fromkeys(receivers, self.number))
        return [Send(name, message, document) for name in receivers]

    def owned_shares(self) -> dict[str, float]:
        """Return the share of all chunks that each worker owns; empty for a star."""
        table = self.table
        if not table.has_peers:
            return {}
        counts = dict.fromkeys(table.members, 0)
        for owner in table.owners:
            counts[table.members[owner]] += 1
        return {name: round(count / self._grid.count, 3) for name, count in counts.items()}

    def _adopt(self, table: OwnerTable) -> OwnerTable:
        if table.has_peers:
            owner_count, member_count = len({*table.owners}), len(table.members)
            self.reason = f"sharded: {owner_count} of {member_count} linked members average"
        if table != self.table:
            self.table = table
            self.number += 1
        return table

    def _table_of(self, members: Sequence[str], shares: Sequence[float]) -> OwnerTable:
        owners = tuple(divide_chunks(shares, self._grid))
        return OwnerTable(
            members=tuple(members), owners=owners, scribe=self._choose_scribe(members)
        )

    def _choose_scribe(self, members: Sequence[str]) -> str | None:
        """Return a member on the coordinator's machine, which receives all averages anyway."""
        return next((name for name in members if self._hosts[name] == COORDINATOR_HOST), None)

    def _are_linked(self, first: str, second: str) -> bool:
        return second in self.links.get(first, {}) and first in self.links.get(second, {})

    def _clique(self, names: Sequence[str]) -> list[str]:
        """Return members that all reach each other: drop the member with the most missing links,
        until none are missing."""
        candidates = list(names)
        while candidates:
            missing_links = {
                name: sum(
                    not self._are_linked(name, other) for other in candidates if other != name
                )
                for name in candidates
            }
            worst = max(candidates, key=lambda name: (missing_links[name], name))
            if not missing_links[worst]:
                break
            candidates.remove(worst)
        return candidates

    def _speed(self, name: str, members: Sequence[str]) -> float:
        """Return the speed of a member's fastest peer link in Mbit/s, as the speed of its network
        link."""
        speeds = [
            min(self.links[name][other], self.links[other][name])
            for other in members
            if other != name
        ]
        return max(speeds, default=1.0)

    def _reason_for_star(
        self, members: Sequence[str], speeds: Mapping[str, float], shares: Sequence[float],
        active: Collection[str],
    ) -> str:  # fmt: skip
        """Return why the exchange is a star; empty if it is sharded."""
        if len(active) < 2:
            return "a star: there is one worker, and sharded needs two"
        if len(members) < 2:
            return "a star: no two members reach each other"
        if self._topology == "sharded":
            return ""
        hosts = {self._hosts.get(name, name) for name in active}
        if len(hosts) < _FEWEST_HOSTS:
            return f"a star: fewer than {_FEWEST_HOSTS} hosts"
        total = sum(shares)
        mesh_members = [
            MeshMember(
                speeds[name], share / total, has_coordinator=self._hosts[name] == COORDINATOR_HOST
            )
            for name, share in zip(members, shares, strict=True)
        ]
        star, sharded = (
            predict_star_s(self._volume, mesh_members),
            predict_sharded_s(self._volume, mesh_members),
        )
        if sharded > _MOST_TIME_RATIO * star:
            ms = f"{star * 1e3:.0f} ms, a sharded exchange {sharded * 1e3:.0f}"
            return f"a star: it is expected to take {ms}"
        return self._times.reason_for_star()


def _equal_time_shares(speeds: Sequence[float]) -> list[float]:
    """Return the share that each member owns, such that all links are busy for about equally long.

    In units of all chunks, one of n members that owns the share f sends 1 - f to other owners, and
    its averages, f each, to n - 1 others: 1 + (n - 2) f. It receives as much.
    """
    count = len(speeds)
    if count < 3:
        return [1.0] * count
    median_speed = median(speeds)
    smoothed_speeds = [
        median_speed
        if median_speed / _SIMILAR_SPEED_FACTOR < speed < median_speed * _SIMILAR_SPEED_FACTOR
        else speed
        for speed in speeds
    ]
    low, high = 0.0, 2.0 * count / min(smoothed_speeds)
    for _ in range(60):  # bisect the duration of a step at which all shares sum to 1
        middle = (low + high) / 2
        if sum(_share_at(middle, speed, count) for speed in smoothed_speeds) < 1:
            low = middle
        else:
            high = middle
    return [_share_at(high, speed, count) for speed in smoothed_speeds]


def _share_at(time: float, speed: float, count: int) -> float:
    return max(0.0, (time * speed - 1) / (count - 2))
