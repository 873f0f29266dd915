"""The files that a run writes while it executes, and how a restart finds them.

Imports `coordinator.disk`, `coordinator.capture` and the records of `coordinator.run.outputs`.
Start with `run_storage`, which writes, and `recovery`, which reads. Chapters, low to high: `log`,
`directory`, `states`.
"""
