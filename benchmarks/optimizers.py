"""One step of an optimizer on one large weight, by onnxgrad and by PyTorch's foreach form.

The weight has 16 million elements of float32 by default. `in an epoch` runs the update as training
does: in the body of a Scan over batches, four steps a call, with the same gradient in all of them.
`alone` is one step a call, and `build_update` the model of that name, whose weights and slots keep
their shapes. `plain` does without blocks. Ratios below 1 say that onnxgrad is faster: medians of
turns, and in brackets the quartiles turn by turn.

    python benchmarks/optimizers.py [--size 4096] [--rounds 9] [--optimizer adam]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from common import ratio, turns
from onnx import ModelProto

from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import to_proto
from onnxgrad.optimizers import presets
from onnxgrad.training.step.inputs import feed_inputs
from onnxgrad.training.step.update import build_update, write_update
from onnxgrad.training.step.weight_groups import Group

STEPS = 4  # of an epoch
RATE = 1e-3
TORCH = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop", "nadam": "NAdam"}


def tensor(name: str, *shape: int) -> ir.Value:
    kind = ir.TensorType(ir.DataType.FLOAT)
    return ir.Value(name=name, type=kind, shape=ir.Shape(shape))


def step(name: str, size: int, blocks: bool) -> tuple[ir.Graph, Group, ir.Value]:
    """Return the graph of a step, its only group, and the gradient, which it captures."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="step")
    op, weight, gradient = Emit(graph), tensor("w", size, size), tensor("g", size, size)
    optimizer = presets.select(name)
    update = write_update(op, {weight: gradient}, optimizer, blocks=blocks)
    graph.inputs[:] = [*update.states, *feed_inputs(graph).values()]
    op.give(update.new)
    for old, new in zip(update.states, graph.outputs, strict=True):
        op.set_type_like(new, old)
    return graph, update.groups[0], gradient


def epoch(name: str, size: int, blocks: bool) -> tuple[ModelProto, Group]:
    body, group, gradient = step(name, size, blocks)
    states, scalars = body.inputs[:-2], body.inputs[-2:]
    outer = [tensor(f"{v.name}/all", *v.shape) for v in states]
    outer += [tensor(f"{v.name}/all", STEPS) for v in scalars]
    graph = ir.Graph([*outer, gradient], [], nodes=[], opset_imports={"": 20}, name="epoch")
    op = Emit(graph, [str(v.name) for v in body.inputs])
    attributes = {"body": body, "num_scan_inputs": 2}
    graph.outputs[:] = op.emit_many("Scan", outer, attributes, outputs=len(states))
    for new, old in zip(graph.outputs, states, strict=True):
        op.set_type_like(new, old)
    return to_proto(ir.Model(graph, ir_version=9)), group


def alone(name: str, size: int, blocks: bool) -> tuple[ModelProto, Group]:
    graph, group, gradient = step(name, size, blocks)
    graph.inputs.append(gradient)
    return to_proto(ir.Model(graph, ir_version=9)), group


def by_onnxruntime(model: ModelProto, threads: int, states: list[np.ndarray]) -> Callable:
    """Return a function that runs the model on what it returned last."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    rng, fed, kept = np.random.default_rng(0), {}, [x.name for x in session.get_inputs()]
    for x in session.get_inputs()[len(states) :]:
        value = -RATE if "rate" in x.name else 1.0
        array = np.full(x.shape, value, np.int64 if x.name == "step" else np.float32)
        if len(x.shape) == 2:
            array = rng.standard_normal(x.shape, np.float32)
        fed[x.name] = ort.OrtValue.ortvalue_from_numpy(array)
    now = [ort.OrtValue.ortvalue_from_numpy(array) for array in states]

    def run() -> None:
        binding = session.io_binding()
        for name, value in (*zip(kept, now, strict=False), *fed.items()):
            binding.bind_ortvalue_input(name, value)
        for y in session.get_outputs():
            binding.bind_output(y.name, "cpu")
        session.run_with_iobinding(binding)
        now[:] = binding.get_outputs()

    return run


def by_torch(name: str, size: int, threads: int) -> Callable:
    weight = torch.randn(size, size, requires_grad=True)
    weight.grad = torch.randn(size, size)
    optimizer = getattr(torch.optim, TORCH[name])([weight], lr=RATE, foreach=True)

    def run() -> None:
        torch.set_num_threads(threads)
        optimizer.step()

    return run


def measured(name: str, size: int, threads: int, rounds: int) -> None:
    w = np.random.default_rng(1).standard_normal((size, size), np.float32)
    jobs: dict[str, Callable] = {"PyTorch foreach": by_torch(name, size, threads)}
    for kind, build in (("in an epoch", epoch), ("alone", alone)):
        for suffix, blocks in (("", True), (", plain", False)):
            model, group = build(name, size, blocks)
            jobs[kind + suffix] = by_onnxruntime(model, threads, group.initial({"w": w}, {}))
    model = build_update({"w": ((size, size), np.float32)}, presets.select(name))
    _, group = alone(name, size, False)
    jobs["build_update"] = by_onnxruntime(model, threads, group.initial({"w": w}, {}))
    seconds = turns(jobs, rounds)
    steps = {key: STEPS if key.startswith("in an epoch") else 1 for key in jobs}
    per_step = {key: [s / steps[key] for s in taken] for key, taken in seconds.items()}
    theirs = per_step["PyTorch foreach"]
    for key, ours in per_step.items():
        line = f"{name}, {size * size:,} elements, threads {threads}, {key}: "
        print(f"{line}{1000 * median(ours):.1f} ms, ratio {ratio(ours, theirs)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--rounds", type=int, default=9, help="turns; the median counts")
    parser.add_argument("--optimizer", choices=TORCH, default="adam")
    options = parser.parse_args()
    job = partial(measured, options.optimizer, options.size, rounds=options.rounds)
    for threads in (1, 2):
        job(threads=threads)


if __name__ == "__main__":
    main()
