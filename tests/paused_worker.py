"""A worker that pauses between two steps: `python -m tests.paused_worker STEPS PORT ARGUMENTS...`.

After STEPS steps or more, its engine connects to PORT on loopback and continues when that
connection closes: it has been assigned subtrees of the next step and has computed none. Heartbeats
and its answer to the last step are still sent. With `4,8` it pauses twice. With `4g` it pauses
between the embeddings and the gradients of step 4 or a later one. Everything else is the product's
worker.
"""

from __future__ import annotations

import socket
import sys

from worker.cli import main
from worker.logic import actions as act
from worker.shell.engine import Engine


def wait(committed_steps: int, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as test:
        test.sendall(b"%d\n" % committed_steps)
        test.recv(1)  # nothing arrives: it waits for the end


def hold_between_phases(step: int, port: int) -> None:
    load = Engine._HANDLERS[act.LoadEmbeddings]
    seconds: list[int] = []

    def load_and_wait(self: Engine, action: act.LoadEmbeddings) -> None:
        load(self, action)
        if action.step_id.step >= step and not seconds:
            seconds.append(action.step_id.step)
            wait(action.step_id.step, port)

    Engine._HANDLERS[act.LoadEmbeddings] = load_and_wait


def hold(hold_steps: list[int], port: int) -> None:
    # Not before a subtree was computed: a slow worker may have been assigned none.
    apply = Engine._HANDLERS[act.Apply]

    def apply_and_wait(self: Engine, action: act.Apply) -> None:
        apply(self, action)
        step = self._require_job().replica.step
        if hold_steps and step >= hold_steps[0]:
            del hold_steps[0]
            wait(step, port)

    Engine._HANDLERS[act.Apply] = apply_and_wait


if __name__ == "__main__":
    steps, waiting_port = sys.argv.pop(1), int(sys.argv.pop(1))
    if steps.endswith("g"):
        hold_between_phases(int(steps[:-1]), waiting_port)
    else:
        hold([int(step) for step in steps.split(",")], waiting_port)
    main()
