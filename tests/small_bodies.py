"""A worker for the coordinator of `tests.small_buffers`: `python -m tests.small_bodies`.

It sends large states in chunks that this coordinator accepts.
"""

from __future__ import annotations

from tests.small_buffers import change

if __name__ == "__main__":
    change()
    from worker.cli import main

    main()
