"""Log-probabilities of sequences.

`sequence_log_probs` adds the log-probability of a text to a model, for preference losses.
`ctc_decode` decodes the log-probabilities of time steps, of a model trained with CTC, into labels.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.checks import check_count
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.losses.classification import causal_terms
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.spec import widen_to_float32
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.local_functions import inline_functions, raise_opset
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
    """Replace each input (rows * `count`, ...) by an input (rows, `count`, ...) and a Reshape."""
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


def ctc_decode(
    log_p: np.ndarray, blank: int = 0, beam: int | None = None
) -> tuple[list[int], float]:
    """Return the most likely label sequence l: argmax of p(l), the sum of all its alignments.

    Without a beam, the most likely alignment gives the labels: repeated classes are merged and
    blanks removed (best path decoding, Graves et al. 2006). A beam adds up the alignments of each
    prefix, and keeps the best prefixes from step to step (Hannun et al. 2014, arXiv:1408.2873,
    algorithm 1, without a language model).

    Args:
        log_p: logarithms of probabilities, (T, C).
        blank: the class that is the blank.
        beam: number of prefixes that are kept; None: the most likely alignment.

    Returns:
        The labels and a confidence. With a beam, this is p(l), summed over the alignments in the
        beam; without, the mean over labels of the probability at the first step of each label, or 0
        if there is no label.

    Raises:
        ValueError: a beam below 1.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> log_p = np.log([[0.6, 0.4], [0.6, 0.4]])  # of a blank, and of the class 1
        >>> og.language.ctc_decode(log_p)  # the alignment of two blanks has 0.36
        ([], 0.0)
        >>> labels, p = og.language.ctc_decode(log_p, beam=4)  # the other three add up
        >>> labels, round(p, 2)
        ([1], 0.64)
    """
    if beam is None:
        best = log_p.argmax(axis=1)
        kept = (best != blank) & (best != np.append(-1, best)[:-1])
        sure = np.exp(log_p.max(axis=1)[kept]).mean() if kept.any() else 0.0
        return best[kept].tolist(), float(sure)
    check_count("beam", beam)
    prefixes: list[tuple[int, ...]] = [()]
    ends = np.array([[0.0], [-np.inf]])
    for step in np.asarray(log_p, np.float64):
        prefixes, ends = _extend_prefixes(prefixes, ends, step, blank, beam)
    total = np.logaddexp(*ends)
    return [*prefixes[int(total.argmax())]], float(np.exp(total.max()))


def _extend_prefixes(
    prefixes: list[tuple[int, ...]], ends: np.ndarray, step: np.ndarray, blank: int, beam: int
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return the best label prefixes after one more time step, and their log-probabilities.

    Args:
        prefixes: the best prefixes before this step.
        ends: log p of each prefix by alignments that end with a blank, and by alignments that end
            with a label, (2, prefixes).
        step: log p of the classes at this step, (C,).
        blank: as in `ctc_decode`.
        beam: as in `ctc_decode`.
    """
    total, n = np.logaddexp(*ends), len(prefixes)
    last = [prefix[-1] if prefix else blank for prefix in prefixes]
    stays = np.stack([total + step[blank], ends[1] + step[last]])
    grown = total[:, None] + step
    # a label equal to the last one needs a blank in between
    grown[np.arange(n), last] = ends[0] + step[last]
    grown[:, blank] = -np.inf
    at = {prefix: i for i, prefix in enumerate(prefixes)}
    for j, prefix in enumerate(prefixes):
        # a shorter prefix grows into this one
        if prefix and (i := at.get(prefix[:-1])) is not None:
            stays[1, j] = np.logaddexp(stays[1, j], grown[i, prefix[-1]])
            grown[i, prefix[-1]] = -np.inf
    scores = np.append(np.logaddexp(*stays), grown)
    chosen = np.argpartition(-scores, min(beam, len(scores) - 1))[:beam]
    chosen = chosen[scores[chosen] > -np.inf]
    old, new = chosen[chosen < n], chosen[chosen >= n]
    grew = [divmod(int(k) - n, len(step)) for k in new]
    ended = np.stack([np.full(len(new), -np.inf), scores[new]])
    kept = [prefixes[k] for k in old] + [(*prefixes[i], label) for i, label in grew]
    return kept, np.append(stays[:, old], ended, axis=1)
