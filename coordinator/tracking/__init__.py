"""Experiment trackers (TensorBoard, Weights & Biases, MLflow), fed from a journal.

Each tracker has its own process (`coordinator track`), so no tracker can block, slow or end a run.
Imports `coordinator.storage` and `coordinator.service`. Start with `rows`, then `feeding`.
"""
