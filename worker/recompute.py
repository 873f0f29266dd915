"""Steps of a run computed once more on this CPU, for an audit that compares bits.

An audit starts `worker recompute` and talks to it over standard input and output. It sends a line
of JSON with the run, and gets an empty document once the task is built; then for each step a line
with its place and the parameters that it starts from, and gets a line with its loss and its
averages. Parameters and averages are float32, flat, block after block.
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
_RUN: Final = "recomputed"


class StepRecomputer:
    """A worker's own engine, which computes every microbatch of a step.

    Args:
        spec: The run's; its arithmetic is canonical.
        manifest_digest: Of the run's manifest.

    Raises:
        SamestepError: Model or data are not here, or are not the run's.
    """

    def __init__(self, spec: RunSpec, manifest_digest: str) -> None:
        self._spec = spec
        self._events: SimpleQueue[Event | GroupReport] = SimpleQueue()
        self._engine = Engine(LocalDevice("cpu", None, lambda _: None), self._events.put)
        self._engine.do(act.Build(_RUN, spec, keep=False))
        self._manifest: Manifest = self._next(Built).manifest
        if self._manifest.digest() != manifest_digest:
            raise Mismatch(
                "expected the model and data that the run was trained with, found different ones "
                "here; put them where its run spec names them"
            )

    @property
    def elements(self) -> list[int]:
        """Of each block."""
        return [block.elements for block in self._manifest.blocks]

    def step(
        self, number: int, loss_scale: float, parameters: list[Array]
    ) -> tuple[float, list[Array]]:
        """The loss of a step that starts from these parameters, and its averages block by block.

        Raises:
            SamestepError: It cannot be computed here.
        """
        for block, values in enumerate(parameters):
            for chunk in range(self._manifest.blocks[block].chunks):
                part = self._manifest.blocks[block].chunk_slice(chunk)
                self._engine.do(act.LoadChunk("parameters", block, chunk, values[part]))
        self._engine.do(act.Restore(number, number))
        self._next(Applied)
        manifest = self._manifest
        order = order_of_steps(
            self._spec, manifest.train_samples, manifest.row_groups, manifest.sampling
        )
        assert isinstance(order, SampleOrder), "an audit asks for no other run"
        microbatches = order.microbatch_count(number)
        step_id = StepId(number, 0, loss_scale)
        if manifest.embeddings is not None:
            self._load_embeddings(step_id, microbatches)
        self._engine.do(act.Compute(step_id, microbatches, root(microbatches)))
        averages = [np.empty(elements, np.float32) for elements in self.elements]
        for _ in averages:
            self._average(self._next(BlockSum), microbatches, averages)
        loss = self._next(SubtreeDone).loss
        return (loss.loss_sum / loss.weight if loss.weight else 0.0), averages

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.close()

    def _load_embeddings(self, step_id: StepId, microbatches: int) -> None:
        """Compute the rows that the step's loss reads of all its samples."""
        embed = replace(step_id, phase="embeddings")
        self._engine.do(act.Compute(embed, microbatches, root(microbatches)))
        rows = [self._next(MicrobatchRows).rows.reshape(-1) for _ in range(microbatches)]
        self._next(SubtreeDone)
        self._engine.do(act.LoadEmbeddings(step_id, np.concatenate(rows)))

    def _average(self, found: BlockSum, microbatches: int, averages: list[Array]) -> None:
        """As the coordinator takes it, chunk by chunk."""
        block = self._manifest.blocks[found.block]
        chunks = range(block.chunks)
        reducer = Reducer(
            microbatches,
            self._spec.codecs,
            chunks,
            lambda chunk: averages[found.block][block.chunk_slice(chunk)],
        )
        for chunk in chunks:
            values = found.values[block.chunk_slice(chunk)]
            if isinstance(reducer.put(chunk, _RUN, found.subtree, found.weight, values), NonFinite):
                raise RunFailed(
                    f"step {found.step_id.step}: block {block.name!r} recomputed is not finite"
                )

    def _next(self, kind: type[E]) -> E:
        event = self._events.get()
        if isinstance(event, BuildFailed):
            raise event.error
        if isinstance(event, DeviceFailed):
            error = event.error
            raise error if isinstance(error, SamestepError) else RunFailed(str(error))
        if isinstance(event, FilesNeeded):
            raise DataError(
                f"the step reads files in other places, {event.names[0]} among them: such a run "
                "cannot be recomputed"
            )
        assert isinstance(event, kind), event
        return event


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Answer an audit until it asks no more.

    Raises:
        SamestepError: As `StepRecomputer`.
    """

    def tell(document: dict[str, Any], arrays: list[Array]) -> None:
        answers.write(json.dumps(document).encode() + b"\n")
        for array in arrays:
            answers.write(array.tobytes())
        answers.flush()

    question = json.loads(questions.readline())
    spec = parse_run_spec_bytes(json.dumps(question["spec"]).encode())
    steps = StepRecomputer(spec, question["manifest_digest"])
    try:
        tell({}, [])
        while line := questions.readline():
            step = json.loads(line)
            read = [questions.read(4 * elements) for elements in steps.elements]
            parameters = [np.frombuffer(each, np.float32) for each in read]
            loss, averages = steps.step(step["step"], step["loss_scale"], parameters)
            tell({"loss": loss}, averages)
    finally:
        steps.close()
