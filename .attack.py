"""Independent torch loop against runs."""
import json, sys, pathlib, subprocess, tempfile, math
import numpy as np, torch, transformers
from torch.nn.functional import normalize, cross_entropy
from tests.small_chat import save_chat_model
from protocol.cli.command_line import command_of, child_environment
ROOT = pathlib.Path("runs/attack").resolve(); ROOT.mkdir(parents=True, exist_ok=True)
MODEL = ROOT / "model"
def model():
    if MODEL.exists(): return
    save_chat_model(MODEL)
    tok = transformers.AutoTokenizer.from_pretrained(MODEL)
    (MODEL / "model.safetensors").unlink()
    torch.manual_seed(0)
    cfg = transformers.BertConfig(vocab_size=len(tok), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=64, hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
    transformers.BertModel(cfg).save_pretrained(MODEL)
def train(name, rows, raw=None, more=(), **spec):
    d = ROOT / name; d.mkdir(exist_ok=True)
    f = d / "pairs.jsonl"; f.write_text(raw if raw is not None else "".join(json.dumps(r, ensure_ascii=False)+"\n" for r in rows), encoding="utf-8")
    doc = {"name": name, "task": "embed", "seed": 7, "model": {"source": str(MODEL)}, "data": {"train": str(f), "max_tokens": 32, "holdout": 0, **spec.pop("data", {})},
      "batch": {"samples": 8, "microbatch": 4}, "steps": 4, "optimizer": {"name": "adamw", "lr": 5e-3}, **spec}
    (d/"run.yaml").write_text(json.dumps(doc))
    r = subprocess.run([*command_of("coordinator"), "--run", str(d/"run.yaml"), "--local-workers", "1", "--out", str(d/"out"), "--no-announce", "--bind", "127.0.0.1:0", "--control", "127.0.0.1:0", *more], env=child_environment(), capture_output=True, text=True)
    if not (d/"out/result.json").exists():
        print(name, "-> rc", r.returncode, "|", [l for l in (r.stdout+r.stderr).splitlines() if l.strip()][-3:]); return None, doc
    return json.loads((d/"out/result.json").read_text()), doc
def loop(rows, doc, order):
    """Plain torch: all pairs of a step at once."""
    tok = transformers.AutoTokenizer.from_pretrained(MODEL)
    m = transformers.AutoModel.from_pretrained(MODEL, attn_implementation="eager"); m.train()
    e = {"pooling": "mean", "normalize": True, "temperature": 0.05, "learn_temperature": False, "symmetric": False, **doc.get("embed", {})}
    params = {n: p for n, p in m.named_parameters() if "pooler" not in n}
    ls = torch.nn.Parameter(torch.tensor(-math.log(e["temperature"])))
    if e["learn_temperature"]: params["log_scale"] = ls
    o = doc["optimizer"]
    groups = []
    default = dict(lr=o["lr"], weight_decay=o.get("weight_decay", 0.0))
    left = dict(params)
    for g in o.get("groups", []):
        import fnmatch
        mine = {n: p for n, p in left.items() if any(fnmatch.fnmatch(n, pat) for pat in g["match"])}
        for n in mine: del left[n]
        groups.append({"params": list(mine.values()), "lr": o["lr"]*g.get("lr_scale",1), "weight_decay": g.get("weight_decay", default["weight_decay"])})
    groups.append({"params": list(left.values()), **default})
    opt = torch.optim.AdamW(groups)
    def enc(texts):
        out = []
        for t in texts:
            ids = tok(t, truncation=True, max_length=doc["data"]["max_tokens"], return_tensors="pt")
            h = m(input_ids=ids["input_ids"]).last_hidden_state[0]
            v = h.mean(0) if e["pooling"]=="mean" else h[0] if e["pooling"]=="cls" else h[-1]
            out.append(normalize(v, dim=0) if e["normalize"] else v)
        return torch.stack(out)
    losses = []
    for step in order:
        rs = [rows[i] for i in step]
        negs = [r.get("negative") for r in rs]
        negs = [[] if n is None else n if isinstance(n, list) else [n] for n in negs]
        A = enc([r["anchor"] for r in rs]); P = enc([r["positive"] for r in rs])
        cand = [P]; texts = [r["positive"] for r in rs]
        for k in range(len(negs[0])):
            cand.append(enc([n[k] for n in negs])); texts += [n[k] for n in negs]
        C = torch.cat(cand); scale = ls.clamp(max=math.log(100)).exp() if e["learn_temperature"] else 1/e["temperature"]
        S = scale * A @ C.T; n = len(rs)
        mask = torch.zeros_like(S, dtype=torch.bool)
        for i in range(n):
            for j in range(len(texts)):
                if j == i: continue
                if texts[j] == rs[i]["positive"] or (j < n and rs[j]["anchor"] == rs[i]["anchor"]): mask[i, j] = True
        L = cross_entropy(S.masked_fill(mask, -math.inf), torch.arange(n))
        if e["symmetric"]:
            S2 = scale * P @ A.T
            L = (L + cross_entropy(S2.masked_fill(mask[:, :n], -math.inf), torch.arange(n)))/2
        opt.zero_grad(); L.backward(); opt.step(); losses.append(L.item())
    return losses, {n: p.detach().numpy() for n, p in params.items()}
def compare(name, rows, result, doc):
    if result is None: return
    from protocol.exact.samples import SampleOrder
    from protocol.spec.run_spec import parse_run_spec
    spec = parse_run_spec(doc)
    man = json.loads((ROOT/name/"out/manifest.json").read_text())
    so = SampleOrder(spec.seed, man["train_samples"], spec.batch)
    order = [[s for mb in so.microbatches(st) for s in mb] for st in range(len(result["losses"]))]
    losses, params = loop(rows, doc, order)
    from safetensors.numpy import load_file
    got = load_file(ROOT/name/"out/model/model.safetensors")
    worst = max((float(np.abs(got[n]-v).max()), n) for n, v in params.items() if n in got)
    dl = max(abs(a-b) for a, b in zip(losses, result["losses"]))
    missing = [n for n in params if n not in got]
    print(f"{name}: losses {[round(x,5) for x in result['losses']]} apart {dl:.1e}; weights apart {worst[0]:.1e} in {worst[1]} {missing} {result['eval'] or ''}", flush=True)
words = "alpha beta gamma delta find the red city where is oslo rome kyiv bern lima paris one two three".split()
rng = np.random.default_rng(1)
def text(n=4): return " ".join(rng.choice(words, n))
def rows_of(n, neg=0):
    out = []
    for i in range(n):
        r = {"anchor": f"{text()} {i}", "positive": f"{text(6)} p{i}"}
        if neg == 1: r["negative"] = f"{text(5)} n{i}"
        if neg > 1: r["negative"] = [f"{text(5)} n{i} {k}" for k in range(neg)]
        out.append(r)
    return out
if __name__ == "__main__":
    model()
    which = sys.argv[1:]
    def go(name, rows, **k):
        if which and name not in which: return
        r, doc = train(name, rows, **k); compare(name, rows, r, doc)
    go("plain", rows_of(24))
    uni = rows_of(20); uni[0] = {"anchor": "wo ist 東京 🗼?", "positive": "Zürich naïve שלום \u200b"}; uni[1]["positive"] = "x"; uni[2]["anchor"] = " leading and trailing "; uni[3]["positive"] = text(90); uni[5]["anchor"] = uni[6]["anchor"]; uni[7]["positive"] = uni[8]["positive"]
    go("odd", uni)
    go("shortstep", rows_of(10)); go("oneinstep", rows_of(9))
    go("onepair", rows_of(1))
    t = rows_of(16, neg=2); t[3]["negative"][1] = t[5]["positive"]; t[6]["anchor"] = t[7]["anchor"]
    go("triplets", t, embed={"symmetric": True, "learn_temperature": True, "temperature": 0.07})
    go("cls", rows_of(16, neg=1), embed={"pooling": "cls", "normalize": False, "temperature": 1.0})
    go("decay", rows_of(16), embed={"learn_temperature": True}, optimizer={"name": "adamw", "lr": 5e-3, "weight_decay": 0.3, "groups": [{"match": ["*.bias", "*LayerNorm*", "log_scale"], "weight_decay": 0.0, "lr_scale": 2.0}]})
    case = rows_of(16); case[0]["positive"] = "Oslo Rome p"; case[1]["positive"] = "oslo rome P"
    go("case", case)
    go("emptytext", [*rows_of(3), {"anchor": "a b", "positive": ""}, *rows_of(2)])
    go("missing", [*rows_of(3), {"anchor": "a b"}, *rows_of(2)])
    go("stop", rows_of(24), steps=30, evaluate_every=1, data={"holdout": 0.25}, stop={"figure": "mrr_at_10", "better": "higher", "patience": 2})
