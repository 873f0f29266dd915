"""A user's script: the task that its `samestep.fit` describes, and the command that runs it.

Start with `script_task`, which converts a `samestep.Task` to a worker's task. `launch` runs
`worker SCRIPT.py`. Imports nothing of `samestep`, which imports this package.
"""
