"""A worker for the coordinator of `tests.small_buffers`: `python -m tests.small_bodies`.

What it sends in pieces, as the states of replicas, is in pieces that this coordinator takes.
"""

from __future__ import annotations

from tests.small_buffers import change

if __name__ == "__main__":
    change()
    from worker.cli import main

    main()
