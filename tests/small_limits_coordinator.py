"""A coordinator with small buffers: `python -m tests.small_limits_coordinator ARGUMENTS...`.

The coordinator's memory per connection is then small compared with its memory per parameter.
"""

from __future__ import annotations

from protocol.base import limits

MIB = limits.MIB
SMALL_LIMITS = {
    "PARTIAL_SUMS_BYTES": 4 * MIB,
    "INNER_CHECKPOINTS_BYTES": 4 * MIB,
    "WRITE_HIGH_WATER_BYTES": 1 * MIB,
    "SEGMENT_COPIES_BYTES": MIB // 2,
    "SEGMENT_SUMS_BYTES": MIB // 2,
    "SEGMENT_AVERAGES_BYTES": 1 * MIB,
    "SEGMENT_MAPPED_BYTES": MIB // 2,
    "SEND_AHEAD_BYTES": 4 * MIB,  # a joining worker keeps up on a loaded machine
    "BODY_BYTES": 1 * MIB,
    "CHUNK_ELEMENTS": MIB // 4,
    "REPLAY_BYTES": 1 * MIB,
}


def shrink_limits() -> None:
    """Set the small limits in this process."""
    for name, value in SMALL_LIMITS.items():
        setattr(limits, name, value)


if __name__ == "__main__":
    shrink_limits()
    from coordinator.cli import main

    main()
