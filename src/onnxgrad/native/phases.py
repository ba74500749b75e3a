"""The groups of rewrites of the native form, in the order in which they run."""

NODES = "native.nodes"  # first, since they see which gradients come from convolutions
BLOCKS = "native.blocks"  # convolutions in blocks of channels, and what is between them
PLAIN = "native.plain"  # what is not in blocks
LOOPS = "native.loops"  # what leaves the bodies of Scans
WIDTH = "native.width"  # last, since all others may write nodes with many inputs

EPOCH = "native.epoch"  # in the loop over the batches, whose body is the step

PHASES = (NODES, BLOCKS, PLAIN, LOOPS, WIDTH)
