"""`sequence_log_probs`: adds a text's log-probability to a model, for preference losses."""

from __future__ import annotations

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.primal.local_functions import inline_functions, raise_opset
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.losses.classification import causal_terms
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.spec import widen_to_float32
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.weights import record_constants
from onnxgrad.operators.shapes import dims, rank
from onnxgrad.training.filled import MASK, computable_inputs, compute_inputs

LABELS, LOG_PROBS = "labels", "log_probs"


def sequence_log_probs(
    model: ModelLike, alternatives: int | None = None, *, output: str | None = None
) -> ModelProto:
    """Return a language model whose output is the log-probability of each text.

    This is the sum of log p of its tokens, each given the tokens before it. Losses of preferences
    are functions of it: see the recipe of DPO. The logits of all positions are in memory.

    Args:
        model: inputs (rows, tokens) such as `input_ids` and `attention_mask`; output: logits (rows,
            tokens, vocabulary). Never modified. The result has no inputs of caches, which are
            empty, nor `position_ids`, which are computed from the mask.
        alternatives: number k of texts in each row, such as 2 for a chosen and a rejected text: all
            inputs are (rows, k, tokens). None: a row is a text.
        output: name of the logits; None: `logits`, or the only float output.

    Returns:
        A model with one more input, `labels`, int64: the tokens, and -100 for tokens that do not
        count, as at padding and in the prompt; and one output, `log_probs`, (rows,) or (rows, k).
        Weights and adapters keep their names.

    Raises:
        ValueError: an input without rows on its first axis, logits of another shape, or an input
            with the name `labels`.
        ModelError: `model` cannot be read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og, onnxruntime as ort
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (int64[N,T] input_ids) => (float[N,T,2] logits) <float[2,2] w = {0.0, 9, 9, 0}>
        ...     { logits = Gather(w, input_ids) }''')
        >>> pairs = og.language.sequence_log_probs(model, 2)
        >>> ids = np.array([[[0, 1, 0], [0, 1, 1]]])
        >>> session = ort.InferenceSession(pairs.SerializeToString())
        >>> session.run(None, {"input_ids": ids, "labels": ids})[0].round(1).tolist()
        [[-0.0, -9.0]]
    """
    proto = read(model)
    names = [y.name for y in proto.graph.output]
    chosen = choose_output(proto, "logits" if output is None and "logits" in names else output)
    made = to_ir(raise_opset(inline_functions(proto)))
    graph = made.graph
    compute_inputs(made, computable_inputs(proto, language=True) - {MASK})
    infer(made)
    logits = ir.convenience.create_value_mapping(graph, include_subgraphs=False)[chosen]
    shape = dims(logits)
    if shape is None or len(shape) != 3:
        raise ValueError(
            f"`output` {chosen!r} has the shape {shape}: name logits, (rows, tokens, vocabulary)"
        )
    if any(x.name == LABELS for x in graph.inputs):
        raise ValueError(f"the model has an input {LABELS!r} already: rename it")
    op = Emit(graph, [LABELS, LOG_PROBS])
    _write_log_prob_output(op, logits, alternatives)
    if alternatives is not None:
        _add_alternatives_axis(op, alternatives)
    tidy(made)
    record_constants(made, proto)
    return to_proto(made)


def _write_log_prob_output(op: Emit, logits: ir.Value, alternatives: int | None) -> None:
    """Add an input of labels, and let the log-probability of each text be the only output."""
    shape = ir.Shape((dims(logits) or ())[:2])
    label = ir.Value(name=LABELS, type=ir.TensorType(ir.DataType.INT64), shape=shape)
    op.graph.inputs.append(label)
    with op:
        terms = causal_terms(op, widen_to_float32(op, logits), label)
        total = op.Neg(op.ReduceSum(terms.losses, [1], keepdims=0))
        if alternatives is not None:
            total = op.Reshape(total, [-1, alternatives])
    total.name = LOG_PROBS
    total.shape = ir.Shape(["rows"] if alternatives is None else ["rows", alternatives])
    op.graph.outputs[:] = [total]


def _add_alternatives_axis(op: Emit, count: int) -> None:
    """Let each input be (rows, `count` texts, ...); reshape it to (rows * `count`, ...)."""
    graph = op.graph
    for x in [x for x in graph.inputs if x.name not in graph.initializers]:
        shape = dims(x)
        if not shape or isinstance(shape[0], int):
            raise ValueError(
                f"the input {x.name!r} has the shape {shape}: its first axis must be the axis "
                "of rows, of any length"
            )
        taken = ir.Value(name=x.name, type=x.type, shape=ir.Shape(["rows", count, *shape[1:]]))
        x.name = op.name(f"{x.name}_of_each")
        graph.inputs[graph.inputs.index(x)] = taken
        with op.at(next(iter(graph))):
            lengths = [op.dim(taken, i) for i in range(2, (rank(taken) or 0))]
            each = op.Reshape(taken, op.vector(-1, *lengths))
        each.shape = x.shape
        ir.convenience.replace_all_uses_with(x, each)
