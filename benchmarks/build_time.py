"""Time to build a gradient, by the number of nodes of the primal: it should be linear.

python benchmarks/build_time.py
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import onnx
from onnx import helper, numpy_helper
from rich.console import Console
from rich.table import Table

from onnxgrad import onnx_derivative
from onnxgrad.graph import set_limits


def chain(nodes: int) -> onnx.ModelProto:
    """Return a residual network of that many nodes: h + tanh(h w + b), again and again."""
    made, weights, h = [], [], "x"
    for i in range(nodes // 4):
        for name, shape in ((f"w{i}", (8, 8)), (f"b{i}", (8,))):
            weights.append(numpy_helper.from_array(np.full(shape, 0.1, np.float32), name))
        made += [
            helper.make_node("MatMul", [h, f"w{i}"], [f"m{i}"]),
            helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"]),
            helper.make_node("Tanh", [f"a{i}"], [f"t{i}"]),
            helper.make_node("Add", [h, f"t{i}"], [f"h{i}"]),
        ]
        h = f"h{i}"
    values = (helper.make_tensor_value_info(n, 1, ["N", 8]) for n in ("x", h))
    graph = helper.make_graph(made, "chain", *([v] for v in values), weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def main() -> None:
    table = Table("nodes", "seconds of the CPU", "microseconds a node", "nodes of the gradient")
    set_limits(nodes=1_000_000)
    for nodes in (1250, 5000, 12_000, 25_000, 50_000, 100_000):
        model, times = chain(nodes), []
        for _ in range(3):
            start = time.process_time()
            made = onnx_derivative(model)
            times.append(time.process_time() - start)
        seconds = median(times)
        counts = f"{nodes:,}", f"{len(made.graph.node):,}"
        table.add_row(counts[0], f"{seconds:.2f}", f"{seconds / nodes * 1e6:.0f}", counts[1])
    Console().print(table)


if __name__ == "__main__":
    main()
