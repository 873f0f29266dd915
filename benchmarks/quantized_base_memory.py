"""Main memory of LoRA by storage format of the frozen base, from reading the model to training.

    python -m benchmarks.quantized_base_memory
    python -m benchmarks.quantized_base_memory --model qwen3-4b --layers 9 --kinds int4 \
        --backends cpu vulkan

Each format and backend runs in its own process. The command prints the peak of the resident memory
beyond that of the libraries, including mapped files, in total and by phase, with the estimate of
`device_memory.estimate` for the quantized base, and the size of the largest tensor. Weights are
random; one file is written at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
import transformers

from backends.base.interface import Program
from backends.registry import choose
from protocol.cli.command_line import child_environment
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.run_spec import ModelRun
from tests.resident_memory import MIB, measured_growth
from worker.models.base_tensors import stored_tensors
from worker.models.device_memory import estimate
from worker.results.gguf_file import write_gguf
from worker.tasks.registry import build

ROOT: Final = Path(__file__).parents[1]
FORMATS: Final = ("float32", "bfloat16", "int8", "int4", "nf4", "q8_0", "q4_0")
FROM_GGUF: Final = "int4 of a GGUF file"
MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama-155m": {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16,
        "max_position_embeddings": 160, "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560,
        "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def main() -> None:
    """Print a line for each backend and storage format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-155m")
    parser.add_argument(
        "--layers", type=int, default=0, help="number of layers, instead of the model's"
    )
    parser.add_argument("--kinds", nargs="+", dest="formats", default=[*FORMATS, FROM_GGUF])
    parser.add_argument("--backends", nargs="+", default=["cpu"])
    parser.add_argument(
        "--set", nargs="+", default=[], dest="settings", help="KEY=VALUE of the run spec"
    )
    parser.add_argument("--directory", type=Path, help="directory of the model, which is kept")
    options = parser.parse_args()
    config = MODELS[options.model] | (
        {"num_hidden_layers": options.layers} if options.layers else {}
    )
    with contextlib.ExitStack() as stack:
        directory = options.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory = directory.resolve()
        run = directory / "run.json"
        if not run.is_file():
            write_run(directory, config, with_gguf=FROM_GGUF in options.formats)
        for backend in options.backends:
            for base_format in options.formats:
                print(measure_in_process(run, backend, base_format, options.settings), flush=True)


def write_run(directory: Path, config: dict[str, Any], *, with_gguf: bool) -> Path:
    """Write a run spec with its model and data."""
    spec = load_run_spec(
        ROOT / "deploy" / "runs" / "small-chat.yaml",
        [f"data.train={ROOT / 'deploy' / 'runs' / 'small-chat.jsonl'}"],
    )
    task = build(spec)
    model = directory / "model"
    write_model(model, config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_text(task.manifest.export.files[name])
    if with_gguf:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        model_with_weights = transformers.AutoModelForCausalLM.from_pretrained(model)
        write_gguf(model_with_weights, tokenizer, directory / "model.gguf", "f16", "model")
    document = json.loads(spec.model_dump_json())
    document |= {"model": {"source": str(model)}, "tokenizer": None, "lora": {"r": 8}}
    document["data"]["max_tokens"] = 64
    document["batch"] = {"samples": 4, "microbatch": 2}
    path = directory / "run.json"
    path.write_text(json.dumps(document))
    return path


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """Write a decoder in bfloat16 with random weights, one file for each layer."""
    keys = dict(config)
    model_config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        auto_model: Any = transformers.AutoModelForCausalLM
        model = auto_model.from_config(model_config)
    model_config.architectures = [type(model).__name__]
    model_config.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    weight_map = {}
    for name, parameter in model.named_parameters():
        layer = name.split(".")[2] if ".layers." in name else "others"
        weight_map[name] = f"model-{layer}.safetensors"
        files.setdefault(weight_map[name], {})[name] = parameter
    for file, tensors in files.items():
        values = {name: _random_tensor(tensor, generator) for name, tensor in tensors.items()}
        safetensors.torch.save_file(values, directory / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _random_tensor(template: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if template.dim() == 1:
        return torch.ones(template.shape, dtype=torch.bfloat16)
    return (torch.randn(template.shape, generator=generator) * 0.02).bfloat16()


_MEASURE_SCRIPT: Final = """
import sys
from benchmarks.quantized_base_memory import measure
print(measure(*sys.argv[1:]))
"""


def measure_in_process(run: Path, backend: str, base_format: str, settings: list[str]) -> str:
    """Run `measure` in a new process; return its line."""
    process = subprocess.run(  # noqa: S603 -- our own module
        [sys.executable, "-c", _MEASURE_SCRIPT, str(run), backend, base_format, *settings],
        env=child_environment(), stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return process.stdout.splitlines()[-1]


def measure(run: str, device: str, base_format: str, *settings: str) -> str:
    """Train two microbatches; return a line with the peak of resident memory in each phase."""
    base_dtype, _, is_gguf = base_format.partition(" ")
    source = [f"model.source={Path(run).parent / 'model.gguf'}"] if is_gguf else []
    spec = load_run_spec(Path(run), [f"model.base_dtype={base_dtype}", *source, *settings])
    assert isinstance(spec, ModelRun)
    backend = choose(device).backend
    importlib.import_module("peft")
    phases = dict[str, tuple[float, float]]()

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        earlier_mib = sum(remaining_mib for _, remaining_mib in phases.values())
        with measured_growth() as growth:
            yield
        phases[name] = (earlier_mib + growth.peak_bytes / MIB, growth.remaining_bytes / MIB)
        print(f"{name}: {time.perf_counter() - start_s:.1f} s", file=sys.stderr)

    with phase("read"):
        task = build(spec)
    batches = [task.batch([0, 1]), task.batch([2, 3])]
    with phase("compile"):
        program: Program = backend.compile(task.trainable, batches[0])
        program.load(task.initial_parameters())
    with phase("train"):
        for _ in program.gradients([(batch, n) for n, batch in enumerate(batches)]):
            pass
    program.close()
    peaks = ", ".join(f"{name} {peak_mib:.0f}" for name, (peak_mib, _) in phases.items())
    peak_mib = max(peak_mib for peak_mib, _ in phases.values())
    return f"{device:7} {base_format:19} {peak_mib:6.0f} MiB ({peaks}); {_estimate_text(spec)}"


def _estimate_text(spec: ModelRun) -> str:
    memory = estimate(spec)
    if memory is None or spec.model.source is None:
        return "from GGUF"
    shapes = [shape for _, shape, _ in stored_tensors(Path(spec.model.source))]
    largest_bytes = max(4 * math.prod(shape) for shape in shapes)
    return f"quantized base {memory.weights / MIB:.0f}, largest tensor {largest_bytes / MIB:.0f}"


if __name__ == "__main__":
    main()
