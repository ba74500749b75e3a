"""Which constants of a model train by default, and why.

`choice.py` decides by the roles of constants (`roles.py`, `flow.py`), by evidence that numbers are
weights (`evidence.py`), and by the patterns of users; `aliases.py` names them, `equal_constants.py`
tells apart what an exporter stored once, and `table.py` is the table that `trainable` returns.
"""
