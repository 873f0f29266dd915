"""Limit the number of Hypothesis examples: few by default, more on request."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

_SUPPRESSED: Final = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


def examples(default: int) -> settings:
    """Return settings for `default` examples, or `SAMESTEP_EXAMPLES` if set.

    Each example makes the driver compile kernels, so defaults are small.
    """
    count = int(os.environ.get("SAMESTEP_EXAMPLES", default))
    return settings(max_examples=count, suppress_health_check=_SUPPRESSED)
