"""Reads and runs a transcript: commands to one `Run`, and the actions that must come of each.

A command stands on a line after `> `; what it leads to follows, indented by two spaces, one
action a line, in order; the phase in brackets when it changes. `#` begins a remark. The job has
4 microbatches of one sample and two blocks of one chunk each.

    run [workers=1] [steps=2] [evaluate_every=0] [parts=0] [exactness=prefer] [every=0] [disk=slow]
        [scale=8]             float16, with this scale of losses at first
        [way=star|sharded]    sharded: members may average slices among themselves
    restart STEP [saved=0] [skipped=N] [signature=S] [state=S] [steps=2] [disk=slow] ...
                              a new coordinator, instead of `run`; `state` if it is known at once
    invite NAME [duty=evaluate] [devices=1]   a worker is connected and free
    ready NAME [initial=S] [signature=S] [run=ID] [data=D] [step=N] [state=S]
    unready NAME [run=ID] [own=yes]
    chunk NAME [block=layer] [last=yes]   of state 0
    loaded [state=S]          all of it is in the replica
    node NAME LO-HI [nan=embedding|layer|loss] [step=S] [attempt=A]   its payloads and its loss
    payload NAME LO-HI [block=layer] [value=1]   one payload
    loss NAME LO-HI           a node's loss
    applied NAME STEP [state=S]   a worker has taken so many steps, and is in this state
    replica STEP [state=S]        so has the coordinator's own replica
    replayed NAME                 it was sent the state, or the steps that it had missed
    behind NAME STEP              it reads too slowly: it is sent nothing from this step on
    result NAME PART [step=N]     a held-out part is evaluated
    opens NAME [port=7000]        it listens for other members
    links NAME PEER...            it reaches these members, all equally quickly
    unlinks NAME PEER             not any more
    sums OWNER NAME LO-HI [table=N]   of this worker's node all of the owner's slices is there
    slice NAME SLICE [value=1] [told=VALUE] [of=A:0-2+B:2-4] [table=N]   an owner's average and
                                  its word on it, of these workers' nodes
    average NAME SLICE [value=1] [table=N]     the average alone
    done OWNER SLICE [value=1] [of=...] [table=N]   the word alone
    through NAME SLICE LO-HI      a slice's sum that goes to its owner by the coordinator
    infinite OWNER SLICE LO-HI [of=NAME]   a sum, or (of nobody) all of them, is not finite
    wants NAME STEP               slices of a committed step have not come
    wrong NAME STEP SLICE OWNER   one of them came with another digest
    lost NAME, fails NAME, differs NAME, drains NAME
    drain, halt, continue [skip=yes], give-up, save
    tick MS                       the time goes on until then
    durable STEP, saved STEP  what the disk answers; at once unless it is slow
    full [commit=lost]        or it refuses; maybe it was the commit that did not get there
    unwritten                 it refuses the result of a run that is done
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from blake3 import blake3

from coordinator.run.outputs import actions as act
from coordinator.run.outputs.restart import Resumption, Terms
from coordinator.run.run import Run, RunPhase
from protocol.base import limits
from protocol.base.errors import RemoteProtocolError
from protocol.exact.slice_merge import origin_document
from protocol.exact.slices import slice_digest
from protocol.exact.tree import Node
from protocol.spec.manifest import Block, Manifest, Metric, TensorSpec
from protocol.spec.run_spec import (
    BatchSpec,
    CheckpointSpec,
    ExchangeSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
)
from protocol.wire import messages as msg
from protocol.wire.peers import OwnerTable, parse

EPOCH = 1
RUN_ID = "run-1"
BLOCKS = {"embedding": 0, "layer": 1}
Actions = list[act.Action]


def play(path: Path) -> str:
    """The transcript with what its commands lead to now."""
    return "".join(f"{line}\n" for line in _played(path.read_text().splitlines()))


def _played(lines: list[str]) -> Iterator[str]:
    stage: Stage | None = None
    for line in lines:
        if line.startswith("> "):
            yield line
            word, *rest = line.removeprefix("> ").split("#")[0].split()
            plain = [part for part in rest if "=" not in part]
            options = dict(part.split("=") for part in rest if "=" in part)
            if word == "run":
                stage = Stage(**options)
            elif word == "restart":
                stage = Stage(restart=plain[0], **options)
                yield from (f"  {told}" for told in stage.told(stage.run.resume()))
            else:
                assert stage is not None
                yield from (f"  {told}" for told in stage.command(word, plain, options))
        elif not line.startswith("  "):
            yield line


def digest(name: str) -> str:
    """The state of this name."""
    return blake3(name.encode()).hexdigest()


class Stage:
    """One run, and the commands by name."""

    def __init__(
        self,
        *,
        workers: str = "1",
        steps: str = "2",
        evaluate_every: str = "0",
        parts: str = "0",
        exactness: str = "prefer",
        every: str = "0",
        disk: str = "quick",
        restart: str = "",
        saved: str = "0",
        skipped: str = "",
        signature: str = "s",
        state: str = "",
        scale: str = "",
        way: str = "star",
    ) -> None:
        spec = RunSpec(
            task="scripted",
            steps=int(steps),
            batch=BatchSpec(samples=4, microbatch=1),
            optimizer=OptimizerSpec(name="sgd", lr=1.0),
            evaluate_every=int(evaluate_every),
            exactness=exactness,
            checkpoint=CheckpointSpec(every=int(every)),
            exchange=ExchangeSpec.model_validate({"way": way}),
        )
        if scale:  # of a model, which is not there
            half = ModelSpec(source="m", precision="float16", loss_scale=float(scale))
            spec = spec.model_copy(update={"model": half})
        self._parts = int(parts)
        self._now_ms = 0
        self.hears: Callable[[Actions], object] = lambda _: None
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
                terms=Terms(
                    signature=digest(signature), initial_digest=digest("0"),
                    signatures=(digest(signature),),
                ),
            )  # fmt: skip
        self.run = Run(RUN_ID, spec, EPOCH, int(workers), resumption, secret=b"of the run")
        run = self.run
        self._commands: dict[str, Callable[..., Actions]] = {
            "invite": lambda name, duty="train", devices="1": run.invite(
                name, devices=int(devices), evaluates=duty == "evaluate"
            ),
            "ready": self._ready,
            "unready": self._unready,
            "loaded": self._loaded,
            "chunk": self._chunk,
            "node": self._node,
            "payload": self._payload,
            "loss": self._loss,
            "applied": self._applied,
            "replica": lambda step, state="": run.replica_applied(int(step), digest(state or step)),
            "result": self._result,
            **self._sliced_commands(),
            "lost": lambda name: run.lost(name, "the connection is over"),
            "fails": lambda name: run.lost(name, "the device failed: out of memory", exit_code=1),
            "differs": lambda name: run.lost(name, "another script", exit_code=78),
            "drains": lambda name: run.receive(name, msg.Drain(), None),
            "drain": run.drain,
            "replayed": run.replayed,
            "behind": lambda name, step: run.fell_behind(name, int(step)),
            "halt": lambda: run.halt("halted by the operator"),
            "continue": lambda skip="": run.end_halt(skip_step=bool(skip)),
            "give-up": lambda: run.give_up("nobody is left"),
            "save": run.save,
            "tick": self._tick,
            "durable": lambda step: run.durable(int(step)),
            "saved": lambda step: run.checkpointed(int(step)),
            "unwritten": lambda: run.result_refused("the disk is full"),
            "full": lambda commit="": run.storage_failed(
                "the disk is full", lost_commit=bool(commit)
            ),
        }

    def _sliced_commands(self) -> dict[str, Callable[..., Actions]]:
        hear = self.run.receive
        of_run = {"run_id": RUN_ID}
        return {
            "opens": lambda name, port="7000": hear(
                name, msg.DoorOpen(**of_run, port=int(port), fingerprint=bytes(32)), None
            ),
            "links": lambda name, *peers: [
                action
                for peer in peers
                for action in hear(name, msg.Linked(**of_run, peer=peer, mbit=1000.0), None)
            ],
            "unlinks": lambda name, peer: hear(
                name, msg.Unlinked(**of_run, peer=peer, reason="cut"), None
            ),
            "sums": self._sums,
            "slice": self._slice,
            "average": self._average,
            "done": self._done,
            "through": self._through,
            "infinite": self._infinite,
            "wants": lambda name, step: hear(
                name, msg.SlicesWanted(**self._where(step=step, attempt="0")), None
            ),
            "wrong": lambda name, step, number, owner: hear(
                name,
                msg.WrongSlice(
                    **self._where(step=step, attempt="0"), slice=int(number), owner=owner
                ),
                None,
            ),
        }

    def command(self, word: str, plain: list[str], options: dict[str, str]) -> list[str]:
        """Do it; the actions as text, or the error."""
        before = self.run.phase
        try:
            actions = self._commands[word](*plain, **options)
        except RemoteProtocolError as error:
            return [f"{type(error).__name__}: {error}"]
        return self.told(actions, before)

    def told(self, actions: Actions, before: RunPhase = RunPhase.WAITING) -> list[str]:
        """The actions as text, with what a quick disk answers to them."""
        told: list[str] = []
        todo = list(actions)
        while todo:
            action = todo.pop(0)
            self.hears([action])
            if not isinstance(action, act.Report) or action.fact.event:
                told.append(_text(action))
            if not self._disk_is_slow:
                todo += self._answer(action)
        if self.run.phase is not before:
            reason = f": {self.run.reason}" if self.run.reason else ""
            told.append(f"[{self.run.phase.value}{reason}]")
        return told

    def _answer(self, action: act.Action) -> Actions:
        match action:
            case act.Persist(record):
                return self.run.durable(record.commit.step)
            case act.MakeCheckpoint(step):
                return self.run.checkpointed(step)
            case _:
                return []

    def _tick(self, until_ms: str) -> Actions:
        actions: Actions = []
        while self._now_ms < int(until_ms):
            self._now_ms += limits.TICK_MS
            actions += self.run.tick(float(self._now_ms))
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
        return self.run.receive(name, message, manifest.to_bytes())

    def _loaded(self, state: str = "0") -> Actions:
        assert self.run.settled is not None
        return self.run.replica_loaded(self.run.settled.admission.upload, digest(state))

    def _chunk(self, name: str, block: str = "embedding", last: str = "no") -> Actions:
        message = msg.StateChunk(
            run_id=RUN_ID, kind="parameters", block=BLOCKS[block], chunk=0, step=0,
            optimizer_step=0, last=last == "yes",
        )  # fmt: skip
        return self.run.receive(name, message, np.zeros(2, np.float32))

    def _unready(self, name: str, run: str = RUN_ID, own: str = "no") -> Actions:
        reason = "too large for its device" if own == "yes" else "no such data"
        message = msg.Unready(run_id=run, reason=reason, own=own == "yes", exit_code=2)
        return self.run.receive(name, message, None)

    def _node(self, name: str, node: str, nan: str = "", **where: str) -> Actions:
        actions: Actions = []
        for block in reversed(BLOCKS):
            value = "nan" if nan == block else "1"
            actions += self._payload(name, node, block=block, value=value, **where)
        return actions + self._loss(name, node, nan, **where)

    def _loss(self, name: str, node: str, nan: str = "", **where: str) -> Actions:
        lo, hi = _ends(node)
        message = msg.NodeLoss(
            **self._where(**where), lo=lo, hi=hi, weight=hi - lo, sums=b"",
            elapsed_ms=(hi - lo) * 10,
            loss_sum=float("inf") if nan == "loss" else (hi - lo) * 0.5,
        )  # fmt: skip
        return self.run.receive(name, message, None)

    def _payload(
        self, name: str, node: str, block: str = "layer", value: str = "1", **where: str
    ) -> Actions:
        lo, hi = _ends(node)
        kind = msg.BlockGradientPayload if block == "layer" else msg.NonBlockGradientPayload
        message = kind(
            **self._where(**where), block=BLOCKS[block], chunk=0, lo=lo, hi=hi, weight=hi - lo
        )
        values = np.full(2, float(value) * (hi - lo), np.float32)
        return self.run.receive(name, message, values)

    def _applied(self, name: str, step: str, state: str = "") -> Actions:
        message = msg.StepApplied(epoch=EPOCH, step=int(step), state_digest=digest(state or step))
        return self.run.receive(name, message, None)

    def _result(self, name: str, part: str, step: str = "") -> Actions:
        sums = {"sum": float(part), "count": 1.0}
        at = int(step or self.run.step)
        message = msg.EvalResult(epoch=EPOCH, step=at, part=int(part), sums=sums)
        return self.run.receive(name, message, None)

    def _of_table(self, table: str, **where: str) -> dict[str, int]:
        settled = self.run.settled
        assert settled is not None
        return {**self._where(**where), "owners": int(table or settled.progress.mesh.number)}

    def _sums(self, owner: str, name: str, node: str, table: str = "", **where: str) -> Actions:
        lo, hi = _ends(node)
        message = msg.SumsArrived(**self._of_table(table, **where), worker=name, lo=lo, hi=hi)
        return self.run.receive(owner, message, None)

    def _slice(
        self, name: str, number: str, *, value: str = "1", told: str = "", of: str = "",
        table: str = "", **where: str,
    ) -> Actions:  # fmt: skip
        came = self._average(name, number, value, table, **where)
        return came + self._done(name, number, told or value, of, table, **where)

    def _average(
        self, name: str, number: str, value: str = "1", table: str = "", **where: str
    ) -> Actions:
        message = msg.SliceAverage(**self._of_table(table, **where), slice=int(number))
        return self.run.receive(name, message, np.full(2, float(value), np.float32))

    def _done(
        self, name: str, number: str, value: str = "1", of: str = "", table: str = "", **where: str
    ) -> Actions:
        added = [part.partition(":") for part in of.split("+")] if of else []
        origin = tuple((worker, Node(*_ends(node))) for worker, _, node in added)
        message = msg.SliceDone(
            **self._of_table(table, **where), slice=int(number),
            digest=slice_digest(np.full(2, float(value), np.float32)),
        )  # fmt: skip
        return self.run.receive(name, message, origin_document(origin))

    def _through(self, name: str, number: str, node: str, **where: str) -> Actions:
        lo, hi = _ends(node)
        message = msg.SliceSum(
            **self._of_table("", **where), slice=int(number), worker=name, lo=lo, hi=hi,
            weight=hi - lo,
        )  # fmt: skip
        return self.run.receive(name, message, np.full(2, float(hi - lo), np.float32))

    def _infinite(self, owner: str, number: str, node: str, of: str = "", **where: str) -> Actions:
        lo, hi = _ends(node)
        message = msg.SumNotFinite(
            **self._where(**where), slice=int(number), worker=of or None, lo=lo, hi=hi
        )
        return self.run.receive(owner, message, None)

    def _where(self, step: str = "", attempt: str = "") -> dict[str, int]:
        progress = self.run.progress
        now = progress.attempt if progress is not None else 0
        return {
            "epoch": EPOCH,
            "step": int(step or self.run.step),
            "attempt": int(attempt or now),
        }


def _ends(node: str) -> tuple[int, int]:
    lo, _, hi = node.partition("-")
    return int(lo), int(hi)


def _text(action: act.Action) -> str:
    match action:
        case act.Send(worker, msg.Owners() as message, bytes() as document):
            return f"{worker} <- {_message(message)}: {_table(document)}"
        case act.Send(worker, message):
            return f"{worker} <- {_message(message)}"
        case act.Broadcast(message, body):
            values = "" if body is None else f" {body.tolist()}"
            return f"all <- {_message(message)}{values}"
        case act.Replay(worker, step):
            return f"replay {worker} from step {step}"
        case act.Summarise(_, _, averages):
            return f"summarise blocks {', '.join(map(str, averages))}"
        case act.Persist(record):
            return f"persist the commit of step {record.commit.step}"
        case act.MakeCheckpoint(step):
            return f"save the state after {step} steps"
        case act.Remember():
            return "remember the terms"
        case act.Follow(worker, step):
            return f"follow {worker} from step {step}"
        case act.Withhold(worker):
            return f"withhold broadcasts from {worker}"
        case act.Seed(worker):
            return f"seed {worker}"
        case act.ApplyStep(step, averages, scalars):
            if scalars is None:
                return f"replica: skip step {step}"
            return f"replica: apply step {step}, {[a.tolist() for a in averages]}"
        case act.Dismiss(worker, reason, exit_code):
            return f"dismiss {worker}, {int(exit_code)}: {reason}"
        case act.Report(fact):
            return f"report {fact.event} {fact.fields()}"
        case act.FillReplica(message):
            return f"replica: fill block {message.block} chunk {message.chunk}"
        case act.DigestReplica(upload):
            return f"replica: digest upload {upload}"
        case act.Finish(outcome, reason, exit_code):
            return f"finish {outcome}, {int(exit_code)}: {reason}"
        case act.Adopt():
            return "adopt the manifest"
        case act.KeepBoundary(message):
            return f"keep {_message(message)}"
        case act.AnswerStretch(worker, message):
            return f"answer {worker} {_message(message)}"
        case act.SendAverages(worker, step):
            return f"send {worker} the averages of step {step}"


def _table(document: bytes) -> str:
    table = parse(OwnerTable, document)
    owned = " ".join(f"{n}:{table.owner(n)}" for n in range(len(table.owners)))
    return owned if table.scribe is None else f"{owned}, {table.scribe} writes"


def _message(message: msg.Message) -> str:
    left_out = {"epoch", "view", "averages_digest", "run_id", "scalars", "blobs"}
    fields = message.model_dump(exclude=left_out)
    place = ""
    if "attempt" in fields:
        place = f" {fields.pop('step')}.{fields.pop('attempt')}"
    if isinstance(message, msg.Commit) and message.scalars is None:
        fields["skip"] = True
    if fields.get("uploads") == len(BLOCKS):
        del fields["uploads"]  # all may be sent
    if fields.get("owners") == 0:
        del fields["owners"]  # sums go to the coordinator
    if fields.get("loss_scale") == 1.0:
        del fields["loss_scale"]  # nothing is scaled
    if "nodes" in fields:
        fields["nodes"] = "+".join(f"{lo}-{hi}" for lo, hi in fields["nodes"]) or "none"
    rest = "".join(f" {name}={value}" for name, value in fields.items())
    return f"{type(message).__name__}{place}{rest}"
