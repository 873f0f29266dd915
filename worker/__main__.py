"""The command `worker`, also as `python -m worker`; Ctrl-C prints one line from the start.

`python -m` searches the current directory first, so that a user's `json.py` or `protocol` would
shadow Python's or ours. That directory is removed from the path, unless it contains this package.
"""

import sys

if (
    __name__ == "__main__"
    and not sys.flags.safe_path
    and sys.path[0] != __file__.removesuffix("/worker/__main__.py")
):
    del sys.path[0]

from protocol.cli.command_line import end_when_interrupted
from protocol.cli.output import tolerate_stream_failures


def main() -> None:
    """Entry point."""
    tolerate_stream_failures("worker")
    end_when_interrupted("worker")
    from worker.cli import main as command  # noqa: PLC0415 -- a slow import, interruptible here

    command()


if __name__ == "__main__":
    main()
