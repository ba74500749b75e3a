"""What each level of `partition(recompute=)` costs: bytes saved, time of forward and of backward.

Every time is on one thread, the median of blocks of calls, which take turns; the ratio is that of
forward and backward together to one joint gradient model, `onnx_derivative` with `KeepOutputs`.

    python benchmarks/partition.py [--rounds 15]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort
from common import model, ratio, turns
from onnx import numpy_helper
from rich.console import Console
from rich.table import Table

from onnxgrad import DerivativeOptions, onnx_derivative
from onnxgrad.autodiff.partition import RECOMPUTE, partition

DIGITS = Path(__file__).parents[1] / "data" / "digits_cnn.onnx"
Values = dict[str, ort.OrtValue]


def transformer(layers: int = 2, d: int = 128, heads: int = 4, tokens: int = 64) -> onnx.ModelProto:
    """Return encoder layers as `torch.nn.TransformerEncoderLayer` has them, without dropout."""
    rng, weights, lines, h = np.random.default_rng(0), {}, [], "X"
    for i in range(layers):
        shapes = {"qkv": (d, 3 * d), "o": (d, d), "u": (d, 4 * d), "v": (4 * d, d)}
        for name, shape in shapes.items():
            weights[f"{name}{i}"] = rng.normal(0, shape[0] ** -0.5, shape)
            weights[f"{name}b{i}"] = np.zeros(shape[1:])
        for name in ("s", "t"):
            weights |= {f"{name}{i}": np.ones(d), f"{name}b{i}": np.zeros(d)}
        lines.append(f"""
            a{i} = MatMul({h}, qkv{i})  b{i} = Add(a{i}, qkvb{i})
            c{i} = Reshape(b{i}, split)  e{i} = Transpose<perm=[2, 0, 3, 1, 4]>(c{i})
            f{i}, g{i}, j{i} = Split<axis=0, num_outputs=3>(e{i})
            k{i} = Squeeze(f{i}, zero)  l{i} = Squeeze(g{i}, zero)  m{i} = Squeeze(j{i}, zero)
            n{i} = Transpose<perm=[0, 1, 3, 2]>(l{i})  p{i} = MatMul(k{i}, n{i})
            q{i} = Mul(p{i}, scale)  r{i} = Softmax(q{i})  w{i} = MatMul(r{i}, m{i})
            x{i} = Transpose<perm=[0, 2, 1, 3]>(w{i})  y{i} = Reshape(x{i}, join)
            z{i} = MatMul(y{i}, o{i})  aa{i} = Add(z{i}, ob{i})  bb{i} = Add({h}, aa{i})
            cc{i} = LayerNormalization<axis=-1>(bb{i}, s{i}, sb{i})
            dd{i} = MatMul(cc{i}, u{i})  ee{i} = Add(dd{i}, ub{i})  ff{i} = Relu(ee{i})
            gg{i} = MatMul(ff{i}, v{i})  hh{i} = Add(gg{i}, vb{i})  ii{i} = Add(cc{i}, hh{i})
            h{i} = LayerNormalization<axis=-1>(ii{i}, t{i}, tb{i})""")
        h = f"h{i}"
    made = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18]>
        encoder (float[N, {tokens}, {d}] X) => (float[N, {tokens}, {d}] {h})
        <int64[5] split = {{0, 0, 3, {heads}, -1}}, int64[3] join = {{0, 0, -1}},
         int64[1] zero = {{0}}, float scale = {{{(d // heads) ** -0.5}}}>
        {{ {"".join(lines)} }}""")
    made.graph.initializer.extend(
        numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()
    )
    return made


def runner(proto: onnx.ModelProto, feeds: Values) -> Callable[[], Values]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options)
    fed = {x.name: feeds[x.name] for x in session.get_inputs()}
    names = [y.name for y in session.get_outputs()]
    return lambda: dict(zip(names, session.run_with_ort_values(names, fed), strict=True))


def measure(name: str, onx: onnx.ModelProto, batch: int, rounds: int) -> None:
    table = Table("recompute", "bytes a row", "forward", "backward", "joint", "ratio (quartiles)")
    table.title = f"{name}, batch {batch}, microseconds"
    weights = [w.name for w in onx.graph.initializer if w.data_type == 1 and w.name != "scale"]
    arrays = {w.name: numpy_helper.to_array(w) for w in onx.graph.initializer if w.name in weights}
    fixed = [d.dim_value for d in onx.graph.input[0].type.tensor_type.shape.dim[1:]]
    arrays[onx.graph.input[0].name] = np.random.default_rng(0).normal(size=(batch, *fixed))
    feeds = {k: ort.OrtValue.ortvalue_from_numpy(a.astype(np.float32)) for k, a in arrays.items()}
    cuts = {recompute: partition(onx, weights, recompute=recompute) for recompute in RECOMPUTE}
    jobs, saved = {}, {}
    for recompute, cut in cuts.items():
        forward = runner(cut.forward, feeds)
        made = forward()
        saved[recompute] = sum(made[s.name].numpy().nbytes for s in cut.saved)
        for y in onx.graph.output:
            ones = np.ones(made[y.name].shape(), np.float32)
            made[f"{y.name}_grad"] = ort.OrtValue.ortvalue_from_numpy(ones)
        jobs |= {f"forward {recompute}": forward, recompute: runner(cut.backward, feeds | made)}
    joint = onnx_derivative(onx, weights, options=DerivativeOptions.KeepOutputs)
    jobs["joint"] = runner(joint, feeds | made)
    seconds, whole = turns(jobs, rounds), jobs["joint"]()
    for recompute in RECOMPUTE:
        for key, value in jobs[recompute]().items():
            np.testing.assert_allclose(value.numpy(), whole[key].numpy(), rtol=1e-3, atol=1e-3)
        times = seconds[f"forward {recompute}"], seconds[recompute]
        both = [a + b for a, b in zip(*times, strict=True)]
        micros = (f"{median(t) * 1e6:,.0f}" for t in (*times, seconds["joint"]))
        size = f"{saved[recompute] / batch:,.0f}"
        table.add_row(recompute, size, *micros, ratio(both, seconds["joint"]))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each; the median counts")
    rounds = parser.parse_args().rounds
    measure("MLP", model("N", 18), 15, rounds)
    measure("MLP", model("N", 18), 256, rounds)
    measure("CNN of data/digits_cnn.onnx", onnx.load(DIGITS), 32, rounds)
    measure("transformer, 2 encoder layers", transformer(), 8, rounds)


if __name__ == "__main__":
    main()
