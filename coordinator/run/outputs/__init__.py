"""What comes out of a run's decisions: actions for the shell, facts to tell, records to keep. Pure.

Imports nothing else of the coordinator. Start with `actions`, then `facts`.
"""
