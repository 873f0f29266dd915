"""Read and run a transcript: commands to one `Run`, and the actions that each must cause.

Each command is on a line that begins with `> `. The actions that it causes follow, one per line, in
order, indented by two spaces, then the phase in brackets if it changed. `#` begins a comment. The
job has 4 microbatches of one sample and two blocks of one chunk each.

    run [workers=1] [steps=2] [evaluate_every=0] [parts=0] [exactness=prefer] [every=0] [disk=slow]
        [scale=8]             float16, with this initial loss scale
        [embeds=yes]          the loss couples all samples of a step, by one embedding per sample
        [topology=star|sharded]   sharded: workers may average among themselves
    restart STEP [saved=0] [skipped=N] [signature=S] [state=S] [steps=2] [disk=slow] ...
                              a new coordinator resumes at STEP, in place of `run`; `state`: name of
                              the state, if its digest is known at the start
    invite NAME [duty=evaluate] [devices=1]   a worker is connected and free
    ready NAME [initial=S] [signature=S] [run=ID] [data=D] [step=N] [state=S]
    unready NAME [run=ID] [own=yes]
    chunk NAME [block=layer] [last=yes]   a worker sends a chunk of state 0
    loaded [state=S]          the coordinator's replica holds all chunks of the state
    subtree NAME LO-HI [nan=embedding|layer|loss] [step=S] [attempt=A]   its payloads and its loss
    payload NAME LO-HI [block=layer] [value=1]   one payload
    loss NAME LO-HI [unlike=0+1]   a subtree's loss; `unlike`: microbatches whose recomputed
                              embeddings differ from those in StepEmbeddings
    embeds NAME LO-HI [value=1] [step=S] [attempt=A]   all embeddings of a subtree, then the loss
                              that completes them
    applied NAME STEP [state=S]   a worker has applied STEP steps and reports this state
    replica STEP [state=S]        the coordinator's replica has applied STEP steps
    replayed NAME                 the worker has been sent the state, or the steps that it missed
    behind NAME STEP              the worker reads too slowly: it is sent nothing from STEP on
    result NAME PART [step=N]     a worker has evaluated a part of the evaluation data
    opens NAME [port=7000]        the worker listens for peers
    links NAME PEER...            it can reach these peers, all at the same bandwidth
    unlinks NAME PEER             it has lost the link to PEER
    sums OWNER NAME LO-HI [table=N]   OWNER has NAME's sums of this subtree, for all chunks that
                              OWNER owns
    reduce NAME CHUNK [value=1] [digest=VALUE] [origin=A:0-2+B:2-4] [table=N]   an owner's average
                              and its digest, and which workers' subtrees it sums; chunk 0 is the
                              layer's
    average NAME CHUNK [value=1] [table=N]     the average alone
    digest OWNER CHUNK [value=1] [origin=...] [table=N]   the digest alone
    relay NAME CHUNK LO-HI        a sum that the coordinator relays to the chunk's owner
    infinite OWNER CHUNK LO-HI [worker=NAME]   OWNER reports a non-finite sum: NAME's, or without
                              `worker` the total of all workers
    wants NAME STEP               it requests averages of a committed step that have not arrived
    wrong NAME STEP CHUNK OWNER   one of these averages does not match its digest
    lost NAME, fails NAME, differs NAME, drains NAME
    drain, halt, continue [skip=yes], give-up, save
    tick MS                   the clock advances to MS
    durable STEP, saved STEP  the disk reports a commit or a checkpoint as durable; without
                              `disk=slow` it does so by itself
    full [commit=lost]        a write fails because the disk is full; `commit=lost`: the commit was
                              not written
    unwritten                 writing the result of a finished run fails
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from coordinator.run import inputs
from coordinator.run.outputs import actions as act
from coordinator.run.outputs.restart import AdmissionRecord, Resumption
from coordinator.run.run import Run, RunPhase
from protocol.base import limits
from protocol.base.errors import RemoteProtocolError
from protocol.exact.reduction.chunk_grid import chunk_digest
from protocol.exact.reduction.reducer import origin_document
from protocol.exact.reduction.tree import Subtree
from protocol.spec.manifest import (
    Block,
    EmbeddingField,
    EmbeddingLayout,
    Manifest,
    Metric,
    TensorSpec,
)
from protocol.spec.run_spec import ScriptedRun
from protocol.spec.sections.checkpoint import CheckpointSpec
from protocol.spec.sections.exchange import ExchangeSpec
from protocol.spec.sections.model import ModelSpec
from protocol.spec.sections.optimizer import Sgd
from protocol.spec.sections.tasks import BatchSpec
from protocol.wire import messages as msg
from protocol.wire.peers import OwnerTable, parse
from tests.simulation.probes import check_invariant

TERM = 1
RUN_ID = "run-1"
BLOCKS = {"embedding": 0, "layer": 1}
_EMBEDDINGS = EmbeddingLayout(fields=(EmbeddingField(name="e", dtype="float32"),))
Actions = list[act.Action]
Body = NDArray[Any] | bytes | None


def play(path: Path) -> str:
    """Return the transcript with the actions that its commands cause now."""
    return "".join(f"{line}\n" for line in _play_lines(path.read_text().splitlines()))


def _play_lines(lines: list[str]) -> Iterator[str]:
    coordinator: ScriptedCoordinator | None = None
    for line in lines:
        if line.startswith("> "):
            yield line
            word, *rest = line.removeprefix("> ").split("#")[0].split()
            arguments = [part for part in rest if "=" not in part]
            options = dict(part.split("=") for part in rest if "=" in part)
            if word == "run":
                coordinator = ScriptedCoordinator(**options)
            elif word == "restart":
                coordinator = ScriptedCoordinator(restart=arguments[0], **options)
                yield from (
                    f"  {text}"
                    for text in coordinator.process_actions(coordinator.run.step(inputs.Resume()))
                )
            else:
                assert coordinator is not None
                yield from (f"  {text}" for text in coordinator.command(word, arguments, options))
        elif not line.startswith("  "):
            yield line


def digest(name: str) -> str:
    """Return the digest that stands for this name."""
    return blake3(name.encode()).hexdigest()


class ScriptedCoordinator:
    """Runs the commands of a transcript on one `Run`."""

    def __init__(
        self,
        *,
        workers: str = "1",
        steps: str = "2",
        evaluate_every: str = "0",
        parts: str = "0",
        exactness: str = "prefer",
        every: str = "0",
        disk: str = "fast",
        restart: str = "",
        saved: str = "0",
        skipped: str = "",
        signature: str = "s",
        state: str = "",
        scale: str = "",
        topology: str = "star",
        embeds: str = "",
    ) -> None:
        spec = ScriptedRun(
            task="scripted",
            steps=int(steps),
            batch=BatchSpec(samples=4, microbatch=1),
            optimizer=Sgd(name="sgd", lr=1.0),
            evaluate_every=int(evaluate_every),
            exactness=exactness,
            checkpoint=CheckpointSpec(every=int(every)),
            exchange=ExchangeSpec.model_validate({"topology": topology}),
        )
        if scale:  # precision and loss scale; the model itself need not exist
            float16_model = ModelSpec(source="m", precision="float16", loss_scale=float(scale))
            spec = spec.model_copy(update={"model": float16_model})
        self._parts = int(parts)
        self._embeddings = _EMBEDDINGS if embeds else None
        self._now_ms = 0
        self.on_actions: Callable[[Actions], object] = lambda _: None
        self._disk_is_slow = disk == "slow"
        resumption = None
        if restart:
            resumption = Resumption(
                manifest=self._manifest("d"),
                step=int(restart),
                optimizer_step=int(restart),
                losses=(0.5,) * int(restart),
                state_digest=digest(state) if state else None,
                saved=int(saved),
                redone={int(skipped): None} if skipped else {},
                admission=AdmissionRecord(
                    signature=digest(signature), initial_digest=digest("0"),
                    signatures=(digest(signature),),
                ),
            )  # fmt: skip
        self.run = Run(RUN_ID, spec, TERM, int(workers), resumption, secret=b"of the run")
        step = self.run.step
        self._commands: dict[str, Callable[..., Actions]] = {
            "invite": lambda name, duty="train", devices="1": step(
                inputs.WorkerAvailable(name, devices=int(devices), evaluates=duty == "evaluate")
            ),
            "ready": self._ready,
            "unready": self._unready,
            "loaded": self._loaded,
            "chunk": self._chunk,
            "subtree": self._subtree,
            "payload": self._payload,
            "loss": self._loss,
            "embeds": self._embeds,
            "applied": self._applied,
            "replica": lambda step_number, state="": step(
                inputs.ReplicaApplied(int(step_number), digest(state or step_number))
            ),
            "result": self._result,
            **self._peer_commands(),
            "lost": lambda name: step(inputs.WorkerGone(name, "the connection is over")),
            "fails": lambda name: step(
                inputs.WorkerGone(name, "the device failed: out of memory", exit_code=1)
            ),
            "differs": lambda name: step(inputs.WorkerGone(name, "another script", exit_code=78)),
            "drains": lambda name: step(inputs.WorkerMessage(name, msg.Drain())),
            "drain": lambda: step(inputs.DrainRun()),
            "replayed": lambda name: step(inputs.WorkerCaughtUp(name)),
            "behind": lambda name, step_number: step(
                inputs.WorkerFellBehind(name, int(step_number))
            ),
            "halt": lambda: step(inputs.HaltRun("halted by the operator")),
            "continue": lambda skip="": step(inputs.ContinueRun(bool(skip))),
            "give-up": lambda: step(inputs.FailRun("nobody is left")),
            "save": lambda: step(inputs.SaveState()),
            "tick": self._tick,
            "durable": lambda step_number: step(inputs.CommitDurable(int(step_number))),
            "saved": lambda step_number: step(inputs.CheckpointDurable(int(step_number))),
            "unwritten": lambda: step(inputs.ResultNotWritten("the disk is full")),
            "full": lambda commit="": step(
                inputs.WriteFailed("the disk is full", is_commit_lost=bool(commit))
            ),
        }

    def _receive(self, name: str, message: msg.Message, body: Body) -> Actions:
        return self.run.step(inputs.WorkerMessage(name, message, body))

    def _peer_commands(self) -> dict[str, Callable[..., Actions]]:
        receive = self._receive
        run_fields = {"run_id": RUN_ID}
        return {
            "opens": lambda name, port="7000": receive(
                name, msg.PeerPort(**run_fields, port=int(port), fingerprint=bytes(32)), None
            ),
            "links": lambda name, *peers: [
                action
                for peer in peers
                for action in receive(name, msg.Linked(**run_fields, peer=peer, mbit=1000.0), None)
            ],
            "unlinks": lambda name, peer: receive(
                name, msg.Unlinked(**run_fields, peer=peer, reason="cut"), None
            ),
            "sums": self._sums,
            "reduce": self._reduce,
            "average": self._average,
            "digest": self._digest,
            "relay": self._relay,
            "infinite": self._infinite,
            "wants": lambda name, step: receive(
                name, msg.AveragesRequest(**self._step_fields(step=step, attempt="0")), None
            ),
            "wrong": lambda name, step, chunk, owner: receive(
                name,
                msg.AverageMismatch(
                    **self._step_fields(step=step, attempt="0"), **_chunk_fields(chunk), owner=owner
                ),
                None,
            ),
        }

    def command(self, word: str, arguments: list[str], options: dict[str, str]) -> list[str]:
        """Apply a command; return the actions as text, or the error."""
        phase_before = self.run.phase
        try:
            actions = self._commands[word](*arguments, **options)
            check_invariant(self.run)
        except RemoteProtocolError as error:
            return [f"{type(error).__name__}: {error}"]
        return self.process_actions(actions, phase_before)

    def process_actions(
        self, actions: Actions, phase_before: RunPhase = RunPhase.WAITING
    ) -> list[str]:
        """Return the actions as text.

        If the disk is fast, apply its reports too, and append the actions that they cause.
        """
        lines: list[str] = []
        pending = list(actions)
        while pending:
            action = pending.pop(0)
            self.on_actions([action])
            if not isinstance(action, act.Report) or action.event.name:
                lines.append(_format_action(action))
            if not self._disk_is_slow:
                pending += self._report_of_disk(action)
        if self.run.phase is not phase_before:
            reason = f": {self.run.reason}" if self.run.reason else ""
            lines.append(f"[{self.run.phase.value}{reason}]")
        return lines

    def _report_of_disk(self, action: act.Action) -> Actions:
        match action:
            case act.Persist(record):
                return self.run.step(inputs.CommitDurable(record.commit.step))
            case act.MakeCheckpoint(step):
                return self.run.step(inputs.CheckpointDurable(step))
            case _:
                return []

    def _tick(self, until_ms: str) -> Actions:
        actions: Actions = []
        while self._now_ms < int(until_ms):
            self._now_ms += limits.TICK_MS
            actions += self.run.step(inputs.Tick(float(self._now_ms)))
        return actions

    def _manifest(self, data: str) -> Manifest:
        return Manifest(
            blocks=tuple(
                Block(
                    name=block,
                    kind="block" if block == "layer" else "non_block",
                    tensors=(TensorSpec(name=f"{block}.weight", shape=(2,)),),
                )
                for block in BLOCKS
            ),
            train_samples=8,
            evaluation_parts=self._parts,
            metrics=(Metric(name="mean", numerator={"sum": 1}, denominator={"count": 1}),),
            digests={"data": digest(data)},
            embeddings=self._embeddings,
        )

    def _ready(
        self,
        name: str,
        *,
        initial: str = "0",
        signature: str = "s",
        run: str = RUN_ID,
        data: str = "d",
        step: str = "0",
        state: str = "",
        left_out: str = "",
    ) -> Actions:
        message = msg.Ready(
            run_id=run, backend="scripted", device="a device", initial_digest=digest(initial),
            step=int(step), state_digest=digest(state or initial),
            signature_text=f"device {signature}",
            signature=digest(signature), left_out=left_out,
        )  # fmt: skip
        manifest = self._manifest(data)
        return self._receive(name, message, manifest.to_bytes())

    def _loaded(self, state: str = "0") -> Actions:
        assert self.run.run_parts is not None
        upload, state_digest = self.run.run_parts.admission.upload, digest(state)
        return self.run.step(inputs.ReplicaLoaded(upload, state_digest, state_digest))

    def _chunk(self, name: str, block: str = "embedding", last: str = "no") -> Actions:
        message = msg.StateChunk(
            run_id=RUN_ID, kind="parameters", block=BLOCKS[block], chunk=0, step=0,
            optimizer_step=0, last=last == "yes",
        )  # fmt: skip
        return self._receive(name, message, np.zeros(2, np.float32))

    def _unready(self, name: str, run: str = RUN_ID, own: str = "no") -> Actions:
        reason = "too large for its device" if own == "yes" else "no such data"
        message = msg.Unready(run_id=run, reason=reason, own=own == "yes", exit_code=2)
        return self._receive(name, message, None)

    def _subtree(self, name: str, subtree: str, nan: str = "", **step_id: str) -> Actions:
        actions: Actions = []
        for block in reversed(BLOCKS):
            value = "nan" if nan == block else "1"
            actions += self._payload(name, subtree, block=block, value=value, **step_id)
        return actions + self._loss(name, subtree, nan, **step_id)

    def _embeds(self, name: str, subtree: str, value: str = "1", **step_id: str) -> Actions:
        lo, hi = _bounds(subtree)
        actions: Actions = []
        for leaf in range(lo, hi):
            message = msg.CapturedRows(
                **self._step_fields(**step_id), lo=lo, hi=hi, microbatch=leaf, chunk=0
            )
            rows = np.full(1, float(value) + leaf, np.float32).view(np.uint8)
            actions += self._receive(name, message, rows)
        return actions + self._loss(name, subtree, **step_id)

    def _loss(
        self, name: str, subtree: str, nan: str = "", unlike: str = "", **step_id: str
    ) -> Actions:
        lo, hi = _bounds(subtree)
        message = msg.SubtreeLoss(
            **self._step_fields(**step_id), lo=lo, hi=hi, weight=hi - lo, sums=b"",
            elapsed_ms=(hi - lo) * 10,
            loss_sum=float("inf") if nan == "loss" else (hi - lo) * 0.5,
            unlike=tuple(map(int, unlike.split("+"))) if unlike else (),
        )  # fmt: skip
        return self._receive(name, message, None)

    def _payload(
        self, name: str, subtree: str, block: str = "layer", value: str = "1", **step_id: str
    ) -> Actions:
        lo, hi = _bounds(subtree)
        kind = msg.BlockGradientPayload if block == "layer" else msg.NonBlockGradientPayload
        message = kind(
            **self._step_fields(**step_id),
            block=BLOCKS[block],
            chunk=0,
            lo=lo,
            hi=hi,
            weight=hi - lo,
        )
        values = np.full(2, float(value) * (hi - lo), np.float32)
        return self._receive(name, message, values)

    def _applied(self, name: str, step: str, state: str = "") -> Actions:
        message = msg.StepApplied(term=TERM, step=int(step), state_digest=digest(state or step))
        return self._receive(name, message, None)

    def _result(self, name: str, part: str, step: str = "") -> Actions:
        sums = {"sum": float(part), "count": 1.0}
        step_number = int(step or self.run.steps_committed)
        message = msg.EvalResult(term=TERM, step=step_number, part=int(part), sums=sums)
        return self._receive(name, message, None)

    def _table_fields(self, table: str, **step_id: str) -> dict[str, int]:
        progress = self.run.progress
        assert progress is not None
        return {**self._step_fields(**step_id), "owners": int(table or progress.mesh.number)}

    def _sums(
        self, owner: str, name: str, subtree: str, table: str = "", **step_id: str
    ) -> Actions:
        lo, hi = _bounds(subtree)
        message = msg.SumsArrived(**self._table_fields(table, **step_id), worker=name, lo=lo, hi=hi)
        return self._receive(owner, message, None)

    def _reduce(
        self, name: str, chunk: str, *, value: str = "1", digest: str = "", origin: str = "",
        table: str = "", **step_id: str,
    ) -> Actions:  # fmt: skip
        average = self._average(name, chunk, value, table, **step_id)
        return average + self._digest(name, chunk, digest or value, origin, table, **step_id)

    def _average(
        self, name: str, chunk: str, value: str = "1", table: str = "", **step_id: str
    ) -> Actions:
        kind = msg.AveragedBlockGradient if chunk == "0" else msg.AveragedNonBlockGradient
        message = kind(**self._table_fields(table, **step_id), **_chunk_fields(chunk))
        return self._receive(name, message, np.full(2, float(value), np.float32))

    def _digest(
        self,
        name: str,
        chunk: str,
        value: str = "1",
        origin: str = "",
        table: str = "",
        **step_id: str,
    ) -> Actions:
        contributions = [part.partition(":") for part in origin.split("+")] if origin else []
        document = origin_document(
            tuple((source, Subtree(*_bounds(subtree))) for source, _, subtree in contributions)
        )
        message = msg.ChunkReduced(
            **self._table_fields(table, **step_id), **_chunk_fields(chunk),
            digest=chunk_digest(np.full(2, float(value), np.float32)),
        )  # fmt: skip
        return self._receive(name, message, document)

    def _relay(self, name: str, chunk: str, subtree: str, **step_id: str) -> Actions:
        lo, hi = _bounds(subtree)
        kind = msg.BlockGradientPayload if chunk == "0" else msg.NonBlockGradientPayload
        message = kind(
            **self._table_fields("", **step_id),
            **_chunk_fields(chunk),
            lo=lo,
            hi=hi,
            weight=hi - lo,
        )
        return self._receive(name, message, np.full(2, float(hi - lo), np.float32))

    def _infinite(
        self, owner: str, chunk: str, subtree: str, worker: str = "", **step_id: str
    ) -> Actions:
        lo, hi = _bounds(subtree)
        block = _chunk_fields(chunk)["block"]
        message = msg.NonFiniteSum(
            **self._step_fields(**step_id),
            lo=lo,
            hi=hi,
            worker=worker or None,
            block=block,
            device="",
        )
        return self._receive(owner, message, None)

    def _step_fields(self, step: str = "", attempt: str = "") -> dict[str, int]:
        progress = self.run.progress
        current_attempt = progress.attempt if progress is not None else 0
        return {
            "term": TERM,
            "step": int(step or self.run.steps_committed),
            "attempt": int(attempt or current_attempt),
        }


def _chunk_fields(chunk: str) -> dict[str, int]:
    """Return the wire's block and chunk: 0 is the layer's, 1 the embedding's; no others exist."""
    return {"block": {"0": 1, "1": 0}.get(chunk, int(chunk)), "chunk": 0}


