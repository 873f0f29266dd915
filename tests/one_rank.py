"""One rank of a group, as from torchrun: `python -m tests.one_rank RANK SIZE PORT ARGS...`."""

from __future__ import annotations

import os
import sys

from worker.cli import main

if __name__ == "__main__":
    rank, size, port = (sys.argv.pop(1) for _ in range(3))
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    main()
