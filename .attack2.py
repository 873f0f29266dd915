import json, math, sys
exec(open(".attack.py").read().split('if __name__')[0])
from worker.tasks.registry import build
from protocol.spec.run_spec import parse_run_spec
from backends.eager.eager import EagerBackend
from backends.base.interface import BlockGradient
from protocol.exact.tree import Subtree
from worker.logic.events import StepId
from worker.shell.coupled_step import CoupledStep
model()
def once(name, rows, **spec):
    d = ROOT / name; d.mkdir(exist_ok=True); f = d / "pairs.jsonl"
    f.write_text("".join(json.dumps(r, ensure_ascii=False)+"\n" for r in rows), encoding="utf-8")
    n = len(rows)
    doc = {"name": name, "task": "embed", "seed": 7, "model": {"source": str(MODEL)}, "data": {"train": str(f), "max_tokens": 32, "holdout": 0, **spec.pop("data", {})},
      "batch": {"samples": n, "microbatch": 4}, "steps": 4, "optimizer": {"name": "sgd", "lr": 1.0}, **spec}
    try:
        task = build(parse_run_spec(doc))
        mb = min(4, n)
        parts = [range(lo, min(lo+mb, n)) for lo in range(0, n, mb)]
        program = EagerBackend("cpu").compile(task.trainable, task.batch(parts[0]))
        program.load(task.initial_parameters())
        leaves = [(task.batch(p), i) for i, p in enumerate(parts)]
        er = np.concatenate([*program.embed(leaves)])
        step = CoupledStep(program, StepId(0, 1), er.reshape(-1), [len(p) for p in parts], 0)
        sums = {}
        w = Subtree(0, len(parts))
        for item in program.gradients(step.leaves(w, leaves)):
            if isinstance(item, BlockGradient): sums[item.block] = item.values
        assert step.unlike(w, program.take_embedded()) == ()
        loss = step.loss(w, n).loss_sum / n
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True); return
    doc["optimizer"] = {"lr": 0.0}
    got = {}
    for b, blk in enumerate(task.manifest.blocks):
        for t, pl in blk.slices(): got[t.name] = sums[b][pl].reshape(t.shape) / n
    import torch.optim
    grads = {}
    real = torch.optim.AdamW
    class Keep(real):
        def step(self, *a):
            for g in self.param_groups:
                for p in g["params"]: grads[id(p)] = None if p.grad is None else p.grad.clone().numpy()
    torch.optim.AdamW = Keep
    try: losses, params = loop(rows, doc, [list(range(n))])
    finally: torch.optim.AdamW = real
    ps = KEEP
    worst = (0, "")
    for nme, p in ps.items():
        g = grads[id(p)]; g = np.zeros(p.shape, "f4") if g is None else g
        have = np.nan_to_num(got[nme], nan=0.0) if nme in got else None
        worst = max(worst, (float(np.abs(have-g).max()/ (1e-6+max(np.abs(g).max(), 1e-3))), nme))
    print(f"{name}: loss {loss:.6f} torch {losses[0]:.6f}; gradients apart {worst[0]:.1e} ({worst[1]}) notes {dict(task.manifest.notes)}", flush=True)
src = open(".attack.py").read().split('if __name__')[0].replace("    if e[\"learn_temperature\"]: params[\"log_scale\"] = ls\n", "    if e[\"learn_temperature\"]: params[\"log_scale\"] = ls\n    global KEEP; KEEP = params\n")
exec(src)
once("plain", rows_of(12)); once("onepair", rows_of(1))
t = rows_of(13, neg=2); t[3]["negative"][1] = t[5]["positive"]; t[6]["anchor"] = t[7]["anchor"]; t[8]["positive"] = t[9]["positive"]
once("triplets", t, embed={"symmetric": True, "learn_temperature": True, "temperature": 0.07})
once("cap", rows_of(8), embed={"learn_temperature": True, "temperature": 0.01})
once("cls", rows_of(9, neg=1), embed={"pooling": "cls", "normalize": False, "temperature": 1.0})
once("last", rows_of(9, neg=1), embed={"pooling": "last"})
case = rows_of(8); case[0]["positive"] = "Oslo Rome p"; case[1]["positive"] = "oslo rome P"
once("case", case)
same = rows_of(8); same[0]["positive"] = text(40)+" one"; same[1]["positive"] = same[0]["positive"][:-3]+"two"
once("cut", same)
alls = [{"anchor": "same", "positive": f"p {i}"} for i in range(6)]
once("allsame", alls); once("allsamesym", alls, embed={"symmetric": True})
once("emptytext", [*rows_of(3), {"anchor": "a b", "positive": ""}, *rows_of(2)])
once("blank", [*rows_of(3), {"anchor": "\u200b", "positive": "x"}, *rows_of(2)])
once("missing", [*rows_of(3), {"anchor": "a b"}, *rows_of(2)])
once("null", [*rows_of(3), {"anchor": "a b", "positive": None}, *rows_of(2)])
once("list", [*rows_of(3), {"anchor": ["a b"], "positive": "x"}, *rows_of(2)])
once("number", [*rows_of(3), {"anchor": 3, "positive": "x"}, *rows_of(2)])
once("emptyneg", [{**r, "negative": []} for r in rows_of(4)])
once("selfpair", [*rows_of(3), {"anchor": "a b", "positive": "a b"}, *rows_of(2)])
once("tiny-tokens", rows_of(6), data={"max_tokens": 2})
