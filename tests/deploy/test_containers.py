"""The container files: as text, and built and run for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ROOT
from tests.deploy.locked_wheels import locked_wheels

FILES = sorted((ROOT / "deploy").glob("*.Containerfile"))
BASE = "localhost/samestep-test-base"
SECRET = "a-password-for-pip-3f9c"
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")


def test_each_daemon_has_a_container_file():
    assert [file.stem for file in FILES] == ["coordinator", "worker"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
class TestText:
    def test_container_runs_as_an_unprivileged_user(self, file):
        assert re.findall(r"^USER (.*)$", file.read_text(), re.MULTILINE) == ["10001:10001"]

    def test_no_secret_in_build_arguments_or_copies(self, file):
        suspicious_words = re.compile(
            r"token|password|secret|pip\.conf|index|COPY \. ", re.IGNORECASE
        )
        for line in re.findall(r"^(?:ARG|ENV|COPY|ADD) .*$", file.read_text(), re.MULTILINE):
            assert not suspicious_words.search(line), line
        assert file.read_text().count("--mount=type=secret,id=pip.conf") == 1

    def test_copied_files_exist_and_are_tracked(self, file):
        allowed = (ROOT / ".dockerignore").read_text()
        assert allowed.splitlines()[1] == "*"
        for line in re.findall(r"^COPY (?!--)(.*)$", file.read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                assert (ROOT / source).exists()
                assert re.search(rf"^!{re.escape(source)}($|/)", allowed, re.MULTILINE), source

    def test_only_the_coordinator_has_a_health_check(self, file):
        (check,) = re.findall(r"^HEALTHCHECK (.*)$", file.read_text(), re.MULTILINE)
        assert (check == "NONE") is (file.stem == "worker")


class Podman:
    """Images and containers in separate folders; podman needs a short `runtime_directory`."""

    def __init__(self, directory: Path, runtime_directory: str) -> None:
        self._storage = [
            "--root", str(directory / "storage"), "--runroot", runtime_directory,
            "--storage-driver", "overlay",
        ]  # fmt: skip

    def run(self, *arguments: str, check: bool = True, stdin: bytes | None = None) -> str:
        runtime = ["--runtime", shutil.which("runc") or "runc", "--cgroup-manager", "cgroupfs"]
        command = ["podman", *self._storage, *runtime, "--events-backend", "none", *arguments]
        completed = subprocess.run(command, input=stdin, capture_output=True, check=False)
        assert completed.returncode == 0 or not check, f"{arguments}: {completed.stderr.decode()}"
        return completed.stdout.decode().strip()

    def build(
        self, name: str, settings: Path, wheels: Path, *arguments: str, tag: str = ""
    ) -> None:
        completed = subprocess.run(
            ["buildah", *self._storage, "bud", "--isolation", "chroot", "--pull-never",
             "--format", "docker", "--build-arg", f"BASE={BASE}",
             "--secret", f"id=pip.conf,src={settings}", "--volume", f"{wheels}:/wheels:ro",
             "--file", str(ROOT / "deploy" / f"{name}.Containerfile"), "--tag", tag or name,
             *arguments, str(ROOT)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]


@pytest.fixture(scope="module")
def podman(request, tmp_path_factory) -> Iterator[Podman]:
    """Build both images on a Debian that debootstrap creates and the cache keeps between runs."""
    if os.geteuid() != 0:
        pytest.skip("images can be built only by root")
    for command in ("podman", "buildah", "runc", "debootstrap"):
        if shutil.which(command) is None:
            pytest.skip(f"no images can be built here: {command} is missing")
    wheels = locked_wheels(request.config.cache)
    directory = tmp_path_factory.mktemp("podman")
    runtime_directory = tempfile.mkdtemp(prefix="podman-", dir="/run")
    engine = Podman(directory, runtime_directory)
    engine.run("import", str(base_system(request.config.cache, directory)), BASE)
    settings = write_pip_settings(directory)
    engine.build("coordinator", settings, wheels)
    engine.build("worker", settings, wheels, "--build-arg", "PACKAGES=coordinator")
    yield engine
    engine.run("rm", "--all", "--force", "--depend", check=False)
    engine.run("system", "reset", "--force", check=False)
    shutil.rmtree(runtime_directory, ignore_errors=True)


def write_pip_settings(directory: Path) -> Path:
    settings = directory / "pip.conf"
    settings.write_text(f"# {SECRET}\n[global]\nno-index = true\nfind-links = /wheels\n")
    return settings


def base_system(cache: pytest.Cache, directory: Path) -> Path:
    """Return a small Debian as one file."""
    archive = cache.mkdir("debian") / "bookworm.tar"
    if not archive.exists():
        root, part = directory / "debian", archive.with_suffix(".part")
        packages = "--include=python3,python3-venv"
        completed = subprocess.run(
            ["debootstrap", "--variant=minbase", packages, "bookworm", str(root)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if completed.returncode:
            pytest.skip(f"no Debian to build on: {completed.stdout.strip().splitlines()[-1]}")
        subprocess.run(["tar", "-C", root, "-cf", part, "."], check=True)
        shutil.rmtree(root)
        part.rename(archive)
    return archive


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestImages:
    def test_worker_joins_a_coordinator(self, podman):
        podman.run(
            "run", "--detach", "--name", "c", *LIMITS, "--network=none", "--read-only",
            "--tmpfs", "/tmp", "coordinator",
        )  # fmt: skip
        wait_for_line(podman, "c", "status: ")
        podman.run("healthcheck", "run", "c")
        token = podman.run("exec", "c", "coordinator", "token", "show")
        podman.run("secret", "create", "join.token", "-", stdin=token.encode())
        podman.run(
            "run", "--detach", "--name", "w", *LIMITS, "--network=container:c",
            "--secret", "join.token,uid=10001,mode=0400",
            "worker", "--backend", "scripted", "--name", "boxed",
        )  # fmt: skip
        wait_for_line(podman, "w", "joined as 'boxed'")
        status = json.loads(podman.run("exec", "c", "coordinator", "status", "--json"))
        assert [worker["name"] for worker in status["workers"]] == ["boxed"]
        doctor = json.loads(
            podman.run("exec", "w", "worker", "doctor", "--backend", "scripted",
                       "--coordinator", "127.0.0.1:9000", "--json")
        )  # fmt: skip
        assert doctor["ok"], doctor
        for name in ("w", "c"):
            assert podman.run("exec", name, "id", "-u") == "10001"
            podman.run("stop", "--time", "60", name)
            assert podman.run("inspect", name, "--format", "{{.State.ExitCode}}") == "0"

    def test_a_worker_with_all_its_packages_computes(self, podman, request, tmp_path):
        wheels = locked_wheels(request.config.cache, "run", "cpu")
        podman.build("worker", write_pip_settings(tmp_path), wheels, tag="full-worker")
        output = podman.run(
            "run", "--rm", *LIMITS, "--network=none", "full-worker", "doctor", "--backend", "cpu",
            "--coordinator", "127.0.0.1:9", "--json", check=False,
        )  # fmt: skip
        checks = {each["check"]: each for each in json.loads(output)["checks"]}
        assert checks["packages"]["outcome"] == "ok", output
        assert checks["device"]["found"].endswith("computes"), output

    @pytest.mark.parametrize("name", ["coordinator", "worker"])
    def test_no_secret_is_in_a_layer(self, podman, tmp_path, name):
        archive = tmp_path / "image.tar"
        podman.run("save", "--format", "docker-archive", "--output", str(archive), name)
        contents = archive.read_bytes()
        assert b"environment.sh" in contents
        assert SECRET.encode() not in contents
        for generated_content in (b"join.token\0", b"key.pem\0"):
            assert generated_content not in contents


def wait_for_line(podman: Podman, name: str, text: str) -> None:
    """Follow the output of a container until it contains this text."""
    command = ["podman", *podman._storage, "logs", "--follow", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        lines_read = []
        for line in follower.stdout:
            lines_read.append(line)
            if text in line:
                follower.kill()
                return
    raise AssertionError(f"no {text!r} in {lines_read}")
