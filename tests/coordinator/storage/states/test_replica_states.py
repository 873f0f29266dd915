"""Per-replica states are read completely or not at all, and kept while a restart needs them."""

import numpy as np
import pytest

from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.states.replica_states import (
    ReplicaStates,
    replica_state_steps,
    state_fault,
)
from protocol.base.errors import RunFailed, StorageDamaged
from protocol.wire.messages import InnerCheckpointChunk, InnerStateRequest

STATE_BYTES = 1000


def open_states(tmp_path, every=0, state_lengths=(STATE_BYTES,), guard=lambda: None, **changes):
    return ReplicaStates(RunDirectory(tmp_path), state_lengths, every, guard, **changes)


def state_chunks(seed, replicas=3):
    """Make states of all replicas, each in two chunks."""
    rng = np.random.default_rng(seed)
    full_states = [rng.integers(0, 256, STATE_BYTES, np.uint8) for _ in range(replicas)]
    return [chunk_bytes for each in full_states for chunk_bytes in (each[:600], each[600:])]


def request_state(replica_states, step, replica, *, attempt=0, own=True):
    request = InnerStateRequest(term=1, step=step, attempt=attempt, replica=replica, own=own)
    inner, chunks = replica_states.read_inner_state(request)
    return inner, b"".join(chunks)


def write_state(replica_states, step, inner, chunks, attempt=0):
    for chunk, chunk_bytes in enumerate(chunks):
        message = InnerCheckpointChunk(
            term=1, step=step, attempt=attempt, replica=1, inner=inner, chunk=chunk,
            last=chunk == len(chunks) - 1,
        )  # fmt: skip
        replica_states.write_inner_checkpoint(message, np.frombuffer(chunk_bytes, np.uint8))


def test_each_replica_gets_its_own_state(tmp_path):
    replica_states, contents = open_states(tmp_path), state_chunks(1)
    digest = replica_states.save_round(4, contents)
    for replica in range(3):
        expected = b"".join(p.tobytes() for p in contents[2 * replica :][:2])
        assert request_state(replica_states, 4, replica) == (0, expected)
        assert request_state(open_states(tmp_path, step=4, own_digest=digest), 4, replica) == (
            0,
            expected,
        )


def test_state_of_an_older_release_has_no_missed_steps(tmp_path):
    contents = state_chunks(1)
    digest = open_states(tmp_path).save_round(4, contents)
    newer = open_states(
        tmp_path, state_lengths=(STATE_BYTES + 12, STATE_BYTES), step=4, own_digest=digest
    )
    for replica in range(3):
        expected = b"".join(p.tobytes() for p in contents[2 * replica :][:2])
        assert request_state(newer, 4, replica) == (0, expected + bytes(12))
    assert newer.save_round(5, ()) == digest
    assert request_state(newer, 5, 1) == request_state(newer, 4, 1)
    assert (
        state_fault(tmp_path / "replicas" / "own-5", (STATE_BYTES + 12, STATE_BYTES), digest) == ""
    )


def test_skipped_round_changes_nothing(tmp_path):
    replica_states, contents = open_states(tmp_path), state_chunks(1)
    replica_states.save_round(1, ())
    assert request_state(replica_states, 1, 2) == (0, bytes(STATE_BYTES))
    assert replica_states.save_round(2, contents) == replica_states.save_round(3, ())
    assert request_state(replica_states, 3, 1) == request_state(replica_states, 2, 1)


@pytest.mark.parametrize("replacement", ["nothing", "another round", "fewer replicas", "more"])
@pytest.mark.parametrize("repeat", [False, True])
def test_replaced_file_is_detected(tmp_path, replacement, repeat):
    replica_states = open_states(tmp_path)
    replica_states.save_round(1, state_chunks(2))
    digest = replica_states.save_round(2, state_chunks(1))
    path = tmp_path / "replicas" / "own-2"
    raw = path.read_bytes()
    path.write_bytes(
        {
            "nothing": b"",
            "another round": path.with_name("own-1").read_bytes(),
            "fewer replicas": raw[: 2 * (STATE_BYTES + 32)],
            "more": raw + raw[: STATE_BYTES + 32],
        }[replacement]
    )
    if repeat:
        replica_states = open_states(tmp_path, step=2, own_digest=digest)
    with pytest.raises(StorageDamaged, match="own-2"):
        request_state(replica_states, 2, 0)


