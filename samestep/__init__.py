"""The library door: train a plain PyTorch model with the same bits on every machine.

    import samestep
    result = samestep.fit(build, steps=200, batch=64, optimizer={"name": "adamw", "lr": 1e-3})

`Task` is what `build` returns, `fit` trains it, `Result` is what comes back. All else in here is
for these three. Start reading with `fitting`. Imports worker, backends, protocol, and of the
coordinator how to ask its control port; it starts the coordinator as a process.
"""

from samestep.own_names import taken_names, words_for

if _taken := taken_names():
    raise ImportError(words_for(_taken[0]))

from protocol import __version__
from protocol.base.errors import SamestepError
from samestep.fitting import fit
from samestep.result import FitResult as Result
from samestep.user_task import UserTask as Task

__all__ = ["Result", "SamestepError", "Task", "__version__", "fit"]
