"""Runtime checks of labels in models that others run: a wrong label must not train silently."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.losses.info import LossInfo


def require_labels(op: Emit, label: ir.Value, info: LossInfo) -> None:
    """Make a graph fail for labels that its loss does not take, as trainers refuse them.

    The node that fails is a Reshape to a shape with other elements, whose name tells what labels
    are: providers other than the CPU may not check the indices of a Gather, but all check shapes.
    """
    users = list(label.uses())
    if not users or (info.classes is None and info.bounds is None):
        return
    with op.at(next(iter(op.graph))):
        if info.classes is not None:
            right = op.GreaterOrEqual(label, 0)
            text = "0 and above"
            if isinstance(info.classes, int):
                right = op.And(right, op.Less(label, info.classes))
                text = f"0 to {info.classes - 1}"
            if info.ignore_index is not None:
                right = op.Or(right, op.Equal(label, info.ignore_index))
                text = f"{text}, or {info.ignore_index}"
        else:
            assert info.bounds is not None
            right, text = info.bounds.write(op, label), info.bounds.text
            if info.ignore_nan:
                right, text = op.Or(right, op.IsNaN(label)), f"{text}, or NaN"
        number = op.ReduceMax(op.Cast(op.Not(right), to=ir.DataType.INT64), keepdims=0)
        shape = op.Add(op.Shape(label), number)
        checked = op.emit("Reshape", [label, shape], {"allowzero": 1}, fresh=True)
        node = op.set_type_like(checked, label).producer()
        assert node is not None
        node.name = f"labels in {label.name!r} are {text}"
    for consumer, i in users:
        consumer.replace_input_with(i, checked)
