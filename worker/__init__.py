"""The worker daemon: it owns one device, computes its subtrees, and takes the same step as all."""
