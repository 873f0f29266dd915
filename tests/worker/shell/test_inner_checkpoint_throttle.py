"""Inner checkpoints do not pile up on a slow link."""

from protocol.wire.messages import InnerCheckpointChunk
from worker.shell.client import InnerCheckpointThrottle


def pieces(inner, replica=0, count=3):
    return [
        InnerCheckpointChunk(
            term=1, step=2, attempt=0, replica=replica, inner=inner, chunk=chunk,
            last=chunk == count - 1,
        )
        for chunk in range(count)
    ]  # fmt: skip


def offer(throttle, pending, boundary):
    for chunk in boundary:
        if not throttle.skips(chunk, pending):
            pending.append(chunk)


def test_at_most_one_complete_inner_checkpoint_waits():
    throttle = InnerCheckpointThrottle()
    pending: list[InnerCheckpointChunk] = []
    offer(throttle, pending, pieces(1))
    offer(throttle, pending, pieces(2))
    offer(throttle, pending, pieces(1, replica=1))
    assert pending == [*pieces(1), *pieces(1, replica=1)]
    del pending[:2]  # one of its chunks is still pending
    offer(throttle, pending, pieces(3))
    assert pending == [pieces(1)[-1], *pieces(1, replica=1)]
    del pending[0]
    offer(throttle, pending, pieces(4))
    assert pending == [*pieces(1, replica=1), *pieces(4)]
