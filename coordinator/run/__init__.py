"""The decisions of a run, pure: events and the time in, typed actions and facts out.

No clock, socket, file, thread or randomness. Imports nothing else of the coordinator. Start with
`run`, then `round`.
"""
