"""A worker for the coordinator of `tests.small_buffers`: `python -m tests.small_bodies`.

It sends large states in chunks that are small enough for that coordinator.
"""

from __future__ import annotations

from tests.small_buffers import shrink_limits

if __name__ == "__main__":
    shrink_limits()
    from worker.cli import main

    main()
