"""The backend that the eager suite tests: SAMESTEP_TESTED_BACKEND, or by default the CPU."""

import os
from typing import Final

BACKEND: Final = os.environ.get("SAMESTEP_TESTED_BACKEND", "cpu")
