"""Main memory of LoRA on the CPU by storage format of the frozen base.

    python -m benchmarks.narrow_base

A Llama of 155 million parameters in a bfloat16 file, most of them in its layers; loading, compiling
and two microbatches, each format in its own process. It measures anonymous memory beyond that of
the libraries, because the system can drop mapped files.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from backends.registry import choose
from protocol.cli.command_line import child_environment
from protocol.spec.files.run_spec_file import load_run_spec
from worker.results.gguf_file import write_gguf
from worker.tasks.registry import build

ROOT: Final = Path(__file__).parents[1]
KINDS: Final = ("float32", "bfloat16", "int8", "int4", "nf4", "q8_0", "q4_0")
FROM_GGUF: Final = "int4 of a GGUF file"
_MIB: Final = 1 << 20


def main() -> None:
    """Print a line for each kind."""
    with tempfile.TemporaryDirectory() as directory:
        run = write_run(Path(directory))
        peaks = {kind: peak_bytes(run, kind) for kind in (*KINDS, FROM_GGUF)}
    for kind, peak in peaks.items():
        print(f"{kind:19} {peak / _MIB:6.0f} MiB  {peak / peaks['float32']:.2f} of float32's")


def write_run(directory: Path) -> Path:
    """A run spec with its model and data."""
    spec = load_run_spec(
        ROOT / "deploy" / "runs" / "small-chat.yaml",
        [f"data.train={ROOT / 'deploy' / 'runs' / 'small-chat.jsonl'}"],
    )
    task = build(spec)
    model = directory / "model"
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=160,
    )  # fmt: skip
    torch.manual_seed(0)
    start: Any = transformers.LlamaForCausalLM(config)
    start.to(torch.bfloat16).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_text(task.manifest.export.files[name])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    write_gguf(start, tokenizer, directory / "model.gguf", "f16", "model")
    document = json.loads(spec.model_dump_json())
    document |= {"model": {"source": str(model)}, "tokenizer": None, "lora": {"r": 8}}
    document["data"]["max_tokens"] = 64
    path = directory / "run.json"
    path.write_text(json.dumps(document))
    return path


def peak_bytes(run: Path, kind: str) -> int:
    """Measured in a process of its own."""
    done = subprocess.run(  # noqa: S603 -- this very file
        [sys.executable, "-m", "benchmarks.narrow_base", str(run), kind],
        env=child_environment(), capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return int(done.stdout.split()[-1])


def measure(run: Path, kind: str) -> int:
    """Train two microbatches; the most anonymous memory above that at the beginning."""
    kind, _, of_gguf = kind.partition(" ")
    source = [f"model.source={run.parent / 'model.gguf'}"] if of_gguf else []
    spec = load_run_spec(run, [f"model.base_dtype={kind}", *source])
    backend = choose("cpu").backend
    importlib.import_module("peft")
    before, most, over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            most[0] = max(most[0], anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    task = build(spec)
    batches = [task.batch([0]), task.batch([1])]
    program = backend.compile(task.trainable, batches[0])
    program.load(task.initial_parameters())
    for _ in program.gradients([(batch, n) for n, batch in enumerate(batches)]):
        pass
    program.close()
    over.set()
    watching.join()
    return most[0] - before


def anonymous_bytes() -> int:
    """As proc(5) counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    raise AssertionError


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(measure(Path(sys.argv[1]), sys.argv[2]))
    else:
        main()
