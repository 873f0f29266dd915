"""Addresses as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base.address import format_address, parse_address
from protocol.base.errors import ExitCode, UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9000", ("127.0.0.1", 9000)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:9000", ("fe80::1%eth0", 9000)),
        ("a-host.example:80", ("a-host.example", 80)),
    ],
)
def test_host_and_port_are_parsed(text, expected):
    assert parse_address(text, "--bind") == expected


@pytest.mark.parametrize(
    "text", ["", "9000", ":9000", "host", "host:", "host:x", "host:-1", "host:65536", "host:1.5"]
)
def test_invalid_addresses_are_refused(text):
    with pytest.raises(UsageError, match="--bind: expected HOST:PORT") as error_info:
        parse_address(text, "--bind")
    assert repr(text) in str(error_info.value)
    assert error_info.value.exit_code == ExitCode.USAGE == 2


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_usage_error(text):
    try:
        host, port = parse_address(text, "--bind")
    except UsageError:
        return
    assert host
    assert 0 <= port <= 65535


@pytest.mark.parametrize("text", ["10.0.0.7", "10.0.0.7:9000", "localhost", "[fe80::1]", "host"])
def test_host_without_port_uses_the_default_port(text):
    assert parse_address(text, "--coordinator", 9000)[1] == 9000


@pytest.mark.parametrize("host", ["2001:db8::7", "fe80::1%eth0", "::1"])
def test_lone_ipv6_address_needs_no_brackets(host):
    assert parse_address(f"[{host}]", "--coordinator", 9000) == (host, 9000)
    assert parse_address(host, "--coordinator", 9000) == (host, 9000)
    assert parse_address("::1:9001", "--coordinator", 9000) == ("::1", 9001)


@pytest.mark.parametrize("address", [("::1", 9000), ("10.0.0.7", 1), ("fe80::1%eth0", 2)])
def test_address_round_trip(address):
    assert parse_address(format_address(*address), "--bind") == address
