"""Entries as the journal gets them, at the end of a socket that stands for it."""

import os
import socket

import pytest

from protocol.base.errors import Mismatch
from protocol.command import system_journal
from protocol.command.system_journal import Priority, SystemJournal, write_error


@pytest.fixture
def heard(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "journal"))
        monkeypatch.setattr(system_journal, "_SOCKET", str(tmp_path / "journal"))
        yield end


@pytest.fixture
def stream(tmp_path):
    """A file that stands for standard error, and the variable that says it is the journal."""
    with (tmp_path / "stream").open("w+") as file:
        status = os.fstat(file.fileno())
        yield file, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}


def entry(datagram):
    """Read one as systemd-journald does."""
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


def test_an_entry_has_the_line_and_the_fields(heard, stream):
    file, environment = stream
    journal = SystemJournal.behind("worker", file.fileno(), environment)
    assert journal is not None
    journal.write("two\nlines", {"run_id": "r-1", "step": 3, "block": 2}, Priority.WARNING)
    assert entry(heard.recv(4096)) == {
        "MESSAGE": "two\nlines",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "worker",
        "SAMESTEP_RUN_ID": "r-1",
        "SAMESTEP_STEP": "3",
        "SAMESTEP_BLOCK": "2",
    }
    journal.close()


def test_without_its_socket_the_line_goes_where_it_went_before(stream):
    file, environment = stream
    journal = SystemJournal.behind("worker", file.fileno(), environment)
    assert journal is not None
    journal._address = "/nowhere"
    journal.write("a line", priority=Priority.ERROR)
    file.seek(0)
    assert file.read() == "<3>a line\n"
    journal.close()


@pytest.mark.parametrize("named", ["", "1:2", "no stream"])
def test_where_the_stream_is_not_the_journal_there_is_none(stream, named):
    file, _ = stream
    assert SystemJournal.behind("worker", file.fileno(), {"JOURNAL_STREAM": named}) is None
    assert SystemJournal.behind("worker", file.fileno(), {}) is None
    assert SystemJournal.behind("worker", 10_000, {"JOURNAL_STREAM": named}) is None


def test_an_error_ends_in_the_journal_with_its_exit_code_or_on_standard_error(
    heard, stream, monkeypatch, capsys
):
    write_error("worker", Mismatch("other versions"))
    assert capsys.readouterr().err == "worker: other versions\n"
    file, _ = stream
    monkeypatch.setattr(
        SystemJournal,
        "behind",
        lambda command: SystemJournal(command, file.fileno(), system_journal._SOCKET),
    )
    write_error("worker", Mismatch("other versions"))
    assert capsys.readouterr().err == ""
    told = entry(heard.recv(4096))
    assert (told["MESSAGE"], told["PRIORITY"]) == ("other versions", "3")
    assert told["SAMESTEP_EXIT_CODE"] == "78"
