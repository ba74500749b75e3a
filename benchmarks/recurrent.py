"""RNN, GRU and LSTM against PyTorch: one thread, milliseconds, medians of blocks that take turns.

The forward pass by onnxruntime's fused kernel, by the Scan that takes its place where a gradient is
needed, and by `torch.nn`; forward and backward, for the gradients of X and of all weights.

    python benchmarks/recurrent.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import onnxruntime as ort
import torch
from common import ratio, turns
from rich.console import Console
from rich.table import Table

from onnxgrad import DerivativeOptions, onnx_derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import to_proto

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
ORDER = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 3, 1, 2]}  # PyTorch's gates in ONNX's order
# (kind, time, batch, input, hidden, layers, bidirectional)
CASES = [(kind, 50, 32, 64, 128, 1, False) for kind in GATES]
CASES += [(kind, 20, 4, 16, 16, 1, False) for kind in GATES]
CASES += [(kind, 50, 32, 64, 128, 2, True) for kind in ("GRU", "LSTM")]


def model(layer: torch.nn.RNNBase, time: int, batch: int) -> onnx.ModelProto:
    """Return the layers as PyTorch's exporter writes them; the weights are inputs."""
    kind, hidden, d = layer.mode.split("_")[0], layer.hidden_size, 1 + layer.bidirectional
    wide, way = GATES[kind] * hidden, "bidirectional" if layer.bidirectional else "forward"
    linear = ", linear_before_reset=1" if kind == "GRU" else ""
    inputs, body, last = [f"float[{time}, {batch}, {layer.input_size}] x"], "", "x"
    for i in range(layer.num_layers):
        size = layer.input_size if i == 0 else d * hidden
        inputs += [
            f"float[{d}, {wide}, {size}] w{i}",
            f"float[{d}, {wide}, {hidden}] r{i}",
            f"float[{d}, {2 * wide}] b{i}",
        ]
        body += f"""a{i} = {kind}<hidden_size={hidden}, direction="{way}"{linear}>
            ({last}, w{i}, r{i}, b{i})  t{i} = Transpose<perm=[0, 2, 1, 3]>(a{i})
            h{i} = Reshape(t{i}, k)  """
        last = f"h{i}"
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]>
        g ({", ".join(inputs)}) => (float[{time}, {batch}, {d * hidden}] y)
        {{ k = Constant<value_ints=[0, 0, -1]>() {body} y = Identity({last}) }}""")


def weights(layer: torch.nn.RNNBase, gradients: bool = False) -> list[np.ndarray]:
    """Return W, R and B of every layer as ONNX has them, or their gradients."""
    kind, hidden = layer.mode.split("_")[0], layer.hidden_size

    def stacked(name: str, i: int) -> np.ndarray:
        made = []
        for suffix in ("", "_reverse")[: 1 + layer.bidirectional]:
            v = getattr(layer, f"{name}_l{i}{suffix}")
            v = (v.grad if gradients else v.detach()).numpy()
            made.append(v.reshape(GATES[kind], hidden, -1)[ORDER[kind]].reshape(v.shape))
        return np.stack(made)

    found = []
    for i in range(layer.num_layers):
        bias = np.concatenate([stacked("bias_ih", i), stacked("bias_hh", i)], axis=1)
        found += [stacked("weight_ih", i), stacked("weight_hh", i), bias]
    return found


def runs(proto: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> Callable[[], list[np.ndarray]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(proto.SerializeToString(), options)
    fed = {x.name: arrays[x.name] for x in session.get_inputs()}
    return lambda: session.run(None, fed)


def measure(case: tuple, rounds: int, table: Table) -> None:
    kind, time, batch, size, hidden, layers, both = case
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(size, hidden, layers, bidirectional=both)
    x = torch.randn(time, batch, size, requires_grad=True)
    dy = torch.randn(time, batch, hidden * (1 + both))
    proto = model(layer, time, batch)
    names = [v.name for v in proto.graph.input]
    arrays = dict(zip(names, [x.detach().numpy(), *weights(layer)], strict=True))
    arrays["y_grad"] = dy.numpy()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return layer(x)[0]

    def both_ways() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x)[0].backward(dy)

    scan = to_proto(prepare(proto, late=True))
    jobs = {"kernel": runs(proto, arrays), "Scan": runs(scan, arrays), "PyTorch": forward}
    gradient = runs(onnx_derivative(proto, options=DerivativeOptions.KeepOutputs), arrays)
    both_ways()
    found = gradient()
    for a, b in zip(found, [x.grad.numpy(), *weights(layer, True)], strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    kernel, ours, theirs = turns(jobs, rounds).values()
    whole, peer = turns({"ours": gradient, "PyTorch": both_ways}, rounds).values()
    columns = [f"{median(times) * 1e3:.3f}" for times in (kernel, ours, theirs, whole, peer)]
    name = f"{kind} {time}x{batch}, {size}->{hidden}, {layers} layer{'s'[: layers - 1]}"
    name += ", both ways" * both
    table.add_row(name, *columns[:3], ratio(ours, kernel), *columns[3:], ratio(whole, peer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each; the median counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("", "kernel", "Scan", "PyTorch", "Scan : kernel", "fwd+bwd", "PyTorch", "ratio")
    for case in CASES:
        measure(case, options.rounds, table)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
