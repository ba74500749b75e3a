"""Gradients of single operators against PyTorch's: those that were, or are, far slower than others.

Forward and backward pass on one thread, from `onnx_derivative` and from autograd, on the same data;
the gradients must agree. Blocks of calls take turns; ratios are those of the medians, and in
brackets the quartiles of the ratios turn by turn. Above 1, we are faster.

    python benchmarks/operators.py [NAME ...] [--rounds 10]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from common import ratio, turns
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from onnxgrad import onnx_derivative


@dataclass(frozen=True)
class Case:
    """An operator: `node` computes `y` from the inputs of `shapes`, as `peer` does in PyTorch.

    `between` are the bounds of the numbers of all inputs, if they are not normal ones.
    """

    node: str
    peer: Callable[..., Tensor]
    shapes: dict[str, tuple[int, ...]]
    between: tuple[float, float] | None = None
    constants: str = ""

    def model(self) -> onnx.ModelProto:
        sizes = {n: ",".join(map(str, s)) for n, s in self.shapes.items()}
        inputs = ", ".join(f"float[{size}] {name}" for name, size in sizes.items())
        constants = f"<{self.constants}>" if self.constants else ""
        return onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["": 20]> f ({inputs}) => (float y) {constants} '
            f"{{ {self.node} }}"
        )

    def data(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        if self.between is not None:
            return {n: rng.uniform(*self.between, s).astype("f") for n, s in self.shapes.items()}
        return {n: rng.standard_normal(s, np.float32) for n, s in self.shapes.items()}


CASES = {
    "Resize, bicubic": Case(
        'y = Resize<mode = "cubic", cubic_coeff_a = -0.75>(x, , scales)',
        lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"),
        {"x": (4, 16, 32, 32)},
        constants="float[4] scales = {1, 1, 2, 2}",
    ),
    "Resize, linear": Case(
        'y = Resize<mode = "linear">(x, , scales)',
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        {"x": (4, 16, 32, 32)},
        constants="float[4] scales = {1, 1, 2, 2}",
    ),
    "GridSample": Case(
        'y = GridSample<mode = "linear">(x, grid)',
        lambda x, grid: functional.grid_sample(x, grid, align_corners=False),
        {"x": (4, 8, 32, 32), "grid": (4, 32, 32, 2)},
        (-1, 1),
    ),
    "MaxPool 2x2": Case(
        "y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)",
        lambda x: functional.max_pool2d(x, 2),
        {"x": (8, 32, 32, 32)},
    ),
    "MaxPool 3x3, stride 2": Case(
        "y = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x)",
        lambda x: functional.max_pool2d(x, 3, 2, 1),
        {"x": (8, 32, 32, 32)},
    ),
    "AveragePool 3x3": Case(
        "y = AveragePool<kernel_shape = [3, 3]>(x)",
        lambda x: functional.avg_pool2d(x, 3, 1),
        {"x": (8, 32, 32, 32)},
    ),
    "Conv 3x3": Case(
        "y = Conv<pads = [1, 1, 1, 1]>(x, w)",
        lambda x, w: functional.conv2d(x, w, padding=1),
        {"x": (8, 32, 28, 28), "w": (32, 32, 3, 3)},
    ),
    "Conv 3x3, by channel": Case(
        "y = Conv<pads = [1, 1, 1, 1], group = 32>(x, w)",
        lambda x, w: functional.conv2d(x, w, padding=1, groups=32),
        {"x": (8, 32, 28, 28), "w": (32, 1, 3, 3)},
    ),
    "ConvTranspose 2x2, stride 2": Case(
        "y = ConvTranspose<strides = [2, 2]>(x, w)",
        lambda x, w: functional.conv_transpose2d(x, w, stride=2),
        {"x": (8, 32, 16, 16), "w": (32, 16, 2, 2)},
    ),
    "LayerNormalization": Case(
        "y = LayerNormalization<axis = -1>(x, s, b)",
        lambda x, s, b: functional.layer_norm(x, [256], s, b),
        {"x": (512, 256), "s": (256,), "b": (256,)},
    ),
    "Softmax": Case(
        "y = Softmax<axis = -1>(x)", lambda x: functional.softmax(x, -1), {"x": (8, 8, 64, 64)}
    ),
    "Gelu": Case("y = Gelu(x)", functional.gelu, {"x": (512, 1024)}),
}


def jobs_of(case: Case) -> dict[str, Callable[[], list[np.ndarray]]]:
    """Return forward and backward pass of both tools, which give the gradients of all inputs."""
    arrays, options = case.data(), ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    tensors = [torch.tensor(array, requires_grad=True) for array in arrays.values()]
    y = case.peer(*tensors)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    model = onnx_derivative(case.model(), weights=[], inputs=list(arrays))
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [f"{name}_grad" for name in arrays]
    fed: dict[str, Any] = {**arrays, "y_grad": g.numpy()}
    fed = {x.name: fed[x.name] for x in session.get_inputs()}

    def theirs() -> list[np.ndarray]:
        for tensor in tensors:
            tensor.grad = None
        case.peer(*tensors).backward(g)
        return [t.grad.numpy() for t in tensors if t.grad is not None]

    return {"onnxgrad": lambda: list(session.run(names, fed)), "PyTorch": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each; the median counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("operator", "ms", "PyTorch, ms", "ratio (quartiles)")
    for name in options.names or CASES:
        jobs = jobs_of(CASES[name])
        for ours, theirs in zip(*(job() for job in jobs.values()), strict=True):
            scale = np.abs(theirs).max()
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale)
        seconds = turns(jobs, options.rounds)
        ms = (f"{1000 * median(seconds[tool]):.3f}" for tool in jobs)
        table.add_row(name, *ms, ratio(seconds["PyTorch"], seconds["onnxgrad"]))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
