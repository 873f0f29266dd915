"""One attempt at one step: payloads in, averages out, whoever does the averaging. Pure.

Imports `coordinator.run.outputs`. Start with `round`; where workers average slices among
themselves, with `mesh` (who owns what) and `sliced` (how far they are).
"""
