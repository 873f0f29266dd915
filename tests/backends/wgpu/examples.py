"""How many examples a property is tried on: few by default, more on request."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

_SUPPRESSED: Final = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


def examples(default: int) -> settings:
    """Limit examples by default, because each makes the driver compile. `SAMESTEP_EXAMPLES`
    overrides this."""
    count = int(os.environ.get("SAMESTEP_EXAMPLES", default))
    return settings(max_examples=count, suppress_health_check=_SUPPRESSED)
