"""What systemd hears, at the end of a socket that stands for it."""

import asyncio
import os
import socket

import pytest

from protocol.command.supervisor import Supervisor


@pytest.fixture
def manager(tmp_path):
    """systemd's end, and an environment that names it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.setblocking(False)
        environment = {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "30000",
            "WATCHDOG_PID": str(os.getpid()),
        }
        yield heard, environment


async def next_of(heard):
    told = await asyncio.get_running_loop().sock_recv(heard, 4096)
    return told.decode().split("\n")


async def test_it_is_told_of_the_start_the_status_the_turning_loop_and_the_end(manager):
    heard, environment = manager
    status = "step 1\nof 2"
    service = Supervisor(environment)
    service.ready(lambda: status)
    assert await next_of(heard) == ["READY=1"]
    assert await next_of(heard) == ["WATCHDOG=1", "STATUS=step 1 of 2"]
    assert await next_of(heard) == ["WATCHDOG=1"]
    status = "step 2 of 2"
    while (told := await next_of(heard)) == ["WATCHDOG=1"]:
        pass
    assert told == ["WATCHDOG=1", "STATUS=step 2 of 2"]
    service.stopping()
    while (told := await next_of(heard)) == ["WATCHDOG=1"]:
        pass
    assert told == ["STOPPING=1"]
    service.close()
    service.stopping()  # nobody is told any more


async def test_a_watchdog_of_another_process_is_not_fed(manager):
    heard, environment = manager
    service = Supervisor({**environment, "WATCHDOG_PID": "1"})
    service.ready(lambda: "idle")
    assert await next_of(heard) == ["READY=1"]
    assert await next_of(heard) == ["STATUS=idle"]
    service.close()


async def test_a_manager_that_is_away_or_busy_stops_nobody(manager):
    heard, environment = manager
    busy = Supervisor(environment)
    for _ in range(1000):
        busy.stopping()
    busy.close()
    heard.close()
    away = Supervisor({"NOTIFY_SOCKET": "@samestep-nobody-listens-here"})
    away.stopping()
    away.ready(lambda: "idle")
    await asyncio.sleep(0)
    away.close()


async def test_without_systemd_nothing_is_made_and_nothing_scheduled():
    service = Supervisor({})
    service.ready(lambda: pytest.fail("nobody asked"))
    await asyncio.sleep(0)
    assert service._socket is None
    assert len(asyncio.all_tasks()) == 1
    service.stopping()
    service.close()


def test_processes_that_are_started_from_here_do_not_speak_for_it(manager):
    _, environment = manager
    Supervisor(environment).close()
    assert environment == {}
