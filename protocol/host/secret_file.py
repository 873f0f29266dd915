"""Files that hold secrets: where they are, and that only their owner can read them."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from protocol.base import limits
from protocol.base.errors import UsageError
from protocol.base.regular_file import check_regular


def state_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this user's samestep keeps tokens and keys, of all runs and both daemons.

    `$SAMESTEP_HOME`, else `$STATE_DIRECTORY` (systemd's), else `$XDG_STATE_HOME/samestep`, else
    `~/.local/state/samestep`.

    Raises:
        UsageError: None of them is known.
    """
    if own := environment.get("SAMESTEP_HOME"):
        return Path(own)
    if given := environment.get("STATE_DIRECTORY"):
        return Path(given.partition(":")[0])
    if shared := environment.get("XDG_STATE_HOME"):
        return Path(shared) / "samestep"
    try:
        return Path("~/.local/state/samestep").expanduser()
    except RuntimeError:
        raise UsageError(
            "expected a home directory for tokens and keys, but this user has none; set "
            "SAMESTEP_HOME=DIR"
        ) from None


def join_token_file(home: Path) -> Path:
    """Where a coordinator keeps its join token; its user's workers on this machine look there."""
    return home / "coordinator" / "join.token"


def control_token_file(home: Path, address: str) -> Path:
    """Where the coordinator whose control port has this address keeps that port's token."""
    return home / "coordinator" / "control" / f"{address.replace('/', '_')}.token"


def secret_places(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Files and directories with secrets of this user's daemons, or of processes of this system."""
    home = state_home(environment)
    named = ("SAMESTEP_TOKEN_FILE", "SAMESTEP_CONTROL_TOKEN_FILE", "CREDENTIALS_DIRECTORY")
    given = [Path(environment[name]) for name in named if environment.get(name)]
    system = [Path("/proc"), Path("/sys"), Path("/dev")]  # the environment of a process is a file
    return (home / "coordinator", home / "worker", *given, *system)


def read_secret(path: Path) -> str | None:
    """A secret's text; None if there is no such file.

    Raises:
        UsageError: Others may read it too, or it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe is refused below
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from None
    try:
        mode = os.fstat(fd).st_mode
        check_regular(mode, path)
        # On Windows a mode tells nothing of who may read.
        if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(
                f"{str(path)!r} can be read by others (mode {stat.S_IMODE(mode):04o}), so its "
                f"secret is none; run: chmod 600 {path}"
            )
        with os.fdopen(fd, encoding="utf-8", errors="replace", closefd=False) as file:
            text = file.read(limits.SECRET_FILE_CHARACTERS + 1)
        if len(text) > limits.SECRET_FILE_CHARACTERS:
            raise UsageError(f"expected a secret in {str(path)!r}, got a file far larger than one")
        return text
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from None
    finally:
        os.close(fd)


def write_secret(path: Path, text: str) -> None:
    """Write a file of mode 0600 in a directory of mode 0700, at once or not at all.

    Raises:
        UsageError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        make_private(path.parent)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            give_to_owner(fd, path.parent)
            file.write(text)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def give_to_owner(fd: int, directory: Path) -> None:
    """A file that root writes for a service must be the service's: its user is the directory's.

    Raises:
        OSError: It cannot be given away.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        owner = directory.stat()
        os.fchown(fd, owner.st_uid, owner.st_gid)


def make_private(directory: Path) -> None:
    """Make a directory of mode 0700, if it is not there.

    Raises:
        UsageError: It cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from None


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {str(path)!r}: {error.strerror}; SAMESTEP_HOME=DIR keeps tokens elsewhere"
    )
