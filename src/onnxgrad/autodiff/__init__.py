"""Gradients of graphs: from a primal in the working dialect to models of derivatives.

`primal` prepares a model; `reverse.py` is the sweep, which calls the rules; `control` has the rules
of subgraphs, and `forms` the rewrites after the sweep. `derivative.py`, `partition.py`, `higher.py`
(with `derivative_builder.py`, `matrices.py`) and `family.py` are public models of derivatives.
`recompute.py` and `attention_blocks.py` trade time for memory, `row_proofs.py` proves that rows
are not mixed, `members` pushes the axis of a stack through a graph, and `check` compares with
central differences.
"""

from onnxgrad.autodiff import control
