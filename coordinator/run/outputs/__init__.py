"""What comes out of a run's decisions: actions, events, and records for a restart. Pure.

Imports nothing else of the coordinator. Start with `actions`, then `events`.
"""
