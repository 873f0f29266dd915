"""The decisions of a run, pure: inputs in, typed actions and events out.

No clock, socket, file, thread or randomness. Imports nothing else of the coordinator. Start with
`run`: its table, at the end, says what follows which input in which phase. Then `progress`, the
step. Chapters, low to high: `outputs`, `exchange`, `workers`,
`evaluation`.
"""
