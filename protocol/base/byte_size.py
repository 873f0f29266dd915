"""Numbers of bytes as people read them."""

from __future__ import annotations

from protocol.base import limits


def byte_size(count: int) -> str:
    """In GiB with two decimals; less than one in MiB with one."""
    gib = 1024 * limits.MIB
    return f"{count / gib:.2f} GiB" if count >= gib else f"{count / limits.MIB:.1f} MiB"
