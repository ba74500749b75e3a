"""The gradient of operators with subgraphs: If, Loop and Scan.

The backward pass computes the body of every iteration again, from the states at the start of the
iteration, and then its gradient. The forward pass saves these states and the random numbers that
the body draws; other results only where `iterations` finds them worth saving.
"""

from onnxgrad.autodiff.control import subgraph_rules
