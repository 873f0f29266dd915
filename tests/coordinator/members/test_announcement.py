"""A coordinator is announced at its current addresses, also after they change."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from coordinator.members import announcement
from coordinator.members.announcement import Announcement

PATIENCE_S = 20.0


class Network:
    """Replaces zeroconf: records which addresses are announced, one list after the other."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[list[str]] = asyncio.Queue()
        self.withdrawn = 0
        self.failure: OSError | None = None
        self.tried = asyncio.Event()

    def __call__(self, *_arguments, **_options) -> Network:
        if self.failure is not None:
            self.tried.set()
            raise self.failure
        return self

    async def async_register_service(self, info, **_options):
        async def registered() -> None:
            await self.heard.put(info.parsed_addresses())

        return registered()

    async def async_unregister_all_services(self) -> None:
        self.withdrawn += 1

    async def async_close(self) -> None:
        pass


@pytest.fixture
def network(monkeypatch) -> Network:
    fake_network = Network()
    monkeypatch.setattr(announcement, "AsyncZeroconf", fake_network)
    monkeypatch.setattr(announcement, "LOOK_EVERY_S", 0.0)
    return fake_network


def addresses(monkeypatch, *now: str) -> None:
    monkeypatch.setattr(announcement, "reachable_addresses", lambda _: list(now))


async def test_changed_addresses_are_announced_again(network, monkeypatch):
    addresses(monkeypatch, "192.0.2.1")
    advert = Announcement("den", ("0.0.0.0", 9000), "")
    advert.start()
    async with asyncio.timeout(PATIENCE_S):
        assert await network.heard.get() == ["192.0.2.1"]
        addresses(monkeypatch, "198.51.100.7", "192.0.2.9")
        assert await network.heard.get() == ["198.51.100.7", "192.0.2.9"]
        assert network.withdrawn == 1
        await advert.stop()
    assert network.withdrawn == 2
    assert network.heard.empty()


async def test_announcement_starts_when_the_network_is_up(network, monkeypatch):
    """Started before the network, as services are at boot; each reason is logged once."""
    addresses(monkeypatch)
    network.failure = OSError(101, "Network is unreachable")
    advert = Announcement("den", ("0.0.0.0", 9000), "")
    with capture_logs() as logs:
        advert.start()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.sleep(0)  # after its first attempt
            addresses(monkeypatch, "192.0.2.1")
            await network.tried.wait()
            network.failure = None
            assert await network.heard.get() == ["192.0.2.1"]
            await advert.stop()
    reasons = [entry["reason"] for entry in logs if entry["event"] == "not_announced"]
    assert "no address that other machines reach" in reasons[0]
    assert "Network is unreachable" in reasons[1]
    assert len(reasons) == 2
