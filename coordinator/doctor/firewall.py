"""What the machine's packet filter says about a port, as far as that can be seen without changes.

Only root may look. nft shows the rules of iptables (not of iptables-legacy), ufw and firewalld too.
A chain for incoming packets is followed, with what it jumps to, as the first packet of a connection
to the port goes that comes from another machine. It is taken to be let in by a rule for the port,
whatever else that asks for, and by one for all packets or for all of an interface; to be stopped
by a drop or reject that asks for nothing that it may not have, or by the chain's policy. So a port
that is open to some counts as open.
"""

from __future__ import annotations

import json
import operator
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class _Fate(Enum):
    """What becomes of the packet."""

    NAMED = "let in by a rule for its port"
    LET_IN = "let in with all others"
    STOPPED = "stopped"


class _Fit(Enum):
    """Whether a rule is for the packet; the first that holds for one of its parts is the rule's."""

    NO = "no"
    UNKNOWN = "it depends on what cannot be known here"
    INTERFACE = "it depends on the interface it comes by"
    YES = "yes"


_TCP: Final[tuple[str | int, ...]] = ("tcp", 6)
_INTERFACES: Final = {"iif", "iifname", "iifgroup", "iiftype"}
_ORDERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_STOPS: Final = {"DROP", "REJECT"}
"""Targets of iptables that nft has no words for."""


