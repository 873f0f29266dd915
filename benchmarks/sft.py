"""Supervised fine-tuning on conversations, against TRL's SFTTrainer with the same settings.

    python -m benchmarks.sft --trl PYTHON     # an interpreter with trl

The small Llama of `deploy/runs/small-chat.yaml` starts from the same weights and trains on the same
batches of the dialogues in `small-chat.jsonl`, each side in its own process. The losses on held-out
dialogues are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.numpy

from benchmarks.cluster import run_to_end
from protocol.datasets.conversations import Conversation, read_conversations
from protocol.exact.samples import SampleOrder
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.run_spec import RunSpec
from worker.data import holdout
from worker.tasks.registry import build

ROOT: Final = Path(__file__).parents[1]
RUN: Final = ROOT / "deploy" / "runs" / "small-chat.yaml"
MAX_RELATIVE_DIFFERENCE: Final = 1e-3
TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] + ':\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""The template of the sample run, with generation markers, by which TRL finds assistant
messages."""
OVERRIDES: Final = (
    "optimizer={name: adamw, lr: 2.0e-3, clip_norm: 1.0}",
    f"data.chat_template={json.dumps(TEMPLATE)}",
)
"""Includes a constant learning rate, because the sides count warm-up steps differently."""


def main() -> None:
    """Print both losses and their relative difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", required=True, metavar="PYTHON")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work_directory = Path(directory)
        overrides = [*OVERRIDES, f"steps={args.steps}", f"data.train={RUN.with_suffix('.jsonl')}"]
        save_initial_model(load_run_spec(RUN, overrides), work_directory / "model")
        overrides += [f"model={{source: {work_directory / 'model'}}}", "tokenizer=null"]
        spec = load_run_spec(RUN, overrides)
        write_batches(spec, work_directory)
        samestep_result = train(spec, work_directory)
        trl_result = train_with_trl(Path(args.trl), work_directory)
    relative_difference = abs(samestep_result["loss"] - trl_result["loss"]) / trl_result["loss"]
    print(
        f"trl {trl_result['version']}, torch {trl_result['torch']}, {args.steps} steps of 16 "
        "dialogues"
    )
    print(f"held-out loss before: TRL {trl_result['before']:.7f}")
    print(
        f"held-out loss after: samestep {samestep_result['loss']:.7f}, TRL {trl_result['loss']:.7f}"
    )
    print(f"relative difference: {relative_difference:.2e} (limit {MAX_RELATIVE_DIFFERENCE:g})")
    sys.exit(relative_difference > MAX_RELATIVE_DIFFERENCE)


def save_initial_model(spec: RunSpec, directory: Path) -> None:
    """Save the initial model of a run from scratch."""
    task = build(spec)
    directory.mkdir()
    tensors = {
        tensor.name: np.ascontiguousarray(values[span].reshape(tensor.shape))
        for block, values in zip(task.manifest.blocks, task.initial_parameters(), strict=True)
        for tensor, span in block.slices()
    }
    export = task.manifest.export
    safetensors.numpy.save_file(tensors, directory / export.weights_file, {"format": "pt"})
    for name, text in export.files.items():
        (directory / name).write_text(text)


def write_batches(spec: RunSpec, work_directory: Path) -> None:
    """Write the training samples in the order of the run, and the held-out samples."""
    assert spec.data is not None
    conversations = read_conversations(spec.data)
    train, held_out = holdout.split(conversations.documents, spec.seed, spec.data.holdout)
    order = SampleOrder(spec.seed, len(train), spec.batch)
    train_rows = [
        train[sample]
        for step in range(spec.steps)
        for samples in order.microbatches(step)
        for sample in samples
    ]
    for name, rows in (("train", train_rows), ("held_out", held_out)):
        lines = [json.dumps({"messages": messages(conversations[row])}) for row in rows]
        (work_directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "steps": spec.steps, "microbatch": spec.batch.microbatch,
        "microbatches": spec.batch.samples // spec.batch.microbatch,
        "rate": spec.optimizer.lr, "clip_norm": spec.optimizer.clip_norm,
        "max_tokens": spec.data.max_tokens,
    }  # fmt: skip
    (work_directory / "settings.json").write_text(json.dumps(settings))


def messages(conversation: Conversation) -> list[dict[str, str]]:
    """Return a conversation's messages in TRL's format."""
    return [{"role": message.role, "content": message.content} for message in conversation.messages]


def train(spec: RunSpec, work_directory: Path) -> dict[str, Any]:
    """Train with a coordinator and a worker."""
    (work_directory / "run.json").write_text(spec.model_dump_json())
    result = run_to_end(work_directory / "run.json", work_directory / "out", (), "--backend", "cpu")
    return {"loss": result["eval"]["loss_per_token"]}


def train_with_trl(python: Path, work_directory: Path) -> dict[str, Any]:
    """Train with TRL, in its interpreter."""
    script = Path(__file__).with_name("trl_side.py")
    subprocess.run([str(python), str(script), str(work_directory)], check=True)  # noqa: S603
    document: dict[str, Any] = json.loads((work_directory / "trl.json").read_text())
    return document


if __name__ == "__main__":
    main()
