"""What logical replicas have of their own from one round to the next: how long it is. Pure."""

from __future__ import annotations

from protocol.exact.update import counts_updates, moment_count
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec


def own_state_bytes(spec: RunSpec, manifest: Manifest) -> int:
    """Of one replica: moments and missed updates where they are carried, and what topk has left; 0
    without either."""
    return next(iter(own_state_lengths(spec, manifest)), 0)


def own_state_lengths(spec: RunSpec, manifest: Manifest) -> tuple[int, ...]:
    """How long it can be in a file: as it is now, then as releases before protocol version 9 wrote
    it, which counted no missed updates. Empty without any."""
    if spec.replicas is None:
        return ()
    carried = spec.replicas.inner_state == "carry"
    arrays = (moment_count(spec.optimizer) if carried else 0) + (spec.replicas.codec == "topk")
    length = arrays * manifest.elements * 4
    if carried and counts_updates(spec.optimizer):
        tensors = sum(len(block.tensors) for block in manifest.blocks)
        return (length + 4 * tensors, length)
    return (length,) if length else ()
