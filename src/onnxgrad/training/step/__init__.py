"""The step: from a batch, weights and slots to the loss, new weights and new slots.

`inputs.py` declares what a step reads beside weights and slots, each feed once; `build.py` joins
`gradients.py` (sums over micro-batches and processes) and `update.py` (the optimizer, for the
groups of `weight_groups.py`), and writes the loop over batches. `members.py` makes the step of one
model the step of a stack.
"""
