"""What logical replicas have of their own from one round to the next: how long it is. Pure."""

from __future__ import annotations

from protocol.exact.update import moment_count
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec


def own_state_bytes(spec: RunSpec, manifest: Manifest) -> int:
    """Of one replica: moments where they are carried, and what topk has left; 0 without either."""
    if spec.replicas is None:
        return 0
    carried = spec.replicas.inner_state == "carry"
    arrays = (moment_count(spec.optimizer) if carried else 0) + (spec.replicas.codec == "topk")
    return arrays * manifest.elements * 4
