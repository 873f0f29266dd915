"""`python -m worker`, and the command itself: Ctrl-C is one line from the first import on.

`python -m` looks into the present folder first, and would take a `json.py` or `protocol` of the
user's for Python's or ours. So that folder is left out, unless it is where this package lies.
"""

import sys

if (
    __name__ == "__main__"
    and not sys.flags.safe_path
    and sys.path[0] != __file__.removesuffix("/worker/__main__.py")
):
    del sys.path[0]

from protocol.cli.command_line import end_when_interrupted
from protocol.cli.output import keep_reporting


def main() -> None:
    """Entry point."""
    keep_reporting("worker")
    end_when_interrupted("worker")
    from worker.cli import main as command  # noqa: PLC0415 -- what may be interrupted

    command()


if __name__ == "__main__":
    main()
