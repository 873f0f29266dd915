"""A packet filter that drops: the kernel's own, on a host of its own."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from coordinator.doctor import Plan, examine
from coordinator.firewall import closed_by
from tests.network_hosts import network

NFT = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin")
DROPS = """
flush ruleset
table inet filter {{
  chain incoming {{
    type filter hook input priority 0; policy {policy};
    {rules}
  }}
}}
"""


@pytest.fixture(scope="module")
def host():
    """Runs work on a host whose filter is the rules given."""
    if NFT is None:
        pytest.skip("no packet filter here: the command nft is missing (nftables)")
    with network("filtered", subnet="10.8.0") as made:

        def run(rules, work, policy="drop"):
            def filtered():
                done = subprocess.run(
                    [NFT, "-f", "-"],
                    input=DROPS.format(policy=policy, rules=rules),
                    text=True, capture_output=True, check=False,
                )  # fmt: skip
                if done.returncode:
                    assert "syntax error" not in done.stderr
                    pytest.skip(f"no packet filter here: {done.stderr.strip()}")
                return work()

            return made.run_on("filtered", filtered)

        yield run


@pytest.mark.parametrize(
    ("rules", "closed"),
    [
        ("ct state established accept", True),
        ("tcp dport 22 accept", True),
        ("udp dport 9000 accept\ntcp dport 9001 accept", True),
        ("tcp dport 9000 drop", True),
        ("tcp dport 9000 accept", False),
        ("tcp dport { 22, 9000-9010 } accept", False),
        ("tcp dport 8000-9999 counter accept", False),
        ("counter accept", False),
    ],
)
def test_what_the_filter_lets_in(host, rules, closed):
    assert host(rules, lambda: closed_by(9000)) == ("inet filter incoming" if closed else "")


def test_a_filter_that_lets_all_in(host):
    assert host("", lambda: closed_by(9000), policy="accept") == ""


@pytest.mark.parametrize("rules", ["iif lo accept", "iif lo accept\ntcp dport 9000 accept"])
def test_the_doctor_says_so(host, tmp_path, rules):
    plan = Plan(("0.0.0.0", 9000), ("127.0.0.1", 9001), tmp_path, tmp_path)
    checks = host(rules, lambda: {each.check: each for each in examine(plan)})
    assert checks["workers' port"].outcome == "ok"
    told = checks["reachable"]
    if "9000" in rules:
        assert (told.outcome, "others connect to 10.8.0.1:9000" in told.found) == ("ok", True)
    else:
        assert (told.outcome, "inet filter incoming" in told.found) == ("warning", True)
        assert "worker doctor --coordinator 10.8.0.1:9000" in told.advice


def test_a_filter_that_keeps_the_machine_from_itself(host, tmp_path):
    plan = Plan(("0.0.0.0", 9000), ("127.0.0.1", 9001), tmp_path, tmp_path)
    checks = host("counter drop", lambda: {each.check: each for each in examine(plan)})
    assert checks["workers' port"].outcome == "failure"
    assert "cannot be reached at 10.8.0.1:9000 even from here" in checks["workers' port"].found
