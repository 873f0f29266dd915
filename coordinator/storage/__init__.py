"""What a run keeps on disk, written while it goes on, and found by a restart.

Imports `coordinator.disk`, `coordinator.capture` and the records of `coordinator.run.outputs`.
Start with `run_storage`, which writes, and `recovery`, which finds. Rooms, low to high: `log`,
`directory`, `states`.
"""
