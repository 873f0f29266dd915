"""One attempt at one step: payloads in, averages out, whoever does the averaging. Pure.

Imports `coordinator.run.outputs`. Start with `round`; where workers average among themselves, with
`mesh` (who owns which chunk) and `peer_sums` (how far they are).
"""