def _bounds(subtree: str) -> tuple[int, int]:
    lo, _, hi = subtree.partition("-")
    return int(lo), int(hi)


def _format_action(action: act.Action) -> str:
    match action:
        case act.Send(worker, msg.Owners() as message, bytes() as document):
            return f"{worker} <- {_format_message(message)}: {_format_table(document)}"
        case act.Send(worker, msg.StepEmbeddings() as message, np.ndarray() as rows):
            return f"{worker} <- {_format_message(message)} {rows.view(np.float32).tolist()}"
        case act.Send(worker, message):
            return f"{worker} <- {_format_message(message)}"
        case act.Broadcast(message, body):
            values = "" if body is None else f" {body.tolist()}"
            return f"all <- {_format_message(message)}{values}"
        case act.Replay(worker, step):
            return f"replay {worker} from step {step}"
        case act.Summarize(_, _, averages):
            return f"summarize blocks {', '.join(map(str, averages))}"
        case act.Persist(record):
            return f"persist the commit of step {record.commit.step}"
        case act.MakeCheckpoint(step):
            return f"save the state after {step} steps"
        case act.SaveAdmissionRecord():
            return "save the admission record"
        case act.Subscribe(worker, step):
            return f"subscribe {worker} from step {step}"
        case act.Unsubscribe(worker):
            return f"unsubscribe {worker}"
        case act.Seed(worker):
            return f"seed {worker}"
        case act.ApplyStep(step, averages, scalars):
            if scalars is None:
                return f"replica: skip step {step}"
            return f"replica: apply step {step}, {[a.tolist() for a in averages]}"
        case act.Dismiss(worker, reason, exit_code):
            return f"dismiss {worker}, {int(exit_code)}: {reason}"
        case act.Report(event):
            return f"report {event.name} {event.fields()}"
        case act.FillReplica(message):
            return f"replica: fill block {message.block} chunk {message.chunk}"
        case act.DigestReplica(upload):
            return f"replica: digest upload {upload}"
        case act.Finish(outcome, reason, exit_code):
            return f"finish {outcome}, {int(exit_code)}: {reason}"
        case act.AdoptManifest():
            return "adopt the manifest"
        case act.WriteInnerCheckpoint(message):
            return f"write {_format_message(message)}"
        case act.AnswerInnerStateRequest(worker, message):
            return f"answer {worker} {_format_message(message)}"
        case act.SendAverages(worker, step):
            return f"send {worker} the averages of step {step}"


