"""Apply averages to the weights, and define the order of samples: update, replica, digests.

Pure arithmetic. Imports `protocol.base`, `protocol.spec` and `protocol.exact.reduction`. Start with
`update`, then `replica`.
"""
