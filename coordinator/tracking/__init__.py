"""Trackers of experiments (TensorBoard, Weights & Biases, MLflow, Trackio), fed from a journal.

Each is a process of its own (`coordinator track`), so that none can hold, slow or end a run.
Imports `coordinator.storage` and `coordinator.service`. Start with `rows`, then `feeding`.
"""
