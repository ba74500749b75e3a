"""The gradient of operators that hold graphs: If, Loop and Scan.

A body is repeated in the backward pass, from the states that its iteration started with, and its
gradient follows. The forward pass returns these states too: nothing else of a body is kept, but for
its random numbers.
"""

from onnxgrad.autodiff.control.conditional import conditional
from onnxgrad.autodiff.control.loop import loop
from onnxgrad.autodiff.control.scan import scan
from onnxgrad.autodiff.rules import SUBGRAPH_RULES

SUBGRAPH_RULES.update({"If": conditional, "Loop": loop, "Scan": scan})
