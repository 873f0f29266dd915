"""One word for one device: its backend and its number, such as cuda0. Units are named so."""

from __future__ import annotations

import re
from typing import Final

_NUMBERED: Final = re.compile(r"(cpu|cuda|vulkan)([0-9]{1,4})")


def parse_device_name(name: str) -> tuple[str, int | None]:
    """Backend, and the device's number if the name has one; other names are left as they are.

    A machine has one CPU; numbers tell several workers on it apart.
    """
    numbered = _NUMBERED.fullmatch(name)
    return (numbered[1], int(numbered[2])) if numbered is not None else (name, None)
