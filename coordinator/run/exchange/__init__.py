"""One attempt at one step: payloads in, averages out, whether the coordinator or workers average.
Pure.

Imports `coordinator.run.outputs`. Start with `round`; where workers average among themselves, with
`mesh` (who owns which chunk) and `peer_sums` (how far they are).
"""
