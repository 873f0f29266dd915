"""Boundaries do not pile up where the link is slow."""

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


def offered(turns, waiting, boundary):
    for piece in boundary:
        if not turns.skips(piece, waiting):
            waiting.append(piece)


def test_one_of_a_replica_waits_at_most_and_always_whole():
    turns = InnerCheckpointThrottle()
    waiting: list[InnerCheckpointChunk] = []
    offered(turns, waiting, pieces(1))
    offered(turns, waiting, pieces(2))
    offered(turns, waiting, pieces(1, replica=1))
    assert waiting == [*pieces(1), *pieces(1, replica=1)]
    del waiting[:2]  # one of its pieces is still to go
    offered(turns, waiting, pieces(3))
    assert waiting == [pieces(1)[-1], *pieces(1, replica=1)]
    del waiting[0]
    offered(turns, waiting, pieces(4))
    assert waiting == [*pieces(1, replica=1), *pieces(4)]
