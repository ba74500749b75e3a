"""Runners of steps: in one session, in place, for the members of a stack, by several processes.

`runner.py` makes the one choice of how a step runs: in a session (`sessions.py`) or in stages
(`stages.py`) whose rows processes divide, or in parts where they need much memory
(`row_parts.py`); with states that a call replaces or updates in place (`states.py`).
"""
