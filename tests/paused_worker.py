"""A worker that pauses between two steps: `python -m tests.paused_worker STEPS PORT ARGUMENTS...`.

After STEPS steps or more, its engine connects to PORT on loopback and continues when that
connection closes. During the pause, it has computed no subtree of the next step; the worker still
sends heartbeats and its answer to the last step. With `4,8` it pauses twice. With `4g` it pauses
between the embeddings and the gradients of step 4 or a later one. Everything else is the
product's worker.
"""

from __future__ import annotations

import socket
import sys

from worker.cli import main
from worker.logic import actions as act
from worker.shell.engine import Engine


def wait_for_release(committed_steps: int, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"%d\n" % committed_steps)
        connection.recv(1)  # returns when the test closes the connection


def pause_between_phases(step: int, port: int) -> None:
    load = Engine._HANDLERS[act.LoadEmbeddings]
    waited_steps: list[int] = []

    def load_and_wait(self: Engine, action: act.LoadEmbeddings) -> None:
        load(self, action)
        if action.step_id.step >= step and not waited_steps:
            waited_steps.append(action.step_id.step)
            wait_for_release(action.step_id.step, port)

    Engine._HANDLERS[act.LoadEmbeddings] = load_and_wait


def pause_after_steps(pause_steps: list[int], port: int) -> None:
    # Pause after an update, not after a subtree: a slow worker may have been assigned none.
    apply = Engine._HANDLERS[act.Apply]

    def apply_and_wait(self: Engine, action: act.Apply) -> None:
        apply(self, action)
        step = self._require_job().replica.step
        if pause_steps and step >= pause_steps[0]:
            del pause_steps[0]
            wait_for_release(step, port)

    Engine._HANDLERS[act.Apply] = apply_and_wait


if __name__ == "__main__":
    steps, waiting_port = sys.argv.pop(1), int(sys.argv.pop(1))
    if steps.endswith("g"):
        pause_between_phases(int(steps[:-1]), waiting_port)
    else:
        pause_after_steps([int(step) for step in steps.split(",")], waiting_port)
    main()
