"""A user's script: the task that its `samestep.fit` describes, and the command that runs it.

Start with `script_task`, which makes a worker's task of a `samestep.Task`. `launch` runs
`worker SCRIPT.py`. Imports nothing of `samestep`, which imports this room.
"""
