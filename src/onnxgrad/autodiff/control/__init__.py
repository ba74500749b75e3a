"""The gradient of operators with subgraphs: If, Loop and Scan.

The backward pass computes the body of every iteration again, from the states at the start of the
iteration, and then its gradient. The forward pass saves these states and the random numbers that
the body draws; other results only where `motion` finds them worth saving.
"""

from onnxgrad.autodiff.control.conditional import conditional
from onnxgrad.autodiff.control.loop import loop
from onnxgrad.autodiff.control.scan import scan
from onnxgrad.autodiff.rules import SUBGRAPH_RULES

SUBGRAPH_RULES.update({("", "If"): conditional, ("", "Loop"): loop, ("", "Scan"): scan})
