"""Certificate, tokens and keys on disk: created once, private, and the same for every reader."""

from __future__ import annotations

import errno
import json
import os
import ssl
import stat
import subprocess
import sys

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.session import JoinCheck
from coordinator.members.worker_keys import MOST_KEYS
from protocol.base.errors import UsageError
from protocol.machine.secret_file import state_home
from protocol.wire import tls
from tests.commands import run_command


def files(home):
    return sorted(path for path in home.rglob("*") if path.is_file())


def test_credentials_are_created_once(tmp_path):
    first = CoordinatorCredentials.open(tmp_path / "home")
    first.issue_key("w")
    for path in files(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "home" / "coordinator").stat().st_mode) == 0o700
    reopened = CoordinatorCredentials.open(tmp_path / "home")
    assert reopened.fingerprint == first.fingerprint == reopened.join_token().fingerprint
    assert reopened.join_token() == first.join_token()
    assert reopened.keys.get("w") == first.keys.get("w") is not None
    assert CoordinatorCredentials.open(tmp_path / "other").fingerprint != first.fingerprint


def test_fingerprint_equals_openssl(tmp_path):
    credentials = CoordinatorCredentials.open(tmp_path)
    pem = (tmp_path / "coordinator" / "certificate.pem").read_text()
    assert tls.fingerprint(ssl.PEM_cert_to_DER_cert(pem)) == credentials.fingerprint
    assert credentials.server_context().minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("missing", [("certificate.pem", "key.pem"), ("join.token",)])
def test_missing_files_are_created_to_match_the_rest(tmp_path, missing):
    before = CoordinatorCredentials.open(tmp_path)
    assert before.replacement_note == ""
    token = before.join_token()
    for name in missing:
        (tmp_path / "coordinator" / name).unlink()
    after = CoordinatorCredentials.open(tmp_path)
    assert missing[0] in after.replacement_note
    assert after.join_token() != token
    assert after.join_token().fingerprint == after.fingerprint
    after.server_context()
    assert CoordinatorCredentials.open(tmp_path).replacement_note == ""


@pytest.mark.parametrize("missing", ["certificate.pem", "key.pem"])
@pytest.mark.parametrize("other", [None, "join.token"])
def test_incomplete_identity_is_never_replaced(tmp_path, missing, other):
    CoordinatorCredentials.open(tmp_path).issue_key("ann")
    for name in (missing, other):
        if name is not None:
            (tmp_path / "coordinator" / name).unlink()
    contents = {path: path.read_bytes() for path in files(tmp_path)}
    completed = run_command(
        "coordinator", "token", "show", environment={"SAMESTEP_HOME": str(tmp_path)}
    )
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert f"found no {missing}; restore" in completed.stderr
    assert {path: path.read_bytes() for path in files(tmp_path)} == contents


def test_killed_first_start_leaves_no_identity(tmp_path):
    first = CoordinatorCredentials.open(tmp_path)
    for path in files(tmp_path):
        if path.name != "key.pem":
            path.unlink()
    reopened = CoordinatorCredentials.open(tmp_path)
    assert reopened.fingerprint != first.fingerprint
    assert reopened.replacement_note == ""


def test_replaced_damaged_token_is_reported(tmp_path):
    CoordinatorCredentials.open(tmp_path).token_file.write_text("junk")
    completed = run_command(
        "coordinator", "token", "show", environment={"SAMESTEP_HOME": str(tmp_path)}
    )
    assert completed.returncode == 0
    assert "join.token' was missing or held no token" in completed.stderr
    assert completed.stderr.count("\n") == 1
    assert completed.stdout.strip() == CoordinatorCredentials.open(tmp_path).join_token().reveal()