def _format_table(document: bytes) -> str:
    table = parse(OwnerTable, document)
    ownership = " ".join(f"{n}:{table.owner(n)}" for n in range(len(table.owners)))
    return ownership if table.scribe is None else f"{ownership}; {table.scribe} is the scribe"


def _format_message(message: msg.Message) -> str:
    hidden_fields = {"term", "view", "averages_digest", "run_id", "scalars", "blobs"}
    fields = message.model_dump(exclude=hidden_fields)
    location = ""
    if "attempt" in fields:
        location = f" {fields.pop('step')}.{fields.pop('attempt')}"
    if isinstance(message, msg.Commit) and message.scalars is None:
        fields["skip"] = True
    if fields.get("uploads") == len(BLOCKS) or fields.get("phase") == "embeddings":
        del fields["uploads"]  # all may be sent
    if fields.get("owners") == 0:
        del fields["owners"]  # sums go to the coordinator
    if fields.get("phase") == "gradients":
        del fields["phase"]
    if fields.get("loss_scale") == 1.0:
        del fields["loss_scale"]  # nothing is scaled
    if "subtrees" in fields:
        fields["subtrees"] = "+".join(f"{lo}-{hi}" for lo, hi in fields["subtrees"]) or "none"
    rest = "".join(f" {name}={value}" for name, value in fields.items())
    return f"{type(message).__name__}{location}{rest}"
