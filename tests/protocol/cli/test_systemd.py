"""Messages to systemd, received on sockets that replace its own."""

import asyncio
import os
import socket

import pytest

from protocol.base.errors import Mismatch
from protocol.cli import systemd
from protocol.cli.systemd import Priority, Supervisor, SystemJournal, write_error


@pytest.fixture
def manager(tmp_path):
    """Return a socket in place of systemd's, and the environment that names the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(tmp_path / "notify"))
        datagrams.setblocking(False)
        environment = {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "30000",
            "WATCHDOG_PID": str(os.getpid()),
        }
        yield datagrams, environment


async def receive_lines(datagrams):
    datagram = await asyncio.get_running_loop().sock_recv(datagrams, 4096)
    return datagram.decode().split("\n")


async def test_systemd_learns_of_start_status_watchdog_and_stop(manager):
    datagrams, environment = manager
    status = "step 1\nof 2"
    service = Supervisor(environment)
    service.report_ready(lambda: status)
    assert await receive_lines(datagrams) == ["READY=1"]
    assert await receive_lines(datagrams) == ["WATCHDOG=1", "STATUS=step 1 of 2"]
    assert await receive_lines(datagrams) == ["WATCHDOG=1"]
    status = "step 2 of 2"
    while (lines := await receive_lines(datagrams)) == ["WATCHDOG=1"]:
        pass
    assert lines == ["WATCHDOG=1", "STATUS=step 2 of 2"]
    service.report_stopping()
    while (lines := await receive_lines(datagrams)) == ["WATCHDOG=1"]:
        pass
    assert lines == ["STOPPING=1"]
    service.close()
    service.report_stopping()  # sends nothing after close


async def test_the_watchdog_gets_no_pings_while_a_device_hangs(manager):
    datagrams, environment = manager
    hangs = False
    service = Supervisor(environment)
    service.report_ready(lambda: f"hangs: {hangs}", is_alive=lambda: not hangs)
    assert await receive_lines(datagrams) == ["READY=1"]
    assert await receive_lines(datagrams) == ["WATCHDOG=1", "STATUS=hangs: False"]
    hangs = True
    while (lines := await receive_lines(datagrams)) == ["WATCHDOG=1"]:
        pass
    assert lines == ["STATUS=hangs: True"]
    service.close()


async def test_the_watchdog_of_another_process_gets_no_pings(manager):
    datagrams, environment = manager
    service = Supervisor({**environment, "WATCHDOG_PID": "1"})
    service.report_ready(lambda: "idle")
    assert await receive_lines(datagrams) == ["READY=1"]
    assert await receive_lines(datagrams) == ["STATUS=idle"]
    service.close()


async def test_missing_or_busy_service_manager_does_not_stop_a_daemon(manager):
    datagrams, environment = manager
    busy_supervisor = Supervisor(environment)
    for _ in range(1000):
        busy_supervisor.report_stopping()
    busy_supervisor.close()
    datagrams.close()
    lone_supervisor = Supervisor({"NOTIFY_SOCKET": "@samestep-nobody-listens-here"})
    lone_supervisor.report_stopping()
    lone_supervisor.report_ready(lambda: "idle")
    await asyncio.sleep(0)
    lone_supervisor.close()


async def test_without_systemd_there_is_no_socket_and_no_task():
    service = Supervisor({})
    service.report_ready(lambda: pytest.fail("the status was requested"))
    await asyncio.sleep(0)
    assert service._socket is None
    assert len(asyncio.all_tasks()) == 1
    service.report_stopping()
    service.close()


def test_child_processes_do_not_inherit_systemd_s_variables(manager):
    _, environment = manager
    Supervisor(environment).close()
    assert environment == {}


@pytest.fixture
def datagrams(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "journal"))
        monkeypatch.setattr(systemd, "_JOURNAL_SOCKET", str(tmp_path / "journal"))
        yield end


@pytest.fixture
def stream(tmp_path):
    """Return a file in place of standard error, and the variable that marks it as the journal."""
    with (tmp_path / "stream").open("w+") as file:
        status = os.fstat(file.fileno())
        yield file, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}


def parse_entry(datagram):
    """Parse a datagram as systemd-journald does."""
    fields = {}
    while datagram:
        line, _, rest = datagram.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[9 + size :]
        fields[name.decode()] = value.decode()
        datagram = rest
    return fields


def test_an_entry_has_the_line_and_the_fields(datagrams, stream):
    file, environment = stream
    journal = SystemJournal.for_stream("worker", file.fileno(), environment)
    assert journal is not None
    journal.write("two\nlines", {"run_id": "r-1", "step": 3, "block": 2}, Priority.WARNING)
    assert parse_entry(datagrams.recv(4096)) == {
        "MESSAGE": "two\nlines",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "worker",
        "SAMESTEP_RUN_ID": "r-1",
        "SAMESTEP_STEP": "3",
        "SAMESTEP_BLOCK": "2",
    }
    journal.close()


def test_without_the_journal_s_socket_the_line_goes_to_the_stream(stream):
    file, environment = stream
    journal = SystemJournal.for_stream("worker", file.fileno(), environment)
    assert journal is not None
    journal._address = "/nowhere"
    journal.write("a line", priority=Priority.ERROR)
    file.seek(0)
    assert file.read() == "<3>a line\n"
    journal.close()


@pytest.mark.parametrize("stream_id", ["", "1:2", "no stream"])
def test_a_stream_that_is_not_the_journal_has_no_system_journal(stream, stream_id):
    file, _ = stream
    assert SystemJournal.for_stream("worker", file.fileno(), {"JOURNAL_STREAM": stream_id}) is None
    assert SystemJournal.for_stream("worker", file.fileno(), {}) is None
    assert SystemJournal.for_stream("worker", 10_000, {"JOURNAL_STREAM": stream_id}) is None


def test_error_goes_to_the_journal_with_its_exit_code_or_to_stderr(
    datagrams, stream, monkeypatch, capsys
):
    write_error("worker", Mismatch("other versions"))
    assert capsys.readouterr().err == "worker: other versions\n"
    file, _ = stream
    monkeypatch.setattr(
        SystemJournal,
        "for_stream",
        lambda command: SystemJournal(command, file.fileno(), systemd._JOURNAL_SOCKET),
    )
    write_error("worker", Mismatch("other versions"))
    assert capsys.readouterr().err == ""
    fields = parse_entry(datagrams.recv(4096))
    assert (fields["MESSAGE"], fields["PRIORITY"]) == ("other versions", "3")
    assert fields["SAMESTEP_EXIT_CODE"] == "78"