def test_many_first_starts_at_once_agree(tmp_path):
    program = "import sys; from coordinator.token_cli import show; show()"
    environment = {**os.environ, "SAMESTEP_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
        for _ in range(4)
    ]
    assert len({process.communicate()[0] for process in processes}) == 1


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem", "join.token", "workers.json"])
def test_files_readable_by_others_are_refused(tmp_path, name):
    CoordinatorCredentials.open(tmp_path).issue_key("w")
    (tmp_path / "coordinator" / name).chmod(0o644)
    with pytest.raises(UsageError, match=f"{name}.*chmod 600"):
        CoordinatorCredentials.open(tmp_path).keys.get("w")


def test_damage_is_reported_without_secrets(tmp_path):
    credentials = CoordinatorCredentials.open(tmp_path)
    credentials.issue_key("w")
    path = tmp_path / "coordinator" / "workers.json"
    secret = json.loads(path.read_text())["w"]["key"]
    path.write_text(path.read_text()[:-4])
    with pytest.raises(UsageError, match="expected workers' keys") as error_info:
        CoordinatorCredentials.open(tmp_path).keys.get("w")
    assert secret not in str(error_info.value)
    key = tmp_path / "coordinator" / "key.pem"
    key.write_text("no key")
    with pytest.raises(UsageError, match="remove"):
        credentials.server_context()


def test_revoking_one_worker_keeps_the_others(tmp_path):
    credentials = CoordinatorCredentials.open(tmp_path)
    token = credentials.join_token()
    ann, bob = credentials.issue_key("ann"), credentials.issue_key("bob")
    assert ann != bob
    assert credentials.issue_key("ann") == ann
    CoordinatorCredentials.open(tmp_path).revoke("ann")
    assert credentials.keys.get("ann") is None
    assert credentials.keys.get("bob") == bob
    assert credentials.join_token() != token
    assert credentials.issue_key("ann") != ann
    with pytest.raises(UsageError, match="workers with a key: ann, bob"):
        credentials.revoke("carl")


@pytest.fixture
def members(tmp_path):
    """Return credentials, their directory, and a check of the member ann."""
    credentials = CoordinatorCredentials.open(tmp_path / "home")
    check = JoinCheck(credentials, encrypted=True)
    check.name = "ann"
    assert check.new_key() == credentials.keys.get("ann") != b""
    assert credentials.check() == []
    return credentials, tmp_path / "home" / "coordinator", check


def _assert_nothing_revoked(credentials, check) -> None:
    """Check that unreadable files revoke nobody: ann's key, the token and the certificate are
    unchanged."""
    before = check._key
    assert credentials.keys.get("ann") == before
    assert not check.is_revoked


def test_unreadable_keys_are_not_revoked(members, tmp_path):
    """A temporary disk fault must not revoke every member."""
    credentials, directory, check = members
    path = directory / "workers.json"
    moved_path = path.rename(tmp_path / "kept")
    path.symlink_to(path)  # ELOOP, also for root
    _assert_nothing_revoked(credentials, check)
    assert "cannot read" in credentials.check()[0]
    assert credentials.issue_key("bob") == b""
    path.unlink()
    moved_path.rename(path)
    assert credentials.check() == []
    _assert_nothing_revoked(credentials, check)


def test_temporarily_missing_directory_revokes_nobody(members, tmp_path):
    credentials, directory, check = members
    token = credentials.join_token()
    moved_directory = directory.rename(tmp_path / "away")
    for _ in range(2):
        assert "is gone: restore it" in credentials.check()[0]
        _assert_nothing_revoked(credentials, check)
        assert credentials.join_token() == token
        assert credentials.issue_key("bob") == b""
    assert not directory.exists(), "a new directory would prevent restoring the old one"
    moved_directory.rename(directory)
    assert credentials.check() == []
    assert credentials.issue_key("bob")


