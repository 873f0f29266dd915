"""The decisions of a run, pure: inputs in, typed actions and events out.

No clock, socket, file, thread or randomness. Imports nothing else of the coordinator. Start with
`run`: the table at its end has the handler of each input in each phase. Then read `progress`, the
steps. Chapters, low to high: `outputs`, `exchange`, `workers`, `evaluation`.
"""
