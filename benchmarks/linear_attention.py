"""Time and memory of LinearAttention and its gradient, beside PyTorch's loop over the tokens.

python benchmarks/linear_attention.py --rule gated_delta --shape 2 256 4 32 [--per-dimension]

The forms are the chunks that onnxgrad writes, the function body of ONNX, which is a Scan over the
tokens, and a loop of PyTorch. Each runs in a process of its own, on one thread; the memory is how
far the peak of the process rises above what it had before the first step.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort

from onnxgrad import DerivativeOptions, onnx_derivative

FORMS = ("chunks", "body", "pytorch")
Step = Callable[[], object]


def operand_shapes(options: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    batch, tokens, heads, size = options.shape
    shapes = dict.fromkeys("qkv", (batch, tokens, heads * size))
    if "gated" in options.rule:
        shapes["g"] = (batch, tokens, heads * size if options.per_dimension else heads)
    if "delta" in options.rule:
        shapes["b"] = (batch, tokens, heads)
    return shapes


def draw_operands(options: argparse.Namespace) -> dict[str, np.ndarray]:
    rng, size = np.random.default_rng(0), options.shape[-1]
    drawn = {n: rng.standard_normal(s) for n, s in operand_shapes(options).items()}
    drawn["k"] /= size**0.5  # keys of length one, nearly
    if "g" in drawn:
        drawn["g"] = -0.1 * np.abs(drawn["g"])
    if "b" in drawn:
        drawn["b"] = 1 / (1 + np.exp(-drawn["b"]))
    return {n: x.astype(np.float32) for n, x in drawn.items()}


def model_of(options: argparse.Namespace) -> onnx.ModelProto:
    heads, shapes = options.shape[2], operand_shapes(options)
    inputs = ", ".join(f"float{list(s)} {n}" for n, s in shapes.items())
    operands = ", ".join(n if n in shapes else "" for n in "qkvpgb").rstrip(", ")
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 27]> f ({inputs}) =>
        (float{list(shapes["v"])} y) {{ y, s = LinearAttention<q_num_heads={heads},
        kv_num_heads={heads}, update_rule="{options.rule}">({operands}) }}"""
    )
    return made


def write_function_body(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the nodes of the schema's function body: a Scan over the tokens."""
    [node] = model.graph.node
    types = {x.name: x.type for x in model.graph.input}
    schema = onnx.defs.get_schema("LinearAttention", 27)
    text = schema.get_context_dependent_function(
        node.SerializeToString(),
        [types.get(n, onnx.TypeProto()).SerializeToString() for n in node.input],
    )
    body = onnx.FunctionProto.FromString(text)
    body.domain = node.domain = "benchmark"
    del body.attribute[:], node.attribute[:]
    model.functions.append(body)
    model.opset_import.append(onnx.helper.make_opsetid("benchmark", 1))
    return onnx.inliner.inline_local_functions(model)


def gradient_step(options: argparse.Namespace, feed: dict[str, np.ndarray]) -> Step:
    model = model_of(options)
    if options.form == "body":
        model = write_function_body(model)
    made = onnx_derivative(
        model, options=DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
    )
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    session = ort.InferenceSession(made.SerializeToString(), settings, ["CPUExecutionProvider"])
    return lambda: session.run(None, feed)


def pytorch_step(options: argparse.Namespace, feed: dict[str, np.ndarray]) -> Step:
    import torch

    torch.set_num_threads(1)
    batch, tokens, heads, size = options.shape
    given = {n: torch.tensor(x, requires_grad=True) for n, x in feed.items()}

    def step() -> object:
        apart = {n: x.unflatten(-1, (heads, -1)) for n, x in given.items()}
        state, outputs = torch.zeros(batch, heads, size, size), []
        for t in range(tokens):
            q, k, u = (apart[n][:, t] for n in "qkv")
            if "g" in apart:
                state = state * apart["g"][:, t].exp().unsqueeze(-1)
            if "b" in apart:
                u = apart["b"][:, t] * (u - (k.unsqueeze(-2) @ state).squeeze(-2))
            state = state + k.unsqueeze(-1) * u.unsqueeze(-2)
            outputs.append((q.unsqueeze(-2) @ state).squeeze(-2) * size**-0.5)
        y = torch.stack(outputs, 1).flatten(2)
        return [y, *torch.autograd.grad(y.sum(), [*given.values()])]

    return step


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure_form(options: argparse.Namespace) -> None:
    """Print the seconds of the fastest step, its memory in MB, and a sum that tells results."""
    feed = draw_operands(options)
    step = (pytorch_step if options.form == "pytorch" else gradient_step)(options, feed)
    before = peak()
    results = [np.asarray(getattr(x, "detach", lambda x=x: x)()) for x in step()]
    memory, seconds = peak() - before, []
    for _ in range(options.steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    print(min(seconds), memory, sum(float(np.abs(x).sum()) for x in results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=4, default=(2, 256, 4, 32), metavar="N")
    parser.add_argument("--rule", default="gated_delta")
    parser.add_argument("--per-dimension", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--form", choices=FORMS)
    options = parser.parse_args()
    if options.form:
        measure_form(options)
        return
    rows = {}
    for form in FORMS:
        command = [sys.executable, __file__, *sys.argv[1:], "--form", form]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows[form] = [float(x) for x in printed.split()]
    seconds, memory, _ = rows["chunks"]
    print(f"{options.rule}, {'x'.join(map(str, options.shape))}")
    for form, row in rows.items():
        ratios = f"{row[0] / seconds:6.1f} x {row[1] / max(memory, 1):6.1f} x"
        print(f"{form:8} {1e3 * row[0]:9.1f} ms {row[1]:8.1f} MB {ratios}   sum {row[2]:.6g}")


if __name__ == "__main__":
    main()
