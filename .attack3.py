import torch, numpy as np, sys
from dataclasses import replace
from torch.nn.functional import normalize, cross_entropy
from torch.utils.data import TensorDataset
import samestep
from tests.samestep.test_step_loss import *
from worker.scripts.script_task import ScriptTask
from protocol.spec.run_spec import parse_run_spec
from backends.eager.eager import EagerBackend
from worker.shell.coupled_step import CoupledStep
from worker.shell.engine import trainable_of
from worker.logic.events import StepId
from protocol.exact.tree import Subtree
from backends.base.interface import BlockGradient, EMBEDDING_GRADIENT
from backends.cpu import CpuBackend
from protocol.spec.sections.model import ArithmeticSpec
n = len(X)
def go(name, canonical=False, **more):
    try:
        user = task_of(**more)
        spec = parse_run_spec({"task": "samestep:Script", "steps": 2, "batch": {"samples": n, "microbatch": 4, "unit": more.get("unit","sample")}, "options": {"script":"x","read": {}}, **({"arithmetic": "canonical"} if canonical else {})})
        task = ScriptTask(user, spec, {})
        sizes = [range(lo, min(lo+4, n)) for lo in range(0, n, 4)]
        b = CpuBackend()
        program = b.compile(trainable_of(task, spec), task.batch(sizes[0]))
        program.load(task.initial_parameters())
        leaves = [(task.batch(p), i) for i, p in enumerate(sizes)]
        er = np.concatenate([*program.embed(leaves)])
        step = CoupledStep(program, StepId(0,1), er.reshape(-1), [len(p) for p in sizes], 0)
        step.check(); program.take_embedded()
        sums = {}
        w = Subtree(0, len(sizes))
        for item in program.gradients(step.leaves(w, leaves)):
            if isinstance(item, BlockGradient): sums[item.block] = item.values
        assert step.unlike(w, program.take_embedded()) == ()
        loss = step.loss(w, n).loss_sum
        program.close(); m = task.user.module
        for p in m.parameters(): p.grad = None
        m.train()
        e = user.embed(m, [torch.as_tensor(v) for v in (X, Y, LABELS)]); L = user.batch_loss(m, {k: v.float() if v.is_floating_point() else v for k, v in e.items()}).sum(); 
        named = {nn: p for nn, p in m.named_parameters() if p.requires_grad}
        gs = torch.autograd.grad(L, [*named.values()], allow_unused=True)
        worst = 0.0
        for g, (nn, p) in zip(gs, named.items()):
            for bn, blk in enumerate(task.manifest.blocks):
                for t, pl in blk.slices():
                    if t.name == nn:
                        have = np.nan_to_num(sums[bn][pl]); want = 0*have if g is None else g.numpy().reshape(-1)
                        worst = max(worst, float(np.abs(have-want).max()))
        print(f"{name}: loss {loss:.5f} torch {L.item():.5f} gradients apart {worst:.1e}", flush=True)
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
def with_(**f):
    return lambda m, b: {**embed(m, b), **{k: v(m, b) for k, v in f.items()}}
go("plain"); go("plain canonical", True)
go("float64", embed=with_(x=lambda m, b: normalize(m.encoder(b[0]).double(), dim=1)), batch_loss=lambda m, f: batch_loss(m, {**f, "x": f["x"].float()}))
go("half", embed=with_(x=lambda m, b: normalize(m.encoder(b[0]), dim=1).bfloat16()))
go("bool", embed=with_(flag=lambda m, b: b[2] > 2), batch_loss=lambda m, f: batch_loss(m, f) * (1 + f["flag"]))
go("bool canonical", True, embed=with_(flag=lambda m, b: b[2] > 2), batch_loss=lambda m, f: batch_loss(m, f) * (1 + f["flag"]))
go("1-d", embed=with_(s=lambda m, b: m.encoder(b[0])[:, 0]), batch_loss=lambda m, f: batch_loss(m, f) + (f["s"][:, None] - f["s"][None]).square().mean(1))
go("spaces", embed=lambda m, b: {f"{k} of it": v for k, v in embed(m, b).items()}, batch_loss=lambda m, f: batch_loss(m, {k[:-6]: v for k, v in f.items()}))
go("clash", embed=lambda m, b: {EMBEDDING_GRADIENT+k: v for k, v in embed(m, b).items()}, batch_loss=lambda m, f: batch_loss(m, {k[len(EMBEDDING_GRADIENT):]: v for k, v in f.items()}))
def inplace(m, f):
    f["x"] *= 2; return batch_loss(m, f)
go("inplace", batch_loss=inplace)
go("mean", batch_loss=lambda m, f: batch_loss(m, f).mean())
go("unused field", embed=with_(u=lambda m, b: m.encoder(b[0]) * 3))
go("detached", batch_loss=lambda m, f: batch_loss(m, {**f, "y": f["y"].detach()}))
go("topk", batch_loss=lambda m, f: (f["x"] @ f["y"].T).topk(3).values.sum(1))
go("topk canonical", True, batch_loss=lambda m, f: (f["x"] @ f["y"].T).topk(3).values.sum(1))
go("index", batch_loss=lambda m, f: torch.stack([f["x"][f["label"] == l].square().sum() for l in f["label"]]))
go("index canonical", True, batch_loss=lambda m, f: torch.stack([f["x"][f["label"] == l].square().sum() for l in f["label"]]))
go("dropout in loss", batch_loss=lambda m, f: batch_loss(m, {**f, "x": torch.nn.functional.dropout(f["x"], 0.5)}))
go("dropout in loss canonical", True, batch_loss=lambda m, f: batch_loss(m, {**f, "x": torch.nn.functional.dropout(f["x"], 0.5)}))
go("reads encoder", batch_loss=lambda m, f: batch_loss(m, f) + 0.1 * sum(p.square().sum() for p in m.parameters()))
go("reads encoder canonical", True, batch_loss=lambda m, f: batch_loss(m, f) + 0.1 * sum(p.square().sum() for p in m.parameters()))
go("numpy", batch_loss=lambda m, f: batch_loss(m, {**f, "x": torch.from_numpy(f["x"].detach().numpy())}))
go("list", embed=lambda m, b: [*embed(m, b).values()])
go("scalar", embed=with_(s=lambda m, b: m.log_scale))
go("supcon", batch_loss=lambda m, f: -(torch.log_softmax((f["x"] @ f["x"].T) * m.log_scale.exp() - 1e9 * torch.eye(len(f["x"])), 1) * (f["label"][:, None] == f["label"][None]).float()).sum(1))
go("supcon canonical", True, batch_loss=lambda m, f: -(torch.log_softmax((f["x"] @ f["x"].T) * m.log_scale.exp() - 1e9 * torch.eye(len(f["x"])), 1) * (f["label"][:, None] == f["label"][None]).float()).sum(1))
go("siglip canonical", True, batch_loss=lambda m, f: -torch.nn.functional.logsigmoid((2*torch.eye(len(f["x"]))-1) * (f["x"] @ f["y"].T * m.log_scale.exp() - 1)).sum(1))
go("triplet cdist canonical", True, batch_loss=lambda m, f: torch.relu(torch.cdist(f["x"], f["y"]) - torch.cdist(f["x"], f["y"]).mean(1, keepdim=True) + 1).mean(1))
