"""Secret files: their locations, and access restricted to their owner."""

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
    """Return the directory of this user's tokens and keys.

    `$SAMESTEP_HOME`, else systemd's `$STATE_DIRECTORY`, else `$XDG_STATE_HOME/samestep`, else
    `~/.local/state/samestep`.

    Raises:
        UsageError: None of them is set, and the user has no home directory.
    """
    if home := environment.get("SAMESTEP_HOME"):
        return Path(home)
    if directory := environment.get("STATE_DIRECTORY"):
        return Path(directory.partition(":")[0])
    if user_state := environment.get("XDG_STATE_HOME"):
        return Path(user_state) / "samestep"
    try:
        return Path("~/.local/state/samestep").expanduser()
    except RuntimeError:
        raise UsageError(
            "expected a home directory for tokens and keys, but this user has none; set "
            "SAMESTEP_HOME=DIR"
        ) from None


def join_token_file(home: Path) -> Path:
    """Return the file of a coordinator's join token, which this user's workers read too."""
    return home / "coordinator" / "join.token"


def control_token_file(home: Path, address: str) -> Path:
    """Return the file of the token of the control port with this address."""
    return home / "coordinator" / "control" / f"{address.replace('/', '_')}.token"


def secret_paths(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return files and directories that contain secrets of samestep or of other processes."""
    home = state_home(environment)
    variables = ("SAMESTEP_TOKEN_FILE", "SAMESTEP_CONTROL_TOKEN_FILE", "CREDENTIALS_DIRECTORY")
    paths = [Path(environment[name]) for name in variables if environment.get(name)]
    system = [Path("/proc"), Path("/sys"), Path("/dev")]  # the environment of a process is a file
    return (home / "coordinator", home / "worker", *paths, *system)


def read_secret(path: Path) -> str | None:
    """Read a secret; None if there is no such file.

    Raises:
        UsageError: Other users can read the file, or it cannot be read.
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
        # On Windows the mode does not show which users may read.
        if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(
                f"{str(path)!r} can be read by others (mode {stat.S_IMODE(mode):04o}); "
                f"run: chmod 600 {path}"
            )
        with os.fdopen(fd, encoding="utf-8", errors="replace", closefd=False) as file:
            text = file.read(limits.SECRET_FILE_CHARACTERS + 1)
        if len(text) > limits.SECRET_FILE_CHARACTERS:
            raise UsageError(f"expected a secret in {str(path)!r}, got a much larger file")
        return text
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from None
    finally:
        os.close(fd)


def write_secret(path: Path, text: str) -> None:
    """Write a file of mode 0600 in a directory of mode 0700, atomically.

    Raises:
        UsageError: The file cannot be written.
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
    """Give a file that root writes for a service to the directory's owner.

    Raises:
        OSError: The file's owner cannot be changed.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        owner = directory.stat()
        os.fchown(fd, owner.st_uid, owner.st_gid)


def make_private(directory: Path) -> None:
    """Create a directory of mode 0700, unless it exists.

    Raises:
        UsageError: The directory cannot be created.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from None


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {str(path)!r}: {error.strerror}; set SAMESTEP_HOME to another directory"
    )
