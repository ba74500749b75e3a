"""What higher derivatives cost: jvp by forward, hvp by gradient, a 50 x 50 Jacobian by gradient.

An MLP of 50-100-100-50 units, one thread: medians of blocks of calls, which take turns. The
gradient is that by the inputs; those of rows are by the weights, of the squared sum of each row.
PyTorch computes the same by `torch.func`, compared in the same run.

    python benchmarks/higher.py [--rounds 10]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort
from common import ratio, turns
from onnx import numpy_helper
from rich.console import Console
from rich.table import Table

from onnxgrad import attach, hvp, jacobian, jvp, onnx_derivative

SIZES = (50, 100, 100, 50)


def start() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(0, a**-0.5, (a, b)), rng.normal(size=b)) for a, b in pairwise(SIZES)]
    return [w.astype(np.float32) for pair in pairs for w in pair]


def network() -> onnx.ModelProto:
    made = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18]>
        mlp (float[N, {SIZES[0]}] X) => (float[N, {SIZES[-1]}] Y) {{
            a = MatMul(X, w0)  b = Add(a, w1)  c = Tanh(b)
            d = MatMul(c, w2)  e = Add(d, w3)  f = Tanh(e)
            g = MatMul(f, w4)  Y = Add(g, w5)
        }}""")
    tensors = (numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(start()))
    made.graph.initializer.extend(tensors)
    return made


def squares(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model of the sum of the squares of each row of the output."""
    loss = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18]> loss (float[N, {SIZES[-1]}] Y) => (float[N] L)
        <int64[1] axes = {{1}}> {{ L = ReduceSumSquare<keepdims = 0>(Y, axes) }}""")
    return attach(model, loss)


def runner(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Callable[[], np.ndarray]:
    """Return the function that runs a model, and gives its last output."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options)
    fed = {
        x.name: ort.OrtValue.ortvalue_from_numpy(feeds[x.name]) for x in session.get_inputs()
    }  # fmt: skip
    names = [y.name for y in session.get_outputs()]
    return lambda: session.run_with_ort_values(names, fed)[-1].numpy()


def ours(feeds: dict[str, np.ndarray]) -> dict[str, Callable]:
    model = network()
    models = {
        "forward": model,
        "gradient": onnx_derivative(model, []),
        "jvp": jvp(model),
        "hvp": hvp(model),
        "Jacobian": jacobian(model, batched=True),
        "rows": jacobian(squares(model), None, [], batched=True),
    }
    return {name: runner(proto, feeds) for name, proto in models.items()}


def theirs(feeds: dict[str, np.ndarray]) -> dict[str, Callable]:
    import torch
    from torch.func import grad, jacrev, jvp as torch_jvp, vmap

    torch.set_num_threads(1)
    w = [torch.tensor(a) for a in start()]
    x, u, t, v = (torch.tensor(feeds[k]) for k in ("X", "Y_grad", "X_tangent", "X_vector"))

    def net(x):
        h = torch.tanh(x @ w[0] + w[1])
        return torch.tanh(h @ w[2] + w[3]) @ w[4] + w[5]

    slope = grad(lambda x: (net(x) * u).sum())
    rows = vmap(jacrev(lambda x: net(x[None])[0]))

    def square(w, x):
        h = torch.tanh(x @ w[0] + w[1])
        return ((torch.tanh(h @ w[2] + w[3]) @ w[4] + w[5]) ** 2).sum()

    each = vmap(grad(square), in_dims=(None, 0))
    with torch.no_grad():
        return {
            "forward": lambda: net(x),
            "gradient": lambda: slope(x),
            "jvp": lambda: torch_jvp(net, (x,), (t,))[1],
            "hvp": lambda: torch_jvp(slope, (x,), (v,))[1],
            "Jacobian": lambda: rows(x),
            "rows": lambda: each(w, x)[-1],
        }


def measure(batch: int, rounds: int) -> None:
    rng, shape = np.random.default_rng(1), (batch, SIZES[0])
    feeds = {
        name: rng.standard_normal(shape, np.float32)
        for name in ("X", "Y_grad", "X_tangent", "X_vector")
    } | {f"w{i}": w for i, w in enumerate(start())}
    jobs = {f"onnxgrad {name}": job for name, job in ours(feeds).items()}
    try:
        others = theirs(feeds)
    except ImportError:
        others = {}
    jobs |= {f"torch {name}": job for name, job in others.items()}
    for name, job in others.items():
        np.testing.assert_allclose(jobs[f"onnxgrad {name}"](), job(), rtol=1e-2, atol=1e-3)
    seconds = turns(jobs, rounds)
    table = Table("", "forward", "gradient", "jvp", "hvp", "Jacobian", "rows")
    table.title = f"microseconds, batch {batch}; ratios with quartiles"
    for who in ("onnxgrad", "torch") if others else ("onnxgrad",):
        times = {k.removeprefix(f"{who} "): v for k, v in seconds.items() if k.startswith(who)}
        table.add_row(who, *(f"{median(v) * 1e6:,.0f}" for v in times.values()))
        to = {"jvp": "forward", "hvp": "gradient", "Jacobian": "gradient", "rows": "gradient"}
        ratios = [f"{ratio(times[a], times[b])} {b}s" for a, b in to.items()]
        table.add_row("", "", "", *ratios)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each; the median counts")
    rounds = parser.parse_args().rounds
    for batch in (1, 32, 256):
        measure(batch, rounds)


if __name__ == "__main__":
    main()
