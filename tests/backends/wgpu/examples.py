"""How many examples a property is tried on: few in a plain run, as many as you like in others."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

_SUPPRESSED: Final = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


def examples(few: int) -> settings:
    """So many in a plain run: each makes the driver compile. `SAMESTEP_EXAMPLES` says another."""
    count = int(os.environ.get("SAMESTEP_EXAMPLES", few))
    return settings(max_examples=count, suppress_health_check=_SUPPRESSED)
