"""Which constants of a model train by default, and why.

`choice.py` decides by the roles of constants (`roles.py`, `flow.py`), by evidence that numbers are
weights (`evidence.py`), and by the patterns of users; `aliases.py` gives constants readable names,
`equal_constants.py` separates parameters that an exporter stored as one tensor, and `table.py` is
the table that `trainable` returns.
"""
