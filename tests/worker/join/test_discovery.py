"""Which discovered coordinator is chosen, and how untrusted announcements are validated."""

from __future__ import annotations

import socket

import pytest

from protocol.base.errors import MessageError, UsageError
from protocol.wire.discovery import SERVICE, CoordinatorAnnouncement, check_name
from worker.join.address import has_listener, nearest_host
from worker.join.discovery import choose_coordinator

OWN_CERTIFICATE, OTHER_CERTIFICATE = "a" * 64, "b" * 64
VALID_PROPERTIES = {"protocol": "2", "certificate": OWN_CERTIFICATE}


def announcement_of(
    name: str, certificate: str = OTHER_CERTIFICATE, *addresses: str
) -> CoordinatorAnnouncement:
    properties = {"protocol": "2", "certificate": certificate}
    return CoordinatorAnnouncement.read(
        f"{name}.{SERVICE}", [*addresses] or ["192.0.2.1"], 9000, properties
    )


def has_credentials(certificate: str) -> bool:
    return certificate == OWN_CERTIFICATE


@pytest.mark.parametrize(
    ("announcements", "name", "expected_name"),
    [
        ([], "", None),
        ([announcement_of("den")], "", "den"),
        ([announcement_of("den"), announcement_of("lab")], "", None),
        ([announcement_of("den"), announcement_of("lab", OWN_CERTIFICATE)], "", "lab"),
        (
            [announcement_of("den", OWN_CERTIFICATE), announcement_of("lab", OWN_CERTIFICATE)],
            "",
            None,
        ),
        ([announcement_of("den"), announcement_of("lab", OWN_CERTIFICATE)], "den", "den"),
        ([announcement_of("den", OWN_CERTIFICATE)], "lab", None),
    ],
)
def test_choice_among_coordinators(announcements, name, expected_name):
    coordinator = choose_coordinator(announcements, name, has_credentials)
    assert (coordinator.name if coordinator is not None else None) == expected_name


def test_announcement_round_trip():
    announcement = announcement_of("den", OWN_CERTIFICATE, "192.0.2.1", "2001:db8::1")
    assert announcement.properties() == VALID_PROPERTIES
    assert [str(address) for address in announcement.addresses] == ["192.0.2.1", "2001:db8::1"]
    assert announcement_of("den", "").certificate == ""


@pytest.mark.parametrize(
    ("name", "addresses", "port", "properties"),
    [
        ("\x1b[2Jden", ["192.0.2.1"], 9000, VALID_PROPERTIES),
        ("den.lab", ["192.0.2.1"], 9000, VALID_PROPERTIES),
        ("d" * 41, ["192.0.2.1"], 9000, VALID_PROPERTIES),
        ("", ["192.0.2.1"], 9000, VALID_PROPERTIES),
        ("den", [], 9000, VALID_PROPERTIES),
        ("den", ["192.0.2.1"] * 33, 9000, VALID_PROPERTIES),
        ("den", ["here"], 9000, VALID_PROPERTIES),
        ("den", ["192.0.2.1"], 0, VALID_PROPERTIES),
        ("den", ["192.0.2.1"], 9000, {}),
        ("den", ["192.0.2.1"], 9000, {"protocol": None, "certificate": None}),
        ("den", ["192.0.2.1"], 9000, VALID_PROPERTIES | {"protocol": "new"}),
        ("den", ["192.0.2.1"], 9000, VALID_PROPERTIES | {"certificate": "../x"}),
    ],
)
def test_invalid_announcement_is_refused(name, addresses, port, properties):
    with pytest.raises(MessageError):
        CoordinatorAnnouncement.read(f"{name}.{SERVICE}", addresses, port, properties)


@pytest.mark.parametrize("name", ["", "-x", "den.lab", "d" * 41, "den lab"])
def test_invalid_coordinator_name_is_refused(name):
    assert check_name("den-1_x", "--name") == "den-1_x"
    with pytest.raises(UsageError, match="--name"):
        check_name(name, "--name")


def test_nearest_ranks_own_addresses_and_host_names_last():
    # An announced address that this machine has too belongs to a bridge, so it ranks last.
    # 127.0.0.2 shares all but two bits with 127.0.0.1.
    assert nearest_host(["127.0.0.1", "127.0.0.2"]) == "127.0.0.2"
    assert nearest_host(["127.0.0.1"]) == "127.0.0.1"
    assert nearest_host(["node7.cluster", "127.0.0.2"]) == "127.0.0.2"


def test_listener_is_detected_without_a_connection():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = server.getsockname()
        server.listen()
        server.setblocking(False)
        assert has_listener(*address)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not has_listener(*address)
