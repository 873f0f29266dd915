"""A model too large for host memory is refused before it is read, with the missing amount."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from protocol.base.errors import MainMemoryTooSmall
from protocol.spec.run_spec import parse_run_spec
from tests.cluster import ROOT
from worker.models.main_memory import check_model_fits, converted_bytes
from worker.models.pretrained import create_causal_lm

GIB = 2**30


def write_machine_files(directory, available_kib, *, swap_kib=0, limit=None):
    """Write the files of a procfs and of a tree of control groups."""
    (directory / "self").mkdir(parents=True)
    (directory / "meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\nSwapFree: {swap_kib} kB\n"
    )
    (directory / "self" / "cgroup").write_text("0::/slice\n")
    if limit is not None:
        (directory / "slice").mkdir()
        (directory / "slice" / "memory.max").write_text(f"{limit}\n")
        (directory / "slice" / "memory.swap.max").write_text("1000\n")
    return directory


def write_model(directory):
    """Write 3,000 elements in two files, most of them in float16, and a file that is not read."""
    float16_values, float32_values = np.zeros((20, 100), np.float16), np.zeros(1000, np.float32)
    save_file({"a": float16_values}, directory / "model-1.safetensors")
    save_file({"b": float32_values}, directory / "model-2.safetensors")
    save_file({"a": float16_values, "b": float32_values}, directory / "consolidated.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = json.dumps({"weight_map": names})
    (directory / "model.safetensors.index.json").write_text(index)
    return str(directory)


def test_only_16_bit_tensors_need_memory_to_convert(tmp_path):
    assert converted_bytes(tmp_path) == 0
    assert converted_bytes(tmp_path / "org" / "name") == 0
    save_file({"a": np.zeros((4, 5), np.float16)}, tmp_path / "model.safetensors")
    assert converted_bytes(tmp_path) == 4 * 20
    write_model(tmp_path)
    assert converted_bytes(tmp_path) == 4 * 2000, "float32 tensors stay in the file"


@pytest.mark.parametrize(
    ("memory_kib", "is_accepted"),
    [
        ({"available_kib": 8}, True),
        ({"available_kib": 7}, False),
        ({"available_kib": 4, "swap_kib": 4}, True),
        ({"available_kib": 99, "limit": 6999}, False),
        ({"available_kib": 99, "limit": 7000}, True),
        ({"available_kib": 99, "limit": "max"}, True),
    ],
)
def test_model_is_refused_only_if_it_cannot_fit(tmp_path, memory_kib, is_accepted):
    proc = write_machine_files(tmp_path / "proc", **memory_kib)
    directory = write_model(tmp_path)
    if is_accepted:
        check_model_fits(directory, proc, proc)
        return
    with pytest.raises(MainMemoryTooSmall):
        check_model_fits(directory, proc, proc)


def test_a_new_model_that_is_too_large_is_refused_before_it_is_made():
    config = {
        "model_type": "llama", "hidden_size": 65_536, "intermediate_size": 262_144,
        "num_hidden_layers": 100, "num_attention_heads": 64, "num_key_value_heads": 64,
    }  # fmt: skip
    run = parse_run_spec({
        "task": "causal-lm", "steps": 1, "data": {"train": "text"}, "model": {"config": config},
    })  # fmt: skip
    with pytest.raises(MainMemoryTooSmall) as error:
        create_causal_lm(run, 1000, 0)
    layer = 4 * 65_536**2 + 3 * 65_536 * 262_144 + 2 * 65_536
    elements = 100 * layer + 2 * 1000 * 65_536 + 65_536
    assert error.value.needed_bytes == 5 * 4 * elements


def test_check_passes_without_memory_information(tmp_path):
    check_model_fits(write_model(tmp_path), tmp_path / "none", tmp_path / "none")


def test_unreadable_file_passes_the_memory_check(tmp_path):
    proc = write_machine_files(tmp_path / "proc", 0)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    check_model_fits(str(tmp_path), proc, proc)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    check_model_fits(str(tmp_path), proc, proc)


def test_refusal_names_needed_and_available_memory():
    message = str(MainMemoryTooSmall(16 * GIB, 7 * GIB))
    assert message.startswith(
        "reading the model takes 16.00 GiB of main memory, only 7.00 GiB is av"
    )


def test_memory_freed_by_an_earlier_model_counts_as_free(tmp_path):
    """The worker keeps freed memory for the next step; a new model replaces the previous one."""
    code = (
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from protocol.machine.allocator import keep_freed_memory\n"
        "from worker.models.main_memory import check_model_fits\n"
        "def resident():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon'))\n"
        "keep_freed_memory()\n"
        "model = [np.ones(2**21) for _ in range(16)]\n"
        "before = resident()\n"
        "del model\n"
        f"check_model_fits({write_model(tmp_path)!r})\n"
        "print(before - resident())\n"
    )
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    assert int(completed.stdout) > 0.9 * 16 * 2**14, "KiB of 16 arrays"
