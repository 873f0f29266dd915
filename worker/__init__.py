"""The worker daemon: it owns one device, computes its nodes, and takes the same step as all."""
