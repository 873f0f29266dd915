"""Addresses as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base.address import parse_address
from protocol.base.errors import ExitCode, UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9000", ("127.0.0.1", 9000)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("a-host.example:80", ("a-host.example", 80)),
    ],
)
def test_host_and_port(text, expected):
    assert parse_address(text, "--bind") == expected


@pytest.mark.parametrize(
    "text", ["", "9000", ":9000", "host", "host:", "host:x", "host:-1", "host:65536", "host:1.5"]
)
def test_what_is_no_address(text):
    with pytest.raises(UsageError, match="--bind: expected HOST:PORT") as caught:
        parse_address(text, "--bind")
    assert repr(text) in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE == 2


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_usage_error(text):
    try:
        host, port = parse_address(text, "--bind")
    except UsageError:
        return
    assert host
    assert 0 <= port <= 65535


@pytest.mark.parametrize("text", ["10.0.0.7", "10.0.0.7:9000", "localhost", "[fe80::1]", "host"])
def test_a_host_alone_has_the_port_that_is_usual_there(text):
    assert parse_address(text, "--coordinator", 9000)[1] == 9000
