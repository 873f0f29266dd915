"""Special files and hostile JSON: a pipe without a writer, an endless device, endless nesting.

Each test has its own time limit, since a failure would wait forever.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.storage.directory.journal import verify_journal
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.base import limits
from protocol.base.errors import DataError, RunSpecError, StorageDamaged, StorageFailed, UsageError
from protocol.base.regular_file import parse_json, read_regular
from protocol.datasets.capture_index import read_index
from protocol.machine.secret_file import read_secret
from protocol.spec.files import run_spec_file
from protocol.spec.files.adapter import adapter_config
from protocol.spec.files.file_digest import file_digest
from protocol.spec.files.run_files import CAPTURE_INDEX
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.manifest import ADAPTER_CONFIG
from protocol.spec.model_card import CARD, read_card
from tests.commands import run_command
from worker.join.credentials import WorkerCredentials

REGRESS = "task: regress\nsteps: 3\n"
pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    return path


def test_special_files_are_refused_with_their_kind(pipe, tmp_path):
    with pytest.raises(OSError, match="expected a file, got a pipe"):
        read_regular(pipe)
    with pytest.raises(OSError, match="expected a file, got a directory"):
        read_regular(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    with pytest.raises(UsageError, match="expected a file, got a pipe"):
        read_secret(link)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="expected a file, got a socket"):
            read_regular(tmp_path / "socket")
    with pytest.raises(OSError, match="expected a file, got a device"):
        read_regular(Path("/dev/zero"))


def test_no_secret_waits_for_the_writer_of_a_pipe(pipe, tmp_path):
    with pytest.raises(UsageError, match="expected a file, got a pipe"):
        WorkerCredentials(pipe, environment={"SAMESTEP_HOME": str(tmp_path)})
    environment = {"SAMESTEP_HOME": str(tmp_path), "CREDENTIALS_DIRECTORY": str(tmp_path)}
    pipe.rename(tmp_path / "join.token")
    with pytest.raises(UsageError, match="expected a file, got a pipe"):
        WorkerCredentials(None, environment=environment)
    home = tmp_path / "home"
    for name in ("certificate.pem", "key.pem", "join.token", "reader.token", "workers.json"):
        credentials = CoordinatorCredentials.open(home)
        credentials.issue_key("w")
        path = home / "coordinator" / name
        moved_path = path.rename(tmp_path / "moved")
        os.mkfifo(path, 0o600)
        with pytest.raises(UsageError, match="expected a file, got a pipe"):
            CoordinatorCredentials.open(home).keys.get("w")
        path.unlink()
        moved_path.rename(path)


def test_control_token_in_a_pipe_is_refused(pipe):
    completed = run_command(
        "coordinator", "status", environment={"SAMESTEP_CONTROL_TOKEN_FILE": str(pipe)}
    )
    assert completed.returncode == 2
    assert "expected a file, got a pipe" in completed.stderr


def test_size_of_a_secret_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "SECRET_FILE_CHARACTERS", 100)
    (tmp_path / "token").write_text("x" * 101)
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(UsageError, match="got a much larger file"):
        read_secret(tmp_path / "token")


@pytest.mark.parametrize("name", ["run.json", "manifest.json", "result.json", "terms.json"])
def test_pipe_in_a_run_directory_is_refused(tmp_path, name):
    directory = RunDirectory(tmp_path)
    os.mkfifo(tmp_path / name)
    readers = {
        "run.json": directory.read_run,
        "manifest.json": directory.read_manifest,
        "result.json": directory.read_result,
        "terms.json": directory.read_admission_record,
    }
    with pytest.raises(StorageFailed, match="expected a file, got a pipe"):
        readers[name]()


def test_pipe_as_journal_is_refused(tmp_path):
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(StorageFailed, match="expected a file, got a pipe"):
        verify_journal(tmp_path / "journal.jsonl")


@pytest.mark.parametrize(
    "command", [("audit",), ("report",), ("--bind", "127.0.0.1:0", "--resume", "--out")]
)
@pytest.mark.parametrize("content", [None, "[" * 100_000, '{"spec":' * 500 + "1" + "}" * 500])
def test_invalid_run_file_gives_a_one_line_error(tmp_path, command, content):
    path = tmp_path / "run.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    completed = run_command(
        "coordinator", *command, str(tmp_path), environment={"SAMESTEP_HOME": str(tmp_path / "h")}
    )
    assert completed.returncode != 0
    assert "run.json" in completed.stderr
    assert ("a pipe" if content is None else "not JSON") in completed.stderr
    assert "Traceback" not in completed.stderr


def test_nesting_depth_is_limited():
    nested = "[" * 128 + "]" * 128
    assert parse_json(nested) == json.loads(nested)
    assert parse_json("1") == 1
    for levels in (129, 900, 100_000):
        with pytest.raises(ValueError, match="nested at most"):
            parse_json("[" * levels + "]" * levels)


def test_run_file_nested_too_deeply_is_reported_as_damaged(tmp_path):
    (tmp_path / "run.json").write_text('{"spec": ' + "[" * 100_000)
    with pytest.raises(StorageDamaged, match="not JSON"):
        RunDirectory(tmp_path).read_run()


def test_endless_run_spec_is_refused():
    with pytest.raises(RunSpecError, match="expected at most 262144 bytes, got more"):
        load_run_spec(Path("/dev/zero"))


def test_a_run_spec_is_read_from_a_pipe(pipe):
    """From a shell's `<(...)`, and from a named pipe."""
    reading, writing = os.pipe()
    os.write(writing, REGRESS.encode())
    os.close(writing)
    try:
        assert load_run_spec(Path(f"/dev/fd/{reading}")).steps == 3
    finally:
        os.close(reading)
    writer = threading.Thread(target=pipe.write_text, args=(REGRESS,))
    writer.start()
    assert load_run_spec(pipe).steps == 3
    writer.join()


def test_run_spec_in_a_pipe_without_a_writer_is_refused(pipe, monkeypatch):
    monkeypatch.setattr(run_spec_file, "_WRITER_PATIENCE_S", 0.01)
    with pytest.raises(RunSpecError, match="got a pipe that nobody writes to"):
        load_run_spec(pipe)


def test_special_data_files_are_refused(pipe, tmp_path):
    os.mkfifo(tmp_path / CAPTURE_INDEX)
    with pytest.raises(DataError, match="expected a file, got a pipe"):
        read_index(tmp_path)
    os.mkfifo(tmp_path / CARD)
    assert read_card(tmp_path) is None
    os.mkfifo(tmp_path / ADAPTER_CONFIG)
    with pytest.raises(DataError, match="expected a file, got a pipe"):
        adapter_config(tmp_path)
    with pytest.raises(OSError, match="expected a file, got a pipe"):
        file_digest(pipe)
