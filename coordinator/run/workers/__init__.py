"""Who takes part in a run: admitted, late, agreed with the rest, failed or gone. Pure.

Imports `coordinator.run.outputs`, and the round that workers owe subtrees of. Start with
`membership`, then `admission`.
"""
