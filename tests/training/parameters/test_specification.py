"""Which operands train by default, for each operator of the specification that has several."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx import defs

from onnxgrad import trainable
from onnxgrad.graph import Emit
from onnxgrad.model.convert import to_proto
from onnxgrad.training.parameters.table import Tensor

RNG = np.random.default_rng(0)
VARIADIC = defs.OpSchema.FormalParameterOption.Variadic
WITH_BODIES = ("If", "Loop", "Scan", "SequenceMap")
ATTRIBUTES: dict[str, dict] = {
    "CausalConvWithState": {"activation": "silu"},
    "Concat": {"axis": 0},
    "Einsum": {"equation": "ij,jk->ik"},
    "GroupNormalization": {"num_groups": 1},
    "LinearAttention": {"q_num_heads": 1, "kv_num_heads": 1},
    "MaxRoiPool": {"pooled_shape": [1, 1]},
    "MaxUnpool": {"kernel_shape": [1, 1]},
}

# weights of layers, and learned states, masks, queries and tables
TRAINS = """
    Add A B; Attention Q K V attn_mask past_key past_value; BatchNormalization scale B;
    CausalConvWithState weight bias past_state; Concat inputs; Conv W B; ConvTranspose W B;
    DeformConv W B; Div A B; Einsum Inputs; GRU W R B initial_h; Gather data; GatherElements data;
    GatherND data; Gemm A B C; GroupNormalization scale bias; InstanceNormalization scale B;
    LSTM W R B initial_h initial_c P; LayerNormalization Scale B;
    LinearAttention query key value past_state; MatMul A B; Mean data_0; Mul A B; PRelu slope;
    RMSNormalization scale; RNN W R B initial_h; Sub A B; Sum data_0; SwiGLU A B; Where X Y"""
# settings, statistics, fixed tables, and constants that are moved and meet no data
STAYS = """
    BatchNormalization input_mean input_var; CastLike input target_type; Clip min max;
    Compress input; DequantizeLinear x_scale; Dropout data ratio; Equal A B; Expand input;
    Greater A B; GreaterOrEqual A B; Less A B; LessOrEqual A B;
    MelWeightMatrix lower_edge_hertz upper_edge_hertz; NegativeLogLikelihoodLoss input weight;
    NonMaxSuppression boxes scores iou_threshold score_threshold; OneHot indices depth values;
    Pad data constant_value; QLinearConv x_scale w_scale y_scale;
    QLinearMatMul a_scale b_scale y_scale; QuantizeLinear y_scale; Range start limit delta;
    Reshape data; Resize X roi scales; ReverseSequence input; RoiAlign rois;
    RotaryEmbedding cos_cache sin_cache; STFT window; Slice data;
    SoftmaxCrossEntropyLoss scores weights; Split input; SplitToSequence input; Squeeze data;
    Tile input; TopK X; Trilu input; Unsqueeze data"""


def operands_of(table: str) -> set[tuple[str, str]]:
    """Return pairs of an operator and the name of an operand."""
    entries = (entry.split() for entry in table.split(";"))
    return {(op_type, name) for op_type, *names in entries for name in names}


def formal_operands(schema) -> list[str]:
    """Return the names of the operands; a variadic one twice."""
    return [p.name for p in schema.inputs for _ in range(1 + (p.option == VARIADIC))]


def row_of_constant(schema, index: int) -> Tensor:
    """Return the row of a named constant that is an operand, between two layers with weights."""
    op = Emit(ir.Graph([], [], nodes=[], opset_imports={"": defs.onnx_opset_version()}))
    kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([3, 3])
    x, w, c = (ir.Value(name=name, type=kind, shape=shape) for name in ("x", "w", "layer.c"))
    op.graph.inputs.append(x)
    for value in (w, c):
        drawn = RNG.normal(size=(3, 3)).astype(np.float32)
        value.const_value = ir.tensor(drawn, name=value.name)
        op.graph.register_initializer(value)
    operands = [op.Tanh(op.MatMul(x, w))] * len(formal_operands(schema))
    operands[index] = c
    given, count = ATTRIBUTES.get(schema.name, {}), max(schema.min_output, 1)
    y = op.emit_many(schema.name, operands, given, outputs=count, fresh=True)[0]
    op.give([op.Tanh(op.MatMul(op.set_type_like(y, x), w))])
    rows = {t.name: t for t in trainable(to_proto(ir.Model(op.graph, ir_version=10)))}
    return rows["layer.c"]


def test_each_operand_trains_or_stays_or_is_named_in_a_warning():
    trains, stays = operands_of(TRAINS), operands_of(STAYS)
    seen = set()
    for schema in defs.get_all_schemas():
        names = formal_operands(schema)
        if schema.domain or schema.deprecated or schema.name in WITH_BODIES or len(names) < 2:
            continue
        for i, name in enumerate(names):
            if "tensor(float)" in schema.inputs[min(i, len(schema.inputs) - 1)].types:
                operand, row = (schema.name, name), row_of_constant(schema, i)
                assert row.trains == (operand in trains), (operand, row.why)
                assert row.trains or row.doubtful == (operand not in stays), (operand, row.why)
                seen.add(operand)
    assert seen >= trains | stays
    assert len(seen) > 150
