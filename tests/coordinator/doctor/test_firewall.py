"""A packet filter that drops: the kernel's own, on a host of its own."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from coordinator.doctor.doctor import Plan, examine
from coordinator.doctor.firewall import closed_by
from tests.network_hosts import network

SEARCHED = "/usr/sbin:/sbin:/usr/bin"
NFT = shutil.which("nft", path=SEARCHED)
DROPS = """
flush ruleset
table inet filter {{
  {sets}
  chain incoming {{
    type filter hook input priority 0; policy {policy};
    {rules}
  }}
}}
"""
FIREWALLD = """
flush ruleset
table inet firewalld {{
  chain filter_IN_public_allow {{
    tcp dport 22 ct state {{ new, untracked }} accept
    {allowed}
  }}
  chain filter_IN_public_pre {{
  }}
  chain filter_IN_public {{
    jump filter_IN_public_pre
    jump filter_IN_public_allow
    meta l4proto {{ icmp, ipv6-icmp }} accept
    reject with icmpx type admin-prohibited
  }}
  chain filter_IN_trusted {{
    jump filter_IN_public_pre
    accept
  }}
  chain filter_INPUT_ZONES {{
    {zones}
    goto filter_IN_public
  }}
  chain filter_INPUT {{
    type filter hook input priority 10; policy accept;
    ct state {{ established, related }} accept
    ct status dnat accept
    iifname "lo" accept
    ct state invalid drop
    jump filter_INPUT_ZONES
    reject with icmpx type admin-prohibited
  }}
}}
"""
"""What firewalld loads, less what is not about connections to this machine."""


@pytest.fixture(scope="module")
def host():
    """Runs work on a host whose filter is the rules given."""
    if NFT is None:
        pytest.skip("no packet filter here: the command nft is missing (nftables)")
    with network("filtered", subnet="10.8.0") as made:

        def run(rules, work, policy="drop", sets="", *, whole="", command=(NFT, "-f", "-")):
            text = whole or DROPS.format(policy=policy, rules=rules, sets=sets)

            def filtered():
                done = subprocess.run(
                    command, input=text, text=True, capture_output=True, check=False
                )
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
        ("tcp dport < 1024 accept", True),
        ("tcp dport <= 8999 accept", True),
        ("tcp dport > 9000 accept", True),
        ("tcp dport >= 9000 accept", False),
        ("tcp dport <= 9000 accept", False),
        ("counter accept", False),
    ],
)
def test_what_the_filter_lets_in(host, rules, closed):
    assert host(rules, lambda: closed_by(9000)) == ("inet filter incoming" if closed else "")


def test_a_filter_that_lets_all_in(host):
    assert host("", lambda: closed_by(9000), policy="accept") == ""


@pytest.mark.parametrize(
    ("rules", "closed"),
    [
        ("tcp dport 22 accept\nreject", True),
        ("tcp dport 22 accept\ncounter drop", True),
        ("ct state established accept\niifname lo accept\nlog\nreject with tcp reset", True),
        ("iif lo accept\nmeta l4proto tcp reject with tcp reset", True),
        ("iifname != lo drop", True),
        ("ct state new drop", True),
        ("tcp dport 9000 drop\ntcp dport 9000 accept", True),
        ("tcp dport != 22 drop", True),
        ("tcp dport >= 1024 drop", True),
        ("tcp dport < 1024 drop", False),
        ("tcp dport < 1024 accept\ndrop", True),
        ("tcp dport vmap { 22 : accept, 9000 : drop }", True),
        ("meta l4proto tcp accept\nreject", False),
        ("tcp dport 9000 accept\nreject", False),
        ("ip saddr 10.0.0.0/8 tcp dport 9000 accept\nreject", False),
        ("ip saddr 10.0.0.7 accept\nreject", True),
        ("iifname eth1 accept\nreject", False),
        ("ip saddr 10.0.0.7 drop\nudp dport 9000 reject", False),
        ("iifname lo tcp dport 9000 accept\nreject", True),
        ("tcp dport 9000 ct state established accept\nreject", True),
        ("tcp dport vmap { 22 : drop, 9000-9010 : accept }\nreject", False),
        ("tcp dport @open accept\nreject", False),
        ("tcp dport @closed accept\nreject", True),
        ("tcp dport @timed accept\nreject", False),
        ("ct state established,new accept\nreject", False),
        ("ct state vmap { established : accept, invalid : drop, new : jump more }\nreject", False),
        ("jump more", False),
        ("goto less\ntcp dport 9000 accept", False),
        ("jump less\nreject", True),
        ("iifname lo jump more\nreject", True),
    ],
)
def test_a_chain_that_lets_in_what_no_rule_stops(host, rules, closed):
    sets = """
      set open { type inet_service; flags interval; elements = { 22, 9000-9010 }; }
      set timed { type inet_service; flags timeout; elements = { 9000 timeout 1h }; }
      set closed { type inet_service; elements = { 22, 80 }; }
      chain more { tcp dport 9000 accept; }
      chain less { tcp dport 9000 return; accept; }
    """.replace("; }", "\n}")
    found = host(rules, lambda: closed_by(9000), policy="accept", sets=sets)
    assert found == ("inet filter incoming" if closed else "")


@pytest.mark.parametrize(
    ("allowed", "zones", "closed"),
    [
        ("", "", True),
        ("tcp dport 80 accept", "", True),
        ("tcp dport 9000 accept", "", False),
        ("tcp dport 9000 ct state { new, untracked } accept", "", False),
        ("", "iifname eth0 goto filter_IN_public", True),
        ("", "iifname eth1 goto filter_IN_trusted", False),
        ("", "ip saddr 10.0.0.7 goto filter_IN_trusted", True),
    ],
)
def test_a_filter_of_firewalld(host, allowed, zones, closed):
    whole = FIREWALLD.format(allowed=allowed, zones=zones)
    found = host("", lambda: closed_by(9000), whole=whole)
    assert found == ("inet firewalld filter_INPUT" if closed else "")


@pytest.mark.parametrize(
    ("rule", "closed"),
    [
        ("-p tcp --dport 22", True),
        ("-p udp --dport 9000", True),
        ("-p tcp --dport 9000", False),
        ("-p tcp --dport 9000 -m conntrack --ctstate NEW", False),
        ("-p tcp -m comment --comment workers --dport 9000", False),
    ],
)
@pytest.mark.parametrize("last", ["REJECT --reject-with icmp-host-prohibited", "REJECT", "DROP"])
def test_a_filter_of_iptables(host, rule, closed, last):
    iptables = shutil.which("iptables-nft", path=SEARCHED)
    if iptables is None:
        pytest.skip("no iptables here: the command iptables-nft is missing (iptables)")
    rules = ["-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT", "-i lo -j ACCEPT"]
    rules += [f"{rule} -j ACCEPT", f"-j {last}"]
    program = [f"{NFT} flush ruleset", *(f"{iptables} -A INPUT {each}" for each in rules)]
    command = ("sh", "-ec", "\n".join(program))
    found = host("", lambda: closed_by(9000), command=command)
    assert found == ("ip filter INPUT" if closed else "")


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
