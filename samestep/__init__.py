"""The library: train a plain PyTorch model with the same bits on every machine.

    import samestep
    result = samestep.fit(build, steps=200, batch=64, optimizer={"name": "adamw", "lr": 1e-3})

`build` returns a `Task`; `fit` trains it and returns a `Result`. Start reading with `fitting`.
`worker/scripts` turns a `Task` into a worker's task. Imports worker, backends, protocol, and the
client of the coordinator's control port; starts the coordinator as a subprocess.
"""

from samestep import cublas_workspace  # noqa: F401 -- first: it sets a variable that CUDA reads
from samestep.name_conflicts import conflict_message, shadowed_packages

if _shadowed := shadowed_packages():
    raise ImportError(conflict_message(_shadowed[0]), name="samestep")

from samestep import generator_states  # noqa: F401, I001 -- before any random draw
from protocol import __version__
from protocol.base.errors import SamestepError
from samestep.fitting import fit
from samestep.result import FitResult as Result
from worker.scripts.user_task import UserTask as Task

__all__ = ["Result", "SamestepError", "Task", "__version__", "fit"]
