"""Certificate, tokens and keys on disk: made once, private, and the same for all who look."""

from __future__ import annotations

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
from protocol.host.secret_file import state_home
from protocol.wire import tls


def files(home):
    return sorted(path for path in home.rglob("*") if path.is_file())


def test_the_first_start_makes_them_and_the_next_finds_them(tmp_path):
    first = CoordinatorCredentials.open(tmp_path / "home")
    first.enrol("w")
    for path in files(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "home" / "coordinator").stat().st_mode) == 0o700
    again = CoordinatorCredentials.open(tmp_path / "home")
    assert again.fingerprint == first.fingerprint == again.join_token().fingerprint
    assert again.join_token() == first.join_token()
    assert again.keys.get("w") == first.keys.get("w") is not None
    assert CoordinatorCredentials.open(tmp_path / "other").fingerprint != first.fingerprint


def test_the_fingerprint_is_openssl_s(tmp_path):
    credentials = CoordinatorCredentials.open(tmp_path)
    pem = (tmp_path / "coordinator" / "certificate.pem").read_text()
    assert tls.fingerprint(ssl.PEM_cert_to_DER_cert(pem)) == credentials.fingerprint
    assert credentials.server_context().minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("lost", ["certificate.pem", "key.pem", "join.token"])
def test_what_is_missing_is_made_and_fits_the_rest(tmp_path, lost):
    before = CoordinatorCredentials.open(tmp_path)
    token = before.join_token()
    (tmp_path / "coordinator" / lost).unlink()
    after = CoordinatorCredentials.open(tmp_path)
    assert after.join_token() != token
    assert after.join_token().fingerprint == after.fingerprint
    after.server_context()


def test_many_first_starts_at_once_agree(tmp_path):
    program = "import sys; from coordinator.token_cli import show; show()"
    environment = {**os.environ, "SAMESTEP_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
        for _ in range(4)
    ]
    assert len({process.communicate()[0] for process in started}) == 1


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem", "join.token", "workers.json"])
def test_what_others_may_read_is_not_used(tmp_path, name):
    CoordinatorCredentials.open(tmp_path).enrol("w")
    (tmp_path / "coordinator" / name).chmod(0o644)
    with pytest.raises(UsageError, match=f"{name}.*chmod 600"):
        CoordinatorCredentials.open(tmp_path).keys.get("w")


def test_damage_is_named_without_what_it_holds(tmp_path):
    credentials = CoordinatorCredentials.open(tmp_path)
    credentials.enrol("w")
    path = tmp_path / "coordinator" / "workers.json"
    secret = json.loads(path.read_text())["w"]["key"]
    path.write_text(path.read_text()[:-4])
    with pytest.raises(UsageError, match="does not hold workers' keys") as caught:
        credentials.keys.get("w")
    assert secret not in str(caught.value)
    key = tmp_path / "coordinator" / "key.pem"
    key.write_text("no key")
    with pytest.raises(UsageError, match="remove"):
        credentials.server_context()


def test_one_is_revoked_and_others_stay(tmp_path):
    credentials = CoordinatorCredentials.open(tmp_path)
    token = credentials.join_token()
    ann, bob = credentials.enrol("ann"), credentials.enrol("bob")
    assert ann != bob
    assert credentials.enrol("ann") == ann
    CoordinatorCredentials.open(tmp_path).revoke("ann")
    assert credentials.keys.get("ann") is None
    assert credentials.keys.get("bob") == bob
    assert credentials.join_token() != token
    assert credentials.enrol("ann") != ann
    with pytest.raises(UsageError, match="those that have one: ann, bob"):
        credentials.revoke("carl")


def test_keys_that_cannot_be_read_now_are_not_revoked(tmp_path):
    """A passing fault of the disk must not send every member away for good."""
    credentials = CoordinatorCredentials.open(tmp_path)
    check = JoinCheck(credentials, encrypted=True)
    check.name = "ann"
    assert check.new_key() == credentials.keys.get("ann")
    path = credentials.keys._path
    kept = path.rename(tmp_path / "kept")
    path.symlink_to(path)  # ELOOP, also for root
    with pytest.raises(UsageError, match="cannot read"):
        credentials.keys.get("ann")
    assert not check.revoked
    assert credentials.enrol("bob") == b""
    path.unlink()
    assert check.revoked, "there is none any more"
    kept.rename(path)
    assert not check.revoked


def test_there_is_an_end_to_keys(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.members.worker_keys.MOST_KEYS", 2)
    assert MOST_KEYS > 2
    credentials = CoordinatorCredentials.open(tmp_path)
    assert credentials.enrol("a")
    assert credentials.enrol("b")
    assert credentials.enrol("c") == b""
    assert credentials.enrol("a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write for another user")
def test_what_root_changes_stays_the_service_s(tmp_path):
    credentials = CoordinatorCredentials.open(tmp_path)
    for path in (tmp_path / "coordinator", *files(tmp_path)):
        os.chown(path, 65_534, 65_534)
    credentials.rotate(everyone=True)
    credentials.enrol("w")
    assert {path.stat().st_uid for path in files(tmp_path)} == {65_534}


@pytest.mark.parametrize(
    ("environment", "home"),
    [
        ({"SAMESTEP_HOME": "/a", "STATE_DIRECTORY": "/b", "XDG_STATE_HOME": "/c"}, "/a"),
        ({"STATE_DIRECTORY": "/b:/d", "XDG_STATE_HOME": "/c"}, "/b"),
        ({"XDG_STATE_HOME": "/c"}, "/c/samestep"),
    ],
)
def test_where_they_are(environment, home):
    assert str(state_home(environment)) == home


def test_a_home_that_cannot_be_used(tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(UsageError, match="SAMESTEP_HOME"):
        CoordinatorCredentials.open(tmp_path / "home")
