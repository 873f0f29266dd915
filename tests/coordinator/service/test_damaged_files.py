"""Audit and restart name every damaged file of a run's directory, with a remedy, unless the damage
is harmless. No restart reaches another state."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import pytest

from coordinator.audit.audit import audit
from coordinator.disk.durable_file import replace_file
from coordinator.run.outputs.events import Evaluated
from coordinator.run.outputs.restart import AdmissionRecord
from coordinator.service.run_instance import load_run
from coordinator.storage.file_digests import lock_directory
from coordinator.storage.states.checkpoint import checkpoint_path, checkpoint_steps, write_metrics
from protocol.base.errors import SamestepError, StorageDamaged
from tests import durable_run
from tests.durable_run import SPEC, WrittenRun

STEPS = 5
CHECKPOINT_STEP = 3


def flip_middle_bit(content: bytes) -> bytes:
    offset = len(content) // 2
    return content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]


def replace_by_directory(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "missing": lambda path, _: path.unlink(),
    "empty": lambda path, _: path.write_bytes(b""),
    "truncated": lambda path, _: os.truncate(path, path.stat().st_size * 5 // 7),
    "flipped": lambda path, _: path.write_bytes(flip_middle_bit(path.read_bytes())),
    "of another run": lambda path, other: shutil.copyfile(other, path),
    "a directory": replace_by_directory,
    "unreadable": lambda path, _: path.chmod(0),
}
FINAL_FILES = (
    "result.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
)  # fmt: skip
FILES_OF_ANY_RUN = ("journal.jsonl", f"log/term-000001-step-{CHECKPOINT_STEP:010}.log")
FILES = (
    "lock", "term.json", "run.json", "manifest.json", "terms.json", "files.json",
    *FILES_OF_ANY_RUN,
    *(f"checkpoints/step-{CHECKPOINT_STEP:010}/{name}" for name in (
        "checkpoint.json", "metrics.json", "optimizer.safetensors",
        "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
    )),
)  # fmt: skip
CASES = (
    *(("interrupted", name) for name in FILES),
    *(("ended", name) for name in (*FILES_OF_ANY_RUN, *FINAL_FILES)),
)
HARMLESS_DAMAGES = {
    *(("lock", damage) for damage in DAMAGES),
    # Metrics may follow a checkpoint.
    (f"checkpoints/step-{CHECKPOINT_STEP:010}/metrics.json", "missing"),
    # A crash may leave parts of the newest step.
    (f"log/term-000001-step-{CHECKPOINT_STEP:010}.log", "truncated"),
    ("journal.jsonl", "truncated"),
}
NOBODY = 65534
REMEDIES = (
    "from a copy",
    "remove it",
    "writes it again",
    "hashes the files again",
    "read and write",
)


def make_run(path: Path, seed: int, *, is_ended: bool) -> Path:
    """Make a run of five steps with a checkpoint after the third and every optional file."""
    spec = SPEC.model_copy(update={"seed": seed})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable_run, "RUN_ID", f"made-up-{seed}")
        patch.setattr(durable_run, "SPEC", spec)
        run = WrittenRun(path)
        digest = f"{seed:064}"
        run.directory.write_admission_record(
            AdmissionRecord(signature=digest, initial_digest=digest)
        )
        file_list = f'{{"list": "{{\\"sources\\": []}}", "files": {{}}, "of": {seed}}}'
        replace_file(run.directory.files_file, file_list.encode())
        run.record_files()
        while run.replica.step < STEPS:
            run.step()
            if run.replica.step == CHECKPOINT_STEP:
                run.checkpoint()
                state, figures = run.replica.state_digest(), {"accuracy": 0.5}
                evaluation = Evaluated(
                    term=1, step=CHECKPOINT_STEP, metrics=figures, state_digest=state
                )
                run.journal.append(evaluation)
                write_metrics(run.directory.checkpoints, CHECKPOINT_STEP, state, figures)
        if is_ended:
            return run.finish()
        run.log.close()
        run.journal.sync()
        run.journal.close()
        return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return, by final state, a run, another run, and the digest of the first run's last state."""

    @cache
    def runs_in_state(final_state: str) -> tuple[Path, Path, str]:
        top = tmp_path_factory.mktemp("runs")
        is_ended = final_state == "ended"
        this, other = (
            make_run(top / "this", 3, is_ended=is_ended),
            make_run(top / "other", 4, is_ended=is_ended),
        )
        repeat = shutil.copytree(this, top / "again")
        (repeat / "result.json").unlink(missing_ok=True)
        return this, other, restart(repeat)[0]

    return runs_in_state