def closed_by(port: int) -> str:
    """The chain that seems to stop what comes to this TCP port; empty if none is seen to."""
    nft = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin")
    if nft is None:
        return ""
    command = [nft, "--json", "list", "ruleset"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=True)  # noqa: S603
        entries = json.loads(done.stdout)["nftables"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return ""  # not root, or no packet filter in this kernel
    for entry in entries:
        chain = entry.get("chain", {})
        if (chain.get("hook"), chain.get("type")) != ("input", "filter"):
            continue
        fate = _Table(entries, chain["family"], chain["table"], port).fate(chain["name"])
        if fate is _Fate.STOPPED or (fate is None and chain.get("policy") == "drop"):
            return f"{chain['family']} {chain['table']} {chain['name']}"
    return ""


@dataclass(frozen=True, slots=True)
class _Table:
    """A table, and the port that the packet is for.

    Attributes:
        entries: Of all tables, as nft lists them.
        family: The table's.
        name: The table's.
        port: The packet's.
    """

    entries: list[dict[str, Any]]
    family: str
    name: str
    port: int

    def fate(self, chain: str) -> _Fate | None:
        """What a chain makes of the packet; None if it goes on where it came from."""
        for rule in self._own("rule"):
            if rule["chain"] != chain:
                continue
            expressions = rule["expr"]
            fit = self._fit(expressions)
            if fit is _Fit.NO:
                continue
            for verdict, verdict_fit, named in self._verdicts(expressions):
                over, fate = self._carried_out(verdict, _least(fit, verdict_fit), named=named)
                if over:
                    return fate
        return None

    def _own(self, kind: str) -> Iterator[dict[str, Any]]:
        for entry in self.entries:
            found = entry.get(kind, {})
            if (found.get("family"), found.get("table")) == (self.family, self.name):
                yield found

    def _carried_out(
        self, verdict: dict[str, Any], fit: _Fit, *, named: bool
    ) -> tuple[bool, _Fate | None]:
        """Whether the chain is over, and with what."""
        if "accept" in verdict:
            if named:
                return True, _Fate.NAMED
            return fit in {_Fit.YES, _Fit.INTERFACE}, _Fate.LET_IN
        if "drop" in verdict or "reject" in verdict:
            return fit is _Fit.YES, _Fate.STOPPED
        if "return" in verdict:
            return fit is _Fit.YES, None
        for way in ("jump", "goto"):
            if way not in verdict:
                continue
            fate = self.fate(verdict[way]["target"])
            if fate is _Fate.NAMED:
                return True, fate
            if fate is _Fate.LET_IN and fit in {_Fit.YES, _Fit.INTERFACE}:
                return True, fate
            if fit is _Fit.YES:
                return fate is not None or way == "goto", fate
        return False, None

    def _verdicts(
        self, expressions: list[dict[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], _Fit, bool]]:
        """What a rule does, for whom beyond its matches, and whether it names the port."""
        named = any(
            _is_tcp_port(match["left"]) and self._match_fit(match) is _Fit.YES
            for match in _matches(expressions)
        )
        for each in expressions:
            if "xt" in each:
                if _xt(each, "type") == "target" and _xt(each, "name") in _STOPS:
                    yield {"drop": None}, _Fit.YES, named
            elif "vmap" in each:
                yield from self._mapped(each["vmap"], named=named)
            else:
                yield each, _Fit.YES, named

    def _mapped(
        self, vmap: dict[str, Any], *, named: bool
    ) -> Iterator[tuple[dict[str, Any], _Fit, bool]]:
        """What a map of verdicts does with the packet."""
        is_port = _is_tcp_port(vmap["key"])
        for key, verdict in self._elements(vmap["data"]):
            match = {"op": "==", "left": vmap["key"], "right": key}
            fit = self._match_fit(match)
            if fit is not _Fit.NO:
                yield verdict, fit, named or is_port

    def _fit(self, expressions: list[dict[str, Any]]) -> _Fit:
        fits = [self._match_fit(match) for match in _matches(expressions)]
        # What iptables asks for and nft has no words for; a comment asks for nothing.
        fits += [
            _Fit.UNKNOWN
            for each in expressions
            if "xt" in each and _xt(each, "type") != "target" and _xt(each, "name") != "comment"
        ]
        return _least(*fits)

    def _match_fit(self, match: dict[str, Any]) -> _Fit:
        """Whether one comparison holds."""
        left, right = match["left"], match["right"]
        if match["op"] in _ORDERS and _is_tcp_port(left) and isinstance(right, int):
            return _yes(_ORDERS[match["op"]](self.port, right))
        if match["op"] not in {"==", "!=", "in"} or not isinstance(left, dict):
            return _Fit.UNKNOWN
        fit = self._equals(left, right)
        if match["op"] == "!=":
            return {_Fit.YES: _Fit.NO, _Fit.NO: _Fit.YES}.get(fit, fit)
        return fit

    def _equals(self, left: dict[str, Any], right: Any) -> _Fit:
        payload, meta, ct = (left.get(kind, {}) for kind in ("payload", "meta", "ct"))
        if _is_tcp_port(left):
            return _yes(self._holds(right, self.port))
        if payload.get("protocol") in {"udp", "icmp", "icmpv6", "sctp", "dccp", "udplite"}:
            return _Fit.NO
        if meta.get("key") == "l4proto" or payload.get("field") in {"protocol", "nexthdr"}:
            return _yes(any(self._holds(right, name) for name in _TCP))
        if ct.get("key") == "state":
            return _yes(self._holds(right, "new"))
        if meta.get("key") in _INTERFACES:
            return _Fit.NO if right == "lo" else _Fit.INTERFACE
        return _Fit.UNKNOWN

    def _holds(self, right: Any, wanted: int | str) -> bool:
        """Whether it is in what nft compares with: a value, range, set of both, or a set's name."""
        if isinstance(right, list):
            return any(self._holds(each, wanted) for each in right)
        if isinstance(right, str) and right.startswith("@"):
            return any(self._holds(each, wanted) for each in self._elements(right))
        if isinstance(right, dict):
            if "range" in right:
                low, high = right["range"]
                return isinstance(wanted, int) and bool(low <= wanted <= high)
            if "elem" in right:  # of a set, with a timeout or a comment
                return self._holds(right["elem"]["val"], wanted)
            among: Any = right.get("set", right.get("|", ()))
            return any(self._holds(each, wanted) for each in among)
        return bool(right == wanted)

    def _elements(self, data: Any) -> Iterable[Any]:
        """Of a set or map, written out or by name."""
        if isinstance(data, str):
            for kind in ("set", "map"):
                for each in self._own(kind):
                    if each["name"] == data.removeprefix("@"):
                        return list(each.get("elem", ()))
            return []
        return list(data.get("set", ()))


def _least(*fits: _Fit) -> _Fit:
    """Of all that a rule asks for: what fits least."""
    return next((fit for fit in _Fit if fit in fits), _Fit.YES)


def _yes(holds: bool) -> _Fit:  # noqa: FBT001
    return _Fit.YES if holds else _Fit.NO


def _matches(expressions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["match"] for each in expressions if "match" in each]


def _xt(expression: dict[str, Any], key: str) -> str:
    """Of an extension of iptables; empty where nft does not even name it."""
    return str((expression["xt"] or {}).get(key, ""))


def _is_tcp_port(left: Any) -> bool:
    """Whether what is compared is the destination port of TCP (`th`: of whatever it is)."""
    payload = left.get("payload", {}) if isinstance(left, dict) else {}
    return payload.get("field") == "dport" and payload.get("protocol") in {"tcp", "th"}
