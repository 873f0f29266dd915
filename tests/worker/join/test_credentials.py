"""Where a worker's token comes from, which one has precedence, and what is refused."""

from __future__ import annotations

import pytest

from protocol.base.errors import ExitCode, NotAuthorized, UsageError
from protocol.machine.secret_file import join_token_file, write_secret
from protocol.wire.authentication import new_key
from protocol.wire.join_token import JoinToken
from worker.join.credentials import WorkerCredentials

COORDINATOR = b"h" * 32
"""Fingerprint of a coordinator's certificate."""
OTHER_COORDINATOR = b"t" * 32


IS_KEY, IS_TOKEN = True, False
"""Second result of `WorkerCredentials.secret`: whether the secret is the worker's key."""


def token(fingerprint: bytes = COORDINATOR) -> JoinToken:
    return JoinToken(fingerprint, new_key())


def write_token(path, token: JoinToken):
    write_secret(path, token.reveal() + "\n")
    return path


def secret_text(token: JoinToken) -> str:
    """Return the part of the token's text that must not be shown."""
    fingerprint_and_secret = token.reveal()
    return fingerprint_and_secret.partition(".")[2]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    return {"SAMESTEP_HOME": str(tmp_path / "home")}


def test_precedence_of_token_sources(tmp_path, environment):
    file_token, variable_token, systemd_token, coordinator_token = (token() for _ in range(4))
    write_token(join_token_file(tmp_path / "home"), coordinator_token)
    assert WorkerCredentials(environment=environment).secret(COORDINATOR, "w") == (
        coordinator_token.secret,
        IS_TOKEN,
    )
    environment["CREDENTIALS_DIRECTORY"] = str(tmp_path / "systemd")
    assert (
        WorkerCredentials(environment=environment).secret(COORDINATOR, "w")[0]
        == coordinator_token.secret
    )
    credential = write_token(tmp_path / "systemd" / "join.token", systemd_token)
    credential.chmod(0o440)  # as systemd may set it: an ACL restricts access, not the mode
    assert (
        WorkerCredentials(environment=environment).secret(COORDINATOR, "w")[0]
        == systemd_token.secret
    )
    environment["SAMESTEP_TOKEN"] = variable_token.reveal()
    assert (
        # It removes the variable from a copy here, so that the next source has to precede it.
        WorkerCredentials(environment=dict(environment)).secret(COORDINATOR, "w")[0]
        == variable_token.secret
    )
    path = write_token(tmp_path / "file", file_token)
    assert (
        WorkerCredentials(path, environment=environment).secret(COORDINATOR, "w")[0]
        == file_token.secret
    )


def test_variable_is_removed_from_the_environment(environment):
    environment["SAMESTEP_TOKEN"] = token().reveal()
    WorkerCredentials(environment=environment)
    assert "SAMESTEP_TOKEN" not in environment


def test_a_file_is_read_again_each_time(tmp_path, environment):
    path = write_token(tmp_path / "file", token())
    credentials = WorkerCredentials(path, environment=environment)
    new_token = token()
    write_token(path, new_token)
    assert credentials.secret(COORDINATOR, "w") == (new_token.secret, IS_TOKEN)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o644, 0o610])
def test_a_file_that_others_may_access_is_refused(tmp_path, environment, mode):
    join_token = token()
    path = write_token(tmp_path / "file", join_token)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode 0{mode:o}.*chmod 600") as error_info:
        WorkerCredentials(path, environment=environment)
    assert error_info.value.exit_code == ExitCode.USAGE
    assert secret_text(join_token) not in str(error_info.value)


@pytest.mark.parametrize(
    "text", ["", "x", "a" * 64, "a" * 64 + "." + "b" * 42, "A" * 64 + "." + "b" * 43, "\x00" * 108]
)
def test_invalid_token_is_not_shown(tmp_path, environment, text):
    path = tmp_path / "file"
    write_secret(path, text)
    with pytest.raises(UsageError, match="expected a join token") as error_info:
        WorkerCredentials(path, environment=environment)
    if text not in {"", "x"}:  # these occur in any message
        assert text not in str(error_info.value)
    if text:
        with pytest.raises(UsageError, match="SAMESTEP_TOKEN"):
            WorkerCredentials(environment={**environment, "SAMESTEP_TOKEN": text})


def test_missing_token_file_is_refused(tmp_path, environment):
    with pytest.raises(UsageError, match="does not exist"):
        WorkerCredentials(tmp_path / "none", environment=environment)
    with pytest.raises(UsageError, match="expected a file"):
        WorkerCredentials(tmp_path, environment=environment)


