"""A worker that waits between two steps: `python -m tests.held_worker STEPS PORT ARGUMENTS...`.

Once it has taken so many steps, or more, its engine calls PORT of loopback, and goes on when that
connection is closed: of the next step it has been given its nodes, and has computed none. Its
heartbeats and its answer to the last step go out meanwhile. `4,8` has it wait twice. Everything
else is the product's own worker.
"""

from __future__ import annotations

import socket
import sys

from backends.base.interface import Array
from protocol.exact.update import StepScalars
from worker.cli import main
from worker.shell.engine import Engine


def hold(at: list[int], port: int) -> None:
    # Not before a node is computed: a worker that this machine has made slow may be given none.
    apply = Engine._apply

    def apply_and_wait(
        self: Engine, averages: list[Array], scalars: StepScalars | None, attempt: int
    ) -> None:
        apply(self, averages, scalars, attempt)
        taken = self._built().replica.step
        if at and taken >= at[0]:
            del at[0]
            with socket.create_connection(("127.0.0.1", port)) as test:
                test.sendall(b"%d\n" % taken)
                test.recv(1)  # nothing comes: it waits for the end

    Engine._apply = apply_and_wait  # type: ignore[method-assign]


if __name__ == "__main__":
    hold([int(step) for step in sys.argv.pop(1).split(",")], int(sys.argv.pop(1)))
    main()