def restart(path: Path) -> tuple[str, str]:
    """Return the digest of the state from which a restart continues, and its warnings."""
    lock = lock_directory(path)
    try:
        instance = load_run(lock)
    finally:
        lock.release()
    if instance is None or instance.restart is None:
        return "", ""
    recovery = instance.restart.recovery
    return recovery.load_replica().state_digest(), "; ".join(recovery.notes)


def try_restart(path: Path) -> tuple[str, str, str]:
    """Return the refusal of a restart, or else the digest and the warnings of `restart`."""
    try:
        return ("", *restart(path))
    except SamestepError as error:
        return str(error), "", ""


def audit_lines(path: Path) -> str:
    try:
        return "\n".join(str(finding) for finding in audit(path).findings if not finding.ok)
    except SamestepError as error:
        return str(error)


@pytest.fixture
def directory():
    """A directory that an unprivileged user can reach."""
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o755)
        yield Path(path)


@contextmanager
def without_privileges(run: Path) -> Iterator[None]:
    """Drop privileges, because root may read everything."""
    if os.geteuid():
        yield
        return
    for path in (run, *run.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("final_state", "name"), CASES)
def test_damaged_file_is_named_with_a_remedy_or_harmless(
    runs, directory, final_state, name, damage
):
    intact_run, other, state = runs(final_state)
    run = shutil.copytree(intact_run, directory / "run")
    is_unchanged = (intact_run / name).read_bytes() == (other / name).read_bytes()
    DAMAGES[damage](run / name, other / name)
    is_harmless = (name, damage) in HARMLESS_DAMAGES or (
        is_unchanged and damage == "of another run"
    )

    with without_privileges(run) if damage == "unreadable" else nullcontext():
        finding = audit_lines(run)
        is_ended = (run / "result.json").is_file()
        refusal, digest, notes = ("", "", "") if is_ended else try_restart(run)
    if finding or not is_harmless:
        assert Path(name).name in finding or f"{Path(name).parent.name}'" in finding, finding
        assert any(remedy in finding for remedy in REMEDIES), finding

    if is_ended:
        return  # a finished run is not resumed
    if refusal:
        assert name.partition("/")[0] in refusal
        assert "\n" not in refusal
        assert any(remedy in refusal for remedy in REMEDIES), refusal
        return
    if is_harmless and name.startswith("log"):
        assert "cut" in notes
    else:
        assert digest == state
    may_pass = name.startswith("checkpoints") and "metrics" not in name
    assert not may_pass or is_unchanged or "checkpoint skipped" in notes


def test_restart_without_a_valid_checkpoint_names_the_orphaned_log(runs, tmp_path):
    run = shutil.copytree(runs("interrupted")[0], tmp_path / "run")
    (run / "result.json").unlink(missing_ok=True)
    root = run / "checkpoints"
    for step in checkpoint_steps(root):
        (checkpoint_path(root, step) / "optimizer.safetensors").unlink()
    with pytest.raises(StorageDamaged) as error:
        restart(run)
    text = str(error.value)
    assert "expected an intact checkpoint, which the log's steps up to 4 follow, found none" in text
    assert "done again" not in text
    assert "restore it from a copy" in text


def test_run_without_its_log_repeats_steps_only_on_request(tmp_path):
    run = make_run(tmp_path / "run", 3, is_ended=False)
    shutil.rmtree(run / "log")
    with pytest.raises(StorageDamaged, match=r"log' .*the 5 steps .*got 3;.*--from-step 3"):
        restart(run)
    lock = lock_directory(run)
    instance = load_run(lock, from_step=3)
    lock.release()
    assert instance is not None
    assert instance.restart is not None
    assert instance.restart.recovery.step == 3


def test_changed_spec_of_a_queued_run_is_refused(tmp_path):
    """A queued run may wait for days; only this file records its spec."""
    run = WrittenRun(tmp_path / "run").directory
    shutil.rmtree(run.checkpoints)
    for path in (run.journal, run.manifest_file):
        path.unlink()
    shutil.rmtree(run.log)
    content = run.run_file.read_text()
    run.run_file.write_text(content.replace("0.01", "0.03"))
    with pytest.raises(StorageDamaged, match=r"does not match its digest.*submit the run again"):
        restart(run.path)
    run.run_file.write_text(content)
    assert restart(run.path) == ("", "")
