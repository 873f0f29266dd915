"""Checks, before training, that a module, its loss and its data can be trained exactly."""
