"""What the machine's packet filter says about a port, as far as that can be seen without changes.

Only root may look. nft shows the rules of iptables, ufw and firewalld too. A filter is taken to
close a port if its chain for incoming packets drops by default and no rule names the port.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any


def closed_by(port: int) -> str:
    """The chain that seems to drop what comes to this TCP port; empty if none is seen to."""
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
        if (chain.get("hook"), chain.get("policy")) != ("input", "drop"):
            continue
        if not any(_accepts(rule, chain["name"], port) for rule in _rules(entries, chain)):
            return f"{chain['family']} {chain['table']} {chain['name']}"
    return ""


def _rules(entries: list[dict[str, Any]], chain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rules of a chain's table: the chain may jump to any other in it."""
    for entry in entries:
        rule = entry.get("rule", {})
        if (rule.get("family"), rule.get("table")) == (chain["family"], chain["table"]):
            yield rule


def _accepts(rule: dict[str, Any], base: str, port: int) -> bool:
    """Whether a rule accepts this port by name, or in the base chain everything."""
    expressions: list[dict[str, Any]] = rule["expr"]
    if not any("accept" in each for each in expressions):
        return False
    matches = [each["match"] for each in expressions if "match" in each]
    if not matches:
        # `xt` is what nft cannot show in its own words, of a rule that iptables has made.
        return rule["chain"] == base and not any("xt" in each for each in expressions)
    return any(
        _is_tcp_port(match["left"]) and match["op"] in {"==", "in"} and _holds(match["right"], port)
        for match in matches
    )


def _is_tcp_port(left: Any) -> bool:
    """Whether what is compared is the destination port of TCP (`th`: of whatever it is)."""
    payload = left.get("payload", {}) if isinstance(left, dict) else {}
    return payload.get("field") == "dport" and payload.get("protocol") in {"tcp", "th"}


def _holds(right: Any, port: int) -> bool:
    """Whether a port is in what nft compares with: a number, a range, a set of both."""
    if isinstance(right, dict):
        if "range" in right:
            low, high = right["range"]
            return bool(low <= port <= high)
        return any(_holds(each, port) for each in right.get("set", ()))
    return bool(right == port)
