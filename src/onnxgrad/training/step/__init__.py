"""The step: from a batch, weights and slots to the loss, new weights and new slots.

`inputs.py` has the batches and feeds, the inputs of a step other than weights and slots; `build.py`
joins `gradients.py` (sums over micro-batches and processes) and `update.py` (the optimizer, for the
groups of `weight_groups.py`), and writes the loop over batches. `members.py` writes the step of a
stack, which trains several copies of one model.
"""
