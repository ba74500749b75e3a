"""Preparation: any model -> the primal, in the working dialect.

`prepare.py` inlines functions (`model.local_functions`), then visits every node once: infers its
results, folds sizes, takes branches and function bodies (`bodies.py`), reads the final states of
recurrent layers and lowers operators. `free_rows.py` makes the number of rows of a file free, by
proofs or by an axis of rows in each value (`row_axis.py`), once an If on the row is a selection
(`row_branches.py`).
"""
