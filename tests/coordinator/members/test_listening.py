"""The addresses of a coordinator that other machines can reach."""

from __future__ import annotations

import shlex

import pytest
from ifaddr import IP, Adapter

from coordinator.members import listening
from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.invitation import invitation, status_line
from coordinator.members.listening import reachable_addresses
from protocol.base.address import parse_address


def adapter(name: str, *addresses: str) -> Adapter:
    ips = [
        IP((address, 0, 2) if ":" in address else address, 64 if ":" in address else 24, name)
        for address in addresses
    ]
    return Adapter(name, name, ips)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a LAN, a VPN, and a container bridge that is down."""
    adapters = [
        adapter("lo", "127.0.0.1", "::1"),
        adapter("eth0", "192.168.1.20", "fe80::20", "2001:db8::20"),
        adapter("tun0", "10.8.0.2"),
        adapter("docker0", "172.17.0.1"),
    ]
    (tmp_path / "docker0").mkdir()
    (tmp_path / "docker0" / "operstate").write_text("down\n")
    routes = {4: "", 6: ""}
    monkeypatch.setattr(listening, "_INTERFACES", tmp_path)
    monkeypatch.setattr("ifaddr.get_adapters", lambda: adapters)
    monkeypatch.setattr(listening, "_source_address", routes.__getitem__)
    return adapters, routes


def lines(home, host: str) -> list[str]:
    credentials = CoordinatorCredentials.open(home)
    address = (host, 9000)
    return [*invitation(credentials, address, name="", plaintext=False, to_terminal=False)]


@pytest.mark.usefixtures("machine")
def test_all_reachable_addresses_are_listed_without_a_default_route():
    assert reachable_addresses("0.0.0.0") == ["192.168.1.20", "10.8.0.2"]


def test_default_route_address_comes_first(machine):
    machine[1][4] = "10.8.0.2"
    assert reachable_addresses("0.0.0.0") == ["10.8.0.2", "192.168.1.20"]


@pytest.mark.usefixtures("machine")
def test_ipv6_listener_has_no_ipv4_address(tmp_path):
    assert reachable_addresses("::") == ["2001:db8::20"]
    first, *_, last = lines(tmp_path, "::")
    # Quoted: some shells expand brackets.
    assert first == "listening for workers: worker --coordinator '[::1]:9000'"
    assert last.endswith(" worker --coordinator '[2001:db8::20]:9000'")


@pytest.mark.usefixtures("machine")
def test_bound_address_is_listed():
    for host in ("192.0.2.7", "box.example", "fe80::20%eth0"):
        assert reachable_addresses(host) == [host]


def test_link_local_ipv4_address_of_a_direct_cable_is_listed(machine):
    machine[0][:] = [adapter("eth0", "169.254.7.1", "fe80::20")]
    assert reachable_addresses("0.0.0.0") == ["169.254.7.1"]
    assert reachable_addresses("::") == []


def test_all_addresses_are_in_the_lines_to_paste(machine, tmp_path):
    machine[1][4] = "10.8.0.2"
    *_, paste, other_addresses = lines(tmp_path, "0.0.0.0")
    assert paste.endswith(" worker --coordinator 10.8.0.2:9000")
    assert other_addresses == "  or at 192.168.1.20:9000"


@pytest.mark.usefixtures("machine")
def test_slurm_workers_read_the_token_from_the_shared_home(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    _, heading, command = lines(tmp_path, "0.0.0.0")
    assert heading == "on another node of this cluster, in one line:"
    assert command == f"  SAMESTEP_HOME={tmp_path} worker --coordinator 192.168.1.20:9000"


def test_machine_without_a_network_reports_it(machine, tmp_path):
    del machine[0][1:]
    assert lines(tmp_path, "0.0.0.0")[-1] == (
        "other machines cannot reach this one: it is on no network (ip addr)"
    )


@pytest.mark.usefixtures("machine")
def test_every_printed_address_can_be_parsed(tmp_path):
    for host in ("::", "fe80::20%eth0", "::1"):
        for line in lines(tmp_path, host):
            if " --coordinator " in line:
                assert parse_address(shlex.split(line)[-1], "--coordinator")[1] == 9000
    assert "--control '[::1]:9001' " in status_line(("::1", 9001), "", to_terminal=False)
