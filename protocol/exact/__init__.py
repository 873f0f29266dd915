"""Why the bits agree: tree, update, schedule, order of samples, digests, replica.

Everything here is arithmetic on given values. Imports `protocol.base` and `protocol.spec`. Start
with `tree`, then `update`.
"""
