"""A changed file is refused by name at a restart, and a term is never reused."""

import json

import pytest

from coordinator.disk.directory_lock import TERM_FILE, stored_term
from coordinator.disk.older_names import OLDER_TERM_FILE
from coordinator.run.outputs.restart import AdmissionRecord
from coordinator.storage.directory.journal import Journal
from coordinator.storage.directory.journal_records import FileDigests
from coordinator.storage.file_digests import check_files, lock_directory, present_digests
from coordinator.storage.run_storage import RunStorage
from protocol.base.errors import StorageDamaged
from tests.durable_run import MANIFEST, RUN_ID, SPEC, WrittenRun, read_journal, record_of

ADMISSION_RECORD = AdmissionRecord(signature="a" * 64, initial_digest="b" * 64)
NAMES = ("run.json", "manifest.json", "terms.json", "files.json")


@pytest.fixture
def run(tmp_path):
    """A run that was interrupted after two steps, with every small file that can exist."""
    run = WrittenRun(tmp_path / "run")
    run.directory.write_admission_record(ADMISSION_RECORD)
    run.directory.files_file.write_text('{"list": "", "files": {}}')
    run.record_files()
    run.step()
    run.step()
    run.log.close()
    run.journal.close()
    return run.directory


def remove_digest_lines(directory):
    """Rewrite the journal without digest lines, as older releases wrote it."""
    records = [entry.record for entry in read_journal(directory.journal)]
    directory.journal.unlink()
    journal = Journal(directory.journal)
    for record in records:
        if not isinstance(record, FileDigests):
            journal.append(record)
    journal.sync()
    journal.close()


def test_unchanged_files_pass(run):
    check_files(run)
    remove_digest_lines(run)
    check_files(run)


@pytest.mark.parametrize("name", NAMES)
def test_flipped_bit_in_any_file_is_refused_by_name(run, name):
    path = run.path / name
    content = path.read_bytes()
    for offset in range(0, len(content), 17):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        with pytest.raises(StorageDamaged, match="restore it from a copy") as error:
            check_files(run)
        assert error.value.path == str(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_missing_file_is_refused_unless_it_can_be_rebuilt(run, name):
    (run.path / name).unlink()
    if name == "files.json":
        check_files(run)  # the files are located and hashed again
        return
    with pytest.raises(StorageDamaged, match="it is missing"):
        check_files(run)


def test_changed_run_file_of_an_older_release_is_refused(run):
    remove_digest_lines(run)
    document = json.loads(run.run_file.read_text())
    document["spec"]["optimizer"]["lr"] = 0.1
    run.run_file.write_text(json.dumps(document))
    with pytest.raises(StorageDamaged, match=r"run\.json"):
        check_files(run)


def test_changed_manifest_of_an_older_release_is_refused(run):
    remove_digest_lines(run)
    other = MANIFEST.model_copy(update={"train_samples": 11})
    run.manifest_file.write_bytes(other.to_bytes())
    with pytest.raises(StorageDamaged, match=r"manifest\.json"):
        check_files(run)


def test_run_without_its_run_file_is_not_replaced_by_a_new_run(run):
    run.run_file.unlink()
    with pytest.raises(StorageDamaged, match="it is missing"):
        run.begin("another", SPEC)


async def test_restart_accepts_the_old_or_the_new_admission_record(run):
    storage = RunStorage(run, RUN_ID, SPEC, term=2, guard=lambda: None, failed=print)
    storage.begin_journal(list)
    storage.begin_log(MANIFEST, 2)
    before = run.admission_file.read_bytes()
    storage.save_admission_record(ADMISSION_RECORD.model_copy(update={"mixed": True}))
    await storage.commit(record_of(2, 2, skip=True, term=2))
    await storage.close()
    check_files(run)
    run.admission_file.write_bytes(before)
    check_files(run)
    run.admission_file.write_bytes(before.replace(b"a", b"c"))
    with pytest.raises(StorageDamaged, match=r"terms\.json"):
        check_files(run)


def test_only_existing_files_are_reported(tmp_path):
    run = WrittenRun(tmp_path / "run")
    assert sorted(present_digests(run.directory)) == ["manifest.json", "run.json"]


# The term.


@pytest.mark.parametrize("content", [None, '{"term": 1}'])
def test_term_exceeds_journal_and_log(run, content):
    lock_directory(run.path).release()
    run.path.joinpath(TERM_FILE).unlink()
    if content is not None:
        run.path.joinpath(TERM_FILE).write_text(content)
    journal = Journal(run.journal)
    journal.append(FileDigests(term=7, digests={}))
    journal.sync()
    lock = lock_directory(run.path)
    assert lock.term == 8
    assert stored_term(run.path) == 8
    lock.check()
    lock.release()
    (run.log / "term-000011-step-0000000002.log").touch()
    lock = lock_directory(run.path)
    assert lock.term == 12
    lock.release()


def test_term_file_of_an_older_release_is_replaced(tmp_path):
    (tmp_path / OLDER_TERM_FILE).write_text('{"epoch": 6}')
    assert stored_term(tmp_path) == 6
    lock = lock_directory(tmp_path)
    assert (lock.term, stored_term(tmp_path)) == (7, 7)
    assert not (tmp_path / OLDER_TERM_FILE).exists()
    lock.check()
    lock.release()


def test_invalid_term_is_refused_with_a_remedy(run):
    run.path.joinpath(TERM_FILE).write_text('{"term": 1')
    with pytest.raises(StorageDamaged, match=r"term\.json.* remove it"):
        lock_directory(run.path)
    run.path.joinpath(TERM_FILE).unlink()
    lock_directory(run.path).release()
