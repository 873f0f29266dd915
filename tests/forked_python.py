"""`python forked_python.py -u -c CODE`: xdist's Python, forked from the fork server."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from tests.processes import continue_as_server_child

    os._exit(continue_as_server_child(sys.argv[sys.argv.index("-c") + 1]))
