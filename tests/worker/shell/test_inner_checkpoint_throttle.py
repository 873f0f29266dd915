"""Inner checkpoints do not pile up on a slow link."""

from protocol.wire.messages import InnerCheckpointChunk
from worker.shell.client import InnerCheckpointThrottle


def chunks_of(inner, replica=0, count=3):
    return [
        InnerCheckpointChunk(
            term=1, step=2, attempt=0, replica=replica, inner=inner, chunk=chunk,
            last=chunk == count - 1,
        )
        for chunk in range(count)
    ]  # fmt: skip


def offer(throttle, pending, checkpoint_chunks):
    for chunk in checkpoint_chunks:
        if not throttle.skips(chunk, pending):
            pending.append(chunk)


def test_at_most_one_complete_inner_checkpoint_waits():
    throttle = InnerCheckpointThrottle()
    pending: list[InnerCheckpointChunk] = []
    offer(throttle, pending, chunks_of(1))
    offer(throttle, pending, chunks_of(2))
    offer(throttle, pending, chunks_of(1, replica=1))
    assert pending == [*chunks_of(1), *chunks_of(1, replica=1)]
    del pending[:2]  # one of its chunks is still pending
    offer(throttle, pending, chunks_of(3))
    assert pending == [chunks_of(1)[-1], *chunks_of(1, replica=1)]
    del pending[0]
    offer(throttle, pending, chunks_of(4))
    assert pending == [*chunks_of(1, replica=1), *chunks_of(4)]
