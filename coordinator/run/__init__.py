"""The decisions of a run, pure: events and the time in, typed actions and facts out.

No clock, socket, file, thread or randomness. Imports nothing else of the coordinator. Start with
`run`: its table, at the end, says what follows which event in which phase. Then `progress`, the
step. Rooms, low to high: `outputs`, `exchange`, `workers`, `held_out`.
"""
