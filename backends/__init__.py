"""Devices: one interface, one file per kind of device, and a registry that says why not."""
