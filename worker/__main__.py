"""`python -m worker`, and the command itself: Ctrl-C is one line from the first import on."""

from protocol.host.command_line import end_when_interrupted


def main() -> None:
    """Entry point."""
    end_when_interrupted("worker")
    from worker.cli import main as command  # noqa: PLC0415 -- what may be interrupted

    command()


if __name__ == "__main__":
    main()
