"""A worker that waits in a step for a test: `python -m tests.held_worker STEP PORT ARGUMENTS...`.

Before the first node that it is to compute of step STEP, or of a later one, its engine calls PORT
of loopback, and goes on when that connection is closed. Its heartbeats go on meanwhile. Everything
else is the product's own worker.
"""

from __future__ import annotations

import socket
import sys

from protocol.tree import Node
from worker.cli import main
from worker.engine import Engine, Place


def hold(at_step: int, port: int) -> None:
    compute = Engine._compute
    held = False

    def compute_later(
        self: Engine, generation: int, place: Place, microbatches: int, node: Node
    ) -> None:
        nonlocal held
        if place.step >= at_step and not held:
            held = True
            with socket.create_connection(("127.0.0.1", port)) as test:
                test.sendall(b"%d\n" % place.step)
                test.recv(1)  # nothing comes: it waits for the end
        compute(self, generation, place, microbatches, node)

    Engine._compute = compute_later  # type: ignore[method-assign]


if __name__ == "__main__":
    hold(int(sys.argv.pop(1)), int(sys.argv.pop(1)))
    main()