@pytest.mark.parametrize("text", ["", "{", "null", '{"ann": {}}', None])
def test_invalid_key_file_revokes_nobody(members, text):
    credentials, directory, check = members
    path = directory / "workers.json"
    valid = path.read_text()
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    _assert_nothing_revoked(credentials, check)
    (problem,) = credentials.check()
    assert "workers.json" in problem
    if text is not None:
        assert path.read_text() == text, "a damaged file is left for inspection"
        assert credentials.issue_key("bob") == b""
        path.unlink()  # as the message advises
        credentials.check()
    assert json.loads(path.read_text()) == json.loads(valid)
    assert credentials.check() == []
    CoordinatorCredentials.open(directory.parent).revoke("ann")
    assert check.is_revoked


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem", "join.token"])
def test_files_deleted_at_runtime_are_written_again(members, name):
    credentials, directory, check = members
    text = (directory / name).read_text()
    (directory / name).unlink()
    assert f"{name}' was missing and has been written again" in credentials.check()[0]
    assert (directory / name).read_text() == text
    assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    (directory / name).write_text("")
    assert name in credentials.check()[0]
    assert (directory / name).read_text() == ""
    _assert_nothing_revoked(credentials, check)


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem"])
def test_empty_certificate_or_key_is_named(tmp_path, name):
    CoordinatorCredentials.open(tmp_path)
    (tmp_path / "coordinator" / name).write_text("")
    with pytest.raises(UsageError, match=r"certificate.*remove both: the next start makes new"):
        CoordinatorCredentials.open(tmp_path).server_context()


@pytest.mark.parametrize("text", ["", "none\n"])
def test_damaged_token_is_repaired_by_the_advised_command(tmp_path, text):
    before = CoordinatorCredentials.open(tmp_path)
    key, path = before.issue_key("ann"), before.token_file
    path.write_text(text)
    after = CoordinatorCredentials.open(tmp_path)  # as `coordinator token show` does
    assert after.join_token() != before.join_token() or path.read_text() != text
    assert after.join_token().reveal() + "\n" == path.read_text()
    assert after.keys.get("ann") == key


def test_number_of_keys_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.members.worker_keys.MOST_KEYS", 2)
    assert MOST_KEYS > 2
    credentials = CoordinatorCredentials.open(tmp_path)
    assert credentials.issue_key("a")
    assert credentials.issue_key("b")
    assert credentials.issue_key("c") == b""
    assert credentials.issue_key("a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write for another user")
def test_files_changed_by_root_stay_owned_by_the_service(tmp_path):
    credentials = CoordinatorCredentials.open(tmp_path)
    for path in (tmp_path / "coordinator", *files(tmp_path)):
        os.chown(path, 65_534, 65_534)
    credentials.rotate(everyone=True)
    credentials.issue_key("w")
    assert {path.stat().st_uid for path in files(tmp_path)} == {65_534}


@pytest.mark.parametrize(
    ("environment", "home"),
    [
        ({"SAMESTEP_HOME": "/a", "STATE_DIRECTORY": "/b", "XDG_STATE_HOME": "/c"}, "/a"),
        ({"STATE_DIRECTORY": "/b:/d", "XDG_STATE_HOME": "/c"}, "/b"),
        ({"XDG_STATE_HOME": "/c"}, "/c/samestep"),
    ],
)
def test_credentials_are_in_the_first_configured_directory(environment, home):
    assert str(state_home(environment)) == home


def test_unusable_home_is_refused(tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(UsageError, match="SAMESTEP_HOME"):
        CoordinatorCredentials.open(tmp_path / "home")


def test_stale_directory_revokes_nobody(members, monkeypatch):
    """Every system call fails, as on a network file system that has lost its server."""
    credentials, directory, check = members

    def stale_error(path, *_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patch:
        for name in ("stat", "lstat", "open", "mkdir"):
            patch.setattr(os, name, stale_error)
        assert len(credentials.check()) == 1
        _assert_nothing_revoked(credentials, check)
        assert credentials.issue_key("bob") == b""
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", stale_error)
        assert all("Stale" in problem for problem in credentials.check())
        _assert_nothing_revoked(credentials, check)
    assert credentials.check() == []
    assert directory.is_dir()
