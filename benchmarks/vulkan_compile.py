"""Time to compile a deep decoder for a Vulkan device, against a shallow decoder.

    python -m benchmarks.vulkan_compile [--rounds 5] [--cold]

A small Qwen3 model with LoRA, 36 layers against 4, each compiled in its own process,
alternating: the time of `Backend.compile`, and the time until the first microbatch is done. With
`--cold`, Mesa's software driver keeps no shaders between processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any, Final

from benchmarks.machine import print_heading, print_table

LAYERS: Final = (4, 36)


def measure(layers: int) -> dict[str, float]:
    """Measure in this process; return the seconds from the start to the end of each phase."""
    import numpy as np  # noqa: PLC0415  -- only child processes need these
    import peft  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from backends.base.interface import Batch, Trainable  # noqa: PLC0415
    from backends.wgpu.backend import VulkanBackend  # noqa: PLC0415
    from worker.models.blocks import cut_into_blocks  # noqa: PLC0415

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
    }  # fmt: skip
    config = transformers.Qwen3Config(num_hidden_layers=layers, **sizes)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    module = peft.get_peft_model(transformers.Qwen3ForCausalLM(config), lora)

    def loss(model: torch.nn.Module, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=arrays["ids"]).logits.flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, arrays["ids"].flatten(), reduction="sum")

    batch = Batch({"ids": np.arange(64, dtype=np.int64).reshape(2, 32)}, weight=2.0)
    backend = VulkanBackend()
    _ = backend.has_exact_additions, backend.tuner  # measured once per device, not per program
    start_s = time.perf_counter()
    program = backend.compile(Trainable(cut_into_blocks(module), module, loss), batch)  # type: ignore[arg-type]
    compiled_s = time.perf_counter()
    for _ in program.gradients([(batch, 0)]):
        pass
    first_s = time.perf_counter()
    program.close()
    return {"compile": compiled_s - start_s, "with the first microbatch": first_s - start_s}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layers is not None:
        print(json.dumps(measure(options.layers)))
        return
    print_heading("Compiling 36 layers against 4 for a Vulkan device")
    environment = {"MESA_SHADER_CACHE_DISABLE": "true"} if options.cold else {}
    times_by_layers: dict[int, list[dict[str, float]]] = {layers: [] for layers in LAYERS}
    warmup_rounds = 0 if options.cold else 1  # fills the driver's cache, and is not counted
    for round_index in range(warmup_rounds + options.rounds):
        for layers in LAYERS:
            command = [sys.executable, "-m", "benchmarks.vulkan_compile", "--layers", str(layers)]
            process = subprocess.run(  # noqa: S603 -- our own command
                command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
            )
            if round_index >= warmup_rounds:
                times_by_layers[layers].append(json.loads(process.stdout.splitlines()[-1]))
    rows = []
    for phase in times_by_layers[LAYERS[0]][0]:
        shallow, deep = ([times[phase] for times in times_by_layers[layers]] for layers in LAYERS)
        ratios = sorted(deep_s / shallow_s for shallow_s, deep_s in zip(shallow, deep, strict=True))
        ratio_text = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        rows.append(
            [phase, *(f"{statistics.median(side):.2f}" for side in (shallow, deep)), ratio_text]
        )
    print_table(["seconds", *(f"{layers} layers" for layers in LAYERS), "ratio"], rows)


if __name__ == "__main__":
    main()
