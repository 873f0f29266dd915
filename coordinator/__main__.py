"""`python -m coordinator`, and the command itself: Ctrl-C is one line from the first import on.

`python -m` looks into the working directory first, and would import a user's `json.py` or
`protocol` from there. So that directory is removed from the path, unless it contains this package.
"""

import sys

if (
    __name__ == "__main__"
    and not sys.flags.safe_path
    and sys.path[0] != __file__.removesuffix("/coordinator/__main__.py")
):
    del sys.path[0]

from protocol.cli.command_line import end_when_interrupted
from protocol.cli.output import tolerate_stream_failures


def main() -> None:
    """Entry point."""
    tolerate_stream_failures("coordinator")
    end_when_interrupted("coordinator")
    from coordinator.cli import main as command  # noqa: PLC0415 -- may be interrupted

    command()


if __name__ == "__main__":
    main()
