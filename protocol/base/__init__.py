"""What everything stands on: errors, limits, and fields with bounds.

Imports nothing of ours. Start with `errors`: the one tree of errors, and the exit codes.
"""