def test_token_for_one_coordinator_is_not_sent_to_another(environment):
    environment["SAMESTEP_TOKEN"] = token(COORDINATOR).reveal()
    credentials = WorkerCredentials(environment=environment)
    credentials.store_key(OTHER_COORDINATOR, "w", new_key())
    with pytest.raises(NotAuthorized, match=f"expected the certificate {COORDINATOR.hex()[:4]}"):
        credentials.secret(OTHER_COORDINATOR, "w")


def test_token_of_a_local_coordinator_yields_to_a_key(tmp_path, environment):
    """This machine once ran a coordinator; its worker now serves another one."""
    write_token(join_token_file(tmp_path / "home"), token(COORDINATOR))
    credentials = WorkerCredentials(environment=environment)
    with pytest.raises(NotAuthorized, match="expected the certificate"):
        credentials.secret(OTHER_COORDINATOR, "w")
    key = new_key()
    assert credentials.store_key(OTHER_COORDINATOR, "w", key) == ""
    assert credentials.secret(OTHER_COORDINATOR, "w") == (key, IS_KEY)
    with pytest.raises(NotAuthorized):
        credentials.secret(OTHER_COORDINATOR, "another")


def test_a_refused_key_is_followed_by_the_token_once(environment):
    join_token, key = token(), new_key()
    environment["SAMESTEP_TOKEN"] = join_token.reveal()
    credentials = WorkerCredentials(environment=environment)
    assert not credentials.try_token_next()
    credentials.store_key(COORDINATOR, "w", key)
    assert credentials.secret(COORDINATOR, "w") == (key, IS_KEY)
    assert credentials.try_token_next()
    assert credentials.secret(COORDINATOR, "w") == (join_token.secret, IS_TOKEN)
    assert not credentials.try_token_next()
    credentials.store_key(COORDINATOR, "w", key)
    assert credentials.secret(COORDINATOR, "w") == (key, IS_KEY)


def test_plaintext_requires_a_token(environment):
    with pytest.raises(NotAuthorized, match="no join token"):
        WorkerCredentials(plaintext=True, environment=environment).secret(None, "w")
    join_token = token()
    environment["SAMESTEP_TOKEN"] = join_token.reveal()
    credentials = WorkerCredentials(plaintext=True, environment=environment)
    assert credentials.store_key(None, "w", new_key()) == ""
    assert credentials.secret(None, "w") == (join_token.secret, IS_TOKEN)


def test_unwritable_home_is_only_reported(tmp_path, environment):
    (tmp_path / "home").write_text("a file")
    credentials = WorkerCredentials(environment=environment)
    assert "could not be stored" in credentials.store_key(COORDINATOR, "w", new_key())


def test_only_reveal_shows_the_secret_and_parse_reads_it():
    join_token = token()
    assert secret_text(join_token) not in repr(join_token)
    assert str(join_token.secret) not in repr(join_token)
    assert JoinToken.parse(f" {join_token.reveal()}\n", "a test") == join_token


def test_missing_or_damaged_files_keep_the_last_values(tmp_path, environment):
    join_token, key = token(), new_key()
    path = write_token(tmp_path / "file", join_token)
    credentials = WorkerCredentials(path, environment=environment)
    assert credentials.store_key(COORDINATOR, "w", key) == ""
    home = tmp_path / "home"
    home.rename(tmp_path / "away")
    path.unlink()
    assert credentials.secret(COORDINATOR, "w") == (key, IS_KEY)
    assert credentials.try_token_next()
    assert credentials.secret(COORDINATOR, "w") == (join_token.secret, IS_TOKEN)
    path.write_text("")
    assert credentials.secret(COORDINATOR, "w") == (join_token.secret, IS_TOKEN)


@pytest.mark.parametrize("text", ["", "0" * 62, "xyz\n", "\x00" * 65])
def test_a_damaged_key_is_no_key(tmp_path, environment, text):
    credentials = WorkerCredentials(environment=environment)
    credentials.store_key(COORDINATOR, "w", new_key())
    (path,) = (tmp_path / "home" / "worker").glob("*.key")
    path.write_text(text)
    with pytest.raises(NotAuthorized, match=f"{path.name}.*damaged.*join with a token"):
        WorkerCredentials(environment=environment).secret(COORDINATOR, "w")
    token_path = write_token(tmp_path / "file", token())
    credentials_with_token = WorkerCredentials(token_path, environment=environment)
    assert credentials_with_token.secret(COORDINATOR, "w")[1] is IS_TOKEN
