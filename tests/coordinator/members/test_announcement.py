"""A coordinator announces its current addresses, and announces them again when they change."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from coordinator.members import announcement
from coordinator.members.announcement import Announcement

PATIENCE_S = 20.0


class FakeZeroconf:
    """Replaces zeroconf: records each announced list of addresses."""

    def __init__(self) -> None:
        self.announcements: asyncio.Queue[list[str]] = asyncio.Queue()
        self.withdrawal_count = 0
        self.failure: OSError | None = None
        self.attempted = asyncio.Event()

    def __call__(self, *_arguments, **_options) -> FakeZeroconf:
        if self.failure is not None:
            self.attempted.set()
            raise self.failure
        return self

    async def async_register_service(self, info, **_options):
        async def announce() -> None:
            await self.announcements.put(info.parsed_addresses())

        return announce()

    async def async_unregister_all_services(self) -> None:
        self.withdrawal_count += 1

    async def async_close(self) -> None:
        pass


@pytest.fixture
def network(monkeypatch) -> FakeZeroconf:
    fake_network = FakeZeroconf()
    monkeypatch.setattr(announcement, "AsyncZeroconf", fake_network)
    monkeypatch.setattr(announcement, "CHECK_INTERVAL_S", 0.0)
    return fake_network


def set_addresses(monkeypatch, *addresses: str) -> None:
    monkeypatch.setattr(announcement, "reachable_addresses", lambda _: list(addresses))


async def test_changed_addresses_are_announced_again(network, monkeypatch):
    set_addresses(monkeypatch, "192.0.2.1")
    announcer = Announcement("den", ("0.0.0.0", 9000), "")
    announcer.start()
    async with asyncio.timeout(PATIENCE_S):
        assert await network.announcements.get() == ["192.0.2.1"]
        set_addresses(monkeypatch, "198.51.100.7", "192.0.2.9")
        assert await network.announcements.get() == ["198.51.100.7", "192.0.2.9"]
        assert network.withdrawal_count == 1
        await announcer.stop()
    assert network.withdrawal_count == 2
    assert network.announcements.empty()


async def test_announcement_starts_when_the_network_is_up(network, monkeypatch):
    """Services may start before the network at boot; each reason is logged once."""
    set_addresses(monkeypatch)
    network.failure = OSError(101, "Network is unreachable")
    announcer = Announcement("den", ("0.0.0.0", 9000), "")
    with capture_logs() as logs:
        announcer.start()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.sleep(0)  # after its first attempt
            set_addresses(monkeypatch, "192.0.2.1")
            await network.attempted.wait()
            network.failure = None
            assert await network.announcements.get() == ["192.0.2.1"]
            await announcer.stop()
    reasons = [entry["reason"] for entry in logs if entry["event"] == "not_announced"]
    assert "no address that other machines reach" in reasons[0]
    assert "Network is unreachable" in reasons[1]
    assert len(reasons) == 2
