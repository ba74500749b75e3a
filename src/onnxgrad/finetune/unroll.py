"""`unroll`: turn a model of one time step into a model of sequences that can be trained."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.traversal import all_names
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.local_functions import inline_functions
from onnxgrad.model.read import ModelLike, read
from onnxgrad.operators.shapes import dims

_STEPS = "steps"  # the symbolic length of the new axis


def unroll(model: ModelLike, carry: Mapping[str, str]) -> ModelProto:
    """Return a model that runs `model` at each time step of sequences and passes its states on.

    Inputs (N, ...) become (N, steps, ...), and so do outputs; scalar inputs are the same in all
    steps. An input of `carry` is the state before the first step, its output that after the last.
    With `Trainer(carry=carry)`, this is truncated backpropagation through time (Williams and Peng
    1990): a batch has some steps of each sequence, the gradient flows through all of them, and the
    next batch goes on with the state. Constants keep their names, so that
    `replace_initializers_into_onnx(model, trainer.state.weights)` is the model of one step again.

    A Scan runs the steps, in which a `Trainer` refuses `dropout` and `batch_norm="train"`.

    Args:
        model: model, serialized model or path; never modified. Its inputs and outputs that are no
            states have rows on the first axis.
        carry: `{input: output}`, the states.

    Raises:
        ValueError: no state, an unknown name, an output that two inputs take, one of another dtype
            or rank than its input, or an input or output of unknown rank.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> cell = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x, float[N,2] h) => (float[N,2] y, float[N,2] new) {
        ...     new = Add(x, h)  y = Relu(new) }''')
        >>> print(onnx.printer.to_text(og.graph.unroll(cell, {"h": "new"}).graph).splitlines()[0])
        f (float[N,steps,2] x, float[N,2] h) => (float[N,steps,2] y, float[N,2] new) {
    """
    proto = inline_functions(read(model))
    one = to_ir(proto)
    infer(one)
    body = one.graph
    _check_carried_states(body, carry)
    graph = _write_scan(body, [*carry], [*carry.values()])
    made = to_proto(ir.Model(graph, ir_version=one.ir_version, producer_name="onnxgrad"))
    made.metadata_props.extend(proto.metadata_props)
    return made


def _write_scan(body: ir.Graph, befores: list[str], afters: list[str]) -> ir.Graph:
    """Return a graph with a Scan node that runs `body` for each time step.

    Args:
        body: the graph of one step.
        befores: names of the states before a step, inputs of `body`.
        afters: names of the states after a step, outputs of `body`.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(body.opset_imports), name=body.name)
    op = Emit(graph, all_names(body))
    _move_constants(body, graph)
    inputs, outputs = list(body.inputs), list(body.outputs)
    before, after = (
        [next(v for v in values if v.name == name) for name in names]
        for values, names in ((inputs, befores), (outputs, afters))
    )
    scanned = [x for x in inputs if x not in before and dims(x)]
    rest = [y for y in outputs if y not in after]
    outer = {}  # the inputs and outputs of the model, with an axis of steps if they are stacked
    for v in (*inputs, *outputs):
        own = list(v.shape or ())
        shape = [*own[:1], _STEPS, *own[1:]] if v in scanned or v in rest else own
        outer[v] = ir.Value(name=v.name, type=v.type, shape=ir.Shape(shape))
    for x in inputs:
        if x not in before and x not in scanned:
            ir.convenience.replace_all_uses_with(x, outer[x])
    for v in (*inputs, *outputs):
        v.name = op.name(f"{v.name}/step")
    body.inputs[:] = [*before, *scanned]
    body.outputs[:] = []
    Emit(body, outer=op).give([*after, *rest])
    axes = {"scan_input_axes": [1] * len(scanned), "scan_output_axes": [1] * len(rest)}
    attributes = {"body": body, "num_scan_inputs": len(scanned), **axes}
    fed = [outer[x] for x in (*before, *scanned)]
    results = op.emit_many("Scan", fed, attributes, outputs=len(after) + len(rest))
    for y, result in zip((*after, *rest), results, strict=True):
        stated = outer[y]
        result.name, result.type, result.shape = stated.name, stated.type, stated.shape
        outer[y] = result
    graph.inputs.extend(outer[x] for x in inputs)
    graph.outputs.extend(outer[y] for y in outputs)
    return graph


def _check_carried_states(body: ir.Graph, carry: Mapping[str, str]) -> None:
    """Raise `ValueError` if `carry` names unknown states, or an output that does not fit its input,
    or if a shape is not declared.
    """
    inputs, outputs = ({str(v.name): v for v in vs} for vs in (body.inputs, body.outputs))
    if not carry or len({*carry.values()}) < len(carry):
        raise ValueError(
            f"carry={dict(carry)}: pass {{input: output}} of each state, and no output twice"
        )
    for name, output in carry.items():
        for kind, given, known in (("input", name, inputs), ("output", output, outputs)):
            if given not in known:
                raise unknown(f"{kind} in carry", given, known)
    for name, v in (inputs | outputs).items():
        if v.shape is None:
            raise ValueError(
                f"the input or output {name!r} has no declared shape: declare at least its rank"
            )
    for name, output in carry.items():
        x, y = inputs[name], outputs[output]
        if x.dtype != y.dtype or len(dims(x) or ()) != len(dims(y) or ()):
            raise ValueError(
                f"carry: the output {output!r}, {y.dtype} {y.shape}, cannot be fed to the input "
                f"{name!r}, {x.dtype} {x.shape}: name an output of the dtype and rank of the input"
            )
    if not any(dims(x) for name, x in inputs.items() if name not in carry):
        raise ValueError(
            f"all inputs are in carry={dict(carry)}: one input must hold the data of each step"
        )
    for name, y in outputs.items():
        if name not in carry.values() and not dims(y):
            raise ValueError(f"the output {name!r} is a scalar and has no rows: remove the output")


def _move_constants(body: ir.Graph, graph: ir.Graph) -> None:
    """Move the constants of the Scan body to the graph around the Scan, so that all time steps
    share them, in place.
    """
    for name, value in list(body.initializers.items()):
        del body.initializers[name]
        graph.register_initializer(value)
    for node in [node for node in body if node.op_type == "Constant" and not node.domain]:
        body.remove(node)
        graph.append(node)
