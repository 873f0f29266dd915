"""What makes bits agree: reduction tree, update, schedules, sample order, digests, replica.

Pure arithmetic. Imports `protocol.base` and `protocol.spec`. Start with `tree`, then `update`.
"""