def test_skipped_round_does_not_repair_damage(tmp_path):
    replica_states = open_states(tmp_path)
    replica_states.save_round(1, state_chunks(1))
    (tmp_path / "replicas" / "own-1").write_bytes(b"")
    replica_states.save_round(2, ())
    with pytest.raises(StorageDamaged, match="own-2"):
        request_state(replica_states, 2, 0)


@pytest.mark.parametrize("offset", [0, 31, 32, 1031, -1])
def test_changed_byte_is_detected(tmp_path, offset):
    replica_states = open_states(tmp_path)
    replica_states.save_round(1, state_chunks(1))
    path = tmp_path / "replicas" / "own-1"
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)
    with pytest.raises(StorageDamaged, match="roll back to a checkpoint"):
        _ = [request_state(replica_states, 1, replica) for replica in range(3)]


def test_newest_complete_inner_checkpoint_of_the_attempt_counts(tmp_path):
    replica_states = open_states(tmp_path)
    write_state(replica_states, 2, 10, [b"first", b"second"])
    assert request_state(replica_states, 2, 1, own=False) == (10, b"firstsecond")
    write_state(replica_states, 2, 5, [b"a late one"])
    assert request_state(replica_states, 2, 1, own=False) == (10, b"firstsecond")
    assert request_state(replica_states, 2, 1, own=False, attempt=1) == (0, b"")
    assert request_state(replica_states, 3, 1, own=False) == (0, b"")
    assert request_state(replica_states, 2, 0, own=False) == (0, b"")
    inner, chunks = replica_states.read_inner_state(
        InnerStateRequest(term=1, step=2, attempt=0, replica=1, own=False)
    )
    write_state(replica_states, 2, 20, [b"third"])
    assert (inner, b"".join(chunks)) == (10, b"firstsecond")
    assert request_state(replica_states, 2, 1, own=False) == (20, b"third")


def test_changed_inner_checkpoint_is_ignored(tmp_path):
    replica_states = open_states(tmp_path)
    write_state(replica_states, 2, 10, [b"first", b"second"])
    (tmp_path / "replicas" / "boundary-1").write_bytes(b"firstsecone")
    assert request_state(replica_states, 2, 1, own=False) == (0, b"")


def test_inner_checkpoints_removed_by_another_coordinator_are_ignored(tmp_path):
    """Another coordinator took over the directory, and this one does not know yet."""
    replica_states = open_states(tmp_path)
    write_state(replica_states, 2, 10, [b"first", b"second"])
    open_states(tmp_path)
    assert request_state(replica_states, 2, 1, own=False) == (0, b"")


def test_no_inner_checkpoint_is_written_after_a_takeover(tmp_path):
    def raise_lost_lock():
        raise RunFailed("it has another coordinator")

    replica_states = open_states(tmp_path, guard=raise_lost_lock)
    with pytest.raises(RunFailed):
        write_state(replica_states, 2, 10, [b"first", b"second"])
    assert not [*tmp_path.rglob("boundary-*")]


def test_states_of_checkpoints_and_of_the_last_rounds_are_kept(tmp_path):
    replica_states = open_states(tmp_path, every=5)
    for step in range(1, 13):
        replica_states.save_round(step, state_chunks(step))
    assert {5, 9, 10, 11, 12} <= set(replica_state_steps(tmp_path / "replicas"))
    assert {1, 2, 4, 6, 7, 8}.isdisjoint(replica_state_steps(tmp_path / "replicas"))
