"""The backend that the eager suite tests: the CPU, or what SAMESTEP_TESTED_BACKEND names."""

import os
from typing import Final

KIND: Final = os.environ.get("SAMESTEP_TESTED_BACKEND", "cpu")
