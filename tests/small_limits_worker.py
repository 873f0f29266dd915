"""A worker with small limits on messages: `python -m tests.small_limits_worker ARGUMENTS...`.

It sends large states in chunks that `tests.small_limits_coordinator` accepts.
"""

from __future__ import annotations

from tests.small_limits_coordinator import shrink_limits

if __name__ == "__main__":
    shrink_limits()
    from worker.cli import main

    main()
