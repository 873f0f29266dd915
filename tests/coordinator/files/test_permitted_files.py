"""Files that a submitted run may read: below the permitted directories, and never a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.files import blob_index
from coordinator.files.blob_index import index_blobs
from coordinator.files.permitted_files import PermittedFiles
from coordinator.main import DEFAULT_OUT
from coordinator.members.credentials import CoordinatorCredentials
from coordinator.operator.control import ControlPort
from coordinator.operator.control_client import request
from coordinator.service.service import Service, Settings
from protocol.base.errors import DataError, SamestepError
from protocol.machine.secret_file import secret_paths
from tests import reading_task
from tests.commands import run_command
from tests.event_loop import on_uvloop
from tests.live_service import scripted_spec

SECRET = "may hold secrets"
ELSEWHERE = "leads elsewhere"


def spec_reading(path: object):
    return scripted_spec(task=reading_task.NAME, data={"train": str(path)})


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    CoordinatorCredentials.open()
    return tmp_path / "home"


@pytest.fixture
def data(tmp_path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "good.txt").write_text("good")
    return directory


def test_secret_is_refused_by_every_path(tmp_path, home, data):
    permitted = PermittedFiles((), secret_paths())
    key = home / "coordinator" / "key.pem"
    link, home_link = data / "link.txt", tmp_path / "home_link"
    link.symlink_to(key)
    home_link.symlink_to(home)
    (home / "worker").mkdir()
    (home / "worker" / "a.key").write_text("00")
    for path in (
        key, link, home_link / "coordinator" / "key.pem",
        home / "worker" / "a.key", home / "worker",
        data / ".." / "home" / "coordinator" / "join.token", "/proc/self/environ",
    ):  # fmt: skip
        with pytest.raises(DataError, match=SECRET):
            index_blobs(spec_reading(path), permitted)
    assert index_blobs(spec_reading(data / "good.txt"), permitted) is not None
    # The operator's own command line is trusted.
    assert index_blobs(spec_reading(key)) is not None


def test_only_files_below_permitted_directories_are_read(tmp_path, data):
    permitted = PermittedFiles((data, tmp_path / "more"), ())
    other = tmp_path / "other.txt"
    other.write_text("other")
    (data / "out.txt").symlink_to(other)
    (data / "in.txt").symlink_to(data / "good.txt")
    (tmp_path / "data-2").mkdir()
    for path in (other, data / "out.txt", data / ".." / "other.txt", tmp_path / "data-2"):
        with pytest.raises(DataError, match=ELSEWHERE):
            index_blobs(spec_reading(path), permitted)
    for name in ("good.txt", "in.txt"):
        assert index_blobs(spec_reading(data / name), permitted) is not None
    permitted.check_source("python-stdlib")
    permitted.check_source("org/a-hub-name")


def test_file_replaced_by_a_secret_after_the_check_is_refused(tmp_path, home, data, monkeypatch):
    permitted = PermittedFiles((data,), secret_paths())
    permitted_file = data / "inner" / "key.pem"
    permitted_file.parent.mkdir()
    permitted_file.write_text("good")

    def swap(spec):
        del spec
        permitted_file.parent.rename(tmp_path / "before")
        permitted_file.parent.symlink_to(home / "coordinator")

    monkeypatch.setattr(blob_index, "check_data", swap)
    with pytest.raises(DataError, match=SECRET):
        index_blobs(spec_reading(permitted_file), permitted)


def test_error_about_a_swapped_file_quotes_no_content(home, data, monkeypatch):
    permitted_file = data / "good.txt"

    def swap(spec):
        del spec
        permitted_file.unlink()
        permitted_file.symlink_to(home / "coordinator" / "key.pem")
        raise DataError(f"line 1: {permitted_file.read_text()}")

    monkeypatch.setattr(blob_index, "check_data", swap)
    with pytest.raises(DataError, match=SECRET) as error_info:
        index_blobs(spec_reading(permitted_file), PermittedFiles((), secret_paths()))
    assert "PRIVATE" not in str(error_info.value)


@on_uvloop
async def test_files_of_submitted_runs_are_checked(tmp_path, home, data):
    settings = Settings(("127.0.0.1", 0), 1, tmp_path / "runs", once=False, data_roots=(data,))
    service = Service(settings)
    await service.start()
    control = ControlPort(service)
    await control.start("127.0.0.1", 0)
    address = f"127.0.0.1:{control.address[1]}"
    try:
        for path, expected_text in (
            (home / "coordinator" / "key.pem", SECRET),
            (__file__, ELSEWHERE),
        ):
            document = {"run": spec_reading(path).model_dump(mode="json")}
            with pytest.raises(SamestepError, match=expected_text):
                await request(address, "POST", "/submit", document)
        document = {"run": spec_reading(data / "good.txt").model_dump(mode="json")}
        assert (await request(address, "POST", "/submit", document))["run_id"]
    finally:
        await control.stop()
        await service.stop()


def test_data_root_option_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    serve = ("--expect-workers", "1", "--bind", "127.0.0.1:0", "--control", "127.0.0.1:0")
    completed = run_command("coordinator", *serve, "--data-root", "nowhere")
    assert completed.returncode == 2
    assert "--data-root: expected a directory, got 'nowhere'" in completed.stderr
    (tmp_path / "run.yaml").write_text("task: scripted\nsteps: 1\n")
    result = run_command("coordinator", *serve, "--run", "run.yaml", "--data-root", ".")
    assert result.returncode == 2
    assert "--data-root applies to submitted runs" in result.stderr
    assert not (tmp_path / DEFAULT_OUT).exists()
