"""The repository agrees with itself: run specs are valid, locks match, commands and links exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import protocol
from protocol.spec.files.run_spec_file import load_run_spec
from tests import structure

packaging_requirements = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parents[1]
RUNS = sorted((ROOT / "deploy" / "runs").glob("*.yaml"))
LOCKS = sorted({*(ROOT / "requirements").glob("*.txt")} - {ROOT / "requirements" / "rocm.txt"})
"""All lock files except that of the ROCm build, which has no hashes: the user names the index."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)


def pins(*names: str) -> dict[str, str]:
    text = "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in names)
    return dict(PINS.findall(text))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_sample_run_spec_is_valid_and_has_a_description(path):
    assert load_run_spec(path).name == path.stem
    first, second = path.read_text().splitlines()[:2]
    assert first.startswith("# ")
    assert not second.startswith("#")


def test_the_sample_runs_cover_every_task():
    assert {load_run_spec(path).task for path in RUNS} == {
        "causal-lm",
        "classify",
        "digits",
        "distil",
        "embed",
        "regress",
        "teacher-logits",
    }


def test_packages_of_the_rocm_build_have_exact_versions():
    for line in (ROOT / "requirements" / "rocm.txt").read_text().splitlines():
        assert re.fullmatch(r"#.*|[a-z0-9-]+==[\w.+]+", line)


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_locked_package_has_hashes_and_nothing_else(path):
    for line in path.read_text().splitlines():
        assert re.fullmatch(
            r"#.*|[a-z0-9-]+==[\w.+]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line
        )
    assert PINS.search(path.read_text())


@pytest.mark.parametrize("extra", ["", "worker", "hf", "digits", "dev"])
def test_the_lock_has_every_requirement(extra):
    project = PROJECT["project"]
    requirements = project["optional-dependencies"][extra] if extra else project["dependencies"]
    requirements = [*requirements, *PROJECT["build-system"]["requires"]]
    for torch in ("cpu", "cuda"):
        pinned = pins("run", torch, "dev")
        for requirement in map(packaging_requirements.Requirement, requirements):
            name = requirement.name.lower().replace("_", "-")
            if name != "samestep":
                assert requirement.specifier.contains(pinned[name]), requirement


def test_coordinator_requirements_are_a_subset():
    assert pins("coordinator").items() < pins("run").items()
    requirements = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    names = {packaging_requirements.Requirement(name).name.lower() for name in requirements}
    # The build requirements of the kernels have a separate lock file.
    assert names <= {*pins("coordinator"), *pins("build")}
    assert not pins("coordinator").keys() & {"torch", "transformers", "scikit-learn"}


def test_requirement_sets_that_are_installed_together_share_no_package():
    disjoint_sets = [pins("run"), pins("cpu"), pins("dev"), pins("assets")]
    assert len({name for pinned in disjoint_sets for name in pinned}) == sum(
        map(len, disjoint_sets)
    )


def test_entry_points_exist():
    for target in PROJECT["project"]["scripts"].values():
        module, function = target.split(":")
        source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
        assert re.search(rf"^(def {function}\b|{function} = )", source, re.MULTILINE)


def test_readme_has_the_test_command_of_ci():
    command = "bash deploy/test.sh"
    assert f"\ncheck {command}\n" in (ROOT / ".ci" / "run").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        assert re.search(rf"^{command}( .*)?$", (ROOT / page).read_text(), re.MULTILINE)


def test_the_changelog_has_the_current_version():
    assert f"## {protocol.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "page",
    sorted(
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.md")
        if not {".venv", "build", "runs"} & {*path.relative_to(ROOT).parts}
    ),
)
def test_links_between_pages_have_targets(page):
    path = ROOT / page
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_map_names_existing_files():
    page = (ROOT / "CONTRIBUTING.md").read_text().split("## Where is it?")[1].split("\n## ")[0]
    paths = re.findall(r"`([\w/]+\.py)`", page)
    assert len(paths) >= 20
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_architecture_names_every_chapter():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    chapters = {chapter.split(".")[1] for chapter in structure.ALLOWED_CHAPTERS if "." in chapter}
    assert [
        chapter for chapter in sorted(chapters) if f" {chapter} " not in text.replace("/", " ")
    ] == []
