"""The address file: workers read a coordinator's address from it, or report one error line."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from protocol.base.errors import Unreachable
from protocol.wire.address_file import PublishedAddress
from worker.join.address import find_in_file


def discard(_: str) -> None:
    """Discard the text."""


def find(path, retry_for_s=0.0, tell=discard):
    return asyncio.run(find_in_file(path, retry_for_s, tell))


def test_worker_chooses_a_reachable_address(tmp_path):
    path = tmp_path / "address.json"
    published = PublishedAddress(
        data="0.0.0.0:9000",
        control="127.0.0.1:9001",
        reachable=("192.0.2.7:9000", "127.0.0.2:9000"),
    )
    path.write_text(published.to_json())
    assert find(path) == ("127.0.0.2", 9000)


def test_listening_address_is_the_fallback(tmp_path):
    path = tmp_path / "address.json"
    path.write_text(PublishedAddress(data="[::1]:9000", control="127.0.0.1:1").to_json())
    assert find(path) == ("::1", 9000)
    path.write_text(json.dumps({"data": "lab.example:9000", "control": "127.0.0.1:1"}))
    assert find(path) == ("lab.example", 9000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("", "expected the addresses of a coordinator"),
        ("[1, 2]", "expected the addresses of a coordinator"),
        ('{"data": "x", "control": "y"}', "expected HOST:PORT"),
        ('{"data": "a:1", "control": "a:2", "reachable": ["a"]}', "expected HOST:PORT"),
        ("x" * 20_000, "expected at most"),
    ],
)
def test_unusable_file_is_named(tmp_path, content, message):
    path = tmp_path / "address.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Unreachable, match="on a file system that both machines share") as error:
        find(path)
    assert message in str(error.value)


def test_a_worker_waits_for_the_file_and_reports_it(tmp_path):
    path = tmp_path / "address.json"
    is_waiting, lines = threading.Event(), []

    def tell(text):
        lines.append(text)
        is_waiting.set()

    def write():
        is_waiting.wait()
        path.write_text(PublishedAddress(data="127.0.0.1:7", control="127.0.0.1:8").to_json())

    writer = threading.Thread(target=write)
    writer.start()
    assert find(path, 60.0, tell) == ("127.0.0.1", 7)
    writer.join()
    assert "waiting for a coordinator's address in" in lines[0]
