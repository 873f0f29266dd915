"""Experiment trackers (TensorBoard, Weights & Biases, MLflow), fed from a journal.

Each is its own process (`coordinator track`), so that none can block, slow or end a run. Imports
`coordinator.storage` and `coordinator.service`. Start with `rows`, then `feeding`.
"""
