"""The workers of a run: admission, rejection, lateness, and agreement of their states. Pure.

Imports `coordinator.run.outputs` and `coordinator.run.exchange.round`. Start with `membership`,
then `admission`.
"""
