"""Recompute steps of a run on this machine's CPU, for an audit that compares bits.

An audit starts `worker recompute` and uses its standard input and output. It sends a line of JSON
with the run, and receives an empty document once the task is built. Then it sends for each step a
line with the step's number and loss scale, followed by the parameters before the step, and receives
a line with the loss, followed by the averages. Parameters and averages are flat float32, block
after block.
"""

from __future__ import annotations

import json
from dataclasses import replace
from queue import SimpleQueue
from typing import IO, Any, Final, TypeVar

import numpy as np

from backends.base.interface import Array
from protocol.base.errors import DataError, Mismatch, RunFailed, SamestepError
from protocol.exact.inner_phases import order_of_steps
from protocol.exact.reduction.reducer import NonFinite, Reducer
from protocol.exact.reduction.tree import root
from protocol.exact.samples import SampleOrder
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes
from worker.local_device import LocalDevice
from worker.logic import actions as act
from worker.logic.events import (
    Applied,
    BlockSum,
    BuildFailed,
    Built,
    DeviceFailed,
    Event,
    FilesNeeded,
    GroupReport,
    MicrobatchRows,
    StepId,
    SubtreeDone,
)
from worker.shell.engine import Engine

E = TypeVar("E")
_RUN_ID: Final = "recomputed"


class StepRecomputer:
    """Recompute the averages of steps with a worker's engine.

    Args:
        spec: The run spec, with canonical arithmetic.
        manifest_digest: Digest of the run's manifest.

    Raises:
        SamestepError: Model or data are missing on this machine, or differ from the run's.
    """

    def __init__(self, spec: RunSpec, manifest_digest: str) -> None:
        self._spec = spec
        self._events: SimpleQueue[Event | GroupReport] = SimpleQueue()
        self._engine = Engine(LocalDevice("cpu", None, lambda _: None), self._events.put)
        self._engine.do(act.Build(_RUN_ID, spec, keep_state=False))
        self._manifest: Manifest = self._next_event(Built).manifest
        if self._manifest.digest() != manifest_digest:
            raise Mismatch(
                "expected the model and data of the run, found others on this machine; put the "
                "run's files where its run spec names them"
            )

    @property
    def elements(self) -> list[int]:
        """Number of elements of each block."""
        return [block.elements for block in self._manifest.blocks]

    def step(
        self, number: int, loss_scale: float, parameters: list[Array]
    ) -> tuple[float, list[Array]]:
        """Return a step's mean loss, and its averaged gradients by block.

        Args:
            number: The step's number.
            loss_scale: The loss scale (float16); 1 in other runs.
            parameters: By block, the parameters before the step.

        Raises:
            SamestepError: The step cannot be computed on this machine.
        """
        for block, values in enumerate(parameters):
            for chunk in range(self._manifest.blocks[block].chunks):
                part = self._manifest.blocks[block].chunk_slice(chunk)
                self._engine.do(act.LoadChunk("parameters", block, chunk, values[part]))
        self._engine.do(act.Restore(number, number))
        self._next_event(Applied)
        manifest = self._manifest
        order = order_of_steps(
            self._spec, manifest.train_samples, manifest.row_groups, manifest.sampling
        )
        assert isinstance(order, SampleOrder), "an audit recomputes only runs without replicas"
        microbatches = order.microbatch_count(number)
        step_id = StepId(number, 0, loss_scale)
        if manifest.embeddings is not None:
            self._load_embeddings(step_id, microbatches)
        self._engine.do(act.Compute(step_id, microbatches, root(microbatches)))
        averages = [np.empty(elements, np.float32) for elements in self.elements]
        for _ in averages:
            self._average(self._next_event(BlockSum), microbatches, averages)
        loss = self._next_event(SubtreeDone).loss
        return (loss.loss_sum / loss.weight if loss.weight else 0.0), averages

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.close()

    def _load_embeddings(self, step_id: StepId, microbatches: int) -> None:
        """Compute the embeddings of all samples of the step, and load them."""
        embeddings_id = replace(step_id, phase="embeddings")
        self._engine.do(act.Compute(embeddings_id, microbatches, root(microbatches)))
        rows = [self._next_event(MicrobatchRows).rows.reshape(-1) for _ in range(microbatches)]
        self._next_event(SubtreeDone)
        self._engine.do(act.LoadEmbeddings(step_id, np.concatenate(rows)))

    def _average(self, block_sum: BlockSum, microbatches: int, averages: list[Array]) -> None:
        """Average a block's sum chunk by chunk, like the coordinator."""
        block = self._manifest.blocks[block_sum.block]
        chunks = range(block.chunks)
        reducer = Reducer(
            microbatches,
            self._spec.codecs,
            chunks,
            lambda chunk: averages[block_sum.block][block.chunk_slice(chunk)],
        )
        for chunk in chunks:
            values = block_sum.values[block.chunk_slice(chunk)]
            if isinstance(
                reducer.put(chunk, _RUN_ID, block_sum.subtree, block_sum.weight, values), NonFinite
            ):
                raise RunFailed(
                    f"step {block_sum.step_id.step}: block {block.name!r} recomputed is not finite"
                )

    def _next_event(self, event_class: type[E]) -> E:
        event = self._events.get()
        if isinstance(event, BuildFailed):
            raise event.error
        if isinstance(event, DeviceFailed):
            error = event.error
            raise error if isinstance(error, SamestepError) else RunFailed(str(error))
        if isinstance(event, FilesNeeded):
            raise DataError(
                f"expected a run whose files are all on this machine, got a run that fetches "
                f"{event.names[0]}; such a run cannot be recomputed"
            )
        assert isinstance(event, event_class), event
        return event


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer the requests of an audit until its input ends.

    Raises:
        SamestepError: See `StepRecomputer`.
    """

    def send(document: dict[str, Any], arrays: list[Array]) -> None:
        answers.write(json.dumps(document).encode() + b"\n")
        for array in arrays:
            answers.write(array.tobytes())
        answers.flush()

    run = json.loads(requests.readline())
    spec = parse_run_spec_bytes(json.dumps(run["spec"]).encode())
    recomputer = StepRecomputer(spec, run["manifest_digest"])
    try:
        send({}, [])
        while line := requests.readline():
            step = json.loads(line)
            buffers = [requests.read(4 * elements) for elements in recomputer.elements]
            parameters = [np.frombuffer(buffer, np.float32) for buffer in buffers]
            loss, averages = recomputer.step(step["step"], step["loss_scale"], parameters)
            send({"loss": loss}, averages)
    finally:
        recomputer.close()
